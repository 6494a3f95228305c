"""A model read into its calls: order, names, cuts."""

import keras
import numpy as np
import pytest
from keras import layers

from tests import model_zoo
from tfckpt import graph, sizes


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
    specs = sizes.infer(read)
    live = [
        sum(sizes.tensor_bytes(specs[key], 1) for key in keys)
        for keys in read.live()
    ]
    assert np.all(np.array(live) > 0)
