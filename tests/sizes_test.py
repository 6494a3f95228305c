"""Sizes of tensors, from their specs and through nested models."""

import keras
from keras import layers

from tfckpt import graph, sizes


def test_bytes():
    def size(shape, dtype="float32", **kwargs):
        return sizes.tensor_bytes(keras.KerasTensor(shape, dtype), **kwargs)

    assert size((2, 3)) == 24
    assert size((2, 3), "bfloat16") == 12
    assert size((2, 3), "float64") == 48
    assert size((2, 3), "bool") == 6
    assert size(()) == 4
    assert size((None, 3)) is None
    assert size((None, 3), batch_size=5) == 60
    assert size((None, None, 3), batch_size=5) is None
    assert size((None, None, 3), batch_size=5, unknown=2) == 120
    assert size((2,), "string") is None


def test_sizes_reach_into_nested_models():
    within = keras.Input((None, None, 3))
    core = keras.Model(
        within,
        layers.MaxPooling2D(name="pool")(
            layers.Conv2D(4, 3, padding="same", name="conv")(within)
        ),
        name="core",
    )
    x = keras.Input((8, 8, 3))
    read = graph.read(keras.Model(x, core(x)))
    specs = sizes.infer(read)
    found = [
        sizes.tensor_bytes(specs[key], 2)
        for call in read.calls
        for key in call.outputs
    ]
    assert found == [2 * 8 * 8 * 4 * 4, 2 * 4 * 4 * 4 * 4]
    # The same from the shape of the model's own input.
    read = graph.read(core)
    assert sizes.tensor_bytes(sizes.infer(read)[1], 2) is None
    assert (
        sizes.tensor_bytes(sizes.infer(read, [(7, 8, 8, 3)])[1], 2) == found[0]
    )
