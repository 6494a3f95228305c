"""Selective recomputation and Chen's search."""

import pytest

from tests import costs_zoo
from tfckpt import plan, planners, simulator
from tfckpt.planners import names


def _segments(made):
    return [(s.recomputed, len(s.calls), len(s.kept)) for s in made.segments]


def test_recompute_by_class():
    model = costs_zoo.conv_chain(3)
    made = planners.by_type(
        model, recompute=["BatchNormalization", "Activation"]
    )
    assert _segments(made) == [
        (False, 1, 0),
        (True, 2, 0),
        (False, 1, 0),
        (True, 2, 0),
        # The last segment is not recomputed, and joins the one before.
        (False, 3, 0),
    ]
    # Two of three batch normalizations and no convolution run again. What an
    # activation makes is not made again: its own gradient reads it, though.
    walk = simulator.Simulator(model).walk(made)
    assert walk.runs == [1, 2, 2, 1, 2, 2, 1, 1, 1]


def test_recompute_by_name():
    model = costs_zoo.transformer(2)
    made = planners.by_type(model, recompute=["block_0", "block_1/attention"])
    assert _segments(made) == [
        (False, 1, 0),
        (True, 7, 0),
        (False, 1, 0),
        (True, 1, 0),
        (False, 7, 0),
    ]
    assert made == planners.by_type(
        model,
        recompute=["block_1/attention", "block_0", "block_0/dense_1"],
    )


def test_names_of_calls():
    builder = costs_zoo.Builder()
    key = builder.inputs[0]
    for path in ("a", "net/dense", "net/dense#2", "b#2/dense"):
        key = builder.call("Dense", [key], 8, path=path)
    model = builder.done()
    found = names.positions(
        model, ["dense", "net", "net/dense", "net/dense#2", "b", "Dense"]
    )
    assert found == {
        "dense": [1, 2, 3],
        "net": [1, 2],
        "net/dense": [1, 2],
        "net/dense#2": [2],
        "b": [3],
        "Dense": [0, 1, 2, 3],
    }


def test_keep():
    model = costs_zoo.conv_chain(8)
    made = planners.by_type(model, keep=["Conv2D"])
    walk = simulator.Simulator(model).walk(made)
    kept = {path for segment in made.segments for path in segment.kept}
    for call, runs in zip(model.calls, walk.runs, strict=True):
        # A convolution's product is never made again.
        if call.kind == "Conv2D":
            assert runs == 1 or call.path in kept
    assert made.prediction.extra_time < 0.06
    # What is left alone, but for the last segment, are convolutions for
    # themselves: they would not run again anyway.
    for segment in made.segments[:-1]:
        assert segment.recomputed or all(
            path.startswith("conv2d") for path in segment.calls
        )
    none = planners.min_memory(model)
    assert made.prediction.peak_bytes > none.prediction.peak_bytes


def test_keep_some():
    model = costs_zoo.transformer(4)
    made = planners.by_type(model, keep=["dense_1"])
    kept = {path for segment in made.segments for path in segment.kept}
    assert kept
    assert all(path.endswith("dense_1") for path in kept)
    assert not made.segments[0].recomputed  # The embedding.


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        ({}, ["either", "None"]),
        ({"recompute": ["Conv2D"], "keep": ["Conv2D"]}, ["either"]),
        ({"recompute": ["conv2D_0"]}, ["'conv2D_0'", "conv2d_0"]),
        ({"keep": ["Conv3D"]}, ["'Conv3D'", "Near matches: Conv2D"]),
        ({"keep": ["Activation"]}, ["'Activation'", "no products", "Conv2D"]),
        ({"recompute": "Conv2D"}, ["list", "'Conv2D'"]),
        ({"keep": [3]}, ["list", "[3]"]),
    ],
)
def test_refuses(asked, parts):
    with pytest.raises(plan.PlanError) as caught:
        planners.by_type(costs_zoo.conv_chain(2), **asked)
    for part in parts:
        assert part in str(caught.value)


def test_refuses_what_only_reads_ids():
    with pytest.raises(plan.PlanError, match="'Embedding'.*only read ids"):
        planners.by_type(costs_zoo.transformer(1), recompute=["Embedding"])


def test_every_k():
    paths = list("abcdefg")
    made = planners.every_k(paths, 3)
    assert _segments(made) == [(True, 3, 0), (True, 3, 0), (False, 1, 0)]
    assert _segments(planners.every_k(paths, 7)) == [(False, 7, 0)]
    assert _segments(planners.every_k(paths, 100)) == [(False, 7, 0)]
    for wrong in (0, -1, 2.0, "2", None, True):
        with pytest.raises(plan.PlanError, match="`k` is a whole number"):
            planners.every_k(paths, wrong)


def test_chen_on_a_chain():
    for length in (16, 36, 64):
        model = costs_zoo.chain(length, size=8)
        predicted = planners.chen(model).prediction
        # 2 sqrt(n) tensors, but for rounding.
        root = length**0.5
        assert predicted.peak_bytes <= 8 * (2 * root + 2)
        least = planners.min_memory(model).prediction.least_bytes
        assert predicted.peak_bytes >= least


def test_chen_needs_cuts_of_one_tensor():
    # The connections of a U-Net leave hardly any; cuts of several help.
    model = costs_zoo.unet(4)
    chen = planners.chen(model).prediction
    ours = planners.min_memory(model).prediction
    assert ours.peak_bytes < 0.6 * chen.peak_bytes


def test_chen_leaves_what_reads_ids_alone():
    made = planners.chen(costs_zoo.transformer(9))
    for segment in made.segments:
        assert "embedding" not in segment.calls or not segment.recomputed
    assert made.prediction.ratio < 0.5
