"""Plans that keep products: how many are run, in a graph and compiled."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfckpt
from tests import keeping_test
from tfckpt import planners, planning


def _step(model):
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    return step


def _transformer():
    x = inputs = keras.Input((12, 8))
    for _ in range(3):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(2, 4)(y, y)
        x = layers.Add()([x, y])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(32, activation="gelu")(y)
        x = layers.Add()([x, layers.Dense(8)(y)])
    return keras.Model(inputs, x)


def _convolutions():
    return keras.applications.ResNet50(
        weights=None, input_shape=(32, 32, 3), classes=4
    )


_CASES = {
    "transformer": (
        _transformer,
        ["MultiHeadAttention", "Dense"],
        # As TensorFlow and as XLA:CPU name them.
        ["MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"],
        r" dot\(|__onednn\$matmul|dot_general",
    ),
    "resnet50": (
        _convolutions,
        ["Conv2D"],
        ["Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"],
        r" convolution\(|__onednn\$conv",
    ),
}


def _planned(model, keep):
    """The model where all but the last segment keep these layers' products."""
    costs = planning.costs_of(model, batch_size=2)
    kept = planners.by_type(costs, keep=keep)
    return tfckpt.SegmentedModel.from_model(model, plan=kept), kept


def _ran(step, x, types):
    counts = keeping_test.ops_run(tf.function(step), x)
    return sum(
        count
        for op, count in counts.items()
        # With its bias or padding a convolution has another name.
        if re.sub("^PadWith(Fused)?|WithBias$", "", op) in types
    )


def _compiled(step, x, pattern):
    compiled = tf.function(step, jit_compile=True)
    text = compiled.experimental_get_compiler_ir(x)(stage="optimized_hlo")
    return len(re.findall(pattern, text))


@pytest.mark.parametrize("name", _CASES)
def test_as_many_products_as_the_plain_step(name):
    make, keep, types, pattern = _CASES[name]
    model = make()
    ours, plan = _planned(model, keep)
    recomputed = [s for s in plan.segments if s.recomputed]
    assert sum(len(s.calls) for s in recomputed) > len(plan.calls) / 2
    bare = tfckpt.SegmentedModel.from_model(model, plan="sqrt")
    x = tf.constant(
        np.random.RandomState(0).normal(size=(2, *model.input.shape[1:])),
        tf.float32,
    )
    plain, kept, dropped = (
        _ran(_step(each), x, types) for each in (model, ours, bare)
    )
    assert plain == kept < dropped
    plain, kept, dropped = (
        _compiled(_step(each), x, pattern) for each in (model, ours, bare)
    )
    assert 0 < plain == kept < dropped


@pytest.mark.parametrize("name", _CASES)
def test_the_same_gradients(name):
    make, keep, *_ = _CASES[name]
    model = make()
    ours, _ = _planned(model, keep)
    x = tf.constant(
        np.random.RandomState(0).normal(size=(2, *model.input.shape[1:])),
        tf.float32,
    )
    plain, found = (tf.function(_step(each))(x) for each in (model, ours))
    largest = max(np.abs(g).max() for g in plain)
    for a, b in zip(plain, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=32 * 2**-23 * largest)
