"""Variables in which each replica adds up its own part.

Reading one outside of the replicas gives the total (synchronization ON_READ,
aggregation SUM), so that a checkpoint holds it and may be restored on another
number of replicas. Of all kinds of variables only this one keeps the parts of
all replicas through a checkpoint.
"""

from typing import Any

import tensorflow as tf

_READ = tf.VariableSynchronization.ON_READ


def total(shape: Any, dtype: tf.DType, name: str | None = None) -> tf.Variable:
    """Makes a variable of zeros, the total of which is that of all replicas.

    It is made out of the function that is being traced, and out of its loops.

    Example:

    >>> float(total([], tf.float32))
    0.0
    """
    return _new(shape, dtype, name, tf.VariableAggregation.SUM)


def alike(dtype: tf.DType, name: str | None = None) -> tf.Variable:
    """Makes a scalar of zero that each replica changes as the others do.

    Example:

    >>> int(alike(tf.int64))
    0
    """
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return _new([], dtype, name, first)


def _new(shape, dtype, name, aggregation):
    with tf.init_scope():
        return tf.Variable(
            tf.zeros(shape, dtype),
            trainable=False,
            name=name,
            synchronization=_READ,
            aggregation=aggregation,
        )
