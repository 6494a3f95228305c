"""A graph cut at its batch normalizations, to run them over a whole window.

A stage is what can be computed of each micro-batch by itself once the
statistics of the stages before are known: the calls whose inputs depend on as
many batch normalizations, one after another. Stage 0 needs no statistics. The
inputs of the batch normalizations are kept from stage to stage. What else is
read in later stages (skips) is kept too, unless it is cheap to make again from
what is kept: the sum of a residual block is that of a few normalized tensors.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection
from typing import Any

import keras

from tfckpt import graph as graph_lib

# Of how many calls a chain is made again in one stage. More of them save little
# memory, and a chain as long as the network would take quadratic time.
LONGEST_CHAIN = 12

# Whose outputs take about as long to read as to make, and are not drawn.
_CHEAP = (
    keras.layers.Activation,
    keras.layers.Add,
    keras.layers.Average,
    keras.layers.BatchNormalization,
    keras.layers.Concatenate,
    keras.layers.ELU,
    keras.layers.Flatten,
    keras.layers.LeakyReLU,
    keras.layers.Maximum,
    keras.layers.Minimum,
    keras.layers.Multiply,
    keras.layers.Permute,
    keras.layers.PReLU,
    keras.layers.ReLU,
    keras.layers.Rescaling,
    keras.layers.Reshape,
    keras.layers.Subtract,
    keras.layers.UpSampling2D,
    keras.layers.ZeroPadding2D,
)


@dataclasses.dataclass(frozen=True)
class Stage:
    """What is computed of a micro-batch at once.

    Attributes:
        size: Elements of one sample in all tensors that are read and made;
            None where that is not known.
        calls: Positions of the calls that are made, in order.
        arguments: Keys of the tensors that they read and don't make.
        normalized: Positions of the batch normalizations among the calls.
        outputs: Keys of the tensors that they make and later stages read, or
            that the model returns.
    """

    size: int | None
    calls: tuple[int, ...]
    arguments: tuple[int, ...]
    normalized: tuple[int, ...]
    outputs: tuple[int, ...]


def cut(
    graph: graph_lib.Graph,
    is_normalized: Callable[[Any], bool],
    longest_chain: int = LONGEST_CHAIN,
) -> tuple[Stage, ...]:
    """Returns the stages of a graph; the last one makes the outputs.

    Args:
        graph: The graph.
        is_normalized: Whether an operation is a batch normalization with the
            statistics of the window.
        longest_chain: How many calls of earlier stages a stage makes again at
            most.
    """
    return _Cutter(graph, is_normalized, longest_chain).stages()


def parts_of(
    stage: Stage, largest: int | None, parts: int | tuple[int, ...]
) -> int | tuple[int, ...]:
    """Returns in how many parts a stage needs to run.

    Late stages are small and have most of the weights. In fewer parts they
    take no more memory than the largest stage does, and less time.

    Args:
        stage: The stage.
        largest: The size of the largest stage; None if that is not known.
        parts: Number of micro-batches, or their sizes.

    Returns:
        A number of parts or their sizes, as `parts` is.
    """
    if largest is None:
        return parts
    count = parts if isinstance(parts, int) else len(parts)
    fewer = max(1, math.ceil(count * stage.size / largest))
    if isinstance(parts, int):
        return fewer
    # Neighbours together.
    ends = [round(count * i / fewer) for i in range(fewer + 1)]
    return tuple(sum(parts[a:b]) for a, b in itertools.pairwise(ends))


class _Cutter:
    def __init__(self, graph, is_normalized, longest_chain):
        self._graph = graph
        self._longest = longest_chain
        self._maker = {}
        self._level = dict.fromkeys(graph.inputs, 0)
        self._levels = []
        self._normalized = set()
        for position, call in enumerate(graph.calls):
            read = {key for keys, _ in call.steps for key in keys}
            made = [key for _, keys in call.steps for key in keys]
            level = max(
                (self._level[k] for k in read if k in self._level), default=0
            )
            if is_normalized(call.operation):
                self._normalized.add(position)
                level += 1
            self._levels.append(level)
            for key in made:
                self._level[key] = level
                self._maker[key] = position
        self._last = max(self._levels)
        # What is kept anyway.
        self._kept = set(graph.inputs) | {
            key for position in self._normalized for key in self._read(position)
        }

    def stages(self):
        """Returns the stages."""
        # Each look at a stage may find more that has to be kept.
        while True:
            kept = frozenset(self._kept)
            stages = [self._stage(level) for level in range(self._last + 1)]
            if kept == self._kept:
                return tuple(stages)

    def _read(self, position):
        call = self._graph.calls[position]
        made = {key for _, keys in call.steps for key in keys}
        return [
            key for keys, _ in call.steps for key in keys if key not in made
        ]

    def _stage(self, level):
        if level == self._last:
            outputs = tuple(dict.fromkeys(self._graph.outputs))
        else:
            outputs = tuple(
                sorted(
                    key
                    for key in self._kept
                    if key in self._maker and self._level[key] == level
                )
            )
        calls, arguments = self._calls(level, outputs)
        return Stage(
            self._size(calls, arguments),
            tuple(calls),
            tuple(arguments),
            tuple(p for p in calls if p in self._normalized),
            outputs,
        )

    def _calls(self, level, outputs):
        """Returns the calls that make the outputs, and what they read."""
        calls, arguments, again = set(), set(), []
        waiting = set(outputs)
        done = set()
        while waiting:
            # The last made first.
            key = max(waiting, key=lambda k: (self._maker.get(k, -1), k))
            waiting.remove(key)
            done.add(key)
            position = self._maker.get(key)
            own = position is not None and self._levels[position] == level
            if position in calls:
                continue
            if position is None or (key in self._kept and not own):
                arguments.add(key)
                continue
            if not own:
                if not self._is_cheap(position):
                    self._kept.add(key)
                    arguments.add(key)
                    continue
                again.append(key)
                if len(again) > self._longest:
                    # Chains of later stages begin anew with the nearest.
                    self._kept.add(again[0])
                    return self._calls(level, outputs)
            calls.add(position)
            waiting.update(k for k in self._read(position) if k not in done)
        return sorted(calls), sorted(arguments)

    def _size(self, calls, arguments):
        made = [
            key
            for position in calls
            for _, keys in self._graph.calls[position].steps
            for key in keys
        ]
        total = 0
        for key in [*arguments, *made]:
            shape = tuple(self._graph.specs[key].shape[1:])
            if None in shape:
                return None
            total += math.prod(shape)
        return total

    def _is_cheap(self, position):
        operation = self._graph.calls[position].operation
        if isinstance(operation, keras.Layer):
            # A subclass may do anything.
            kind = type(operation)
            return getattr(kind, "plain_class", kind) in _CHEAP
        return type(operation).__name__ in _CHEAP_OPERATIONS


# Operations on Keras tensors, such as `x + y`: their classes have no public
# names.
_CHEAP_OPERATIONS: Collection[str] = frozenset(
    {
        "Add",
        "Concatenate",
        "Divide",
        "Multiply",
        "Negative",
        "Relu",
        "Reshape",
        "Sigmoid",
        "Silu",
        "Square",
        "Subtract",
        "Tanh",
        "Transpose",
    }
)
