"""Segments inside of segments: memory of order log n, at a price in time.

The dynamic programme of Beaumont et al., "Optimal checkpointing for
heterogeneous chains: how to train deep neural networks with limited memory"
(2019), https://arxiv.org/abs/1911.13214 ("rotor"), over cuts of a general
graph. On a uniform chain it is Revolve: Griewank and Walther, "Algorithm 799:
revolve", ACM TOMS 26 (2000). The calls between two cuts are run in one of
three ways:

- all of them with everything saved, then backward;
- a left part without saving, then the right part, then the left part again:
  a recomputed segment that holds the plan of the left part;
- a left part with everything saved, then the right part.

Optimal where tensors live across cuts as in a chain, but for rounding to a
grid of bytes; kept products are not considered. Elsewhere an upper bound.
"""

import numpy as np

from tfckpt import costs as costs_lib
from tfckpt import plan as plan_lib
from tfckpt import simulator as simulator_lib
from tfckpt.planners import checks, cuts, finish
from tfckpt.planners import search as search_lib
from tfckpt.planners import tables as tables_lib

_MOST_CUTS = 128
_GRID = 512


def recursive(
    costs: costs_lib.Costs, budget_bytes: int | None = None
) -> plan_lib.Plan:
    """Returns a plan of nested segments.

    Args:
        costs: What the calls of the model cost.
        budget_bytes: Most bytes of activation memory; the plan takes the
            least time within it. Without it the plan needs the least memory.

    Raises:
        PlanError: No plan is that small.

    Example:

    >>> from tfckpt import costs
    >>> calls = [
    ...     costs.CallCost(
    ...         f"dense_{i}", "Dense", (i,), (i + 1,), needs=(i,),
    ...         forward_time=1.0, backward_time=2.0,
    ...     )
    ...     for i in range(32)
    ... ]
    >>> model = costs.Costs(
    ...     tuple(calls), (8,) * 33, (0,) * 33, ("t",) * 33,
    ...     inputs=(0,), outputs=(32,), batch_size=1,
    ... )
    >>> plan = recursive(model)
    >>> plan.prediction.peak_bytes < 32 * 8 / 4
    True
    >>> any(segment.segments for segment in plan.segments)
    True
    """
    simulator = simulator_lib.Simulator(costs)
    nest = _Nest(simulator)
    if budget_bytes is None:
        plan = nest.least()
        least = simulator.walk(plan).peak
    else:
        size = checks.budget(budget_bytes)
        plan = nest.plan(min(size, simulator.plain.peak))
        least = None
        if plan is None:
            raise checks.too_small(
                size, nest.least(), simulator, "or reduce the batch size"
            )
    return finish.finished(simulator, plan, least_bytes=least)


class _Nest:
    """The dynamic programme for one model."""

    def __init__(self, simulator):
        self._simulator = simulator
        index = simulator.index
        places = cuts.candidates(index, _MOST_CUTS)
        tables = tables_lib.Tables(index, places)
        self._cuts = places
        self._upstream = tables.upstream[places]
        self._alone, self._again = tables.alone(), tables.recomputed()
        times = [call.forward_time for call in simulator.costs.calls]
        self._elapsed = np.concatenate([[0.0], np.cumsum(times)])[places]
        self._last = len(places) - 1

    def least(self):
        """Returns a plan of least peak, nearly."""
        plain = self._simulator.plain.peak
        flat = search_lib.Search([self._alone, self._again], plain)
        # Rounding up may make the flat plan too large for its own budget.
        size = flat.least
        while True:
            grid = max(1, -(-size // _GRID))
            values = self._values(grid, -(-size // grid))
            found = np.flatnonzero(np.isfinite(values[0, self._last]))
            if len(found):
                return self._plan(values, grid, int(found[0]))
            size = size + size // 4 + 1

    def plan(self, budget):
        """Returns the plan of least time within the budget, None if none."""
        grid = max(1, -(-budget // _GRID))
        values = self._values(grid, budget // grid)
        room = budget // grid
        if np.isfinite(values[0, self._last, room]):
            return self._plan(values, grid, room)
        return None

    def _plan(self, values, grid, room):
        segments = self._segments(values, grid, 0, self._last, room)
        return finish.tidy(self._simulator, segments)

    def _values(self, grid, room):
        """Returns the least time of running from cut to cut within memory.

        Entry [s, t, m] is the added time of running the calls between the
        cuts forward and backward with m units beside what persists then.
        """
        values = np.full((self._last + 1, self._last + 1, room + 1), np.inf)
        every = np.arange(room + 1)
        for start in reversed(range(self._last)):
            for end in range(start + 1, self._last + 1):
                values[start, end] = self._ways(
                    values, grid, start, end, every
                ).min(axis=0)
        return values

    def _ways(self, values, grid, start, end, room):
        """Returns the time of every way to run from cut to cut.

        The first row runs all at once; then come rows that run a left part
        twice, for each place where it may end; then those that save it.
        """
        alone, again = self._alone, self._again
        skip = again.credit
        final = end == self._last
        if final:
            need = max(
                alone.forward[start, end],
                alone.backward[start, end] + skip[start, end],
            )
            time = 0.0
        else:
            need = again.backward[start, end] + skip[start, end]
            time = again.time[start, end]
        rows = [np.where(room >= -(-need // grid), time, np.inf)[None, :]]
        middle = np.arange(start + 1, end)
        if not len(middle):
            return rows[0]
        # In the first forward pass there are no gradients yet, and what runs
        # in it is no extra time.
        ahead = 0 if final else self._upstream[end]
        spent = 0.0 if final else self._elapsed[middle] - self._elapsed[start]
        spent = np.broadcast_to(spent, middle.shape)[:, None]
        right = skip[start, end] - skip[middle, end]
        gain = (skip[start, middle] - skip[start, end]) // grid
        for table in (again, alone):
            need = table.forward[start, middle] + ahead
            if table is alone:
                need = np.maximum(
                    need, table.backward[start, middle] + skip[start, end]
                )
            need = -(-need // grid)
            shift = -(-(table.persisting[start, middle] + right) // grid)
            left = room[None, :] - shift[:, None]
            possible = (left >= 0) & (room[None, :] >= need[:, None])
            left = np.clip(left, 0, values.shape[2] - 1)
            time = spent + values[middle[:, None], end, left]
            if table is again:
                more = np.minimum(
                    room[None, :] + gain[:, None], values.shape[2] - 1
                )
                time = time + values[start, middle[:, None], more]
            rows.append(np.where(possible, time, np.inf))
        return np.concatenate(rows)

    def _segments(self, values, grid, start, end, room):
        skip = self._again.credit
        paths, segments = self._simulator.costs.paths, []
        while True:
            way = int(
                np.argmin(
                    self._ways(values, grid, start, end, np.array([room]))
                )
            )
            inside = end - start - 1
            if way == 0:
                calls = paths[self._cuts[start] : self._cuts[end]]
                return [*segments, plan_lib.Segment(calls, recomputed=False)]
            twice = way <= inside
            table = self._again if twice else self._alone
            middle = start + (way if twice else way - inside)
            calls = paths[self._cuts[start] : self._cuts[middle]]
            inner = ()
            if twice:
                gain = (skip[start, middle] - skip[start, end]) // grid
                more = min(room + int(gain), values.shape[2] - 1)
                inner = self._segments(values, grid, start, middle, more)
                if len(inner) == 1:
                    inner = ()
            segments.append(
                plan_lib.Segment(calls, recomputed=twice, segments=inner)
            )
            shift = (
                table.persisting[start, middle]
                + skip[start, end]
                - skip[middle, end]
            )
            room = min(room - int(-(-shift // grid)), values.shape[2] - 1)
            start = middle
