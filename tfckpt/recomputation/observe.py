"""What a function reads from outside.

Beside its arguments a function can read tensors of its surroundings (a
closure), which are differentiated, and raw `tf.Variable`s, which are held to
the value that was read. What can't be repeated is refused on the way.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfckpt import _compat
from tfckpt.recomputation import (
    arguments,
    errors,
    keeping,
    raw_variables,
    trace,
    unrepeatable,
)

# What a graph puts in the place of a tensor of another graph, or of none.
_CAPTURES = ("Const", "Placeholder")


_local = threading.local()


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """While tfckpt runs ops that are no part of any function observed."""
    before, _local.unnoticed = _is_unnoticed(), True
    try:
        yield
    finally:
        _local.unnoticed = before


def _is_unnoticed():
    return getattr(_local, "unnoticed", False)


@contextlib.contextmanager
def refusing(label: str) -> Iterator[None]:
    """Refuses the ops of this thread that can't be run a second time.

    Args:
        label: names what will run again, in errors.

    Raises:
        RecomputeError: an op draws random numbers, assigns or has effects.
    """
    thread = threading.get_ident()

    def refuse(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        if threading.get_ident() == thread and not _is_unnoticed():
            op_type, name = _text(op_type), _text(op_name or "")
            unrepeatable.refuse(op_type, label, name)
            for function in (op_type, *_names(tuple(attrs or ()))):
                for inner in unrepeatable.unrepeatable_ops(function):
                    unrepeatable.refuse(inner, label, name)
        return outputs

    with _compat.observed_ops(refuse):
        yield


class Observer:
    """Takes note of the ops of one run of a function.

    Args:
        label: names the function in errors.
        inputs: the tensors that it is given.
        keeper: says what its ops return, where tensors are kept.

    Attributes:
        trace: the ops that ran.
    """

    def __init__(
        self, label: str, inputs: list[tf.Tensor], keeper: keeping.Keeper
    ):
        self._label = label
        self._keeper = keeper
        self._produced = {_key(tensor) for tensor in inputs}
        self._read = {}
        self._handles = {}
        self._hidden = set()  # handles that only a function read
        self._paused = False
        self._graph = None
        self._thread = None
        self.trace = trace.Trace(label)

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
        with _compat.observed_ops(self._callback), self._keeper.running():
            yield
        if self._graph is not None:
            # TensorFlow reports every op but calls of functions.
            for op in self._graph.get_operations()[start:]:
                if op.type in ("PartitionedCall", "StatefulPartitionedCall"):
                    self._note(
                        op.type,
                        op.inputs,
                        ["f", op.node_def.attr["f"]],
                        op.outputs,
                        op.name,
                        self._graph,
                    )
        self._read = {
            key: outside
            for tensor in self._read.values()
            if (outside := self._outside(tensor)) is not None
            for key in (_key(outside),)
        }
        self._produced.clear()

    def results(self, tensors: list[tf.Tensor]) -> None:
        """Takes note of what the function returns; it may be a captured one."""
        for tensor in tensors:
            self._note_read(tensor)

    def made(self, tensor: tf.Tensor) -> bool:
        """Whether the function made it, or was given it, while it runs."""
        return _key(tensor) in self._produced

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
        return list(self._read.values())

    def raw_variables(
        self, known: list[tf.Variable]
    ) -> list[raw_variables.RawVariable]:
        """The variables read that are no Keras variables.

        Args:
            known: those that TensorFlow reported, which are the trainable
                ones. Of others only the handle is known.
        """
        handles = {_key(v.handle): v.handle for v in known}
        names = {_key(v.handle): v.name for v in known}
        for key, handle in self._handles.items():
            outermost = _outermost(handle)
            dtype = _compat.variable_dtype(outermost)
            if dtype is None:
                continue
            if key in self._hidden:
                raise errors.RecomputeError(
                    f"{self._label} calls a tf.function that reads a variable "
                    f"({dtype.name}). In eager mode nothing tells which, so "
                    "that it can't be differentiated. Put tf.function around "
                    "the training step instead, or remove it."
                )
            handles.setdefault(_key(outermost), outermost)
        return [
            raw_variables.RawVariable(
                self._label, handle, names.get(key, "its name is not known")
            )
            for key, handle in handles.items()
        ]

    def _callback(
        self, op_type, inputs, attrs, outputs, op_name=None, graph=None
    ):
        """For `_compat.observed_ops`: called after each op."""
        if threading.get_ident() == self._thread:
            self._note(op_type, inputs, attrs, outputs, op_name, graph)
            paused = self._paused or _is_unnoticed()
            if not paused and graph is not None and graph is self._graph:
                outputs = self._keeper.outputs(_text(op_type), outputs)
                self._produced.update(map(_key, outputs))
        return outputs  # for the callback of the next observer

    def _note(self, op_type, inputs, attrs, outputs, op_name, graph):
        outputs = [x for x in outputs or () if isinstance(x, tf.Tensor)]
        if self._paused or _is_unnoticed():
            self._produced.update(map(_key, outputs))
            return
        op_type, op_name = _text(op_type), _text(op_name or "")
        attrs = tuple(attrs or ())
        unrepeatable.refuse(op_type, self._label, op_name)
        traced = graph is not None and self._graph is None
        if op_type == "Const" and not traced:
            self._note_constant(outputs[0])
        if graph is not self._graph:
            return  # the body of a loop or function, which is traced
        self.trace.op(op_type, attrs)
        functions = [op_type, *_names(attrs)]
        for function in functions:
            for inner in unrepeatable.unrepeatable_ops(function):
                unrepeatable.refuse(inner, self._label, op_name)
        for tensor in inputs:
            if not isinstance(tensor, tf.Tensor):
                continue
            if tensor.dtype == tf.resource:
                key = _key(tensor)
                self._handles.setdefault(key, tensor)
                if tf.executing_eagerly() and any(
                    map(_compat.function_definition, functions)
                ):
                    self._hidden.add(key)
            else:
                self._note_read(tensor)
        self._produced.update(map(_key, outputs))

    def _note_constant(self, tensor):
        value = tensor.op.get_attr("value")
        if tensor.dtype != tf.string:
            self.trace.constant(tf.make_ndarray(value))

    def _note_read(self, tensor):
        key = _key(tensor)
        if key in self._read:
            return
        if tf.executing_eagerly():
            if key in self._produced:
                return
            if tensor.dtype not in (tf.string, tf.variant, tf.resource):
                self.trace.constant(tensor.numpy())
        elif key in self._produced and tensor.op.type not in _CAPTURES:
            return
        if arguments.is_differentiable(tensor):
            self._read[key] = tensor

    def _outside(self, tensor):
        """The tensor that a closure holds; None for one that is made inside.

        A capture looks like an op that the function makes.
        """
        outermost = _outermost(tensor)
        if outermost is tensor and _key(tensor) in self._produced:
            return None
        return outermost


def _outermost(tensor: tf.Tensor) -> tf.Tensor:
    """What `tensor` is a capture of, in the graph where that was made.

    The graph in which the gradient is built captures it for itself, so that
    the capture in this graph would not be met again.
    """
    while hasattr(tensor, "op") and tensor.op.type in _CAPTURES:
        captures = getattr(tensor.graph, "captures", ())
        outer = [x for x, inner in captures if inner.name == tensor.name]
        if not outer:
            break
        tensor = outer[0]
    return tensor


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
    """A name for a tensor that no other has while the function runs."""
    if isinstance(tensor, tf.__internal__.EagerTensor):
        return _compat.tensor_id(tensor)
    return tensor.name, id(tensor.graph)
