"""Which nested models become calls, and what is done to their inputs."""

import keras
import pytest
from keras import layers

from tests import model_zoo
from tfckpt import graph


def _identity(inputs, name):
    return keras.Model(inputs, layers.Dense(3, name="inner")(inputs), name=name)


class _OwnCall(keras.Model):
    def call(self, inputs, training=None, mask=None):
        return super().call(inputs, training=training, mask=mask) + 1.0


class _Plain(keras.Model):
    pass


def _with(model, **attributes):
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def _in_remat_scope():
    with keras.RematScope(mode="larger_than", output_size_threshold=10**9):
        return _identity(keras.Input((3,)), "core")


@pytest.mark.parametrize(
    ("make", "flat"),
    [
        (lambda x: _identity(x, "core"), True),
        (lambda x: _Plain(x, layers.Dense(3, name="inner")(x)), True),
        (lambda x: _OwnCall(x, layers.Dense(3, name="inner")(x)), False),
        (
            lambda x: _with(
                _identity(x, "core"),
                activity_regularizer=keras.regularizers.L2(0.1),
            ),
            False,
        ),
        (lambda x: _with(_identity(x, "core"), supports_masking=True), False),
        (
            lambda x: _with(
                _identity(x, "core"), call=lambda x, training=None: x
            ),
            False,
        ),
        (lambda x: _in_remat_scope(), False),
    ],
)
def test_which_nested_models_are_flattened(make, flat):
    core = make(keras.Input((3,)))
    outer = keras.Input((3,))
    read = graph.read(keras.Model(outer, core(outer)))
    assert read.paths == ((f"{core.name}/inner",) if flat else (core.name,))


@pytest.mark.filterwarnings("ignore:Layer 'core':UserWarning")
def test_masks_that_enter_a_nested_model():
    core = _identity(keras.Input((None, 3)), "core")
    x, mask = keras.Input((None, 3)), keras.Input((None,), dtype="bool")
    read = graph.read(keras.Model([x, mask], core(x, mask=mask)))
    assert read.paths == ("core/inner",)
    assert read.calls[0].entries[0].masked
    assert "core/lstm_1" in graph.read(model_zoo.make("masked")).paths


@pytest.mark.parametrize("structure", [list, tuple, dict])
def test_nested_models_with_several_inputs(structure):
    def inputs():
        found = {
            "a": keras.Input((3,), name="a"),
            "b": keras.Input((3,), name="b"),
        }
        return found if structure is dict else structure(found.values())

    given = inputs()
    flat = keras.tree.flatten(given)
    core = keras.Model(given, layers.Add(name="sum")(flat), name="core")
    given = inputs()
    read = graph.read(keras.Model(given, core(given)))
    assert read.paths == ("core/sum",)
    assert not read.calls[0].entries[0].feeds


def test_sequential_without_graph_stays_opaque():
    class Pair(layers.Layer):
        def call(self, inputs, training=None):
            return inputs[0] + inputs[1]

    core = keras.Sequential([Pair()], name="pair")
    a, b = keras.Input((3,)), keras.Input((3,))
    assert graph.read(keras.Model([a, b], core([a, b]))).paths == ("pair",)


def test_a_nested_model_that_changes_is_read_again():
    core = keras.Sequential([keras.Input((3,)), layers.Dense(3)], name="core")
    x = keras.Input((3,))
    read = graph.read(keras.Model(x, core(x)))
    assert read.is_current()
    core.add(layers.Dense(3))
    assert not read.is_current()


def test_entries_convert_only_what_differs():
    """Under mixed precision a nested model's float32 input is a cast."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    core = _identity(keras.Input((3,)), "core")
    x = keras.Input((3,))
    y = layers.Dense(3, name="before")(x)
    read = graph.read(keras.Model(x, core(y)))
    (entry,) = read.calls[1].entries
    (key,) = entry.outputs
    assert read.specs[key].dtype == "float32"
    assert read.names[key] == "core:input_0"
    read = graph.read(keras.Model(x, core(x)))
    assert read.calls[0].entries[0].outputs == (None,)
