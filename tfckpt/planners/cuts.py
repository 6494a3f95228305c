"""Where a model may be cut: prefixes of the order in which calls run.

Cuts through which several tensors live are allowed: in networks with skip
connections, cuts of a single tensor are few and far between. Prefixes of one
topological order reach nearly what the lower sets of Kusumoto et al., "A
Graph Theoretic Framework of Recomputation Algorithms for Memory-Efficient
Backpropagation", https://arxiv.org/abs/1905.11722, do.
"""

import numpy as np

from tfckpt.simulator import index as index_lib


def widths(index: index_lib.Index) -> np.ndarray:
    """Returns for 0, 1, ..., n the bytes that live across the cut there.

    The cut p lies before the call p.
    """
    change = np.zeros(index.length + 2, dtype=np.int64)
    for size, made, last in zip(
        index.sizes, index.made, index.last_read, strict=True
    ):
        if last > made >= 0:
            change[made + 1] += size
            change[last + 1] -= size
    return np.cumsum(change)[: index.length + 1]


def live(index: index_lib.Index, cut: int) -> list[int]:
    """Returns the keys of the tensors with bytes that live across a cut."""
    return [
        key
        for key, (made, last) in enumerate(
            zip(index.made, index.last_read, strict=True)
        )
        if 0 <= made < cut <= last and index.sizes[key]
    ]


def held_bytes(index: index_lib.Index) -> np.ndarray:
    """Returns what a plain step holds for the backward pass, by maker."""
    return np.array(
        [
            call.saved
            + sum(
                index.sizes[key]
                for key in call.makes
                if index.first_need[key] < index_lib.NEVER
            )
            for call in index.costs.calls
        ],
        dtype=np.float64,
    )


def candidates(index: index_lib.Index, limit: int) -> list[int]:
    """Returns cuts from 0 to n, at most about `limit` of them.

    The model is divided into parts of equal weight (bytes held, time, number
    of calls), and the narrowest cut of each is taken. Cuts around calls that
    must not run again are always there.
    """
    length = index.length
    calls = index.costs.calls
    forced = {0, length}
    for position, call in enumerate(calls):
        if not call.recomputable:
            forced.update((position, position + 1))
    free = [p for p in range(length + 1) if p not in forced]
    room = max(limit - len(forced), 1)
    if len(free) <= room:
        return list(range(length + 1))
    time = np.array([call.forward_time for call in calls])
    weight = np.ones(length) / length
    for part in (held_bytes(index), time):
        if part.sum() > 0:
            weight += part / part.sum()
    share = np.concatenate([[0.0], np.cumsum(weight)])
    bucket = np.minimum(share[free] / share[-1] * room, room - 1).astype(int)
    width = widths(index)
    best = {}
    for place, number in zip(free, bucket, strict=True):
        # The later one of equals: what comes before it is recomputed with it.
        if number not in best or width[place] <= width[best[number]]:
            best[number] = place
    return sorted(forced | set(best.values()))
