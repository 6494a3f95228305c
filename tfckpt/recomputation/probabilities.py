"""Probabilities that Keras' cross-entropies recognize by their op.

In a graph they look for the op that made what they are given, and take the
logits from its input: that loses less than the logarithm of a probability
near 0. What passes into or out of a recomputed function is the result of
another op, so it is made again there, of the logits that went with it.
"""

from collections.abc import Callable

import tensorflow as tf

from tfckpt import _compat

_OPS = {"Sigmoid": tf.nn.sigmoid, "Softmax": tf.nn.softmax}


def logits_of(
    tensor: tf.Tensor,
) -> tuple[Callable[[tf.Tensor], tf.Tensor], tf.Tensor] | None:
    """Returns how probabilities were made and of what; None for others.

    Those of Keras' own activations carry their logits themselves.
    """
    if isinstance(tensor, tf.__internal__.EagerTensor):
        return None
    make = _OPS.get(tensor.op.type)
    if make is None or _compat.get_logits(tensor) is not None:
        return None
    return make, tensor.op.inputs[0]
