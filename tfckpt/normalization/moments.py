"""Means and variances of parts, and of their union.

The variance of a union is that within the parts plus that between their means
(Chan, Golub and LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for
Computing Sample Variances"); the mean of the parts' variances lacks the second.
Sums of squares about 0 would lose the variance where the mean is large.
"""

import dataclasses
from typing import Any

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Moments:
    """Moments of the positions of a part, or of many parts.

    Attributes:
        count: Number of positions, of shape [..., channels].
        mean: Their mean, of the same shape.
        variance: Their variance, of the same shape.
        surplus: What Keras adds to the number that it divides by.
    """

    count: tf.Tensor
    mean: tf.Tensor
    variance: tf.Tensor
    surplus: float = 0.0

    @property
    def divisor(self) -> tf.Tensor:
        """What sums were divided by."""
        return self.count + self.surplus if self.surplus else self.count


def of_inputs(layer: Any, inputs: tf.Tensor, mask: Any) -> Moments:
    """Returns the moments of a layer's inputs, as Keras computes them.

    Args:
        layer: A `keras.layers.BatchNormalization`.
        inputs: Its inputs, in the dtype in which it normalizes.
        mask: Which positions count, of one dimension less; None for all.
    """
    axes = reduction_axes(layer, inputs)
    if mask is None:
        mean, variance = keras.ops.moments(inputs, axes)
        count = tf.reduce_prod(tf.gather(tf.shape(inputs), axes))
        count = tf.cast(count, inputs.dtype) * tf.ones_like(mean)
        return Moments(count, mean, variance)
    surplus = keras.config.epsilon()
    mask = tf.cast(tf.expand_dims(mask, -1), tf.bool)
    mask = tf.broadcast_to(mask, tf.shape(inputs))
    zero = tf.zeros([], inputs.dtype)
    count = tf.reduce_sum(tf.cast(mask, inputs.dtype), axes)
    mean = tf.reduce_sum(tf.where(mask, inputs, zero), axes) / (count + surplus)
    difference = inputs - along_axis(layer, mean, inputs)
    square = tf.square(tf.where(mask, difference, zero))
    variance = tf.reduce_sum(square, axes) / (count + surplus)
    return Moments(count, mean, variance, surplus)


def reduction_axes(layer: Any, inputs: tf.Tensor) -> list[int]:
    """Returns all axes of a layer's inputs but that of the channels."""
    rank = inputs.shape.rank
    return [axis for axis in range(rank) if axis != layer.axis % rank]


def along_axis(layer: Any, values: tf.Tensor, inputs: tf.Tensor) -> tf.Tensor:
    """Returns a value for each channel in a shape to go with the inputs."""
    shape = [1] * inputs.shape.rank
    shape[layer.axis] = -1
    return tf.reshape(values, shape)


def pooled(parts: Moments) -> Moments:
    """Returns the moments of the union of parts.

    Args:
        parts: Moments of shape [parts, channels]. A part without positions
            counts for nothing, whatever its moments are.
    """
    surplus = parts.surplus
    none = parts.count == 0
    zero = tf.zeros_like(parts.mean)
    means = tf.where(none, zero, parts.mean)
    count = tf.reduce_sum(parts.count, 0)
    divisor = count + surplus if surplus else count
    divide = tf.math.divide_no_nan
    mean = divide(tf.reduce_sum(means * parts.divisor, 0), divisor)
    between = means - mean
    squares = tf.where(none, zero, parts.variance) * parts.divisor
    squares += parts.count * tf.square(between)
    if surplus:
        # Divided by more, a mean is not quite in the middle.
        squares += 2 * surplus * means * between
    return Moments(
        count, mean, divide(tf.reduce_sum(squares, 0), divisor), surplus
    )


def over_replicas(local: Moments) -> Moments:
    """Returns the moments of all replicas, from those of each.

    It is one collective operation: each replica fills its row of a table of
    zeros, and the tables are added up.
    """
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    context = tf.distribute.get_replica_context()
    if replicas == 1 or context is None:
        return local
    total = context.all_reduce(tf.distribute.ReduceOp.SUM, in_own_row(local))
    return pooled(from_rows(total, local.surplus))


def in_own_row(local: Moments) -> tf.Tensor:
    """Returns a table of shape [replicas, 3, channels] with one row filled."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    stacked = tf.stack([local.count, local.mean, local.variance])
    if replicas == 1:
        return stacked[tf.newaxis]
    # NaN of no positions would be everybody's.
    stacked = tf.where(local.count > 0, stacked, tf.zeros_like(stacked))
    context = tf.distribute.get_replica_context()
    own = tf.equal(tf.range(replicas), context.replica_id_in_sync_group)
    own = tf.reshape(own, [replicas, 1, 1])
    return tf.where(own, stacked[tf.newaxis], tf.zeros([], stacked.dtype))


def from_rows(table: tf.Tensor, surplus: float) -> Moments:
    """Returns the moments in a table that is filled."""
    count, mean, variance = tf.unstack(table, axis=1)
    return Moments(count, mean, variance, surplus)
