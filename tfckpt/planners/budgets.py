"""Plans that fit a budget, need least memory, or lie between.

Flat segments through cuts of several tensors, and in each segment products
that are kept. Sources: dynamic programmes over cuts as in Kusumoto et al.
(https://arxiv.org/abs/1905.11722); keeping what is dear to compute and cheap
to hold as in Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (https://arxiv.org/abs/2205.05198). `tfckpt.planners.tables`
and `tfckpt.planners.search` say what is exact. The least time over all plans
(Checkmate, https://arxiv.org/abs/1910.02653) can be lower: there any tensor
may be kept for itself and run again at any time.
"""

import dataclasses
import functools

import numpy as np

from tfckpt import costs as costs_lib
from tfckpt import plan as plan_lib
from tfckpt import simulator as simulator_lib
from tfckpt.planners import by_bytes, checks, cuts, finish
from tfckpt.planners import search as search_lib
from tfckpt.planners import tables as tables_lib

# More cuts than these are thinned; see `cuts.candidates`.
_MOST_CUTS = 224
# How many choices of kept products there are beside none.
_CHOICES = 7
# Budgets between the least and the plain step that are always tried.
POINTS = 10
# Numbers of equal segments that are offered too: tables look at one segment at
# a time, and the walk sometimes finds these better than they do.
_ALIKE = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
# Memory that is worth a shorter time where least memory is asked for.
SLACK = 0.01


def budget(costs: costs_lib.Costs, budget_bytes: int) -> plan_lib.Plan:
    """Returns the plan of least extra time whose peak is within a budget.

    Args:
        costs: What the calls of the model cost.
        budget_bytes: Most bytes of activation memory, as
            `Prediction.peak_bytes` counts them.

    Raises:
        PlanError: No plan is that small. The message names the least budget
            and the call that sets it.

    Example:

    >>> from tfckpt import costs
    >>> calls = [
    ...     costs.CallCost(
    ...         f"dense_{i}", "Dense", (i,), (i + 1,), needs=(i,),
    ...         forward_time=1.0, backward_time=2.0,
    ...     )
    ...     for i in range(9)
    ... ]
    >>> model = costs.Costs(
    ...     tuple(calls), (8,) * 10, (0,) * 10, tuple("abcdefghij"),
    ...     inputs=(0,), outputs=(9,), batch_size=1,
    ... )
    >>> plan = budget(model, 48)
    >>> plan.prediction.peak_bytes, plan.prediction.plain_bytes
    (48, 72)
    """
    finder = _finder(costs, POINTS)
    return finder.plan(_checked(budget_bytes, finder))


def min_memory(costs: costs_lib.Costs) -> plan_lib.Plan:
    """Returns a plan of least peak, and among the least ones of least time.

    Plans whose peak is at most 1 % above the least count as least: the last
    percent is often dear.

    Args:
        costs: What the calls of the model cost.
    """
    finder = _finder(costs, POINTS)
    return finder.plan(int(finder.least * (1 + SLACK)))


def frontier(
    costs: costs_lib.Costs, points: int = POINTS
) -> tuple[tuple[int, float], ...]:
    """Returns what memory costs in time, from least memory to plain.

    Args:
        costs: What the calls of the model cost.
        points: For how many budgets a plan is made, 2 or more.

    Returns:
        Pairs of activation memory in bytes and extra time relative to a plain
        step, by rising memory and falling time.
    """
    step = costs.step_time
    result = []
    for peak, time, _ in _finder(costs, points).points:
        if not result or time < result[-1][1]:
            result.append((peak, time))
    return tuple((peak, time / step if step else 0.0) for peak, time in result)


class Finder:
    """Plans of one model within any budget.

    Args:
        costs: What the calls of the model cost.
        choices: Sets of calls whose products may be kept.
        alone: Whether segments beside the last one may be left alone though
            they could be recomputed.
        points: Number of budgets whose plans are offered for any budget that
            they fit. Tables may count more than the simulator, so that the
            plan for another budget can be better than the one for this.
    """

    def __init__(
        self,
        costs: costs_lib.Costs,
        choices: list[frozenset[int]],
        alone: bool = True,
        points: int = POINTS,
    ):
        self._choices = choices
        self.simulator = simulator_lib.Simulator(costs)
        index = self.simulator.index
        self._tables = tables_lib.Tables(
            index, cuts.candidates(index, _MOST_CUTS)
        )
        first = self._tables.alone()
        if not alone:
            first = _only_where_needed(first, self._tables.allowed)
        self._search = search_lib.Search(
            [first, *map(self._tables.recomputed, choices)],
            self.simulator.plain.peak,
        )
        self._number = points

    @functools.cached_property
    def points(self) -> list[tuple[int, float, plan_lib.Plan]]:
        """Peak, extra time and plan of some budgets, by rising peak."""
        low, high = self._search.least, self.simulator.plain.peak
        sizes = np.geomspace(max(low, 1), max(high, 1), self._number)
        found = [
            self._walked(self._search.path(min(max(int(size), low), high)))
            for size in sizes
        ]
        found += map(self._judged, self._alike())
        return sorted(found, key=lambda each: each[:2])

    def _alike(self):
        """Plans of equal segments, with least products kept and most."""
        costs = self.simulator.costs
        if not all(call.recomputable for call in costs.calls):
            return
        position = {path: i for i, path in enumerate(costs.paths)}
        for number in _ALIKE:
            if number > len(costs.calls):
                return
            plan = by_bytes.alike(costs, number)
            for kept in dict.fromkeys((self._choices[0], self._choices[-1])):
                yield finish.tidy(
                    self.simulator,
                    [
                        dataclasses.replace(
                            segment,
                            kept=tuple(
                                path
                                for path in segment.calls
                                if segment.recomputed and position[path] in kept
                            ),
                        )
                        for segment in plan.segments
                    ],
                )

    @property
    def least(self) -> int:
        """The least budget, in bytes."""
        return self.points[0][0]

    def made(self, budget_bytes: int) -> plan_lib.Plan:
        """Returns the plan of least time within a budget, bare."""
        found = [each for each in self.points if each[0] <= budget_bytes]
        path = self._search.path(min(budget_bytes, self.simulator.plain.peak))
        if path is not None:
            found.append(self._walked(path))
        return min(found, key=lambda each: (each[1], each[0]))[2]

    def _walked(self, path):
        return self._judged(self._bare(path))

    def _judged(self, plan):
        walk = self.simulator.walk(plan)
        return walk.peak, walk.extra_time, plan

    def _bare(self, path):
        at, paths = self._tables.cuts, self.simulator.costs.paths
        segments = []
        for step in path:
            start, end = int(at[step.start]), int(at[step.end])
            table = self._search.tables[step.option]
            segments.append(
                plan_lib.Segment(
                    paths[start:end],
                    recomputed=step.option > 0,
                    kept=tuple(
                        paths[call]
                        for call in range(start, end)
                        if call in table.products and table.again[call] <= end
                    ),
                )
            )
        return finish.tidy(self.simulator, segments)

    def plan(self, budget_bytes: int) -> plan_lib.Plan:
        """Returns that plan with its prediction."""
        return finish.finished(
            self.simulator,
            self.made(budget_bytes),
            least_bytes=self.least,
            blocked=True,
        )


@functools.lru_cache(maxsize=2)
def _finder(costs, points):
    return Finder(costs, choices(costs), points=points)


def choices(costs: costs_lib.Costs) -> list[frozenset[int]]:
    """Returns sets of calls whose products may be kept, from none to all.

    What saves most time for a byte is kept first.
    """
    worth = {
        i: call.product_time / call.product_bytes
        for i, call in enumerate(costs.calls)
        if call.product_bytes > 0
    }
    order = sorted(worth, key=worth.get, reverse=True)
    sets = [frozenset()]
    if not order:
        return sets
    saved = np.cumsum([costs.calls[i].product_time for i in order])
    # After which calls the worth falls; only there a threshold can lie.
    steps = [
        place + 1
        for place in range(len(order))
        if place + 1 == len(order)
        or worth[order[place + 1]] < worth[order[place]] * (1 - 1e-9)
    ]
    goals = saved[-1] * np.arange(1, _CHOICES + 1) / _CHOICES
    ends = {
        min(steps, key=lambda step: abs(saved[step - 1] - goal))
        for goal in goals
    }
    if len(steps) <= _CHOICES:
        ends = set(steps)
    ends.add(len(order))
    return sets + [frozenset(order[:end]) for end in sorted(ends)]


def _only_where_needed(table, allowed):
    forward = table.forward.copy()
    forward[:, :-1][allowed[:, :-1]] = tables_lib.IMPOSSIBLE
    return dataclasses.replace(table, forward=forward)


def _checked(budget_bytes, finder):
    size = checks.budget(budget_bytes)
    if size < finder.least:
        raise checks.too_small(
            size,
            finder.made(finder.least),
            finder.simulator,
            "reduce the batch size, or use nested segments (the "
            '"recursive" strategy)',
        )
    return size
