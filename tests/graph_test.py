"""A model read into its calls: order, names, cuts, sizes."""

import keras
import numpy as np
import pytest
from keras import layers

from tests import model_zoo
from tfckpt import graph


def _identity(inputs, name):
    return keras.Model(inputs, layers.Dense(3, name="inner")(inputs), name=name)


@pytest.mark.parametrize("name", model_zoo.ZOO)
@pytest.mark.filterwarnings("ignore:Layer 'core':UserWarning")
def test_order_is_that_of_keras(name, monkeypatch):
    """Layers without sublayers, as the plain model calls them."""
    model = model_zoo.make(name)
    called = []
    original = keras.Operation.__call__

    def spy(self, *args, **kwargs):
        if id(self) in wanted:
            called.append(self)
        return original(self, *args, **kwargs)

    expected = [call.operation for call in graph.read(model).calls]
    wanted = set(map(id, expected))
    x = model_zoo.inputs_of(name)
    monkeypatch.setattr(keras.Operation, "__call__", spy)
    model(x)
    assert called == expected


def test_paths():
    assert graph.read(model_zoo.make("nested")).paths == (
        "frozen/inner",
        "frozen/inner_norm",
        "frozen/inner_drop",
        "core/one",
        "core/drop",
        "core/add",
        "backbone/core/one",
        "backbone/core/drop",
        "backbone/core/add",
        "backbone/norm",
        "backbone/two",
        "backbone/core#2/one",
        "backbone/core#2/drop",
        "backbone/core#2/add",
        "dropout",
        "add_1",
        "dense",
    )
    assert graph.read(model_zoo.make("shared")).paths == (
        "dense",
        "dropout",
        "norm",
        "dense#2",
        "norm#2",
        "dropout#2",
        "other",
        "dense#3",
    )


def test_paths_are_unique_even_if_a_name_looks_like_one():
    inputs = keras.Input((3,))
    twice = layers.Dense(3, name="twice")
    x = layers.Dense(3, name="twice#2")(twice(inputs))
    model = keras.Model(inputs, twice(twice(x)))
    assert graph.read(model).paths == (
        "twice",
        "twice#2",
        "twice#3",
        "twice#4",
    )


def test_operations_that_are_no_layers_are_calls():
    x = keras.Input((3,))
    y = keras.ops.relu(x) + 1.0
    paths = graph.read(keras.Model(x, keras.ops.concatenate([x, y]))).paths
    assert paths == ("relu", "add", "concatenate")


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


def _names(read, keys):
    return [read.names[key] for key in keys]


def test_live_tensors():
    x = keras.Input((3,), name="x")
    a = layers.Dense(3, name="a")(x)
    b = layers.Dense(3, name="b")(a)
    c = layers.Dense(3, name="c")(b)
    d = layers.Add(name="d")([c, a])
    read = graph.read(keras.Model(x, [d, b]))
    assert read.paths == ("a", "b", "c", "d")
    assert [_names(read, keys) for keys in read.live()] == [
        ["a"],
        ["a", "b"],
        ["a", "b", "c"],
        ["b", "d"],
    ]


def test_several_outputs_of_a_call():
    x = keras.Input((4,), name="x")
    a, b = keras.ops.split(x, 2, axis=-1)
    read = graph.read(keras.Model(x, layers.Add(name="sum")([a, b])))
    assert next(_names(read, keys) for keys in read.live()) == [
        "split:0",
        "split:1",
    ]


def test_bytes():
    def size(shape, dtype="float32", **kwargs):
        return graph.tensor_bytes(keras.KerasTensor(shape, dtype), **kwargs)

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
    specs = read.infer()
    sizes = [
        graph.tensor_bytes(specs[key], 2)
        for call in read.calls
        for key in call.outputs
    ]
    assert sizes == [2 * 8 * 8 * 4 * 4, 2 * 4 * 4 * 4 * 4]
    # The same from the shape of the model's own input.
    read = graph.read(core)
    assert graph.tensor_bytes(read.infer()[1], 2) is None
    assert graph.tensor_bytes(read.infer([(7, 8, 8, 3)])[1], 2) == sizes[0]


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


def test_a_model_without_graph():
    class Subclassed(keras.Model):
        pass

    with pytest.raises(ValueError, match="'mine' of type Subclassed"):
        graph.read(Subclassed(name="mine"))
    with pytest.raises(ValueError, match="built Sequential"):
        graph.read(keras.Sequential([layers.Dense(1)]))


def test_application():
    model = keras.applications.MobileNetV2(
        (32, 32, 3), weights=None, classes=2, alpha=0.35
    )
    read = graph.read(model)
    assert len(read.calls) == len(model.layers) - 1
    assert len(set(read.paths)) == len(read.paths)
    specs = read.infer()
    live = [
        sum(graph.tensor_bytes(specs[key], 1) for key in keys)
        for keys in read.live()
    ]
    assert np.all(np.array(live) > 0)
