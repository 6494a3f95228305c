"""What gradient tapes see of a recomputed function, and in which order."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfckpt import _compat
from tfckpt.recomputation import arguments


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Nothing is recorded in eager mode: a tape would keep activations.

    In a graph recording costs no memory, and the function may open a tape of
    its own.
    """
    if not tf.executing_eagerly():
        yield
        return
    with _compat.stopped_recording():
        yield


def may_be_asked_for(tensor: tf.Tensor) -> bool:
    """Whether somebody may ask for a gradient with respect to `tensor`.

    In a graph that is not known before it is differentiated; there, what
    nobody asked for is pruned.
    """
    if not arguments.is_differentiable(tensor):
        return False
    return not tf.executing_eagerly() or _compat.is_watched(tensor)


def repeated(objects: list[Any]) -> list[list[int]]:
    """The positions of each object that stands in the list more than once."""
    positions = {}
    for i, each in enumerate(objects):
        positions.setdefault(id(each), []).append(i)
    return [group for group in positions.values() if len(group) > 1]


def noticed(tensor: tf.Tensor, position: int, met: list[int]) -> tf.Tensor:
    """An identity that puts `position` into `met` when its gradient comes."""

    @tf.custom_gradient
    def notice(tensor):
        def gradient(upstream):
            met.append(position)
            return upstream

        return tf.identity(tensor), gradient

    return notice(tensor)
