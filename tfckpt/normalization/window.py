"""The statistics of a window of micro-batches.

Each micro-batch is normalized by its own statistics, or by those of all
replicas; the moving statistics move once an update, with the mean and variance
of all positions of the window: as one big batch would move them, as far as the
inputs are those of the big batch (those of the first layer are).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfckpt import recomputation, replica_variables
from tfckpt.normalization import listening, moments


class MicroBatch(listening.Policy):
    """Normalizes a micro-batch, and takes note of its statistics.

    Args:
        layers: The layers of which note is taken.
        synchronized: Whether the statistics are those of all replicas.

    Attributes:
        found: The moments of this replica, by number of the layer and of its
            call in the micro-batch.
    """

    def __init__(self, layers: list[Any], synchronized: bool):
        self._numbers = {id(layer): str(i) for i, layer in enumerate(layers)}
        self._synchronized = synchronized
        self._graph = _graph()
        self.found: dict[str, moments.Moments] = {}

    def takes(self, layer: Any) -> bool:
        """Whether its statistics get out of where the layer is called."""
        if id(layer) not in self._numbers:
            return False
        if _graph() is self._graph:
            return True
        if self._synchronized:
            raise ValueError(
                "batch_normalization='sync' can't be followed where the "
                f"layer '{layer.path}' is called: inside a loop, a branch or "
                "a tf.function of its own, where replicas can't wait for each "
                "other. Take it out of there, or use batch_normalization="
                "'micro'."
            )
        return False

    def statistics(
        self, layer: Any, inputs: tf.Tensor, mask: Any
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See `listening.Policy`."""
        found = moments.of_inputs(layer, inputs, mask)
        if not recomputation.is_recomputing():
            number, call = self._numbers[id(layer)], 0
            while f"{number}_{call}" in self.found:
                call += 1
            self.found[f"{number}_{call}"] = found
        if self._synchronized or layer.synchronized:
            found = moments.over_replicas(found)
        return found.mean, found.variance


class Given(listening.Policy):
    """Normalizes by statistics that are known.

    Args:
        mean: Of shape [channels].
        variance: Of the same shape.
    """

    def __init__(self, mean: tf.Tensor, variance: tf.Tensor):
        self._given = mean, variance

    def takes(self, layer: Any) -> bool:
        """See `listening.Policy`."""
        return True

    def statistics(
        self, layer: Any, inputs: tf.Tensor, mask: Any
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See `listening.Policy`."""
        if mask is not None:
            raise ValueError(
                f"The layer '{layer.path}' is called with a mask, which "
                "batch_normalization='exact' does not follow. Use 'sync' or "
                "'micro', or leave the mask out."
            )
        return self._given


class WindowStatistics:
    """Sums over the positions of the window, for each call of a layer.

    In float64, as a variance is the difference of two of them. Each replica
    has its own.

    Args:
        layers: The layers, as for `MicroBatch`.

    Attributes:
        totals: The sums, to be saved with the model.
    """

    def __init__(self, layers: list[Any]):
        self._layers = layers
        self.totals = replica_variables.Totals("window_statistics")

    def add(
        self,
        found: Mapping[str, moments.Moments],
        where: tf.Tensor | None = None,
    ) -> None:
        """Adds a micro-batch.

        Args:
            found: Its moments, by call.
            where: Whether it counts.
        """
        for call, part in found.items():
            self.totals.notes[call] = part.surplus
            sums = tf.stack(_sums(part))
            counts = part.count > 0
            if where is not None:
                counts = tf.logical_and(counts, where)
            # Not by a factor: 0 times NaN is NaN.
            sums = tf.where(counts, sums, tf.zeros([], sums.dtype))
            self.totals.add(call, sums, shape=sums.shape, dtype=sums.dtype)

    def tables(self) -> list[tf.Tensor]:
        """Returns tables that, added up over the replicas, are to be moved by.

        See `moments.in_own_row`.
        """
        return [
            moments.in_own_row(self._moments(call)) for call in self._calls()
        ]

    def move(self, tables: Sequence[tf.Tensor]) -> None:
        """Moves the moving statistics.

        Args:
            tables: Those of all replicas.
        """
        for call, table in zip(self._calls(), tables, strict=True):
            layer = self._layer(call)
            table = tf.cast(table, _dtype(layer))
            surplus = self.totals.notes[call]
            found = moments.pooled(moments.from_rows(table, surplus))
            for variable, value in (
                (layer.moving_mean, found.mean),
                (layer.moving_variance, found.variance),
            ):
                before = tf.cast(tf.convert_to_tensor(variable), value.dtype)
                value *= 1.0 - layer.momentum
                value += before * layer.momentum
                variable.assign(tf.where(found.count > 0, value, before))

    def _calls(self):
        """Numbers of layers and of their calls, each layer's in order."""

        def place(call):
            return [int(number) for number in call.split("_")]

        return sorted(self.totals.notes, key=place)

    def _layer(self, call):
        return self._layers[int(call.split("_")[0])]

    def _moments(self, call):
        count, total, squares = tf.unstack(self.totals.value(call))
        surplus = self.totals.notes[call]
        divisor = count + surplus
        mean = tf.math.divide_no_nan(total, divisor)
        squares += count * tf.square(mean) - 2 * mean * total
        variance = tf.math.divide_no_nan(tf.maximum(squares, 0), divisor)
        dtype = _dtype(self._layer(call))
        values = (tf.cast(x, dtype) for x in (count, mean, variance))
        return moments.Moments(*values, surplus)


def _sums(part):
    """Number of positions, their sum and their sum of squares, in float64."""
    count, mean, variance = (
        tf.cast(x, tf.float64) for x in (part.count, part.mean, part.variance)
    )
    divisor = count + part.surplus
    total = mean * divisor
    squares = variance * divisor + 2 * mean * total - count * tf.square(mean)
    return count, total, squares


def _dtype(layer):
    """In which it normalizes."""
    return keras.backend.result_type(layer.moving_mean.dtype, "float32")


def _graph():
    if tf.executing_eagerly():
        return None
    return tf.compat.v1.get_default_graph()
