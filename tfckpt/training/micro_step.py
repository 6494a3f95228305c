"""One micro-batch: loss, gradients, and whether it counts.

Nothing is communicated between replicas here, and the optimizer is only asked
for the scale of the loss.
"""

import contextlib
from typing import Any

import keras
import tensorflow as tf

from tfckpt import _compat_training as compat
from tfckpt import normalization
from tfckpt.training import batches, guard, logs, losses, progress, updates


def run(
    model: keras.Model, state: progress.Progress, data: Any, within_call: bool
) -> dict[str, Any] | None:
    """Adds a micro-batch's gradients, and updates the metrics.

    Args:
        model: The model.
        state: How far its training is.
        data: As `train_step` gets it.
        within_call: Whether the loss is logged at the end of the window.

    Returns:
        What `compute_metrics` returns; None where only a branch of the graph
        has it.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    samples = batches.size_of(x)
    # A batch that is spread over replicas may leave one without samples.
    if tf.executing_eagerly() and samples == 0:
        state.build(model, x)
        state.accumulator.count()
        return _metrics(model, data)
    may_be_empty = not isinstance(samples, int) and state.replicas > 1
    guarded = may_be_empty or state.settings.skip_nonfinite
    if guarded:
        state.build(model, x)
    held = guard.HeldUpdates() if guarded else contextlib.nullcontext()
    policy = state.normalization()
    with tf.GradientTape(persistent=state.may_ask_twice) as tape:
        with held, normalization.under(policy):
            if compat.passes_training(model):
                y_pred = model(x, training=True)
            else:
                y_pred = model(x)
        loss = losses.compute(
            model,
            x,
            y,
            y_pred,
            sample_weight,
            samples=samples,
            names=state.names,
        )
        state.build(model)
        # One number is multiplied sooner than all gradients; in low precision
        # they would be rounded, or leave the range of float16.
        weighted = _is_wide(model) and all(
            target.dtype.size >= 4 for target, _ in loss.targets.values()
        )
        scaled = {
            name: model.optimizer.scale_loss(
                _times(target, weight) if weighted else target
            )
            for name, (target, weight) in loss.targets.items()
        }
    state.denominators = max(state.denominators, len(scaled))
    with normalization.under(policy):
        gradients = {
            name: tape.gradient(target, model.trainable_weights)
            for name, target in scaled.items()
        }
    del tape
    counts = None
    if guarded:
        counts = tf.convert_to_tensor(samples > 0)
        if state.settings.skip_nonfinite:
            finite = _finite(gradients, scaled)
            state.note_skipped(tf.logical_and(counts, tf.logical_not(finite)))
            counts = tf.logical_and(counts, finite)
        held.commit(counts)
    state.statistics.add(policy.found, counts)
    state.accumulator.add_micro_batch(
        gradients,
        {name: weight for name, (_, weight) in loss.targets.items()},
        counts,
        weighted=weighted,
    )

    def log():
        if within_call:
            state.means.add(loss, samples)
        else:
            logs.log_micro_batch(model, loss, samples)
        return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    if counts is None:
        return log()
    if tf.executing_eagerly():
        return log() if counts else _metrics(model, data)
    updates.if_true(counts, log)
    return None


def _is_wide(model):
    scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    return not scaled and all(
        layer.compute_dtype != "float16" for layer in compat.all_layers(model)
    )


def _times(target, weight):
    return target if weight is None else target * tf.cast(weight, target.dtype)


def _metrics(model, data):
    if not compat.metrics_built(model):
        compat.build_metrics(model, data)
    return model.get_metrics_result()


def _finite(gradients, targets):
    tensors = [*targets.values()]
    for each in gradients.values():
        tensors += [x for x in each if x is not None]
    return tf.reduce_all(
        [
            tf.reduce_all(
                tf.math.is_finite(
                    x.values if isinstance(x, tf.IndexedSlices) else x
                )
            )
            for x in tensors
        ]
    )
