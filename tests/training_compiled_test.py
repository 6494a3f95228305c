"""The whole training step, as compiled for devices that are not there."""

import keras
import pytest
import tensorflow as tf

import tfckpt
from tests.memory_test import each_target
from tfckpt import memory

_DEPTH, _WIDTH, _BATCH, _PARTS = 8, 256, 16384, 8


def _temporaries(target, batch, **options):
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((_WIDTH,))
    for i in range(_DEPTH):
        x = keras.layers.Dense(_WIDTH, activation="tanh")(x)
        if i % 4 == 3:
            x = keras.layers.Dropout(0.1)(x)
    outputs = keras.layers.Dense(1)(x)
    model = tfckpt.SegmentedModel(inputs, outputs, plan=4)
    model.compile("adam", "mse", metrics=["mae"], jit_compile=True, **options)
    model.make_train_function()
    needed = memory.compiled_memory(
        lambda x, y: model.train_step((x, y)),
        tf.TensorSpec([batch, _WIDTH]),
        tf.TensorSpec([batch, 1]),
        target=target,
    )
    return needed.temporaries


@pytest.mark.parametrize("target", each_target(["cpu", "v5e", "a100-40gb"]))
def test_recomputation_and_accumulation_in_one_step(target):
    one = _temporaries(
        target, _BATCH // _PARTS, gradient_accumulation_steps=_PARTS
    )
    parts = _temporaries(target, _BATCH, micro_batches=_PARTS)
    gradients = 4 * _DEPTH * _WIDTH**2
    assert parts <= 1.1 * one + gradients
    # Less than a micro-batch's activations, were all of them kept.
    assert parts < 4 * _DEPTH * _WIDTH * _BATCH / _PARTS


@pytest.mark.parametrize("target", each_target(["v5e", "a100-40gb"]))
@pytest.mark.parametrize(
    ("kind", "window"),
    [
        ("micro", {"gradient_accumulation_steps": 4}),
        ("exact", {"micro_batches": 4}),
    ],
)
def test_batch_normalization_of_the_window(kind, window, target):
    """Its float64 sums too; a TPU has no float64 of its own."""
    x = inputs = keras.Input((16, 16, 3))
    for _ in range(2):
        x = keras.layers.Conv2D(8, 3, padding="same")(x)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    outputs = keras.layers.Dense(1)(keras.layers.GlobalMaxPooling2D()(x))
    model = tfckpt.SegmentedModel(inputs, outputs, plan=2)
    model.compile(
        "sgd", "mse", jit_compile=True, batch_normalization=kind, **window
    )
    model.make_train_function()
    needed = memory.compiled_memory(
        lambda x, y: model.train_step((x, y)),
        tf.TensorSpec([16, 16, 16, 3]),
        tf.TensorSpec([16, 1]),
        target=target,
    )
    assert needed.temporaries > 0
