"""The search of Chen et al., the baseline that people know.

"Training Deep Nets with Sublinear Memory Cost" (2016), algorithm 3 and section
4.3, https://arxiv.org/abs/1604.06174: go through the calls, cut at the next
candidate as soon as a segment holds a given number of bytes, and try several
such numbers. Candidates are cuts through which a single tensor lives, as the
paper has it; in networks with long skip connections there are hardly any, and
`budget` and `min_memory` do better there.
"""

import math

import numpy as np

from tfckpt import costs as costs_lib
from tfckpt import plan as plan_lib
from tfckpt import simulator as simulator_lib
from tfckpt.planners import cuts, finish

# Trials around the balance of boundaries and segments; 6 in the paper.
_TRIALS = 6


def chen(costs: costs_lib.Costs) -> plan_lib.Plan:
    """Returns the plan of least peak that Chen's search finds.

    Args:
        costs: What the calls of the model cost.

    Example:

    >>> from tfckpt import costs
    >>> calls = [
    ...     costs.CallCost(
    ...         f"dense_{i}", "Dense", (i,), (i + 1,), needs=(i,)
    ...     )
    ...     for i in range(16)
    ... ]
    >>> model = costs.Costs(
    ...     tuple(calls), (8,) * 17, (0,) * 17, ("t",) * 17,
    ...     inputs=(0,), outputs=(16,), batch_size=1,
    ... )
    >>> [len(segment.calls) for segment in chen(model).segments]
    [3, 3, 3, 3, 3, 1]
    """
    simulator = simulator_lib.Simulator(costs)
    index = simulator.index
    held = cuts.held_bytes(index)
    widths = cuts.widths(index)
    single = [
        cut for cut in range(1, index.length) if len(cuts.live(index, cut)) <= 1
    ]
    # Balance first with the whole as one segment, then around sqrt(x * y).
    stored, largest = _measure([*single, index.length], held, widths)
    balance = math.sqrt(max(stored, 1) * max(largest, 1))
    budgets = {balance}
    for _ in range(2):
        ends = _ends(single, held, balance)
        stored, largest = _measure(ends, held, widths)
        balance = math.sqrt(max(stored, 1) * max(largest, 1))
        budgets.update(
            np.geomspace(
                balance / math.sqrt(2), balance * math.sqrt(2), _TRIALS
            )
        )
    found = []
    for size in sorted(budgets):
        plan = _plan(simulator, _ends(single, held, size))
        walk = simulator.walk(plan)
        found.append((walk.peak, walk.extra_time, len(found), plan))
    return finish.finished(simulator, min(found, key=lambda f: f[:3])[3])


def _ends(single, held, size):
    ends, start = [], 0
    for cut in single:
        if held[start:cut].sum() > size:
            ends.append(cut)
            start = cut
    return [*ends, len(held)]


def _measure(ends, held, widths):
    """Returns the bytes that are stored, and those of the largest segment."""
    starts = [0, *ends[:-1]]
    return (
        sum(int(widths[end]) for end in ends[:-1]),
        max(
            held[start:end].sum()
            for start, end in zip(starts, ends, strict=True)
        ),
    )


def _plan(simulator, ends):
    calls, paths = simulator.costs.calls, simulator.costs.paths
    fixed = [i for i, call in enumerate(calls) if not call.recomputable]
    around = {place for i in fixed for place in (i, i + 1)}
    ends = sorted({*ends, *around} - {0})
    return finish.tidy(
        simulator,
        [
            plan_lib.Segment(
                paths[start:end],
                recomputed=all(c.recomputable for c in calls[start:end]),
            )
            for start, end in zip([0, *ends[:-1]], ends, strict=True)
        ],
    )
