"""What a run of a function did, to hold the second run to the first.

Choices that are made in Python (`random`, `numpy.random`, a counter, a cache)
may come out differently the second time, without any op that tells. They show
in other ops, other numbers among the attributes of ops, or other constants.

Not seen: what differs inside a loop, a branch or an inner `tf.function`, whose
graphs the gradient may build in another way, and attributes that are text.
"""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfckpt.recomputation import errors

# Ops that move tensors, and how loops and branches are put into a graph: how
# many there are depends on what records, and in which graph. What prints is
# what `is_recomputing` is for.
_BOOKKEEPING = frozenset(
    [
        "Assert",
        "Case",
        "Const",
        "Identity",
        "IdentityN",
        "If",
        "NoOp",
        "OptionalFromValue",
        "OptionalGetValue",
        "OptionalNone",
        "PartitionedCall",
        "Placeholder",
        "PrintV2",
        "ReadVariableOp",
        "StatefulPartitionedCall",
        "StatelessIf",
        "StatelessWhile",
        "StopGradient",
        "StringFormat",
        "TensorListPopBack",
        "TensorListPushBack",
        "While",
        "ZerosLike",
    ]
)


class Trace:
    """The ops and constants of one run.

    Args:
        label: names the function in errors.
    """

    def __init__(self, label: str):
        self._label = label
        self._eager = tf.executing_eagerly()
        self._ops = []
        self._constants = []
        self._accumulates = False

    def op(self, op_type: str, attrs: Iterable[Any]) -> None:
        """Adds an op, with its attributes as pairs of name and value."""
        if op_type in ("TensorListPopBack", "ZerosLike"):
            # A loop in the graph of a gradient, with integers of its own.
            self._accumulates = True
        if op_type.startswith("__"):
            self._ops.append(("a tf.function", ()))
        elif op_type not in _BOOKKEEPING:
            self._ops.append((op_type, _settings(attrs)))

    def constant(self, value: np.ndarray) -> None:
        """Adds numbers that come from outside of TensorFlow."""
        if value.dtype != object:
            fingerprint = hash(value.tobytes())
            self._constants.append((value.dtype.name, value.shape, fingerprint))

    def compare(self, replay: "Trace") -> None:
        """Raises if the replay did something else than this forward pass."""
        if self._eager != replay._eager:
            return  # `tape.jacobian` builds a graph to run the replay in
        difference = self._other_op(replay) or self._other_constant(replay)
        if difference:
            raise errors.RecomputeError(
                f"The recomputation of {self._label} {difference}: it depends "
                "on something in Python that has changed (random or "
                "numpy.random, a counter, a tensor cached at the first run, a "
                "variable that was assigned). Draw with keras.random, pass "
                "what changes as an argument, or leave this part out of "
                "recomputation."
            )

    def _other_op(self, replay: "Trace") -> str:
        for first, second in itertools.zip_longest(self._ops, replay._ops):
            if first == second:
                continue
            if first and second and first[0] == second[0]:
                return (
                    f"runs the op {first[0]} with the attributes {second[1]} "
                    f"where it had {first[1]} before"
                )
            names = [each[0] if each else "no op" for each in (second, first)]
            return f"runs {names[0]} where it ran {names[1]} before"
        return ""

    def _other_constant(self, replay: "Trace") -> str:
        first, second = self._constants, replay._constants
        if self._accumulates or replay._accumulates:
            first, second = (
                [each for each in constants if "float" in each[0]]
                for constants in (first, second)
            )
        # A graph makes a constant of a small captured tensor only once.
        same = first == second
        if len(first) != len(second):
            same = set(second) <= set(first)
        return "" if same else "uses another constant than before"


def _settings(attrs: Iterable[Any]) -> tuple[Any, ...]:
    """The attributes that are numbers or flags: no types, no functions."""
    found, attrs = [], iter(attrs)
    for name, value in zip(attrs, attrs, strict=False):
        name = name.decode() if isinstance(name, bytes) else name
        if name.startswith("T") or "type" in name or "shape" in name:
            continue
        if isinstance(value, tf.compat.v1.AttrValue):
            kind = value.WhichOneof("value")
            if kind in ("f", "i", "b"):
                found.append((name, getattr(value, kind)))
            elif kind == "list" and value.list.i:
                found.append((name, tuple(value.list.i)))
        elif isinstance(value, (bool, int, float)):
            found.append((name, value))
        elif isinstance(value, (list, tuple)) and all(
            isinstance(each, int) for each in value
        ):
            found.append((name, tuple(value)))
    return tuple(found)
