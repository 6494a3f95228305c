"""Private names of Keras that training in micro-batches can't do without.

Each function here says what it reaches for and why no public name does the
same; `tests/compat_test.py` tries them, and fails when the list grows.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.saving import keras_saveable
from keras.src.trainers import compile_utils


class Saveable(keras_saveable.KerasSaveable):
    """What a model saves with its weights, but does not count among them.

    Every public class of Keras that is saved holds variables of the model or
    shows up among its metrics.
    """

    def _obj_type(self):
        # One of the kinds that Keras saves: the one without variables.
        return "Loss"


_LOCAL = threading.local()


def passes_training(model: Any) -> bool:
    """Whether `model.call` takes `training`, as Keras found out."""
    return model._call_has_training_arg


def all_layers(model: Any) -> list[Any]:
    """The layers of a model, and those in them, however they hold them.

    `model.layers` has only those that are attributes of the model, and
    layers have no such property.
    """
    return list(model._flatten_layers(include_self=False))


def loss_tracker(model: Any) -> Any:
    """The metric of the total loss.

    `model.metrics` has it too, but a subclass may list others there.
    """
    return model._loss_tracker


def output_losses(model: Any) -> Any:
    """What Keras made of `compile(loss=...)`, None if there is none.

    `model.loss` is as the user gave it: a name, a dictionary of functions.
    """
    return model._compile_loss


def compute_loss(model: Any, x: Any, y: Any, y_pred: Any, weight: Any) -> Any:
    """`model.compute_loss`, also of an older form without `training`."""
    return model._compute_loss(
        x=x, y=y, y_pred=y_pred, sample_weight=weight, training=True
    )


class _SplitLoss(compile_utils.CompileLoss):
    """Keras' loss of all outputs, which hands out the loss of each.

    Keras adds the losses of the outputs, each divided by a number of its own.
    Afterwards they can't be taken apart, and no public name shows them.
    """

    def build(self, y_true, y_pred):
        super().build(y_true, y_pred)
        self._flat_losses = [
            each._replace(loss=_Reporting(each.loss, each.loss_weights))
            for each in self._flat_losses
        ]

    def __call__(self, y_true, y_pred, sample_weight=None):
        nested = keras.tree.is_nested(y_true) or keras.tree.is_nested(y_pred)
        report = _report()
        if report is not None and not nested:
            # Of several losses of one output Keras takes the first.
            _LOCAL.report = _first_only(report)
        try:
            return super().__call__(y_true, y_pred, sample_weight)
        finally:
            _LOCAL.report = report

    @property
    def metrics(self):
        # Of a part of a batch they would be weighted wrongly.
        if _report() is not None:
            return [None] * len(self._metrics)
        return self._metrics


def split_losses(model: Any) -> None:
    """Makes a compiled model's loss one that `reported_losses` can follow."""
    if model._compile_loss is not None:
        model._compile_loss.__class__ = _SplitLoss


class _Reporting:
    """A loss that tells the thread's report how it was called."""

    def __init__(self, loss, weight):
        self.loss = loss
        self.name = loss.name
        self._weight = weight

    def __call__(self, y_true, y_pred, sample_weight=None):
        report = _report()
        if report is None:
            return self.loss(y_true, y_pred, sample_weight)
        return report(self.loss, self._weight, y_true, y_pred, sample_weight)


def _report():
    return getattr(_LOCAL, "report", None)


def _first_only(report):
    called = []

    def once(loss, weight, *args):
        if called:
            return loss(*args)
        called.append(loss)
        return report(loss, weight, *args)

    return once


@contextlib.contextmanager
def reported_losses(report: Callable[..., Any]) -> Iterator[None]:
    """Losses of outputs go through `report` in this thread.

    It is called with the `keras.losses.Loss`, the factor that `loss_weights`
    gives it, and its arguments `y_true, y_pred, sample_weight`, and returns
    the loss. The metrics of these losses are not updated.
    """
    before = _report()
    _LOCAL.report = report
    try:
        yield
    finally:
        _LOCAL.report = before


def wrapped_optimizers(optimizer: Any) -> list[Any]:
    """An optimizer and those that it wraps, which it holds as it likes."""
    found = []
    waiting = [optimizer]
    while waiting:
        each = waiting.pop()
        if isinstance(each, keras.optimizers.Optimizer) and not any(
            each is other for other in found
        ):
            found.append(each)
            waiting.extend(vars(each).values())
        elif isinstance(each, (list, tuple)):
            waiting.extend(each)
        elif isinstance(each, dict):
            waiting.extend(each.values())
    return found


@contextlib.contextmanager
def reduced_already(optimizer: Any) -> Iterator[None]:
    """Keeps an optimizer from adding gradients up over the replicas.

    It does so in every replica, after it has clipped: no option leaves it to
    the caller. Those that it wraps do so too.
    """
    optimizers = wrapped_optimizers(optimizer)
    for each in optimizers:
        vars(each)["_all_reduce_sum_gradients"] = list
    try:
        yield
    finally:
        for each in optimizers:
            del vars(each)["_all_reduce_sum_gradients"]


def begin_at(model: Any, epoch: int) -> None:
    """Makes `fit`, which has begun, begin at an epoch.

    Keras' own `BackupAndRestore` does it so; arguments are settled by then.
    """
    model._initial_epoch = epoch


def build_metrics(model: Any, batch: Any) -> None:
    """Makes the variables of a model's metrics from a batch, unseen.

    They are made at the first training step otherwise, too late to restore
    them.
    """
    strategy = model.distribute_strategy
    with strategy.scope():
        model._symbolic_build(
            data_batch=keras.tree.map_structure(
                lambda x: strategy.experimental_local_results(x)[0], batch
            )
        )


def metrics_built(model: Any) -> bool:
    """Whether the metrics can be asked for results.

    They are made when they are first updated, and say so by an error only.
    """
    return model._compile_metrics is None or model._compile_metrics.built
