"""A call's arguments and results as flat lists of tensors, and back.

Tensors, also those inside sparse and ragged tensors, and what Keras makes them
carry (masks, the logits of probabilities) are taken out; everything else
(None, bool, str, numbers, arrays, callables, variables) stays the Python value
that it is.
"""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfckpt import _compat
from tfckpt.recomputation import probabilities

_COMPOSITES = (
    tf.SparseTensor,
    tf.RaggedTensor,
    tf.IndexedSlices,
    tf.experimental.ExtensionType,
)


def is_differentiable(tensor: tf.Tensor) -> bool:
    """Whether gradients flow through tensors of this dtype."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def is_symbolic(value: Any) -> bool:
    """Whether `value` holds a `keras.KerasTensor`: nothing is computed yet."""
    return any(isinstance(x, keras.KerasTensor) for x in tf.nest.flatten(value))


class Structure:
    """A nested structure whose tensors have been taken out.

    Containers are copied, so that neither a function that changes its
    arguments nor a caller that changes them later is felt.

    Args:
        value: the structure.
        made: says of a tensor whether it may be probabilities that have to
            be made again (see `probabilities`).

    Attributes:
        tensors: the tensors in order, then those that they carry, then
            logits of what is made again.
    """

    def __init__(
        self,
        value: Any,
        made: Callable[[tf.Tensor], bool] = lambda tensor: True,
    ):
        self._leaves = []  # (number of tensors, what to pack them into)
        tensors = []
        for leaf in tf.nest.flatten(value):
            if isinstance(leaf, tf.Tensor):
                tensors.append(leaf)
                self._leaves.append((1, None))
            elif isinstance(leaf, _COMPOSITES):
                parts = tf.nest.flatten(leaf, expand_composites=True)
                tensors.extend(parts)
                self._leaves.append((len(parts), leaf))
            elif isinstance(leaf, Iterator):
                raise TypeError(
                    "A recomputed function can't take an iterator, which is "
                    f"used up the second time. Received: {leaf!r}. Pass a "
                    "list or a tensor."
                )
            else:
                if isinstance(leaf, np.ndarray):
                    leaf = leaf.copy()  # the caller may fill it again
                self._leaves.append((0, leaf))
        self._containers = tf.nest.map_structure(lambda leaf: 0, value)
        self._size = len(tensors)
        self._carried = []  # (position of a tensor, how it carries another)
        self.tensors = list(tensors)
        for put, get in _compat.CARRIED:
            for i, tensor in enumerate(tensors):
                carried = get(tensor)
                if isinstance(carried, tf.Tensor):
                    self._carried.append((i, put))
                    self.tensors.append(carried)
        self._remade = []  # positions of a tensor and its logits, and how
        for i, tensor in enumerate(tensors):
            found = made(tensor) and probabilities.logits_of(tensor)
            if found:
                make, logits = found
                self._remade.append((i, len(self.tensors), make))
                self.tensors.append(logits)

    def remade(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors, with probabilities that are made of their logits."""
        tensors = list(tensors)
        for index, logits, make in self._remade:
            tensors[index] = make(tensors[logits])
        return tensors

    def pack(self, tensors: list[tf.Tensor]) -> Any:
        """The structure with other tensors in the same places."""
        carried = iter(tensors[self._size :])
        for index, put in self._carried:
            put(tensors[index], next(carried))
        remaining = iter(tensors[: self._size])
        flat = []
        for count, leaf in self._leaves:
            parts = [next(remaining) for _ in range(count)]
            if not count:
                flat.append(leaf)
            elif leaf is None:
                flat.append(parts[0])
            else:
                flat.append(
                    tf.nest.pack_sequence_as(
                        leaf, parts, expand_composites=True
                    )
                )
        return tf.nest.pack_sequence_as(self._containers, flat)
