"""The loss of a micro-batch, and what each term of it was divided by.

Keras divides the loss of each output: by its elements, or by those that a mask
leaves, or by the sum of sample weights (`reduction` of the loss), and not at
all for "sum". A window divides once, by the sum of these numbers over its
micro-batches. Terms with one denominator go together; each further one has a
gradient of its own.

What is no mean over elements can't be weighted so. Losses of `add_loss` and
activity regularizers count as means over the micro-batch's samples; weight
regularizers are the same in each micro-batch, and go with any denominator.
"""

import dataclasses
import warnings
from typing import Any

import keras
import tensorflow as tf

from tfckpt import _compat, accumulation
from tfckpt import _compat_training as compat
from tfckpt.training import settings

# Names of denominators. A name with a number belongs to that output's loss.
SAMPLES = "samples"
SUM = "sum"
_OWN = "own"


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
        return self.value * accumulation.as_dtype(self.factor, self.value.dtype)


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss of a micro-batch.

    Attributes:
        targets: For each denominator its part of the loss and the weight.
        terms: The losses of the outputs.
    """

    targets: dict[str, tuple[tf.Tensor, tf.Tensor | None]]
    terms: list[Term]

    @property
    def logged(self) -> dict[str, tuple[tf.Tensor, tf.Tensor | None]]:
        """The targets as Keras logs them: means of what is not reduced."""
        if len(self.terms) != 1 or self.terms[0].unreduced is None:
            return self.targets
        value = self.terms[0].unreduced
        return {"mean": (tf.reduce_mean(value), _float(tf.size(value)))}

    @property
    def total(self) -> tf.Tensor:
        """The whole loss, as Keras logs it."""
        parts = [value for value, _ in self.logged.values()]
        return parts[0] if len(parts) == 1 else tf.add_n(parts)


def compute(
    model: keras.Model,
    x: Any,
    y: Any,
    y_pred: Any,
    weight: Any,
    *,
    samples: Any,
    names: dict[int, Any],
) -> Loss:
    """Returns the loss of a micro-batch.

    Args:
        model: The model.
        x: Its inputs.
        y: Targets.
        y_pred: Its outputs.
        weight: Sample weights, or None.
        samples: Number of samples.
        names: The denominators of the outputs' losses as they were found
            first. They stay, or parts of a window would be kept apart.
    """
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if settings.has_own_loss(model):
        total = compat.compute_loss(model, x, y, y_pred, weight)
        denominator = model.loss_denominator(x, y, y_pred, weight)
        return Loss({_OWN: (_sum(total) * replicas, denominator)}, [])
    reader = _Reader(replicas, _has_open_outputs(model))
    with compat.reported_losses(reader):
        total = compat.compute_loss(model, x, y, y_pred, weight)
    plain, others = reader.plain, model.losses
    regularizers = sum(
        v.regularizer is not None for v in model.trainable_weights
    )
    found = {term.denominator for term in reader.terms}
    riding = len(others) == regularizers and SUM not in found
    joined = bool(others) and not riding
    terms = _settled(reader.terms, names, joined)
    found = {term.denominator for term in terms}
    alone = len(terms) == 1 or SAMPLES not in found
    if len(found) == 1 and not joined and alone:
        # One denominator: the loss is what Keras made of it.
        (name,) = found
        target = _sum(total) if name == SUM else _sum(total) * replicas
        if not plain:
            target = _added(terms, others)
        return Loss({name: (target, terms[0].weight)}, terms)
    return _grouped(terms, others, samples, riding)


def _has_open_outputs(model):
    """Whether outputs differ in size from batch to batch, samples apart."""
    outputs = getattr(model, "outputs", None) or ()
    return any(None in tuple(x.shape[1:]) for x in outputs)


def _settled(terms, names, joined):
    """Returns the terms with the names of the first batch."""
    settled = []
    for index, term in enumerate(terms):
        now = term.denominator, term.per_sample
        first = names.setdefault(index, now)
        shared = sum(each[0] == first[0] for each in names.values()) > 1
        shared = shared or (first[0] == SAMPLES and joined)
        if first != now and shared:
            raise ValueError(
                f"The loss of output {index} is divided by {now[0]!r} "
                f"({now[1]} elements a sample), but in batches before by "
                f"{first[0]!r} ({first[1]} elements a sample), as other "
                "parts of the loss are. In one window they could not be told "
                "apart. Give all batches the same sizes, masks and sample "
                "weights, or declare sizes that change as None, as in "
                "keras.Input((None, 3))."
            )
        settled.append(dataclasses.replace(term, denominator=first[0]))
    return settled


def _grouped(terms, others, samples, riding):
    samples = _float(samples)
    groups = {}
    for term in terms:
        groups.setdefault(term.denominator, []).append(term)
    targets = {
        name: (_added(group, []), group[0].weight)
        for name, group in groups.items()
    }
    if SAMPLES in groups or (others and not riding) or not terms:
        # One for all: each was divided by a multiple of it.
        for term in groups.get(SAMPLES, ()):
            _check_multiple(term, samples)
        targets[SAMPLES] = _added(groups.get(SAMPLES, []), ()), samples
    if others:
        name = SAMPLES if SAMPLES in targets else next(iter(targets))
        value, weight = targets[name]
        targets[name] = value + _added([], others), weight
    return Loss(targets, terms)


def _check_multiple(term, samples):
    text = (
        "The loss of an output is a mean over another number of elements than "
        "that of its samples: it can't be told from others that are. Give "
        "outputs the samples along their first axis."
    )
    tf.debugging.assert_equal(term.weight, samples * term.per_sample, text)


def _added(terms, others):
    values = [term.weighted for term in terms]
    values += [_sum(_as_float(loss)) for loss in others]
    if not values:
        return tf.zeros([], keras.config.floatx())
    return values[0] if len(values) == 1 else tf.add_n(values)


def _as_float(loss):
    if loss.dtype.is_floating:
        return loss
    return tf.cast(loss, keras.config.floatx())


def _sum(value):
    return value if value.shape.rank == 0 else tf.reduce_sum(value)


class _Reader:
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
        unscaled = _sum(value) * self._replicas if scaled else _sum(value)
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
            return SAMPLES, _float(tf.shape(keras.tree.flatten(y_pred)[0])[0])
        if loss.reduction in ("sum", "none", None):
            return SUM, None
        size = _float(tf.size(values))
        if loss.reduction == "mean_with_sample_weight":
            if sample_weight is None and not masks:
                return self._dense(values, size)
            weights = [
                *masks,
                *([] if sample_weight is None else [sample_weight]),
            ]
            return self._named("weights", weights), _float(
                tf.reduce_sum(_product(weights))
            )
        if not masks:
            return self._dense(values, size)
        valid = _product(masks)
        share = size / _float(tf.maximum(tf.size(valid), 1))
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


def _float(value):
    wide = keras.config.floatx() == "float64"
    # float16 would not count far.
    return tf.cast(value, tf.float64 if wide else tf.float32)


def _product(tensors):
    found = None
    for x in tensors:
        x = _float(x)
        if found is not None and x.shape.rank != found.shape.rank:
            # As Keras does: a last axis of 1 is dropped or added.
            x = tf.reshape(x, tf.shape(found))
        found = x if found is None else found * x
    return found
