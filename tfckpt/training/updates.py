"""The end of a window: its gradient is reduced, and applied once.

The order is that of one big batch: the gradients of all replicas are added up
and divided by their weight, and only then does the optimizer look whether they
are finite, clip them and move. What communicates may not be in a branch of the
graph that each replica takes for itself; so the replicas meet, and the branch
is taken for all of them (`merge_call`).
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfckpt import _compat_training as compat
from tfckpt.training import progress


def update(
    model: keras.Model, state: progress.Progress, predicate: Any = True
) -> None:
    """Applies the window's gradient and empties the window.

    It is called in a replica.

    Args:
        model: The model.
        state: How far its training is.
        predicate: Whether to do so, a boolean scalar, equal on all replicas.
    """
    if not tf.distribute.has_strategy():
        if_true(predicate, lambda: _apply(model, state, *state.totals()))
        return

    def together(strategy, predicates):
        def each_replica(function, args=()):
            return strategy.extended.call_for_each_replica(function, args=args)

        def end_window():
            with compat.reduced_already(model.optimizer):
                totals = each_replica(state.totals)
                each_replica(
                    lambda totals: _apply(model, state, *totals), (totals,)
                )

        first = strategy.experimental_local_results(predicates)[0]
        if_true(first, end_window)

    context = tf.distribute.get_replica_context()
    context.merge_call(together, args=(predicate,))


def if_true(predicate: Any, function: Callable[[], None]) -> None:
    """Calls a function where a boolean scalar is True."""
    if predicate is True:
        function()
    elif tf.executing_eagerly():
        if predicate:
            function()
    else:

        def true():
            function()
            return tf.constant(0)

        tf.cond(predicate, true, lambda: tf.constant(0))


def _apply(model, state, gradients, skipped, statistics):
    optimizer = model.optimizer
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    scale = tf.convert_to_tensor(optimizer.dynamic_scale) if scaled else None
    variables = state.accumulator.variables_of_model
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    if scaled and state.settings.skip_nonfinite:
        # Micro-batches that overflow say that the scale is too high.
        _lower_scale(optimizer, scale, skipped > 0)
    state.statistics.move(statistics)
    # The window's gradient is where zeros come now: not before it was used.
    moved = [tf.convert_to_tensor(each.value) for each in variables]
    with tf.control_dependencies(moved):
        state.clear()


def _lower_scale(optimizer, scale, where):
    now = tf.convert_to_tensor(optimizer.dynamic_scale)
    optimizer.dynamic_scale.assign(tf.where(where, scale / 2, now))
    steps = tf.convert_to_tensor(optimizer.step_counter)
    optimizer.step_counter.assign(tf.where(where, tf.zeros_like(steps), steps))
