"""What a function reads from outside, and what it may not do.

Beside its arguments a function can read tensors of its surroundings (a
closure), raw `tf.Variable`s, and random numbers that come from no Keras state.
The first are differentiated, the second are held to the value that was read,
the last are refused: a second run would draw others.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfckpt import _compat
from tfckpt.recomputation import (
    arguments,
    errors,
    raw_variables,
    unrepeatable,
)

# Ops that move tensors, and how loops and branches are put into a graph: how
# many there are depends on what records, and in which graph.
_BOOKKEEPING = frozenset(
    [
        "Case",
        "Const",
        "Identity",
        "IdentityN",
        "If",
        "NoOp",
        "PartitionedCall",
        "Placeholder",
        "ReadVariableOp",
        "StatefulPartitionedCall",
        "StatelessIf",
        "StatelessWhile",
        "StopGradient",
        "While",
        "ZerosLike",
    ]
)


class Observer:
    """Takes note of the ops of one run of a function.

    Args:
        label: names the function in errors.
        inputs: the tensors that it is given.
    """

    def __init__(self, label: str, inputs: list[tf.Tensor]):
        self._label = label
        self._produced = {_key(tensor) for tensor in inputs}
        self._external = {}
        self._handles = {}
        self._hidden = set()  # handles that only a function read
        self._ops = []  # types, in order
        self._constants = set()  # numbers made outside of TensorFlow
        self._paused = False
        self._graph = None
        self._thread = None

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Takes note of the ops that run, or are put into the graph, here.

        Only of those of this thread: replicas build one graph together, and
        share their list of callbacks.
        """
        self._thread = threading.get_ident()
        start = 0
        if not tf.executing_eagerly():
            self._graph = tf.compat.v1.get_default_graph()
            start = len(self._graph.get_operations())
        with _compat.observed_ops(self._callback):
            yield
        if self._graph is not None:
            # TensorFlow reports every op but calls of functions.
            for op in self._graph.get_operations()[start:]:
                if op.type in ("PartitionedCall", "StatefulPartitionedCall"):
                    self._note(
                        op.type,
                        op.inputs,
                        [op.node_def.attr["f"]],
                        op.outputs,
                        op.name,
                        self._graph,
                    )
        self._produced.clear()

    def compare(self, replay: "Observer") -> None:
        """Raises if the replay did something else than this forward pass.

        Other ops, or other numbers made outside of TensorFlow, come from a
        choice in Python: `random`, `numpy.random`, a counter, a cache.
        """
        if self._ops != replay._ops:
            forward, again = next(
                pair
                for pair in itertools.zip_longest(self._ops, replay._ops)
                if pair[0] != pair[1]
            )
            difference = f"runs the op {again} where it ran {forward} before"
        elif not replay._constants <= self._constants:
            difference = "uses another constant than before"
        else:
            return
        raise errors.RecomputeError(
            f"The recomputation of {self._label} {difference}: it depends on "
            "something in Python that has changed (random or numpy.random, a "
            "counter, a tensor cached at the first run). Draw with "
            "keras.random, pass what changes as an argument, or leave this "
            "part out of recomputation."
        )

    @contextlib.contextmanager
    def unnoticed(self) -> Iterator[None]:
        """While tfckpt itself runs ops in between."""
        paused, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = paused

    def ignore(self, tensor: tf.Tensor) -> None:
        """Takes a tensor for one of the inputs."""
        self._produced.add(_key(tensor))

    @property
    def captured(self) -> list[tf.Tensor]:
        """The differentiable tensors read that are no inputs."""
        return list(self._external.values())

    def raw_variables(
        self, known: list[tf.Variable]
    ) -> list[raw_variables.RawVariable]:
        """The variables read that are no Keras variables.

        Args:
            known: those that TensorFlow reported, which are the trainable
                ones. Of others only the handle is known.
        """
        found = [
            raw_variables.RawVariable(self._label, v.handle, v) for v in known
        ]
        # In a graph a loop or function reads a capture of the handle, which
        # is another tensor for a tape than the variable is.
        eager = {_key(v.handle) for v in known}
        for key, handle in self._handles.items():
            if key in eager or _compat.variable_dtype(handle) is None:
                continue
            if key in self._hidden:
                raise errors.RecomputeError(
                    f"{self._label} calls a tf.function that reads a variable "
                    f"({_compat.variable_dtype(handle).name}). In eager mode "
                    "nothing tells which, so that it can't be differentiated. "
                    "Put tf.function around the training step instead, or "
                    "remove it."
                )
            found.append(raw_variables.RawVariable(self._label, handle))
        return found

    def _callback(
        self, op_type, inputs, attrs, outputs, op_name=None, graph=None
    ):
        """For `_compat.observed_ops`: called after each op."""
        if threading.get_ident() == self._thread:
            self._note(op_type, inputs, attrs, outputs, op_name, graph)
        return outputs  # for the callback of the next observer

    def _note(self, op_type, inputs, attrs, outputs, op_name, graph):
        outputs = [x for x in outputs or () if isinstance(x, tf.Tensor)]
        if self._paused:
            self._produced.update(map(_key, outputs))
            return
        op_type, op_name = _text(op_type), _text(op_name or "")
        unrepeatable.refuse(op_type, self._label, op_name)
        if graph is not self._graph:
            return  # the body of a loop or function, which is traced
        if op_type not in _BOOKKEEPING:
            self._ops.append(
                "a tf.function" if op_type.startswith("__") else op_type
            )
        if op_type == "Const" and arguments.is_differentiable(outputs[0]):
            value = tf.make_ndarray(outputs[0].op.get_attr("value"))
            self._constants.add(_fingerprint(value))
        functions = [op_type, *_names(attrs or ())]
        for function in functions:
            for inner in unrepeatable.unrepeatable_ops(function):
                unrepeatable.refuse(inner, self._label, op_name)
        for tensor in inputs:
            if not isinstance(tensor, tf.Tensor):
                continue
            key = _key(tensor)
            if tensor.dtype == tf.resource:
                self._handles.setdefault(key, tensor)
                if tf.executing_eagerly() and any(
                    map(_compat.function_definition, functions)
                ):
                    self._hidden.add(key)
            elif key not in self._produced and arguments.is_differentiable(
                tensor
            ):
                if tf.executing_eagerly() and key not in self._external:
                    self._constants.add(_fingerprint(tensor.numpy()))
                self._external.setdefault(key, tensor)
        self._produced.update(map(_key, outputs))


def _fingerprint(value: np.ndarray) -> tuple[Any, ...]:
    return value.dtype.name, value.shape, hash(value.tobytes())


def _names(attrs: Iterable[Any]) -> Iterator[str]:
    """The strings and function names among the attributes of an op."""
    for attr in attrs:
        if isinstance(attr, (str, bytes)):
            yield _text(attr)
        elif isinstance(attr, tf.compat.v1.AttrValue):
            yield attr.func.name
            yield from (function.name for function in attr.list.func)


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name


def _key(tensor: Any) -> Any:
    if hasattr(tensor, "graph") and not tf.executing_eagerly():
        return tensor.name
    return _compat.tensor_id(tensor)
