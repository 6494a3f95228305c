"""One training step of a model, event by event.

A graph of TensorFlow holds a tensor from the call that makes it to the last
one that reads it, and the gradients of calls read tensors too. This module
follows such a step under a plan: forward, backward, and whatever is run again
in between, with segments inside of segments to any depth.

Gradient checkpointing after Chen et al., "Training Deep Nets with Sublinear
Memory Cost", https://arxiv.org/abs/1604.06174; several levels as in Griewank
and Walther, "Algorithm 799: revolve", ACM TOMS 26 (2000). Not modelled: memory
that the allocator loses between blocks.
"""

import collections
from collections.abc import Sequence

from tfckpt.simulator import index as index_lib


def needed_again(
    index: index_lib.Index,
    parts: Sequence[index_lib.Part],
    provided: frozenset[int] | set[int] = frozenset(),
) -> set[int]:
    """Returns the calls that run when these parts are run again.

    What nobody reads is dead code, which neither Grappler nor XLA runs.

    Args:
        index: The model.
        parts: What is run forward and then backward.
        provided: Calls whose products were kept.
    """
    wanted, run = set(), set()
    for part in reversed(parts):
        if part.recomputed:
            wanted.update(arguments(index, part))
        for call in reversed(range(part.start, part.stop)):
            own = not part.recomputed and index.costs.calls[call].saved > 0
            if not part.recomputed:
                wanted.update(index.needs[call])
            if own or wanted.intersection(index.costs.calls[call].makes):
                run.add(call)
                wanted.update(
                    index.kept_reads[call]
                    if call in provided
                    else index.reads[call]
                )
    return run


def arguments(index: index_lib.Index, part: index_lib.Part) -> set[int]:
    """Returns the keys of tensors from before the part that its calls read."""
    return {
        key
        for call in range(part.start, part.stop)
        for key in index.reads[call]
        if index.made[key] < part.start
    }


class Walk:
    """Memory and time of a step.

    Args:
        index: The model.
        parts: Its segments.

    Attributes:
        peak: Most bytes that existed at a time.
        step_peak: Most bytes together with the gradients of weights, which
            come one after the other.
        peak_call: The call that ran then; -1 in a model without calls.
        peak_phase: "forward", "recomputation" or "backward".
        extra_time: Time of the calls that ran again, in the unit of the calls.
        extra_flops: Their operations.
        runs: How often each call ran forward.
        timeline: For each event the time at which it began and the bytes that
            existed in it; the end of the step at last.
    """

    def __init__(self, index: index_lib.Index, parts: Sequence[index_lib.Part]):
        self.peak = 0
        self.step_peak = 0
        self.peak_call = -1
        self.peak_phase = "forward"
        self.extra_time = 0.0
        self.extra_flops = 0.0
        self.runs = [0] * index.length
        self.timeline = []
        self._index = index
        self._bytes = 0
        self._time = 0.0
        self._weights = 0
        self._products = {}
        self._gradients = collections.Counter()
        self._level(tuple(parts), set(range(index.length)), top=True)
        # Gradients of the model's inputs are left, if anybody wants them.
        self.timeline.append((self._time, self._bytes))

    def _event(self, phase, call, workspace, time):
        now = self._bytes + workspace
        if now > self.peak or self.peak_call < 0:
            self.peak, self.peak_call, self.peak_phase = now, call, phase
        self.step_peak = max(self.step_peak, now + self._weights)
        self.timeline.append((self._time, now))
        self._time += time

    def _level(self, parts, run, top=False):
        """Runs parts forward, then backward."""
        provided = set() if top else set(self._products)
        held = _Held(self._index, parts, run, provided, top)
        for part in parts:
            for call in range(part.start, part.stop):
                if call in run:
                    self._forward(call, part, held, provided, top)
        if top:
            for key in self._index.outputs:
                self._bytes -= held.release(key)
                self._add_gradient(key)
        for part in reversed(parts):
            if part.recomputed:
                again = part.again
                calls = needed_again(self._index, again, set(self._products))
                self._level(again, calls)
                for key in arguments(self._index, part):
                    self._bytes -= held.release(key)
            else:
                for call in reversed(range(part.start, part.stop)):
                    self._backward(call, held)

    def _forward(self, call, part, held, provided, top):
        cost = self._index.costs.calls[call]
        if call in part.kept:
            self._products[call] = cost.product_bytes
            self._bytes += cost.product_bytes
        kept = call in self._products
        sizes = self._index.kept_sizes[call] if kept else self._index.sizes
        saved = self._index.kept_saved[call] if kept else cost.saved
        for key in cost.makes:
            self._bytes += held.take(key, sizes[key])
        self._bytes += saved
        given = call in provided
        time = cost.forward_time - (cost.product_time if given else 0)
        self._event(
            "forward" if top else "recomputation",
            call,
            cost.forward_workspace,
            time,
        )
        self.runs[call] += 1
        if not top:
            self.extra_time += time
            self.extra_flops += cost.forward_flops - (
                cost.product_flops if given else 0
            )
        if part.recomputed:
            self._bytes -= saved
        else:
            held.saved[call] = saved
        for key in cost.makes:
            self._bytes -= held.release(key)
        for key in held.reads(call):
            self._bytes -= held.release(key)

    def _backward(self, call, held):
        index = self._index
        cost = index.costs.calls[call]
        for key in index.reads[call]:
            self._add_gradient(key)
        self._weights += cost.weight_gradient_bytes
        self._event(
            "backward", call, cost.backward_workspace, cost.backward_time
        )
        for key in cost.makes:
            self._bytes -= self._gradients.pop(key, 0)
        for key in index.needs[call]:
            self._bytes -= held.release(key)
        self._bytes -= held.saved.pop(call, 0)
        self._bytes -= self._products.pop(call, 0)

    def _add_gradient(self, key):
        # One for each reader: they are added when all are there.
        self._gradients[key] += self._index.gradients[key]
        self._bytes += self._index.gradients[key]


class _Held:
    """The tensors that one run of some parts makes, while they are held."""

    def __init__(self, index, parts, run, provided, top):
        self.saved = {}
        self._index = index
        self._provided = provided
        self._bytes = {}
        # One holder each: its maker while that runs, every call that reads
        # it, every gradient that reads it, every segment that is run again.
        self._holders = collections.Counter(index.outputs if top else ())
        for part in parts:
            for call in range(part.start, part.stop):
                if call in run:
                    self._holders.update(self.reads(call))
                    self._holders.update(index.costs.calls[call].makes)
                if not part.recomputed:
                    self._holders.update(index.needs[call])
            if part.recomputed:
                self._holders.update(arguments(index, part))

    def reads(self, call):
        if call in self._provided:
            return self._index.kept_reads[call]
        return self._index.reads[call]

    def take(self, key, size):
        self._bytes[key] = size
        return size

    def release(self, key):
        """Returns the bytes that are free when one holder lets go."""
        self._holders[key] -= 1
        if self._holders[key] > 0:
            return 0
        return self._bytes.pop(key, 0)
