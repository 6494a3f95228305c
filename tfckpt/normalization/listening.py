"""Batch normalizations whose statistics somebody else has a say in.

A layer that listens runs as Keras has it, unless training in this thread (each
replica has its own) has a `Policy`. Then that gives the statistics, and the
layer leaves its moving statistics alone. Layers, names and files stay as they
are.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfckpt import _compat_training as compat
from tfckpt import recomputation

_LOCAL = threading.local()


class Policy:
    """Where the statistics of a batch come from."""

    def takes(self, layer: Any) -> bool:
        """Whether the policy is for this call; else it runs as in Keras."""
        raise NotImplementedError

    def statistics(
        self, layer: Any, inputs: tf.Tensor, mask: Any
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns mean and variance that a layer's inputs are normalized by.

        Args:
            layer: A `keras.layers.BatchNormalization` in training.
            inputs: Its inputs, in at least float32.
            mask: Which positions count, or None.
        """
        raise NotImplementedError


@contextlib.contextmanager
def under(policy: Policy | None) -> Iterator[None]:
    """Layers that listen get their statistics from a policy."""
    before = getattr(_LOCAL, "policy", None)
    _LOCAL.policy = policy
    try:
        yield
    finally:
        _LOCAL.policy = before


def layers_of(model: keras.Model) -> list[Any]:
    """Returns the batch normalizations in a model, wherever they are."""
    kind = keras.layers.BatchNormalization
    return [x for x in compat.all_layers(model) if isinstance(x, kind)]


def can_listen(layer: Any) -> bool:
    """Whether a layer computes what Keras' own class computes."""
    kind = getattr(type(layer), "plain_class", type(layer))
    own = keras.layers.BatchNormalization
    return kind.call is own.call and not getattr(layer, "renorm", False)


def listen(model: keras.Model) -> None:
    """Makes the batch normalizations in a model listen, once for all."""
    for layer in layers_of(model):
        if "call" in vars(layer) or not can_listen(layer):
            continue
        layer.call = functools.partial(_call, layer, layer.call)


def _call(layer, as_keras, inputs, training=None, mask=None):
    policy = getattr(_LOCAL, "policy", None)
    if (
        policy is None
        or not training
        or not layer.trainable
        or isinstance(inputs, keras.KerasTensor)
        or (mask is not None and len(mask.shape) != len(inputs.shape) - 1)
        or not policy.takes(layer)
    ):
        return as_keras(inputs, training=training, mask=mask)
    normalize = functools.partial(_normalized, layer, policy)
    if hasattr(type(layer), "plain_class"):
        # A `tfckpt.Recompute` layer.
        normalize = recomputation.recompute(normalize)
    return normalize(inputs, mask)


def dtype_of(layer: Any, dtype: Any) -> str:
    """Returns the dtype in which a layer normalizes inputs of a dtype."""
    dtype = keras.backend.standardize_dtype(dtype)
    if layer.autocast and "float" in dtype:
        dtype = layer.compute_dtype
    # As in Keras: in low precision the squares would overflow.
    return keras.backend.result_type(dtype, "float32")


def as_normalized(layer: Any, inputs: tf.Tensor) -> tf.Tensor:
    """Returns a layer's inputs as it is to normalize them."""
    dtype = dtype_of(layer, inputs.dtype)
    if layer.autocast and inputs.dtype.is_floating:
        inputs = tf.cast(inputs, layer.compute_dtype)
    return tf.cast(inputs, dtype)


def _normalized(layer, policy, inputs, mask):
    inputs = as_normalized(layer, inputs)
    dtype = inputs.dtype
    mean, variance = policy.statistics(layer, inputs, mask)
    outputs = keras.ops.batch_normalization(
        inputs,
        mean,
        variance,
        axis=layer.axis,
        offset=keras.ops.cast(layer.beta, dtype) if layer.center else None,
        scale=keras.ops.cast(layer.gamma, dtype) if layer.scale else None,
        epsilon=layer.epsilon,
    )
    return keras.ops.cast(outputs, layer.compute_dtype)
