"""What Keras divides the loss of each output by.

By its elements, or by those that a mask leaves, or by the sum of sample weights
(`reduction` of the loss), and not at all for "sum". Keras does not say: so its
losses are called through a reader, which takes note.
"""

import dataclasses
import warnings
from typing import Any

import keras
import tensorflow as tf

from tfckpt import _compat, accumulated_gradients

# Names of denominators. A name with a number belongs to that output's loss.
SAMPLES = "samples"
SUM = "sum"


@dataclasses.dataclass(frozen=True)
class Term:
    """The loss of one output.

    Attributes:
        value: The loss, a scalar, before `loss_weights` and not divided by
            the number of replicas.
        factor: What `loss_weights` says, or None.
        denominator: Its name.
        weight: The number that it was divided by; None for a sum.
        per_sample: Elements of each sample, where that is known.
        unreduced: The loss as it is, where it is no scalar.
    """

    value: tf.Tensor
    factor: float | None
    denominator: str
    weight: tf.Tensor | None
    per_sample: int | None = None
    unreduced: tf.Tensor | None = None

    @property
    def weighted(self) -> tf.Tensor:
        """The term of the total loss."""
        if self.factor is None:
            return self.value
        return self.value * accumulated_gradients.as_dtype(
            self.factor, self.value.dtype
        )


class Reader:
    """Takes note of the losses of the outputs while Keras computes them.

    Attributes:
        terms: What was found.
        plain: Whether all are as Keras divides them among replicas.
    """

    def __init__(self, replicas, open_outputs):
        self._open = open_outputs
        self.terms = []
        self.plain = True
        self._replicas = replicas
        # Tensors that others were weighted by: the same ones, the same
        # denominator.
        self._seen = []

    def __call__(self, loss, factor, y_true, y_pred, sample_weight):
        """Returns the loss of an output, and takes note of its term."""
        values, out_mask = None, None

        def call(y_true, y_pred):
            nonlocal values, out_mask
            values = loss.call(y_true, y_pred)
            out_mask = _compat.get_mask(values)
            return values

        value = _with_call(loss, call)(y_true, y_pred, sample_weight)
        masks = [
            mask
            for mask in (_compat.get_mask(y_pred), out_mask)
            if mask is not None
        ]
        name, weight = self._denominator(
            loss, values, masks, sample_weight, y_pred
        )
        scalar = values is None or values.shape.rank == 0
        scaled = name != SUM and not scalar
        if not scaled and name != SUM:
            self.plain = False
        unscaled = (
            tf.reduce_sum(value) * self._replicas
            if scaled
            else tf.reduce_sum(value)
        )
        known = name == SAMPLES and not _is_whole(values, y_pred)
        per_sample = values.shape[1:].num_elements() if known else 1
        unreduced = value if value.shape.rank != 0 else None
        self.terms.append(
            Term(unscaled, factor, name, weight, per_sample, unreduced)
        )
        return value

    def _denominator(self, loss, values, masks, sample_weight, y_pred):
        if _is_whole(values, y_pred):
            warnings.warn(
                f"The loss '{loss.name}' gives one number for the whole "
                "micro-batch. It is taken as a mean over samples; a loss that "
                "compares samples with each other differs from that of the "
                "big batch.",
                stacklevel=2,
            )
            return SAMPLES, as_float(tf.shape(keras.tree.flatten(y_pred)[0])[0])
        if loss.reduction in ("sum", "none", None):
            return SUM, None
        size = as_float(tf.size(values))
        if loss.reduction == "mean_with_sample_weight":
            if sample_weight is None and not masks:
                return self._dense(values, size)
            weights = [
                *masks,
                *([] if sample_weight is None else [sample_weight]),
            ]
            return self._named("weights", weights), as_float(
                tf.reduce_sum(_product(weights))
            )
        if not masks:
            return self._dense(values, size)
        valid = _product(masks)
        share = size / as_float(tf.maximum(tf.size(valid), 1))
        return self._named("valid", masks), tf.reduce_sum(valid) * share

    def _dense(self, values, size):
        if values.shape[1:].is_fully_defined() and not self._open:
            return SAMPLES, size
        return f"elements {len(self.terms)}", size

    def _named(self, kind, tensors):
        for name, seen in self._seen:
            if len(seen) == len(tensors) and all(
                a is b for a, b in zip(seen, tensors, strict=True)
            ):
                return name
        name = f"{kind} {len(self.terms)}"
        self._seen.append((name, tensors))
        return name


def _is_whole(values, y_pred):
    """Whether a loss is one number for the batch, not one a sample."""
    if values is None or values.shape.rank == 0:
        return True
    samples = keras.tree.flatten(y_pred)[0].shape[0]
    return values.shape[0] == 1 and samples != 1


def _with_call(loss, call):
    """A copy of a Keras loss with another `call`; the loss is the user's."""
    copied = object.__new__(type(loss))
    vars(copied).update(vars(loss))
    vars(copied)["call"] = call
    return copied


def as_float(value: Any) -> tf.Tensor:
    """Casts a number to a dtype in which samples can be counted."""
    wide = keras.config.floatx() == "float64"
    # float16 would not count far.
    return tf.cast(value, tf.float64 if wide else tf.float32)


def _product(tensors):
    found = None
    for x in tensors:
        x = as_float(x)
        if found is not None and x.shape.rank != found.shape.rank:
            # As Keras does: a last axis of 1 is dropped or added.
            x = tf.reshape(x, tf.shape(found))
        found = x if found is None else found * x
    return found
