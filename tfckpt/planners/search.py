"""Least time within a budget: a dynamic programme over cuts.

A label at a cut is what persists there and the time spent on running again.
Going on to the next cut adds to both, and is possible while what persists and
the segment's own peak stay within the budget. Only labels that no other beats
in both are kept: the multi-objective shortest path of Martins, "On a
multicriteria shortest path problem", EJOR 16 (1984). Over flat segments this
is the exact optimum of what `tfckpt.planners.tables` says.

With many cuts what persists is rounded up to a grid. The grid depends on the
model alone, so that more budget never costs more time.
"""

import dataclasses

import numpy as np

from tfckpt.planners import tables as tables_lib

# Up to so many cuts nothing is rounded.
EXACT = 64
_GRID = 4096
# Labels at a cut beyond which even a small model is rounded.
_MOST_LABELS = 20_000


@dataclasses.dataclass(frozen=True)
class Step:
    """One segment of a found path.

    Attributes:
        start: Number of the cut where it begins.
        end: Number of the cut where it ends.
        option: Which table says how it is treated.
    """

    start: int
    end: int
    option: int


class Search:
    """Finds paths over cuts.

    Args:
        tables: How a segment may be treated. The first table is that of
            segments that are not recomputed, as the last one must be.
        plain_bytes: Peak with no recomputation, which sets the grid.
    """

    def __init__(self, tables: list[tables_lib.Table], plain_bytes: int):
        self.tables = tables
        # Axes: start, end, option; those of one end lie together.
        self.persisting = np.stack([t.persisting for t in tables], axis=-1)
        self.peak = np.stack([t.peak for t in tables], axis=-1)
        self.time = np.stack([t.time for t in tables], axis=-1)
        self._size = self.peak.shape[0]
        self._grid = max(2, plain_bytes // _GRID)
        self._unit = 1 if self._size - 1 <= EXACT else self._grid
        self._drop_beaten()
        self._least = None

    def _drop_beaten(self):
        """Removes options that another one beats between the same cuts."""
        values = (self.persisting, self.peak, self.time)
        for option in range(1, len(self.tables)):
            for other in range(len(self.tables)):
                if other == option:
                    continue
                no_worse = np.logical_and.reduce(
                    [v[..., other] <= v[..., option] for v in values]
                )
                better = np.logical_or.reduce(
                    [v[..., other] < v[..., option] for v in values]
                )
                # Of equals the first one stays.
                beaten = no_worse & (better | (other < option))
                self.peak[..., option][beaten] = tables_lib.IMPOSSIBLE

    @property
    def least(self) -> int:
        """The least budget for which there is a path, in bytes."""
        if self._least is None:
            low, high = -1, int(self.peak[0, -1, 0])
            while high - low > 1:
                middle = (low + high) // 2
                if self._leanest(middle) is None:
                    low = middle
                else:
                    high = middle
            self._least = high
        return self._least

    def path(self, budget: int) -> list[Step] | None:
        """Returns the path of least time within the budget, None if none is.

        Args:
            budget: Most bytes at any time.
        """
        if budget < self.least:
            return None
        found = []
        # Rounding may lose the leanest path; it is known exactly.
        lean = self._leanest(self.least)
        found.append((self._total(lean), 1, lean))
        path = self._cheapest(budget)
        if path is not None:
            found.append((self._total(path), 0, path))
        return min(found, key=lambda each: each[:2])[2]

    def _total(self, path):
        return sum(float(self.time[s.start, s.end, s.option]) for s in path)

    def _leanest(self, budget):
        """Returns the path that persists least at each cut, None if none."""
        lean = np.full(self._size, tables_lib.IMPOSSIBLE, dtype=np.int64)
        lean[0] = 0
        come = [None] * self._size
        for end in range(1, self._size):
            options = slice(0, 1 if end == self._size - 1 else None)
            start = lean[:end, None]
            after = start + self.persisting[:end, end, options]
            after[start + self.peak[:end, end, options] > budget] = (
                tables_lib.IMPOSSIBLE
            )
            best = int(np.argmin(after))
            lean[end] = after.flat[best]
            come[end] = divmod(best, after.shape[1])
        if lean[-1] >= tables_lib.IMPOSSIBLE:
            return None
        path, end = [], self._size - 1
        while end:
            start, option = come[end]
            path.append(Step(start, end, option))
            end = start
        return path[::-1]

    def _cheapest(self, budget):
        if self._unit > 1:
            labels = self._on_grid(budget)
        else:
            labels = self._exactly(budget)
        if labels is None:
            # Too many labels, even for a small model.
            self._unit = self._grid
            labels = self._on_grid(budget)
        return self._traced(labels, budget) if len(labels[-1][0]) else None

    def _exactly(self, budget):
        labels = [(np.zeros(1, dtype=np.int64), np.zeros(1))]
        for end in range(1, self._size):
            found = [(np.zeros(0, dtype=np.int64), np.zeros(0))]
            for start, room, more, spent, _ in self._ways(end, budget):
                held, time = labels[start]
                fit = np.searchsorted(held, room, side="right")
                found.append((held[:fit] + more, time[:fit] + spent))
            labels.append(_merged(found))
            if len(labels[-1][0]) > _MOST_LABELS:
                return None
        return labels

    def _on_grid(self, budget):
        """The same where what persists is rounded up: one sum for each way."""
        labels = [(np.zeros(1, dtype=np.int64), np.zeros(1))]
        size = budget // self._unit + 1
        # times[cut][m]: least time where at most m units persist.
        times = [np.zeros(size)]
        buffer = np.empty(size)
        for end in range(1, self._size):
            best = np.full(size, np.inf)
            for start, room, more, spent, _ in self._ways(end, budget):
                first = max(0, -more)
                last = min(room, size - 1 - more)
                if last < first:
                    continue
                there = buffer[: last + 1 - first]
                np.add(times[start][first : last + 1], spent, out=there)
                here = best[first + more : last + more + 1]
                np.minimum(here, there, out=here)
            np.minimum.accumulate(best, out=best)
            times.append(best)
            falls = np.flatnonzero(
                np.concatenate([[best[0] < np.inf], best[1:] < best[:-1]])
            )
            labels.append((falls, best[falls]))
        return labels

    def _ways(self, end, budget):
        """Yields the segments that may end at a cut.

        For each: its start, how many units may persist there, how many it
        adds, its time, and its table.
        """
        options = 1 if end == self._size - 1 else len(self.tables)
        room = (budget - self.peak[:end, end, :options]) // self._unit
        places = np.nonzero(room >= 0)
        yield from zip(
            places[0].tolist(),
            room[places].tolist(),
            (-(-self.persisting[:end, end][places] // self._unit)).tolist(),
            self.time[:end, end][places].tolist(),
            places[1].tolist(),
            strict=True,
        )

    def _traced(self, labels, budget):
        """Returns the path that led to the cheapest label at the end."""
        end, path = self._size - 1, []
        held = labels[-1][0][-1]
        while end:
            best = np.inf, None
            for start, room, more, spent, option in self._ways(end, budget):
                most = min(held - more, room)
                known, time = labels[start]
                place = np.searchsorted(known, most, side="right") - 1
                if place >= 0 and time[place] + spent < best[0]:
                    best = time[place] + spent, start, option, known[place]
            _, start, option, held = best
            path.append(Step(start, end, option))
            end = start
        return path[::-1]


def _merged(found):
    """Returns the labels that no other beats, by rising memory."""
    held = np.concatenate([each[0] for each in found])
    time = np.concatenate([each[1] for each in found])
    order = np.lexsort((time, held))
    held, time = held[order], time[order]
    best = np.minimum.accumulate(time)
    keep = np.ones(len(held), dtype=bool)
    keep[1:] = best[1:] < best[:-1]
    return held[keep], time[keep]
