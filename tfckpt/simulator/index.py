"""Who makes, reads and needs each tensor of a model: `Costs`, looked up."""

import dataclasses

from tfckpt import costs as costs_lib

NEVER = 1 << 60


class Index:
    """Answers questions about the tensors of a model.

    Tensors that no call makes, such as the model's inputs, are made at -1 and
    count 0 bytes. Sequences are indexed by tensor or by call.

    Attributes:
        costs: What was indexed.
        length: Number of calls.
        made: The call that makes the tensor.
        sizes: Bytes of the tensor.
        gradients: Bytes of its gradient.
        readers: Calls that read it, in order.
        first_read: The first of them, or `NEVER`.
        last_read: The last of them; `length` for outputs of the model, the
            maker where nobody reads it.
        first_need: The first call whose gradient reads it, or `NEVER`.
        outputs: Keys of the model's outputs, each once.
        reads: Keys that the call reads, each once.
        needs: Keys that its gradient reads, each once.
        kept_reads: What running it again reads if its products are kept.
        kept_saved: Bytes of `saved` that are not part of a kept product.
        kept_sizes: The same for tensors that the call makes, by key.
    """

    def __init__(self, costs: costs_lib.Costs):
        calls = costs.calls
        self.costs = costs
        self.length = len(calls)
        self.made = [-1] * len(costs.sizes)
        for position, call in enumerate(calls):
            for key in call.makes:
                self.made[key] = position
        self.sizes = [
            0 if maker < 0 else size
            for size, maker in zip(costs.sizes, self.made, strict=True)
        ]
        self.gradients = list(costs.gradients)
        self.outputs = tuple(dict.fromkeys(costs.outputs))
        self.reads = [
            tuple(k for k in dict.fromkeys(c.reads) if k not in c.makes)
            for c in calls
        ]
        self.needs = [tuple(dict.fromkeys(c.needs)) for c in calls]
        self.readers = [[] for _ in costs.sizes]
        self.first_need = [NEVER] * len(costs.sizes)
        for position in range(self.length):
            for key in self.reads[position]:
                self.readers[key].append(position)
            for key in self.needs[position]:
                self.first_need[key] = min(self.first_need[key], position)
        self.first_read = [r[0] if r else NEVER for r in self.readers]
        self.last_read = [
            r[-1] if r else maker
            for r, maker in zip(self.readers, self.made, strict=True)
        ]
        for key in self.outputs:
            self.last_read[key] = self.length
        self.kept_reads, self.kept_saved, self.kept_sizes = [], [], []
        for position in range(self.length):
            self._index_product(position)

    def _index_product(self, position):
        call = self.costs.calls[position]
        reads = self.reads[position]
        self.kept_reads.append(
            tuple(key for key in reads if key in call.product_needs)
        )
        # Memory that the product shares counts once, as the product's.
        shared = min(call.product_overlap, call.product_bytes)
        in_saved = min(shared, call.saved)
        self.kept_saved.append(call.saved - in_saved)
        shared -= in_saved
        sizes = {}
        for key in call.makes:
            part = min(shared, self.sizes[key])
            sizes[key] = self.sizes[key] - part
            shared -= part
        self.kept_sizes.append(sizes)


@dataclasses.dataclass(frozen=True)
class Part:
    """A segment by positions of calls.

    Attributes:
        start: Position of the first call.
        stop: Position after the last call.
        recomputed: Whether the backward pass runs the calls again.
        kept: Positions of calls whose products are kept.
        parts: Parts that it is cut into when it is run again.
    """

    start: int
    stop: int
    recomputed: bool
    kept: frozenset[int] = frozenset()
    parts: tuple["Part", ...] = ()

    @property
    def again(self) -> tuple["Part", ...]:
        """What is run forward and then backward when this is run again."""
        return self.parts or (Part(self.start, self.stop, False),)
