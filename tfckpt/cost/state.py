"""Bytes of weights, of their gradients, and of an optimizer's variables."""

import math
from collections.abc import Iterable
from typing import Any

import keras

from tfckpt import sizes

# What an uncompiled model's optimizer is taken for: two variables for each
# weight, in the dtype of the weight.
_ADAM = 2


def variable_bytes(variables: Iterable[Any]) -> int:
    """Returns the bytes of Keras variables."""
    return sum(sizes.tensor_bytes(v) or 0 for v in variables)


def optimizer_bytes(model: keras.Model) -> tuple[int, str]:
    """Returns the bytes of a model's optimizer and what was assumed.

    The optimizer is not built for it: a copy of it is, on a small variable.
    """
    trained = variable_bytes(model.trainable_variables)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        note = "The model is not compiled: optimizer state counts as Adam's."
        return _ADAM * trained, note
    if optimizer.built:
        return variable_bytes(optimizer.variables), ""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    try:
        copy = type(inner).from_config(inner.get_config())
        small = keras.Variable(keras.ops.zeros((3, 5)))
        copy.build([small])
        slots = [math.prod(v.shape) for v in copy.variables]
    except Exception:  # Whatever a user's optimizer raises.
        note = (
            f"The state of the optimizer {type(inner).__name__} is not known "
            "before it is built, and counts as Adam's."
        )
        return _ADAM * trained, note
    # Scalars are counters; a factored state counts as its share.
    share = sum(size for size in slots if size > 1) / math.prod(small.shape)
    return int(share * trained), ""
