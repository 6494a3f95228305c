"""Where a graph is cut, and what is kept; worked out by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfckpt import graph as graph_lib
from tfckpt.normalization import moments, stages

L = keras.layers


def _normalized(operation):
    return isinstance(operation, L.BatchNormalization)


def cut(inputs, outputs, longest_chain=stages.LONGEST_CHAIN):
    """The stages by names: calls made, tensors read, tensors left."""
    graph = graph_lib.read(keras.Model(inputs, outputs))
    found = stages.cut(graph, _normalized, longest_chain)
    names = graph.names
    return [
        (
            [graph.calls[position].path for position in stage.calls],
            [names[key] for key in stage.arguments],
            [names[key] for key in stage.outputs],
        )
        for stage in found
    ]


def block(x, name):
    """An identity skip over a dense layer and its normalization."""
    y = L.Dense(3, name=f"{name}_dense")(x)
    y = L.BatchNormalization(name=f"{name}_bn")(y)
    return L.Add(name=f"{name}_add")([x, y])


def test_a_chain():
    x = inputs = keras.Input((3,), name="x")
    for name in "ab":
        x = L.Dense(3, name=name)(x)
        x = L.BatchNormalization(name=f"bn_{name}")(x)
    outputs = L.Dense(1, name="c")(x)
    assert cut(inputs, outputs) == [
        (["a"], ["x"], ["a"]),
        (["bn_a", "b"], ["a"], ["b"]),
        (["bn_b", "c"], ["b"], ["c"]),
    ]


def test_sums_are_made_again_from_what_is_kept():
    inputs = keras.Input((3,), name="x")
    x = L.Dense(3, name="stem")(inputs)
    for name in "abc":
        x = block(x, name)
    found = cut(inputs, x)
    # The stem is dear and read in each stage.
    assert found[0] == (["stem", "a_dense"], ["x"], ["stem", "a_dense"])
    assert found[2] == (
        ["a_bn", "a_add", "b_bn", "b_add", "c_dense"],
        ["stem", "a_dense", "b_dense"],
        ["c_dense"],
    )
    assert len(found) == 4


def test_a_long_chain_is_kept_in_between():
    inputs = keras.Input((3,), name="x")
    x = L.Dense(3, name="stem")(inputs)
    for name in "abcdef":
        x = block(x, name)
    found = cut(inputs, x, longest_chain=4)
    kept = {name for _, arguments, _ in found for name in arguments}
    # Two blocks are made again, a third one is not.
    assert [name for name in sorted(kept) if "add" in name] == ["c_add"]
    # Where it is kept is where it is made.
    assert found[3][2] == ["c_add", "d_dense"]
    assert found[4][:2] == (["d_bn", "d_add", "e_dense"], ["c_add", "d_dense"])
    assert found[6] == (
        ["d_bn", "d_add", "e_bn", "e_add", "f_bn", "f_add"],
        ["c_add", "d_dense", "e_dense", "f_dense"],
        ["f_add"],
    )


def test_what_is_dear_is_kept():
    """A second reader of a dense layer, two stages on."""
    inputs = keras.Input((3,), name="x")
    x = L.Dense(3, name="a")(inputs)
    skip = L.Dense(3, name="skip")(L.BatchNormalization(name="bn_a")(x))
    x = L.Dense(3, name="b")(L.ReLU(name="relu")(skip))
    x = L.Dense(3, name="c")(L.BatchNormalization(name="bn_b")(x))
    x = L.BatchNormalization(name="bn_c")(x)
    found = cut(inputs, L.Add(name="add")([x, skip]))
    assert found[1] == (["bn_a", "skip", "relu", "b"], ["a"], ["skip", "b"])
    assert found[3] == (["bn_c", "add"], ["skip", "c"], ["add"])


def test_what_draws_is_not_made_again():
    inputs = keras.Input((3,), name="x")
    x = L.Dropout(0.5, name="drop")(inputs)
    y = L.BatchNormalization(name="bn")(L.Dense(3, name="a")(x))
    found = cut(inputs, L.Add(name="add")([x, y]))
    assert found[1] == (["bn", "add"], ["drop", "a"], ["add"])


def test_parallel_normalizations_are_one_stage():
    inputs = keras.Input((3,), name="x")
    branches = [
        L.BatchNormalization(name=f"bn_{name}")(L.Dense(3, name=name)(inputs))
        for name in "ab"
    ]
    found = cut(inputs, L.Add(name="add")(branches))
    assert [sorted(x[0]) for x in found] == [
        ["a", "b"],
        ["add", "bn_a", "bn_b"],
    ]


@pytest.mark.parametrize("surplus", [0.0, 1e-7])
def test_pooled_moments(surplus):
    """One part is empty."""
    random = np.random.default_rng(0)
    parts = [random.normal(5.0, 2.0, size=(n, 3)) for n in (4, 0, 7, 1)]

    def of(x):
        count = np.full(3, len(x), "float64")
        mean = x.sum(0) / (count + surplus) if len(x) else np.full(3, np.nan)
        square = np.square(x - mean).sum(0)
        return count, mean, square / (count + surplus) if len(x) else mean

    stacked = [
        tf.constant(np.stack(x)) for x in zip(*map(of, parts), strict=True)
    ]
    found = moments.pooled(moments.Moments(*stacked, surplus))
    for a, b in zip(
        (found.count, found.mean, found.variance),
        of(np.concatenate(parts)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-14)
