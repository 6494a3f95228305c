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
from typing import Any

import keras
import tensorflow as tf

from tfckpt import _compat_training as compat
from tfckpt.training import denominators, settings

_OWN = "own"


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss of a micro-batch.

    Attributes:
        targets: For each denominator its part of the loss and the weight.
        terms: The losses of the outputs.
    """

    targets: dict[str, tuple[tf.Tensor, tf.Tensor | None]]
    terms: list[denominators.Term]

    @property
    def logged(self) -> dict[str, tuple[tf.Tensor, tf.Tensor | None]]:
        """The targets as Keras logs them: means of what is not reduced."""
        if len(self.terms) != 1 or self.terms[0].unreduced is None:
            return self.targets
        value = self.terms[0].unreduced
        return {
            "mean": (
                tf.reduce_mean(value),
                denominators.as_float(tf.size(value)),
            )
        }

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
    reader = denominators.Reader(replicas, _has_open_outputs(model))
    with compat.reported_losses(reader):
        total = compat.compute_loss(model, x, y, y_pred, weight)
    plain, others = reader.plain, model.losses
    regularizers = sum(
        v.regularizer is not None for v in model.trainable_weights
    )
    found = {term.denominator for term in reader.terms}
    riding = len(others) == regularizers and denominators.SUM not in found
    joined = bool(others) and not riding
    terms = _settled(reader.terms, names, joined)
    found = {term.denominator for term in terms}
    alone = len(terms) == 1 or denominators.SAMPLES not in found
    if len(found) == 1 and not joined and alone:
        # One denominator: the loss is what Keras made of it.
        (name,) = found
        target = (
            _sum(total) if name == denominators.SUM else _sum(total) * replicas
        )
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
        shared = shared or (first[0] == denominators.SAMPLES and joined)
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
    samples = denominators.as_float(samples)
    groups = {}
    for term in terms:
        groups.setdefault(term.denominator, []).append(term)
    targets = {
        name: (_added(group, []), group[0].weight)
        for name, group in groups.items()
    }
    if denominators.SAMPLES in groups or (others and not riding) or not terms:
        # One for all: each was divided by a multiple of it.
        for term in groups.get(denominators.SAMPLES, ()):
            _check_multiple(term, samples)
        targets[denominators.SAMPLES] = (
            _added(groups.get(denominators.SAMPLES, []), ()),
            samples,
        )
    if others:
        name = (
            denominators.SAMPLES
            if denominators.SAMPLES in targets
            else next(iter(targets))
        )
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
