"""Keras state in the forward pass and in its replay.

Both passes run in a `keras.StatelessScope`, through which Keras variables are
read and assigned. The forward pass takes note of every value that it reads
and holds back what it assigns, so that each variable is assigned once, when
the function has succeeded. The replay reads the values that the forward pass
read, in the same order: weights, moving statistics and the states of random
generators, and forgets what it assigns.

Each read is a leaf of its own, as each read of a variable is for a tape: the
contributions to a variable's gradient are then added in the order in which
the plain model adds them.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfckpt import _compat
from tfckpt.recomputation import errors, observe


class ForwardScope(keras.StatelessScope):
    """Takes note of reads, holds back assignments and losses.

    Args:
        label: names the function in errors.
        observer: takes note of the ops of the forward pass.
        until: the code of the frame in which the function is called.

    Attributes:
        reads: variables in the order in which they were read.
        updates: the variables assigned, with their last values.
        layer_losses: pairs of layer and loss tensor from `add_loss`.
        raw: references to the `tf.Variable`s behind Keras variables.
    """

    def __init__(self, label: str, observer: observe.Observer, until: Any):
        super().__init__(collect_losses=True)
        self._until = until
        self._label = label
        self._observer = observer
        self._graph = _current_graph()
        self._current = {}
        self.reads = []
        self.updates = {}
        self.layer_losses = []
        self.raw = set()

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Called by Keras when the variable is read."""
        key = id(variable)
        if not _traced_anew(self._graph):
            # A tf.function keeps its trace: it must read the variable
            # itself, not the value of today.
            self._refuse_stale(variable)
            outer = self.original_scope
            return None if outer is None else outer.get_current_value(variable)
        if key not in self._current:
            with _building(self._graph), self._observer.unnoticed():
                value, raw = read(variable, self.original_scope, peek=True)
            self._current[key] = value
            self._observer.ignore(value)
            self.raw |= raw
        self._refuse_custom_gradient(variable)
        self.reads.append(variable)
        return self._current[key]

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Called by Keras when a variable is assigned."""
        variable, value = update
        if _current_graph() is not self._graph:
            raise errors.RecomputeError(
                f"{self._label} assigns the variable '{variable.path}' inside "
                "a loop, a branch or a tf.function of its own (random layers "
                "and batch normalization do that), from where it can't be "
                "assigned once and replayed. Put the recomputation inside the "
                "loop or tf.function instead, or remove the @tf.function."
            )
        self._current[id(variable)] = value
        self.updates[id(variable)] = (variable, value)

    def add_loss(self, loss: tf.Tensor) -> None:
        """Called by `Layer.add_loss`, and for activity regularizers."""
        super().add_loss(loss)
        self.layer_losses.append((_compat.calling_layer(), loss))

    def _refuse_custom_gradient(self, variable: keras.Variable) -> None:
        if variable.trainable and _compat.in_custom_gradient(self._until):
            raise errors.RecomputeError(
                f"{self._label} reads the weight '{variable.path}' inside a "
                "function with a gradient of its own (tf.custom_gradient, "
                "tf.recompute_grad, keras.remat), which would not see that it "
                "depends on the weight. Pass the weight to that function as "
                "an argument, or leave it out of recomputation."
            )

    def _refuse_stale(self, variable: keras.Variable) -> None:
        if id(variable) in self.updates:
            raise errors.RecomputeError(
                f"{self._label} assigns '{variable.path}' and reads it again "
                "inside a tf.function, which would read the old value. Remove "
                "the @tf.function or leave this part out of recomputation."
            )


class ReplayScope(keras.StatelessScope):
    """Hands out what the forward pass read, and leaves state alone.

    Args:
        label: names the function in errors.
        reads: the variables that the forward pass read, in order.
        values: what the forward pass read, in the same order.
        hand_out: called with the position of a read and the value assigned
            in the replay before it (None if none was); returns what is read.
        observer: takes note of the replay's ops.

    Attributes:
        layer_losses: from `add_loss`, in order.
    """

    def __init__(
        self,
        label: str,
        reads: list[keras.Variable],
        values: Sequence[tf.Tensor],
        hand_out: Callable[[int, tf.Tensor | None], tf.Tensor],
        observer: observe.Observer,
    ):
        super().__init__(collect_losses=True)
        self._label = label
        self._graph = _current_graph()
        self._values = values
        self._hand_out = hand_out
        self._observer = observer
        self._assigned = {}
        self._waiting = {}
        for position, variable in enumerate(reads):
            self._waiting.setdefault(id(variable), []).append(position)
        self._last = {}
        self._closed = False
        self.layer_losses = []

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """While the gradient is computed: weights may not be read any more.

        What never changes may (quantized layers read their kernel there).
        """
        self._closed = True
        with self:
            yield

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Called by Keras when the variable is read."""
        key = id(variable)
        if self._closed and (variable.trainable or key in self._assigned):
            raise errors.RecomputeError(
                f"{self._label} reads the variable '{variable.path}' while "
                "its gradient is computed: something inside recomputes on its "
                "own (tf.recompute_grad, keras.remat or keras.RematScope) and "
                "would not see the state of the forward pass. Remove it, or "
                "use tfckpt.recompute there too."
            )
        if not _traced_anew(self._graph):
            return None
        waiting = self._waiting.get(key)
        if waiting:
            with _building(self._graph), self._observer.unnoticed():
                value = self._hand_out(waiting.pop(0), self._assigned.get(key))
            self._observer.ignore(value)
            self._last[key] = value
        elif key not in self._last:
            raise errors.RecomputeError(
                f"The recomputation of {self._label} reads the variable "
                f"'{variable.path}', which the forward pass did not read. "
                "Variables must not be created in the recomputed function, "
                "and it must do the same both times (see "
                "tfckpt.is_recomputing)."
            )
        elif key in self._assigned:
            return self._assigned[key]
        return self._last[key]

    def peek(self, variable: keras.Variable) -> Any:
        """The value that the next read will have, None for any.

        For the forward pass of a recomputed function inside of this one. It
        reads in its own way; the reads that count are made again after it.
        """
        key = id(variable)
        if key in self._assigned:
            return self._assigned[key]
        waiting = self._waiting.get(key)
        if waiting and _traced_anew(self._graph):
            value = self._values[waiting[0]]
            self._observer.ignore(value)
            return value
        return self.get_current_value(variable)

    def add_loss(self, loss: tf.Tensor) -> None:
        """Called by `Layer.add_loss`, and for activity regularizers."""
        super().add_loss(loss)
        self.layer_losses.append(loss)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Called by Keras when a variable is assigned."""
        # What is assigned is cut off, as for a variable without scope.
        variable, value = update
        self._assigned[id(variable)] = tf.stop_gradient(value)


def read(
    variable: keras.Variable,
    outer: keras.StatelessScope | None,
    peek: bool = False,
) -> tuple[tf.Tensor, set[Any]]:
    """The value of a Keras variable outside of the scope that is entered.

    Args:
        variable: the variable, initialized here if it was just created.
        outer: the `StatelessScope` around the recomputed function, if any.
        peek: whether a replay around it shall not count this as a read.

    Returns:
        The value, in the dtype of the variable, and references to the
        `tf.Variable`s that were read for it.
    """
    value = None
    if peek and isinstance(outer, ReplayScope):
        value = outer.peek(variable)
    elif outer is not None:
        value = outer.get_current_value(variable)
    if value is not None:
        # A tensor of its own: the function may hold the same one.
        return tf.identity(value), set()
    if _compat.stored_value(variable) is None:
        _compat.initialize_variables()
    with _compat.watch_variables() as watcher:
        value = tf.convert_to_tensor(_compat.stored_value(variable))
    return value, {v.ref() for v in watcher.watched_variables()}


def _current_graph() -> Any:
    if tf.executing_eagerly():
        return None
    return tf.compat.v1.get_default_graph()


@contextlib.contextmanager
def _building(graph: Any) -> Iterator[None]:
    """Where the function was called, whatever loop it is in now."""
    if graph is None:
        # In eager mode it would stop tapes, which must see a replay's ops.
        eager = tf.executing_eagerly()
        with contextlib.nullcontext() if eager else tf.init_scope():
            yield
    else:
        with graph.as_default():
            yield


def _traced_anew(home: Any) -> bool:
    """Whether all graphs from here out to `home` are built at every call."""
    graph = _current_graph()
    while graph is not home:
        if not _compat.is_control_flow_graph(graph):
            return False
        graph = graph.outer_graph
    return True
