"""`tfckpt.Recompute`: the same layer to everyone but the backward pass."""

import copy
import inspect
import json
import pickle
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests import equality

L = keras.layers
X = np.random.RandomState(0).randn(16, 5, 4).astype("float32")
Y = X[:, :, :1]


def _plain(layer):
    return layer


def _model(wrap):
    """Functional, Sequential, attention, wrappers, nested recomputation."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5, 4))
    x = wrap(L.Dense(8, activation="gelu"))(inputs)
    x = wrap(L.MultiHeadAttention(2, 4, dropout=0.1, seed=2))(x, x)
    x = wrap(
        L.Bidirectional(L.GRU(3, dropout=0.2, return_sequences=True, seed=3))
    )(x)
    x = L.TimeDistributed(wrap(L.Dense(5)))(x)
    x = wrap(
        keras.Sequential(
            [
                wrap(L.Dense(4, activity_regularizer="l2")),
                L.BatchNormalization(),
                L.Dropout(0.5, seed=4),
            ]
        )
    )(x)
    model = keras.Model(inputs, L.Dense(1)(x))
    model.compile("adam", "mse", jit_compile=False)
    return model


@pytest.fixture
def models():
    made = []
    for wrap in (_plain, tfckpt.Recompute):
        keras.utils.clear_session(free_memory=False)
        made.append(_model(wrap))
    equality.exact_graphs()
    return made


def _assert_same_variables(plain, ours):
    _assert_equal(plain.variables, ours.variables)


def _assert_equal(plain, ours):
    for a, b in zip(plain, ours, strict=True):
        assert a.path == b.path
        np.testing.assert_array_equal(a, b, a.path)


def test_the_layer_itself_is_changed():
    layer = L.Dense(3, name="mlp")
    assert tfckpt.Recompute(layer) is layer
    assert isinstance(layer, tfckpt.Recompute)
    assert isinstance(layer, L.Dense)
    assert type(layer).__name__ == "Dense"
    assert tfckpt.Recompute(layer) is layer  # once is enough


@pytest.mark.parametrize("eagerly", [False, True])
def test_fit(models, eagerly):
    losses = []
    for model in models:
        model.run_eagerly = eagerly
        history = model.fit(
            X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0
        )
        losses.append(history.history["loss"])
    assert losses[0] == losses[1]
    _assert_same_variables(*models)


def test_it_recomputes_in_fit(models):
    runs = []

    class Logged(L.Dense):
        def call(self, x):
            runs.append(tfckpt.is_recomputing())
            return super().call(x)

    model = keras.Sequential([tfckpt.Recompute(Logged(3)), L.Dense(1)])
    model.build((None, 5, 4))
    runs.clear()
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(X, Y, verbose=0)
    assert runs[-2:] == [False, True]
    assert runs.count(True) == 1
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    assert runs.count(True) == 1


def test_weights_load_both_ways(models, tmp_path):
    for model in models:
        model.optimizer.build(model.trainable_variables)
    for source, target in (models, models[::-1]):
        source.fit(X, Y, verbose=0)
        source.save_weights(tmp_path / "model.weights.h5")
        target.load_weights(tmp_path / "model.weights.h5")
        _assert_equal(source.weights, target.weights)


def _recomputed(model):
    return [
        layer.name
        for layer in model._flatten_layers()
        if isinstance(layer, tfckpt.Recompute)
    ]


def test_the_setting_is_saved(models, tmp_path):
    _, ours = models
    ours.fit(X, Y, verbose=0)
    ours.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert _recomputed(loaded) == _recomputed(ours)
    np.testing.assert_array_equal(
        loaded.predict(X, verbose=0), ours.predict(X, verbose=0)
    )
    loaded.fit(X, Y, verbose=0)


def test_the_setting_is_cloned(models):
    _, ours = models
    assert _recomputed(keras.models.clone_model(ours)) == _recomputed(ours)


def test_loads_in_a_new_process(tmp_path):
    model = keras.Sequential([keras.Input((3,)), tfckpt.Recompute(L.Dense(2))])
    model.save(tmp_path / "model.keras")
    code = f"""
        import keras, tfckpt
        model = keras.saving.load_model({str(tmp_path / "model.keras")!r})
        print(isinstance(model.layers[0], tfckpt.Recompute))
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "True"


class CustomBlock(L.Layer):
    """A subclassed layer without a config of its own."""

    def __init__(self, units=4, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.dense = L.Dense(units, activation="tanh")
        self.dropout = L.Dropout(0.5, seed=1)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x, scale=1.0, training=None):
        return scale * self.dropout(self.dense(x), training=training)


def test_config():
    layer = tfckpt.Recompute(CustomBlock(units=7, name="mine"))
    config = layer.get_config()
    assert config["units"] == 7
    json.dumps(config)
    with keras.saving.custom_object_scope({"CustomBlock": CustomBlock}):
        again = type(layer).from_config(config)
    assert isinstance(again, tfckpt.Recompute)
    assert isinstance(again, CustomBlock)
    assert (again.units, again.name) == (7, "mine")


@pytest.mark.parametrize("mode", equality.MODES)
def test_arguments(mode):
    def make(wrap):
        block = wrap(CustomBlock())
        block.build((None, 5, 4))
        return equality.Subject(
            lambda x: block(x, scale=2.0, training=True), block.variables
        )

    equality.check(make, [X], tfckpt.Recompute, mode)


def test_subclassed_model():
    results = []
    for wrap in (_plain, tfckpt.Recompute):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)

        class Model(keras.Model):
            def __init__(self, wrap=wrap):
                super().__init__()
                self.blocks = [wrap(CustomBlock()) for _ in range(3)]
                self.head = L.Dense(1)

            def call(self, x):
                for block in self.blocks:
                    x = block(x)
                return self.head(x)

        model = Model()
        model.compile("adam", "mse", jit_compile=False)
        equality.exact_graphs()
        model.fit(X, Y, batch_size=4, verbose=0, shuffle=False)
        results.append(model)
    _assert_same_variables(*results)


def test_masks_go_through():
    ids = np.array([[1, 2, 0], [3, 0, 0]])
    masks = []
    for wrap in (_plain, tfckpt.Recompute):
        keras.utils.set_random_seed(0)
        x = wrap(L.Embedding(5, 4, mask_zero=True))(ids)
        y = wrap(L.Dropout(0.0))(x)
        masks.append(y._keras_mask.numpy())
        model = keras.Sequential(
            [wrap(L.Embedding(5, 4, mask_zero=True)), wrap(L.LSTM(3))]
        )
        masks.append(model(ids).numpy())
    np.testing.assert_array_equal(masks[0], masks[2])
    np.testing.assert_array_equal(masks[1], masks[3])


def test_shapes_are_inferred():
    layer = tfckpt.Recompute(L.Conv2D(4, 3))
    spec = layer(keras.KerasTensor((None, 8, 8, 3)))
    assert spec.shape == (None, 6, 6, 4)
    assert layer.compute_output_shape((None, 8, 8, 3)) == (None, 6, 6, 4)
    assert tfckpt.Recompute(CustomBlock()).compute_output_spec(
        keras.KerasTensor((2, 5, 4))
    ).shape == (2, 5, 4)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", ["lora", "int8", "lora_int8"])
def test_lora_and_quantize(change, when):
    found = []
    for wrap in (_plain, tfckpt.Recompute):
        keras.utils.set_random_seed(0)
        layer = L.Dense(4)
        layer.build((None, 4))

        def alter(layer=layer):
            if "lora" in change:
                layer.enable_lora(2)
                layer.lora_kernel_b.assign(layer.lora_kernel_b + 0.1)
            if "int8" in change:
                layer.quantize("int8")

        if when == "before":
            alter()
        layer = wrap(layer)
        if when == "after":
            alter()
        with tf.GradientTape() as tape:
            x = tf.constant(X[:, 0])
            tape.watch(x)
            y = tf.reduce_sum(layer(x) ** 2)
        variables = [v.value for v in layer.trainable_variables]
        found.append([y, *tape.gradient(y, [x, *variables])])
    for plain, ours in zip(*found, strict=True):
        if plain is None:
            assert ours is None
        else:
            np.testing.assert_array_equal(plain, ours)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies(copied):
    layer = tfckpt.Recompute(L.Dense(3))
    layer.build((None, 4))
    again = copied(layer)
    assert isinstance(again, tfckpt.Recompute)
    np.testing.assert_array_equal(layer(X), again(X))


def test_refusals():
    with pytest.raises(TypeError, match="takes a keras.Layer.*Received"):
        tfckpt.Recompute(tf.tanh)
    with keras.RematScope("full"):
        layer = L.Dense(3, name="remat")
    with pytest.raises(ValueError, match="'remat' was made under"):
        tfckpt.Recompute(layer)
    wrapped = tfckpt.Recompute(L.Dense(3))
    with pytest.raises(TypeError, match="can't be made directly"):
        type(wrapped)(4)


def test_a_method_given_to_a_tf_function_is_still_recomputed():
    runs = []

    class Block(keras.layers.Layer):
        def call(self, x, training=None):
            runs.append(tfckpt.is_recomputing())
            return tf.sin(x)

    layer = tfckpt.Recompute(Block())

    @tf.function
    def gradient(x, call):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(call(x) ** 2)
        return tape.gradient(y, x)

    gradient(tf.ones([2]), layer.call)
    assert runs == [False, True]
    assert list(inspect.signature(layer.call).parameters) == ["x", "training"]
