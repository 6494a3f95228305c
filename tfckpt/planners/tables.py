"""Memory and time of every segment that a plan may have, in closed form.

A planner asks what a segment between two cuts costs, many times. Seen from
its start, everything that persists from before is one number, so these tables
hold the rest: what the segment adds to what persists, its own peak on top of
that, and the time of running it again. They say what the simulator says, or a
little more where that depends on more than the segment.

Whether a call runs again in a segment [a, b) depends on b alone, and for b
from some place on it does: one number for each call. With it every table is a
maximum over sums along the calls, taken for all b at once while a goes down.
"""

import dataclasses

import numpy as np

from tfckpt.simulator import index as index_lib

# More than any memory, and far enough from overflow to be added up.
IMPOSSIBLE = 1 << 50


@dataclasses.dataclass(frozen=True)
class Table:
    """Segments from cut a to cut b, treated in one way: entry [a, b].

    Attributes:
        persisting: Bytes that persist after it and didn't before it.
        forward: Its peak in the forward pass, less what persisted at a.
        backward: Its peak in the backward pass, less what persisted at a.
        credit: Bytes of what persisted at a that its backward pass no longer
            holds; already subtracted from `backward`.
        time: Time of running it again.
        again: For each call the least end of a segment in which it is run
            again.
        products: The calls whose products are kept, if they run again.
    """

    persisting: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    credit: np.ndarray
    time: np.ndarray
    again: np.ndarray
    products: frozenset[int] = frozenset()

    @property
    def peak(self) -> np.ndarray:
        """The larger one of both peaks."""
        return np.maximum(self.forward, self.backward)


class Tables:
    """Tables of a model between some of its cuts.

    Args:
        index: The model.
        cuts: Positions from 0 to the number of calls, in order.
    """

    def __init__(self, index: index_lib.Index, cuts: list[int]):
        self.index = index
        self.cuts = np.array(cuts)
        self.gradients, self.upstream = _gradients(index)
        self.allowed = self._recomputable()
        self._starts = {cut: place for place, cut in enumerate(cuts)}
        self._skipped = self._skips()

    @property
    def size(self) -> int:
        """Number of cuts."""
        return len(self.cuts)

    def alone(self) -> Table:
        """Returns the table of segments that are not recomputed."""
        index, shape = self.index, (self.size, self.size)
        calls, length = index.costs.calls, index.length
        saved = np.array([c.saved for c in calls], dtype=np.int64)
        saved_sum = _before(saved)
        forward_space = np.array([c.forward_workspace for c in calls])
        backward_space = np.array([c.backward_workspace for c in calls])
        persisting = self._between(saved_sum)
        credit = np.zeros(shape, dtype=np.int64)
        for key, made in enumerate(index.made):
            size, last = index.sizes[key], index.last_read[key]
            if not size:
                continue
            # Held for a gradient inside, or for a reader behind.
            rows = self._row(made + 1)
            needed = index.first_need[key] < index_lib.NEVER
            stop = self.size if needed else self._row(last + 1)
            persisting[:rows, rows:stop] += size
            if self._passes(key):
                # Read inside only: gone when the segment has run.
                first, end = self._row(made + 1), self._row(last + 1)
                credit[first : self._row(index.first_read[key] + 1), end:] += (
                    _least(index, key)
                )
        forward = np.full(shape, IMPOSSIBLE, dtype=np.int64)
        backward = np.full(shape, IMPOSSIBLE, dtype=np.int64)
        ahead = saved_sum[1:] + forward_space
        behind = saved_sum[1:] + backward_space + self.gradients
        ends = {}
        for key in range(len(index.sizes)):
            if index.sizes[key] and self._passes(key):
                ends.setdefault(index.first_read[key], []).append(key)
        for start in reversed(range(length)):
            for key in ends.get(start, ()):
                ahead[index.last_read[key] + 1 :] -= _least(index, key)
            for key in calls[start].makes:
                size, need = index.sizes[key], index.first_need[key]
                if size and self._passes(key):
                    ahead[index.last_read[key] + 1 :] += _least(index, key)
                if need < index_lib.NEVER:
                    ahead[start:] += size
                    behind[need:] += size
                else:
                    ahead[start : max(start, index.last_read[key]) + 1] += size
            row = self._starts.get(start)
            if row is not None:
                columns = self.cuts[row + 1 :] - start - 1
                for table, values in ((forward, ahead), (backward, behind)):
                    highest = np.maximum.accumulate(values[start:])
                    table[row, row + 1 :] = highest[columns] - saved_sum[start]
        skip = self._skipped + credit
        return Table(
            persisting - credit,
            forward,
            backward - skip,
            skip,
            np.zeros(shape),
            np.full(length, index_lib.NEVER),
        )

    def recomputed(self, products: frozenset[int] = frozenset()) -> Table:
        """Returns the table of segments that are recomputed.

        Args:
            products: Calls whose products are kept, if they are run again.
        """
        return _Recomputed(self, products).table()

    def _recomputable(self):
        """Returns for each pair of cuts whether it may be recomputed."""
        fixed = [not call.recomputable for call in self.index.costs.calls]
        allowed = self._between(_before(np.array(fixed, dtype=np.int64))) == 0
        allowed[:, -1] = False
        return np.triu(allowed, 1)

    def _between(self, sums):
        """Returns the sum from each cut to each other one."""
        at = sums[self.cuts]
        return at[None, :] - at[:, None]

    def _row(self, position):
        """Returns the first cut at the position or behind it."""
        return int(np.searchsorted(self.cuts, position))

    def _passes(self, key):
        """Returns whether the tensor is only read, by no gradient."""
        return (
            self.index.made[key] >= 0
            and self.index.first_need[key] == index_lib.NEVER
            and self.index.first_read[key] < index_lib.NEVER
            and self.index.last_read[key] < self.index.length
        )

    def _skips(self):
        """Returns bytes that live at a, but no longer when [a, b) is reached.

        What only calls from b on read is gone when their gradients are done.
        """
        index = self.index
        table = np.zeros((self.size, self.size), dtype=np.int64)
        for key, made in enumerate(index.made):
            if (
                made < 0
                or index.last_read[key] == made
                or key in index.needs[made]
            ):
                continue
            first = self._row(made + 1)
            last = self._row(index.first_read[key] + 1)
            table[first:, first:last] += _least(index, key)
        return table


class _Recomputed:
    """Makes the table of recomputed segments."""

    def __init__(self, tables, products):
        self._tables = tables
        self._index = index = tables.index
        self._products = products
        calls = index.costs.calls
        self._again = _again(index, products)
        # Rows are ends of segments, columns calls.
        self._runs = self._again[None, :] <= tables.cuts[:, None]
        self._row = [tables._row(place) for place in self._again]
        self._saved = _before(
            np.array(
                [
                    index.kept_saved[i] if i in products else c.saved
                    for i, c in enumerate(calls)
                ],
                dtype=np.int64,
            )
        )
        kept = np.zeros(index.length, dtype=np.int64)
        saves = np.zeros(index.length)
        for call in products:
            kept[call] = calls[call].product_bytes
            saves[call] = calls[call].product_time
        self._kept = _sums(self._runs * kept)
        times = np.array([c.forward_time for c in calls]) - saves
        self._times = _sums(self._runs * times)

    def table(self):
        tables, index = self._tables, self._index
        cuts, calls = tables.cuts, index.costs.calls
        shape = (tables.size, tables.size)
        inside = np.arange(index.length)[None, :] < cuts[:, None]
        ahead, again, needed = self._bases(inside)
        behind = (
            self._saved[1:]
            + tables.gradients
            + [call.backward_workspace for call in calls]
        )
        kept_inside = np.where(inside, self._kept[:, 1:], -IMPOSSIBLE)
        forward = np.full(shape, IMPOSSIBLE, dtype=np.int64)
        backward = np.full(shape, IMPOSSIBLE, dtype=np.int64)
        for start in reversed(range(index.length)):
            for key in calls[start].makes:
                if index.sizes[key]:
                    self._make(start, key, ahead, again, behind)
            row = tables._starts.get(start)
            if row is None or row + 1 == tables.size:
                continue
            ends = slice(row + 1, None)
            kept = self._kept[ends, start]
            total = self._kept[ends, -1] - kept
            forward[row, ends] = ahead[ends, start:].max(axis=1) - kept
            rerun = (
                again[ends, start:].max(axis=1)
                - needed[ends, start]
                - self._saved[start]
                + total
                + tables.upstream[cuts[ends]]
            )
            gradient = (
                (kept_inside[ends, start:] + behind[start:]).max(axis=1)
                - kept
                - self._saved[start]
            )
            backward[row, ends] = np.maximum(rerun, gradient)
        forward[~tables.allowed] = IMPOSSIBLE
        backward = np.where(
            tables.allowed, backward - tables._skipped, IMPOSSIBLE
        )
        rows = np.arange(tables.size)
        time = self._times[rows][:, cuts].T
        time = np.diagonal(time)[None, :] - time
        return Table(
            self._persisting(),
            forward,
            backward,
            tables._skipped,
            np.maximum(time, 0.0),
            self._again,
            self._products,
        )

    def _bases(self, inside):
        """Returns what calls hold in the forward pass and when run again."""
        index = self._index
        calls, cuts = index.costs.calls, self._tables.cuts
        space = np.array([call.forward_workspace for call in calls])
        ahead = self._kept[:, 1:] + np.diff(self._saved) + space
        ahead = np.where(inside, ahead, -IMPOSSIBLE)
        needed = np.zeros((len(cuts), index.length), dtype=np.int64)
        for position, call in enumerate(calls):
            for key in call.makes:
                row = self._tables._row(index.first_need[key] + 1)
                needed[row:, position] += self._size(position, key)
        needed = _sums(needed)
        again = needed[:, 1:] + self._saved[1:] + space
        again = np.where(self._runs & inside, again, -IMPOSSIBLE)
        return ahead, again, needed

    def _size(self, call, key):
        if call in self._products:
            return self._index.kept_sizes[call][key]
        return self._index.sizes[key]

    def _make(self, start, key, ahead, again, behind):
        """Lets segments that begin here or before hold a tensor from here."""
        index = self._index
        full, size = index.sizes[key], self._size(start, key)
        last, need = index.last_read[key], index.first_need[key]
        row = self._row[start]
        stop = max(start, last) + 1
        ahead[:, start:stop] += full
        if size != full:
            ahead[row:, start:stop] -= full - size
        if need < index_lib.NEVER:
            behind[need:] += size
        # When run again it is held for its gradient, which `_bases` has
        # counted, or as long as calls that run again read it.
        end = self._tables._row(need + 1)
        readers = sorted(
            (self._again[reader], reader)
            for reader in index.readers[key]
            if reader not in self._products or key in index.kept_reads[reader]
        )
        reach = start
        for place, reader in [*readers, (index_lib.NEVER, start)]:
            following = min(self._tables._row(place), end)
            if row < following:
                again[row:following, start : reach + 1] += size
                row = following
            reach = max(reach, reader)

    def _persisting(self):
        tables, index = self._tables, self._index
        cuts = tables.cuts
        rows = np.arange(len(cuts))
        sums = self._kept[rows][:, cuts].T
        table = np.diagonal(sums)[None, :] - sums
        for key, made in enumerate(index.made):
            full = index.sizes[key]
            if full:
                first = tables._row(made + 1)
                last = tables._row(index.last_read[key] + 1)
                table[:first, first:last] += full
                again = max(first, self._row[made])
                if again < last:
                    less = full - self._size(made, key)
                    table[:first, again:last] -= less
        return table


def _again(index, products):
    """Returns the least end of a segment in which each call is run again."""
    again = np.full(index.length, index_lib.NEVER)
    wanted = [
        need + 1 if need < index_lib.NEVER else need
        for need in index.first_need
    ]
    for call in reversed(range(index.length)):
        cost = index.costs.calls[call]
        again[call] = min(
            [call + 1 if cost.saved > 0 else index_lib.NEVER]
            + [wanted[key] for key in cost.makes]
        )
        kept = call in products
        for key in index.kept_reads[call] if kept else index.reads[call]:
            wanted[key] = min(wanted[key], again[call])
    return again


def _gradients(index):
    """Returns the gradients that exist during each call's, and at each cut."""
    during = np.zeros(index.length, dtype=np.int64)
    at = np.zeros(index.length + 1, dtype=np.int64)
    parts = dict.fromkeys(index.outputs, 0)
    for key in index.outputs:
        parts[key] = index.gradients[key]
    total = sum(parts.values())
    for call in reversed(range(index.length)):
        at[call + 1] = total
        for key in index.reads[call]:
            parts[key] = parts.get(key, 0) + index.gradients[key]
            total += index.gradients[key]
        during[call] = total
        for key in index.costs.calls[call].makes:
            total -= parts.pop(key, 0)
    at[0] = total
    return during, at


def _least(index, key):
    """Returns the bytes of a tensor, at least."""
    maker = index.made[key]
    return index.kept_sizes[maker][key]


def _before(values):
    """Returns the sums of what comes before each place."""
    return np.concatenate([np.zeros(1, dtype=values.dtype), np.cumsum(values)])


def _sums(rows):
    """Returns the sums of what comes before each place in each row."""
    result = np.zeros((rows.shape[0], rows.shape[1] + 1), dtype=rows.dtype)
    np.cumsum(rows, axis=1, out=result[:, 1:])
    return result
