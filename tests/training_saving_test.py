"""Training that is stopped in a window, and goes on in another process."""

import functools
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests import training_zoo as zoo
from tfckpt import accumulated_gradients

L = keras.layers
X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = X[:, :1].copy()


def build(dropout=0.3):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    x = L.Dense(8, activation="tanh")(inputs)
    x = L.BatchNormalization()(x)
    x = L.Dropout(dropout)(x)
    return keras.Model(inputs, L.Dense(1)(x))


def make():
    model = tfckpt.SegmentedModel.from_model(build(), plan=2)
    model.compile(
        keras.optimizers.Adam(0.01),
        "mse",
        metrics=["mae"],
        gradient_accumulation_steps=4,
        batch_normalization="micro",
    )
    return model


def data():
    """Batches in an order that repeats."""
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(3)


def fit(model, *callbacks, epochs=3):
    """Trains on `data`; returns the history."""
    return model.fit(
        data(),
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[*callbacks],
    ).history


@functools.cache
def _whole():
    """A run that was never stopped, and its history."""
    model = make()
    return model, fit(model)


class StopAt(keras.callbacks.Callback):
    def __init__(self, epoch, batch):
        super().__init__()
        self._at = epoch, batch

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self._epoch, batch + 1) == self._at:
            raise KeyboardInterrupt


def _micro_steps(model):
    return int(model.gradient_accumulator.micro_steps)


def test_weights_with_an_open_window(tmp_path):
    """Saved at micro-step 3 of 4 and loaded by a new model."""
    model = make()
    for i in range(7):
        model.train_on_batch(X[3 * i :][:3], Y[3 * i :][:3])
    model.save_weights(tmp_path / "a.weights.h5")
    again = make()
    again.optimizer.build(again.trainable_variables)
    again.load_weights(tmp_path / "a.weights.h5")
    for each in (model, again):
        each.train_on_batch(X[21:], Y[21:])
        assert int(each.optimizer.iterations) == 2
    zoo.assert_equal(model, again)


def test_a_whole_model_with_an_open_window(tmp_path):
    model = make()
    for i in range(3):
        model.train_on_batch(X[3 * i :][:3], Y[3 * i :][:3])
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.flush()
    model.flush()
    zoo.assert_equal(model, again)


def test_weights_go_to_the_plain_model_and_back(tmp_path):
    model, plain = make(), build()
    plain.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    model.train_on_batch(X[:3], Y[:3])
    model.save_weights(tmp_path / "ours.weights.h5")
    plain.optimizer.build(plain.trainable_variables)
    plain.load_weights(tmp_path / "ours.weights.h5")
    for a, b in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_array_equal(a, b)
    plain.fit(X, Y, batch_size=12, verbose=0)
    plain.save_weights(tmp_path / "plain.weights.h5")
    model.load_weights(tmp_path / "plain.weights.h5")
    for a, b in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_array_equal(a, b)
    # What was accumulated belongs to the weights of before.
    assert not model.flush()


def test_a_window_of_other_shapes_is_refused():
    model = make()
    model.train_on_batch(X[:3], Y[:3])
    other = accumulated_gradients.AccumulatedGradients([tf.zeros((2, 2))])
    other.add_micro_batch({"a": [tf.ones((2, 2))]}, {"a": 1.0})
    store = {}
    other.save_own_variables(store)
    with pytest.raises(ValueError, match="shape \\(2, 2\\).*layers trainable"):
        model.gradient_accumulator.load_own_variables(store)
    assert _micro_steps(model) == 1


def test_tensorflow_checkpoint_with_the_iterator(tmp_path):
    model = make()
    iterator = iter(data())
    for _ in range(7):
        model.train_on_batch(*next(iterator))
    path = tf.train.Checkpoint(model=model, data=iterator).write(
        str(tmp_path / "checkpoint")
    )
    again, other = make(), iter(data())
    tf.train.Checkpoint(model=again, data=other).read(path)
    for each, batches in ((model, iterator), (again, other)):
        for batch in batches:
            each.train_on_batch(*batch)
        assert int(each.optimizer.iterations) == 2
    zoo.assert_equal(model, again)


@pytest.mark.parametrize("stop", [(0, 3), (1, 7)])
def test_resume_training_is_identical(tmp_path, stop):
    def resume():
        return tfckpt.ResumeTraining(tmp_path / "resume", save_freq=1)

    with pytest.raises(KeyboardInterrupt):
        fit(make(), resume(), StopAt(*stop))
    model = make()
    found = fit(model, resume())
    whole, expected = _whole()
    zoo.assert_equal(whole, model)
    for name, values in expected.items():
        assert found[name] == values[stop[0] :]


def test_resume_training_with_several_steps_per_execution(tmp_path):
    def one():
        model = make()
        model.steps_per_execution = 2
        return model

    def resume():
        return tfckpt.ResumeTraining(tmp_path / "resume", save_freq=2)

    with pytest.raises(KeyboardInterrupt):
        fit(one(), resume(), StopAt(1, 6))
    model = one()
    fit(model, resume())
    zoo.assert_equal(_whole()[0], model)


_KILLED = """
import os, sys
from tests import training_saving_test as test
import keras, tfckpt

class Kill(test.StopAt):
    def on_train_batch_end(self, batch, logs=None):
        try:
            super().on_train_batch_end(batch, logs)
        except KeyboardInterrupt:
            os._exit(9)

resume = tfckpt.ResumeTraining(sys.argv[1], save_freq=1)
test.fit(test.make(), resume, Kill(0, 7))
"""


def test_a_killed_process(tmp_path):
    """At micro-step 3 of 4; another process, this one, goes on."""
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, tmp_path / "resume"], check=False
    )
    assert done.returncode == 9
    model = make()
    fit(model, tfckpt.ResumeTraining(tmp_path / "resume", save_freq=1))
    zoo.assert_equal(_whole()[0], model)


def test_stock_backup_drops_the_open_window(tmp_path):
    """It begins the epoch anew: its batches would be seen twice."""

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path, save_freq=1)

    with pytest.raises(KeyboardInterrupt):
        fit(make(), backup(), StopAt(0, 7), epochs=1)
    model = make()
    micro_steps = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            micro_steps.append(_micro_steps(self.model))

    fit(model, backup(), Look(), epochs=1)
    assert micro_steps[0] == 0
    # One update before it was stopped, two of the epoch.
    assert int(model.optimizer.iterations) == 3


def test_model_checkpoint(tmp_path):
    model = make()
    save = keras.callbacks.ModelCheckpoint(
        tmp_path / "at{batch}.weights.h5", save_freq=7, save_weights_only=True
    )
    with pytest.raises(KeyboardInterrupt):
        fit(model, save, StopAt(0, 7))
    again = make()
    again.optimizer.build(again.trainable_variables)
    again.load_weights(tmp_path / "at7.weights.h5")
    again.make_train_function()
    assert _micro_steps(again) == 3


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    def resume():
        return tfckpt.ResumeTraining(tmp_path / "resume", save_freq=1)

    with pytest.raises(KeyboardInterrupt):
        fit(make(), resume(), StopAt(0, 3))
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    other = tfckpt.SegmentedModel(inputs, L.Dense(1)(L.Dense(9)(inputs)))
    other.compile("sgd", "mse", gradient_accumulation_steps=4)
    with pytest.raises(ValueError, match="of another model.*directory"):
        fit(other, resume())


@pytest.mark.parametrize("arguments", [("", 1), ("x", 0), ("x", 1.5)])
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match="Received"):
        tfckpt.ResumeTraining(arguments[0], save_freq=arguments[1])


def _two_denominators():
    """A mean over samples beside a sum, with micro-batches left out."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    outputs = [L.Dense(1, name=name)(inputs) for name in "ab"]
    model = tfckpt.SegmentedModel(inputs, outputs, plan=None)
    model.compile(
        keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=8.0
        ),
        [keras.losses.MeanSquaredError(reduction="sum"), "mae"],
        gradient_accumulation_steps=4,
        skip_nonfinite=True,
    )
    return model


@pytest.mark.parametrize("kind", ["weights", "checkpoint"])
def test_a_window_is_ended_by_a_new_process_that_adds_nothing(tmp_path, kind):
    def train(model):
        bad = np.full((3, 3), np.inf, "float32")
        model.train_on_batch(X[:3], [Y[:3], Y[:3]])
        model.train_on_batch(bad, [Y[:3], Y[:3]])

    model, again = _two_denominators(), _two_denominators()
    train(model)
    again.optimizer.build(again.trainable_variables)
    if kind == "weights":
        model.save_weights(tmp_path / "a.weights.h5")
        again.load_weights(tmp_path / "a.weights.h5")
    else:
        path = tf.train.Checkpoint(model=model).write(str(tmp_path / "a"))
        tf.train.Checkpoint(model=again).read(path)
    assert again.nonfinite_micro_batches == 1
    assert model.flush()
    assert again.flush()
    assert float(again.optimizer.dynamic_scale) == 4.0
    zoo.assert_equal(model, again)
