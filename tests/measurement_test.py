"""Measured memory and time of a step, and what they leave alone."""

import dataclasses
import importlib
import random

import keras
import numpy as np
import pytest

import tfckpt
from tfckpt import measured_step, measurement, memory
from tfckpt import plan as plan_lib
from tfckpt import prediction as prediction_lib

_MIB = 2**20


def _chain(depth=12, width=256, plan=4):
    inputs = x = keras.Input((width,))
    for _ in range(depth):
        x = keras.layers.Dense(width, activation="tanh")(x)
    return tfckpt.SegmentedModel(inputs, keras.layers.Dense(3)(x), plan=plan)


def _small():
    """A model with state of every kind that training changes."""
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, activation="tanh")(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dropout(0.5)(x)
    outputs = keras.layers.Dense(3, activation="softmax")(x)
    model = tfckpt.SegmentedModel(inputs, outputs, plan=2)
    model.compile(
        "adam", "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def _batch(examples=16):
    generator = np.random.default_rng(0)
    x = generator.random((examples, 6), np.float32)
    return x, generator.integers(0, 3, examples)


def _state(model):
    variables = [
        *model.variables,
        *model.optimizer.variables,
        *(v for metric in model.metrics for v in metric.variables),
    ]
    return {v.path: v.numpy() for v in variables}


@pytest.mark.alone
def test_memory_and_time_are_measured():
    model = _chain()
    x = np.random.default_rng(0).random((16384, 256), np.float32)
    found = measurement.measure(model, x, repeats=3)
    # The outputs of 12 layers, of which 4 segments need about half.
    saved = 12 * x.nbytes
    assert found.plain_bytes == pytest.approx(saved, rel=0.25)
    assert found.ratio < 0.75
    assert len(found.seconds) == len(found.plain_seconds) == 3
    assert all(0.5 < ratio < 3 for ratio in found.time_ratios)
    assert found.batch_size == 16384
    assert not found.notes


def test_training_leaves_the_model_as_it_was(tmp_path):
    model = _small()
    model.fit(*_batch(), verbose=0)
    before, draws = _state(model), random.getstate()
    found = measurement.measure(model, *_batch(), repeats=1, compare=False)
    after = _state(model)
    assert before.keys() == after.keys()
    for path, value in before.items():
        np.testing.assert_array_equal(after[path], value, err_msg=path)
    assert random.getstate() == draws
    assert found.plain_bytes is None
    assert found.ratio is None
    assert found.plain_seconds == ()
    # It goes on as if nothing had been.
    other = _small()
    other.set_weights(model.get_weights())
    assert np.isfinite(model.train_on_batch(*_batch())[0])


def test_copies_train(tmp_path):
    """Else the test above would pass by doing nothing."""
    model = _small()
    measurement._write(model, _batch(), tmp_path)
    for plain in (False, True):
        copy, data = measured_step._load(str(tmp_path), plain, None)
        assert copy is not model
        assert (copy.plan is None) == plain
        before = [v.numpy() for v in copy.trainable_variables]
        measured_step._step(copy, data)()
        for old, new in zip(before, copy.trainable_variables, strict=True):
            assert not np.array_equal(old, new.numpy())
        assert int(copy.optimizer.iterations) == 1


@pytest.mark.parametrize("compiled", [True, False])
def test_without_targets_the_loss_is_the_mean_square(compiled, tmp_path):
    model = _small()
    if not compiled:
        model = tfckpt.SegmentedModel(model.input, model.output, plan=2)
    x, _ = _batch()
    measurement._write(model, (x, None), tmp_path)
    copy, data = measured_step._load(str(tmp_path), False, 4)
    step = measured_step._step(copy, data)
    before = float(np.mean(copy(x[:4], training=False) ** 2))
    kernel = copy.layers[1].kernel
    old = kernel.numpy()
    for _ in range(3):
        step()
    assert not np.array_equal(old, kernel.numpy())
    after = float(np.mean(copy(x[:4], training=False) ** 2))
    assert before == pytest.approx(after, rel=0.1)  # Steps are small.


def test_the_plan_of_the_copy_is_that_of_the_model(tmp_path):
    # Settled by the first batch, which no file tells of.
    inputs = x = keras.Input((None, 8))
    for _ in range(6):
        x = keras.layers.Dense(8)(x)
    model = tfckpt.SegmentedModel(inputs, x, plan="sqrt")
    assert not isinstance(model.plan, plan_lib.Plan)
    x = np.ones((2, 5, 8), np.float32)
    model(x)
    measurement._write(model, (x, None), tmp_path)
    copy, _ = measured_step._load(str(tmp_path), False, None)
    assert copy.plan == model.plan


_OWN = """
import keras

@keras.saving.register_keras_serializable("own")
class Twice(keras.layers.Layer):
    def call(self, x):
        return keras.ops.tanh(x * 2.0)
"""


def test_a_fresh_process_imports_the_modules_of_registered_classes(
    tmp_path, monkeypatch
):
    (tmp_path / "own_layers.py").write_text(_OWN)
    monkeypatch.syspath_prepend(tmp_path)
    own_layers = importlib.import_module("own_layers")
    x = inputs = keras.Input((64,))
    for _ in range(6):
        x = own_layers.Twice()(keras.layers.Dense(64)(x))
    model = tfckpt.SegmentedModel(inputs, x, plan=2)
    found = measurement.measure(model, np.ones((64, 64), np.float32), repeats=1)
    assert not found.notes
    assert found.peak_bytes is not None


def test_what_a_fresh_process_cannot_load_is_timed_here(capfd):
    @keras.saving.register_keras_serializable(package="measurement_test")
    class Local(keras.layers.Layer):
        def call(self, x):
            return x * 2.0

    inputs = keras.Input((4,))
    x = keras.layers.Dropout(0.1)(Local()(inputs))
    outputs = keras.layers.Dense(2)(x)
    model = tfckpt.SegmentedModel(inputs, outputs, plan=2)
    draws = random.getstate()
    found = measurement.measure(model, np.ones((3, 4)), repeats=2)
    # The copy's dropout drew a seed.
    assert random.getstate() == draws
    assert found.peak_bytes is None
    assert found.plain_bytes is None
    assert len(found.seconds) == len(found.plain_seconds) == 2
    memory_note, time_note = found.notes
    assert "Memory was not measured" in memory_note
    assert "from this process" in time_note
    assert memory_note in str(found)


def test_a_model_that_cannot_be_copied_is_an_error(capfd):
    class Broken(keras.layers.Layer):
        def call(self, x):
            return x * 2.0

        @classmethod
        def from_config(cls, config):
            raise ValueError("not from a file")

    keras.saving.register_keras_serializable("measurement_test")(Broken)
    inputs = keras.Input((4,))
    model = tfckpt.SegmentedModel(inputs, Broken()(inputs), plan=1)
    with pytest.raises(memory.MeasurementError, match="not from a file"):
        measurement.measure(model, np.ones((3, 4)))


@pytest.mark.parametrize(
    ("x", "y", "kind", "words"),
    [
        (iter([1]), None, TypeError, "one batch"),
        (np.ones(()), None, TypeError, "one batch"),
        (np.ones((0, 6)), None, ValueError, "1 or more"),
        (np.ones((4, 6)), np.ones(3), ValueError, r"\[3, 4\]"),
        (None, None, ValueError, "no arrays"),
    ],
)
def test_what_is_no_batch_is_refused(x, y, kind, words):
    with pytest.raises(kind, match=words):
        measurement.measure(_small(), x, y)


def test_repeats_are_checked():
    with pytest.raises(ValueError, match="Received: 0"):
        measurement.measure(_small(), *_batch(), repeats=0)


# --- The table --------------------------------------------------------------


def _prediction(batch_size=8):
    return prediction_lib.Prediction(
        batch_size, 50 * _MIB, 220 * _MIB, extra_time=0.2
    )


def _measurement(**arguments):
    values = {
        "batch_size": 8,
        "peak_bytes": 60 * _MIB,
        "plain_bytes": 200 * _MIB,
        "seconds": (1.2, 1.3, 1.8),
        "plain_seconds": (1.0, 1.0, 1.0),
        "prediction": _prediction(),
    }
    return measurement.Measurement(**(values | arguments))


def test_predictions_stand_beside_measurements():
    lines = str(_measurement()).splitlines()
    cells = [
        [cell.strip() for cell in line.split("  ") if cell.strip()]
        for line in lines[3:]
    ]
    ratio = 50 / 220 / 0.3 - 1
    assert cells == [
        ["peak of the process above batch 1", "60 MiB", "200 MiB", "0.300"],
        ["as predicted", "50 MiB", "220 MiB", f"{50 / 220:.3f}"],
        ["error of the prediction", "-16.7%", "+10.0%", f"{ratio:+.1%}"],
        ["seconds of a step", "1.3 s", "1 s", "1.300 (1.200 to 1.800)"],
        ["as predicted", "1.200"],
    ]


def test_without_a_prediction_there_is_nothing_beside():
    text = str(_measurement(prediction=None, notes=("a note",)))
    assert "predict" not in text
    assert text.endswith("- a note")
    bare = _measurement(peak_bytes=None, plain_bytes=None, plain_seconds=())
    assert "None" not in str(bare)


def test_a_prediction_for_another_batch_size_is_not_compared():
    model = _chain(depth=2, width=4, plan=2)
    plan = dataclasses.replace(model.plan, prediction=_prediction(7))
    model = tfckpt.SegmentedModel.from_model(model, plan=plan)
    notes = []
    assert measurement._prediction(model, 8, notes) is None
    assert "batch size 7" in notes[0]
    assert measurement._prediction(model, 7, []) == plan.prediction
