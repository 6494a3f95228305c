"""Nested segments: Revolve's numbers, and memory of order log n."""

import math

import hypothesis
import pytest
from hypothesis import strategies as st

from tests import costs_zoo
from tfckpt import plan, planners, simulator


def _slots(length, slots):
    """Returns a uniform chain and a budget of so many slots.

    A call saves so much that only one can be run backward at a time, which
    takes 3 besides. Each slot holds the output of a call. Revolve keeps the
    state that it works on apart from the slots, one of which is taken by the
    input; here the input is free, and the state takes that slot.
    """
    model = costs_zoo.chain(length, saved=150, backward_workspace=3)
    return model, slots + 150 + 3


@pytest.mark.parametrize(
    ("length", "slots", "runs"),
    [
        (3, 1, 6),
        (10, 3, 25),
        (20, 3, 65),
        (50, 5, 172),
        (64, 6, 220),
        (100, 5, 416),
        (100, 10, 322),
    ],
)
def test_revolve(length, slots, runs):
    """Griewank and Walther (2000): forward runs of the optimal schedule."""
    model, size = _slots(length, slots)
    made = planners.recursive(model, size)
    walk = simulator.Simulator(model).walk(made)
    assert sum(walk.runs) == runs
    assert walk.peak <= size


def test_one_slot_less_is_refused():
    model, _ = _slots(8, 1)
    with pytest.raises(plan.PlanError) as caught:
        planners.recursive(model, 150)
    for part in ("150 bytes", "The least budget is", "dense_"):
        assert part in str(caught.value)


def test_memory_grows_like_the_logarithm():
    peaks = [
        planners.recursive(costs_zoo.chain(n)).prediction.peak_bytes
        for n in (8, 16, 32, 64)
    ]
    for length, peak in zip((8, 16, 32, 64), peaks, strict=True):
        assert peak <= math.log2(length) + 2
    flat = planners.min_memory(costs_zoo.chain(64)).prediction.peak_bytes
    assert flat >= math.sqrt(64)


def _depth(segments):
    return max((1 + _depth(s.segments) for s in segments), default=0)


def test_plans_are_nested_and_whole():
    model = costs_zoo.chain(64)
    made = planners.recursive(model)
    assert made.calls == model.paths
    assert _depth(made.segments) >= 3
    assert not made.segments[-1].recomputed


def test_never_needs_more_than_flat_segments():
    for model in (
        costs_zoo.conv_chain(8),
        costs_zoo.resnet(8),
        costs_zoo.unet(3),
        costs_zoo.densenet(2, 4),
        costs_zoo.transformer(4),
    ):
        nested = planners.recursive(model).prediction
        flat = planners.min_memory(model).prediction
        # But for rounding to the grid of 512 steps.
        assert nested.peak_bytes <= 1.005 * flat.least_bytes
        assert nested.least_bytes == nested.peak_bytes


@hypothesis.given(costs_zoo.graphs(most=8), st.floats(0, 1))
@hypothesis.settings(max_examples=60)
def test_within_the_budget(model, fraction):
    both = simulator.Simulator(model)
    least = planners.recursive(model).prediction.peak_bytes
    # The grid of bytes is fine enough here to be exact.
    size = least + int(fraction * (both.plain.peak - least))
    try:
        made = planners.recursive(model, size)
    except plan.PlanError:
        # The tables may count more than the walk.
        return
    assert both.walk(made).peak <= size
    assert made.calls == model.paths


def test_checks_its_budget():
    for wrong in (-1, 0.5, "2GiB", True):
        with pytest.raises(plan.PlanError, match="whole number of bytes"):
            planners.recursive(costs_zoo.chain(4), wrong)
