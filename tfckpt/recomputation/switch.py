"""Whether to recompute, and whether a recomputation is under way.

Everything here belongs to one thread: the replicas of a `tf.distribute`
strategy run in threads of their own and must not switch each other.
"""

import contextlib
import inspect
import threading
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfckpt import _compat


class _Switch(threading.local):
    off = 0
    recomputing = 0


_switch = _Switch()


def is_recomputing() -> bool:
    """Whether the code runs again, for the backward pass, in this thread.

    For side effects that must happen once: prints, counters kept in Python,
    data written to a file. What is computed must not depend on it. In a
    `tf.function` it is a Python bool while the function is traced, as the
    recomputation is traced for itself.

    Returns:
        True in a recomputation, False in a forward pass and elsewhere.

    Example:

    >>> import tensorflow as tf
    >>> calls = []
    >>> @tfckpt.recompute
    ... def double(x):
    ...     calls.append(tfckpt.is_recomputing())
    ...     return 2.0 * x
    >>> x = tf.constant(1.0)
    >>> with tf.GradientTape() as tape:
    ...     tape.watch(x)
    ...     y = double(x)
    >>> float(tape.gradient(y, x)), calls
    (2.0, [False, True])
    """
    return _switch.recomputing > 0


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    """Marks a recomputation; nested functions are recomputed in their turn."""
    off, _switch.off = _switch.off, 0
    _switch.recomputing += 1
    try:
        yield
    finally:
        _switch.recomputing -= 1
        _switch.off = off


@contextlib.contextmanager
def no_recompute() -> Iterator[None]:
    """Switches recomputation off in this thread: functions run plainly.

    To measure the price, to debug, or for what recomputation refuses. It
    decides when the forward pass runs (in a `tf.function`: when it is
    traced).

    Example:

    >>> import tensorflow as tf
    >>> square = tfckpt.recompute(lambda x: x * x)
    >>> x = tf.constant(3.0)
    >>> with tf.GradientTape() as tape, tfckpt.no_recompute():
    ...     tape.watch(x)
    ...     y = square(x)
    >>> float(tape.gradient(y, x))
    6.0
    """
    _switch.off += 1
    try:
        yield
    finally:
        _switch.off -= 1


def wanted() -> bool:
    """Whether a call made now has to be prepared for recomputation."""
    if _switch.off or _compat.in_symbolic_scope():
        return False
    if not tf.executing_eagerly() and _compat.in_vectorized_map():
        # `tf.vectorized_map` rewrites ops, and loses what is attached.
        return False
    if _compat.records():
        return True
    # A graph may be differentiated later, from outside, unless Keras traces
    # it to predict, to evaluate or to export.
    return not tf.executing_eagerly() and not _traced_for_inference()


def _traced_for_inference() -> bool:
    """Whether Keras traces this graph for `evaluate`, `predict`, `export`.

    Only their frames on the stack tell: such a graph has no mark, and an
    enclosing `training=False` does not mean that nobody differentiates. A
    `tf.function` between them and here is kept and may be used elsewhere.
    """
    traces = 0
    frame = inspect.currentframe()
    while frame is not None:
        # AutoGraph puts this before the names of what it converts.
        name = frame.f_code.co_name.removeprefix("tf__")
        if name == "func_graph_from_py_func":
            traces += 1
        elif name in ("test_step", "predict_step"):
            if isinstance(frame.f_locals.get("self"), keras.Model):
                return traces == 0
        elif frame.f_globals.get("__name__", "").startswith("keras.src.export"):
            return traces <= 1
        frame = frame.f_back
    return False
