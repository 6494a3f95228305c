"""The calls of a model cut into segments of equal size, or where asked.

Gradient checkpointing, or "sublinear memory", after Chen et al., "Training
Deep Nets with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174. About
the square root of the number of calls is the best number of segments for a
chain of equal calls (section 4.1 there). Nothing is known here of time.
"""

import math
from collections.abc import Sequence

import numpy as np

from tfckpt import plan
from tfckpt.planners import checks, names

# A cut is searched within this part of a segment's size around the place of
# equal sizes: far enough to leave the inside of a residual block, near enough
# to keep the segments alike.
_SEARCH = 0.5


def uniform(
    paths: Sequence[str],
    segments: int,
    sizes: Sequence[float] | None = None,
    cuts: Sequence[float] | None = None,
) -> plan.Plan:
    """Returns a plan of `segments` segments that are alike.

    Args:
        paths: Paths of the calls, in the order in which they run.
        segments: Number of segments, from 1 to the number of calls.
        sizes: Bytes of each call's output. Without them, or when they are
            all equal, the segments hold equal numbers of calls, the first
            ones one more where that can't be.
        cuts: For each call the bytes that live on after it. Among places
            that make the segments nearly alike, the cut with the fewest
            bytes is taken. The last entry is not used.

    Raises:
        PlanError: `segments` is not a whole number in that range.

    Example:

    >>> plan = uniform([f"layer_{i}" for i in range(9)], 5)
    >>> [len(segment.calls) for segment in plan.segments]
    [2, 2, 2, 2, 1]
    """
    paths = checks.paths(paths)
    number = checks.number(segments, len(paths))
    ends = _ends(
        checks.sizes("sizes", sizes, len(paths)),
        checks.sizes("cuts", cuts, len(paths)),
        number,
        len(paths),
    )
    return _from_ends(paths, ends)


def sqrt(
    paths: Sequence[str],
    sizes: Sequence[float] | None = None,
    cuts: Sequence[float] | None = None,
) -> plan.Plan:
    """Returns a plan of about the square root of n segments of equal bytes.

    n counts the calls whose output holds bytes. For a chain of n equal calls
    this keeps about 2 sqrt(n) outputs in place of n.

    Args:
        paths: Paths of the calls, in the order in which they run.
        sizes: Bytes of each call's output.
        cuts: For each call the bytes that live on after it; see `uniform`.

    Example:

    >>> plan = sqrt(["a", "b", "c", "d"], sizes=[6, 2, 2, 2])
    >>> [segment.calls for segment in plan.segments]
    [('a',), ('b', 'c', 'd')]
    """
    paths = checks.paths(paths)
    checked = checks.sizes("sizes", sizes, len(paths))
    holding = len(paths) if checked is None else np.count_nonzero(checked)
    number = max(1, round(math.sqrt(holding)))
    return uniform(paths, number, sizes, cuts)


def at_boundaries(paths: Sequence[str], boundaries: Sequence[str]) -> plan.Plan:
    """Returns the plan in which a segment ends with each named call.

    Args:
        paths: Paths of the calls, in the order in which they run.
        boundaries: Paths of calls: the boundary "conv1" means that a segment
            ends with the call "conv1". The name of a nested model stands for
            its last call. The order doesn't matter; the last call of the
            model ends the last segment in any case.

    Raises:
        PlanError: A boundary is unknown or stands there twice.

    Example:

    >>> plan = at_boundaries(["a", "b/c", "b/d", "e"], ["b"])
    >>> [segment.calls for segment in plan.segments]
    [('a', 'b/c', 'b/d'), ('e',)]
    """
    paths = checks.paths(paths)
    if isinstance(boundaries, str) or not all(
        isinstance(name, str) for name in boundaries
    ):
        raise plan.PlanError(
            "Boundaries are a list of call paths, such as "
            f"{[paths[0]]!r}. Received: {boundaries!r}."
        )
    last = {}
    for position, path in enumerate(paths):
        last[path] = position
        parts = path.split("/")
        for depth in range(1, len(parts)):
            last["/".join(parts[:depth])] = position
    ends = []
    for name in boundaries:
        if name not in last:
            raise names.unknown(name, last, paths)
        ends.append(last[name] + 1)
    if len(set(ends)) < len(ends):
        raise plan.PlanError(
            f"Two boundaries end at the same call. Received: {boundaries!r}. "
            "Name each call once."
        )
    return _from_ends(paths, sorted(set(ends) | {len(paths)}))


def every_k(paths: Sequence[str], k: int) -> plan.Plan:
    """Returns the plan whose segments hold k calls each, the last one the rest.

    Args:
        paths: Paths of the calls, in the order in which they run.
        k: Calls in a segment, 1 or more.

    Raises:
        PlanError: `k` is not a whole number from 1 on.

    Example:

    >>> plan = every_k(["a", "b", "c", "d", "e"], 2)
    >>> [segment.calls for segment in plan.segments]
    [('a', 'b'), ('c', 'd'), ('e',)]
    """
    paths = checks.paths(paths)
    k = checks.whole("k", k)
    return _from_ends(paths, [*range(k, len(paths), k), len(paths)])


def _ends(sizes, cuts, number, length):
    """Returns the position after each segment's last call."""
    if sizes is None or np.all(sizes == sizes[0]):
        sizes = np.ones(length)
    # Equal counts, the larger segments first, as `numpy.array_split` has it.
    counts = np.full(number, length // number)
    counts[: length % number] += 1
    targets = np.cumsum(sizes)[np.cumsum(counts) - 1]
    if not np.all(sizes == sizes[0]):
        targets = np.sum(sizes) * np.arange(1, number + 1) / number
    before = np.concatenate([[0.0], np.cumsum(sizes)])
    reach = _SEARCH * before[-1] / number
    ends = []
    for index in range(number - 1):
        # Every segment before and after needs one call at least.
        first = (ends[-1] if ends else 0) + 1
        places = np.arange(first, length - (number - index - 1) + 1)
        far = np.abs(before[places] - targets[index])
        nearest = places[np.argmin(far)]
        if cuts is None:
            ends.append(int(nearest))
            continue
        near = places[far <= reach] if np.any(far <= reach) else [nearest]
        ends.append(
            int(
                min(
                    near,
                    key=lambda p: (
                        cuts[p - 1],
                        abs(before[p] - targets[index]),
                        p,
                    ),
                )
            )
        )
    return [*ends, length]


def _from_ends(paths, ends):
    starts = [0, *ends[:-1]]
    return plan.Plan(
        tuple(
            plan.Segment(paths[start:end], recomputed=end < len(paths))
            for start, end in zip(starts, ends, strict=True)
        )
    )
