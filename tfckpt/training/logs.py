"""The losses that are logged: those of the samples seen.

A window over calls logs each micro-batch as Keras does, weighted by samples. A
window within a call is one batch to the user: its loss is that of the whole
batch, for which the micro-batches' losses are averaged as their gradients are.
"""

from typing import Any

import keras
import tensorflow as tf

from tfckpt import _compat_training as compat
from tfckpt import replica_variables
from tfckpt.training import denominators, losses


def log_micro_batch(
    model: keras.Model, loss: losses.Loss, samples: Any
) -> None:
    """Updates the metrics of the losses with those of a micro-batch."""
    samples = tf.cast(samples, tf.float32)
    compat.loss_tracker(model).update_state(loss.total, sample_weight=samples)
    for metric, term in zip(_metrics(model), loss.terms, strict=False):
        metric.update_state(term.value, sample_weight=samples)


def _metrics(model):
    output_losses = compat.output_losses(model)
    return [] if output_losses is None else output_losses.metrics


class WindowMeans:
    """Losses of a window, added up micro-batch by micro-batch.

    Each replica adds up its own, as metrics do.
    """

    def __init__(self):
        self._totals = replica_variables.Totals("window_means")
        self._targets = {}
        self._terms = []

    def add(self, loss: losses.Loss, samples: Any) -> None:
        """Adds the losses of a micro-batch of `samples` samples."""
        self._targets = {
            name: weight is not None
            for name, (_, weight) in loss.logged.items()
        }
        self._terms = [term.weight is not None for term in loss.terms]
        for name, (value, weight) in loss.logged.items():
            self._add(name, value, weight)
        for index, term in enumerate(loss.terms):
            self._add(f"output {index}", term.value, term.weight)
        self._add("all", 1.0, samples)

    def log(self, model: keras.Model) -> None:
        """Updates the metrics of the losses."""
        if not self._targets:
            return
        samples = self._totals.value("weight of all")
        total = tf.add_n([self._mean(*each) for each in self._targets.items()])
        compat.loss_tracker(model).update_state(total, sample_weight=samples)
        for metric, (index, divided) in zip(
            _metrics(model), enumerate(self._terms), strict=False
        ):
            metric.update_state(
                self._mean(f"output {index}", divided), sample_weight=samples
            )

    def clear(self) -> None:
        """Forgets the losses that were added."""
        self._totals.clear()

    def _add(self, name, value, weight):
        value = denominators.as_float(value)
        if weight is not None:
            weight = denominators.as_float(weight)
            value *= weight
            self._total(f"weight of {name}", weight)
        self._total(name, value)

    def _total(self, name, value):
        self._totals.add(name, value, dtype=value.dtype)

    def _mean(self, name, divided):
        value = self._totals.value(name)
        if not divided:
            return value
        weight = self._totals.value(f"weight of {name}")
        # Without any weight the sum is 0, or NaN and stays so.
        return value / tf.where(weight == 0, tf.ones_like(weight), weight)
