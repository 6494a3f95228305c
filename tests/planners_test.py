"""Planners: goldens worked out by hand, and errors."""

import subprocess
import sys

import numpy as np
import pytest

import tfckpt
from tfckpt import plan, planners


def _paths(count):
    return [f"layer_{i}" for i in range(count)]


def _counts(made):
    return [len(segment.calls) for segment in made.segments]


@pytest.mark.parametrize(
    ("calls", "segments", "counts"),
    [
        (9, 5, [2, 2, 2, 2, 1]),
        (9, 3, [3, 3, 3]),
        (10, 4, [3, 3, 2, 2]),
        (3, 3, [1, 1, 1]),
        (7, 1, [7]),
        (1, 1, [1]),
    ],
)
@pytest.mark.parametrize("sizes", [None, 7.0])
@pytest.mark.parametrize("cuts", [None, 5.0])
def test_uniform_by_count(calls, segments, counts, sizes, cuts):
    made = planners.uniform(
        _paths(calls),
        segments,
        None if sizes is None else [sizes] * calls,
        None if cuts is None else [cuts] * calls,
    )
    assert _counts(made) == counts
    assert made.calls == tuple(_paths(calls))
    assert [s.recomputed for s in made.segments] == [True] * (segments - 1) + [
        False
    ]


@pytest.mark.parametrize(
    ("segments", "parts"),
    [
        (7, ["3 calls", "7 segments", "from 1 to 3"]),
        (0, ["0", "from 1 to 3", "None"]),
        (-2, ["-2", "from 1 to 3"]),
        ("2", ["'2'", "str", "from 1 to 3"]),
        (True, ["True", "bool"]),
        (2.0, ["2.0", "float"]),
        (None, ["None", "NoneType"]),
    ],
)
def test_uniform_refuses(segments, parts):
    with pytest.raises(plan.PlanError) as caught:
        planners.uniform(_paths(3), segments)
    for part in parts:
        assert part in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_uniform_takes_numpy_integers():
    assert _counts(planners.uniform(_paths(4), np.int64(2))) == [2, 2]


def test_uniform_by_bytes():
    # The first call holds half of all bytes.
    assert _counts(planners.uniform(_paths(5), 2, [8, 2, 2, 2, 2])) == [1, 4]
    # Thirds of 12: after 4 and after 8 bytes.
    assert _counts(planners.uniform(_paths(6), 3, [1, 3, 2, 2, 2, 2])) == [
        2,
        2,
        2,
    ]


def test_every_segment_has_a_call():
    # All bytes at the end, or at the start: the targets crowd there.
    assert _counts(planners.uniform(_paths(5), 4, [0, 0, 0, 0, 9])) == [
        1,
        1,
        1,
        2,
    ]
    assert _counts(planners.uniform(_paths(5), 4, [9, 0, 0, 0, 0])) == [
        1,
        1,
        1,
        2,
    ]
    assert _counts(planners.uniform(_paths(5), 5, [9, 0, 0, 0, 1])) == [1] * 5


def test_takes_the_cheapest_cut_nearby():
    # Residual blocks of 4: inside a block, two tensors are alive.
    cuts = [2, 2, 2, 1] * 4
    made = planners.uniform(_paths(16), 3, [1] * 16, cuts)
    # Targets after 6 and 11; single tensors after 4, 8 and 12.
    ends = np.cumsum(_counts(made))
    assert all(cuts[end - 1] == 1 for end in ends)
    # But not from far away: the only cheap cut is at the very start.
    made = planners.uniform(_paths(16), 2, [1] * 16, [1] + [2] * 15)
    assert _counts(made) == [8, 8]


def test_sqrt():
    assert _counts(planners.sqrt(_paths(9))) == [3, 3, 3]
    assert len(planners.sqrt(_paths(100), [1] * 100).segments) == 10
    # Only 4 of 8 calls hold bytes.
    made = planners.sqrt(_paths(8), [1, 0] * 4)
    assert len(made.segments) == 2
    # No call does: one segment.
    assert len(planners.sqrt(_paths(8), [0] * 8).segments) == 1
    # Equal bytes, not equal counts.
    made = planners.sqrt(_paths(9), [40, 10, 10, 10, 10, 10, 10, 10, 10])
    assert _counts(made) == [1, 4, 4]


def test_boundaries():
    paths = ["a", "b/c", "b/d", "e", "e#2", "f"]
    made = planners.at_boundaries(paths, ["e#2", "a"])
    assert [s.calls for s in made.segments] == [
        ("a",),
        ("b/c", "b/d", "e", "e#2"),
        ("f",),
    ]
    assert made == planners.at_boundaries(paths, ["a", "e#2", "f"])
    assert _counts(planners.at_boundaries(paths, ["b"])) == [3, 3]
    assert _counts(planners.at_boundaries(paths, [])) == [6]


def test_boundaries_refuse():
    paths = ["conv1", "conv2", "backbone/conv1", "dense"]
    with pytest.raises(plan.PlanError) as caught:
        planners.at_boundaries(paths, ["conv_1"])
    assert "'conv_1'" in str(caught.value)
    assert "Near matches: conv1" in str(caught.value)
    with pytest.raises(plan.PlanError, match="Name each call once"):
        planners.at_boundaries(paths, ["conv1", "conv1"])
    with pytest.raises(plan.PlanError, match="list of call paths"):
        planners.at_boundaries(paths, "conv1")
    with pytest.raises(plan.PlanError, match="list of call paths"):
        planners.at_boundaries(paths, [1])


def test_sizes_are_checked():
    for sizes in ([1, 2], [1, 2, -3], [1, 2, float("nan")]):
        with pytest.raises(plan.PlanError, match="`sizes`"):
            planners.uniform(_paths(3), 2, sizes)
    with pytest.raises(plan.PlanError, match="`cuts`"):
        planners.uniform(_paths(3), 2, cuts=[1])
    with pytest.raises(plan.PlanError, match="without calls"):
        planners.uniform([], 1)


def test_needs_neither_tensorflow_nor_keras():
    # The package itself, which imports both, is left out.
    code = (
        "import sys, types\n"
        "sys.modules['tfckpt'] = package = types.ModuleType('tfckpt')\n"
        f"package.__path__ = {tfckpt.__path__!r}\n"
        "from tfckpt import planners\n"
        "print(planners.uniform(['a', 'b'], 2))\n"
        "assert 'tensorflow' not in sys.modules\n"
        "assert 'keras' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
