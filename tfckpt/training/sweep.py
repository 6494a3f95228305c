"""An update by the batch statistics of the whole window.

With one big batch each batch normalization waits for all samples. So does the
sweep: forward, stage by stage (`normalization.stages`), each over all
micro-batches, pooling mean and variance before the next stage starts. Backward,
in reverse, it makes each micro-batch's stage again and differentiates it, with
mean and variance as two more inputs. Their gradients are summed over all
micro-batches before the stage that made them is differentiated: what they add
to the gradient of each sample is what constants would lack (Ioffe and Szegedy
2015, "Batch Normalization: Accelerating Deep Network Training by Reducing
Internal Covariate Shift", section 3). It is gradient checkpointing with the
inputs of the batch normalizations as checkpoints, and takes about one more
forward pass.
"""

from typing import Any

import keras
import tensorflow as tf

from tfckpt import _compat_graph as compat
from tfckpt import graph as graph_lib
from tfckpt import normalization
from tfckpt.normalization import moments, stages
from tfckpt.training import (
    batches,
    denominators,
    losses,
    mapped,
    progress,
    stage_run,
)

_GROUP = "window"


class Sweep:
    """One window.

    Args:
        model: The model.
        state: How far its training is.
        graph: Its calls.

    Attributes:
        kept: Tensors of the whole window by key.
        statistics: What it is normalized by, by position of the call.
        seeds: What the stages drew from, by stage: for each generator its
            states before each micro-batch.
        gradients: Of the kept tensors, as far as they are known.
    """

    def __init__(
        self,
        model: keras.Model,
        state: progress.Progress,
        graph: graph_lib.Graph,
    ):
        self._model, self._state, self._graph = model, state, graph
        self._parts = state.settings.parts
        self._run = stage_run.StageRun(model, graph)
        layers = state.normalizations
        self._stages = stages.cut(graph, _is_normalized)
        self._calls = {}
        # By the keys of their inputs, which batch normalizations wait.
        self._waiting = {}
        for position, call in enumerate(graph.calls):
            if not _is_normalized(call.operation):
                continue
            number = next(
                i for i, each in enumerate(layers) if each is call.operation
            )
            again = sum(
                name.startswith(f"{number}_") for name in self._calls.values()
            )
            self._calls[position] = f"{number}_{again}"
            self._waiting.setdefault(call.feeds[0][1], []).append(position)
        self._divisors = state.divisors
        sizes = [stage.size for stage in self._stages]
        self._largest = None if None in sizes else max(sizes)
        self.kept, self.statistics = {}, {}
        self.seeds, self.gradients = [], {}

    def run(self, data: Any) -> None:
        """Adds the gradient of a window, and updates the metrics.

        Args:
            data: A batch, as `train_step` gets it.
        """
        self._x, self._y, self._weight = keras.utils.unpack_x_y_sample_weight(
            data
        )
        flat = compat.standardize_inputs(self._model, self._x, None)
        self.kept = dict(zip(self._graph.inputs, flat, strict=True))
        self._state.build(self._model)
        *earlier, last = self._stages
        # The first has no calls where the inputs are normalized at once.
        earlier = [stage for stage in earlier if stage.outputs]
        self._look_at_inputs()
        for stage in earlier:
            self._forward(stage)
        self._look(last)
        divisors = self._divisors.variables_by_name
        totals = _over_replicas(
            {name: tf.convert_to_tensor(x) for name, x in divisors.items()}
        )
        self._divisors.clear()
        self._backward_last(last, totals)
        for stage in reversed(earlier):
            self._backward(stage)

    # Forward.

    def _look_at_inputs(self):
        """Pools the statistics of what is normalized first of all."""
        positions = self._reading(self._graph.inputs)
        if not positions:
            return
        arguments = [self.kept[key] for key in self._graph.inputs]

        def body(part, _):
            values = dict(zip(self._graph.inputs, part, strict=True))
            return [], [self._moments(p, values) for p in positions]

        specs = [], [self._spec_of_moments(p) for p in positions]
        _, tables = mapped.mapped(body, arguments, [], self._parts, specs)
        self._pool(positions, tables)

    def _forward(self, stage):
        generators = self._run.generators(stage)
        normalized = self._reading(stage.outputs)

        def body(part, _):
            values, drawn = self._run.first(stage, part, self._given(stage))
            self._run.refuse_what_is_lost(stage, values)
            self._run.check_samples(stage, values, batches.size_of(part))
            found = [self._moments(p, values) for p in normalized]
            return [values[key] for key in stage.outputs], [*drawn, *found]

        specs = (
            [self._spec(key) for key in stage.outputs],
            self._spec_of_seeds(generators)
            + [self._spec_of_moments(position) for position in normalized],
        )
        arguments = self._arguments(stage)
        rows, others = self._mapped(stage, body, arguments, [], specs)
        self.kept.update(zip(stage.outputs, rows, strict=True))
        self.seeds.append(others[: len(generators)])
        self._pool(normalized, others[len(generators) :])

    def _reading(self, keys):
        """Positions of the batch normalizations that read these tensors."""
        return [p for key in keys for p in self._waiting.get(key, ())]

    def _moments(self, position, values):
        call = self._graph.calls[position]
        key = call.feeds[0][1]
        x = normalization.as_normalized(call.operation, values[key])
        found = moments.of_inputs(call.operation, x, None)
        return tf.stack([found.count, found.mean, found.variance])

    def _pool(self, positions, tables):
        """Makes the window's statistics of those of its micro-batches."""
        found = {}
        for position, table in zip(positions, tables, strict=True):
            local = moments.pooled(moments.from_rows(table, 0.0))
            found[self._calls[position]] = local
            self.statistics[position] = moments.over_replicas(local)
        self._state.statistics.add(found)

    def _look(self, stage):
        """Logs the loss, and takes note of what it is divided by."""
        generators = self._run.generators(stage)

        def body(part, _):
            arguments, others = part
            given = self._given(stage)
            values, drawn = self._run.first(stage, arguments, given)
            loss, (x, y, weight, y_pred, samples) = self._loss(values, others)
            self._state.means.add(loss, samples)
            for name, (_, divisor) in loss.targets.items():
                if divisor is not None:
                    # Sums over the window need its digits.
                    divisor = denominators.as_float(divisor)
                    self._divisors.add(name, divisor, dtype=divisor.dtype)
            self._model.compute_metrics(x, y, y_pred, sample_weight=weight)
            return [], drawn

        data = self._arguments(stage), (self._x, self._y, self._weight)
        specs = [], self._spec_of_seeds(generators)
        _, seeds = self._mapped(stage, body, data, [], specs)
        self.seeds.append(seeds)

    def _loss(self, values, others):
        x, y, weight = others
        flat = [values[key] for key in self._graph.outputs]
        y_pred = keras.tree.pack_sequence_as(self._model.output, flat)
        if isinstance(y_pred, (list, tuple)) and len(y_pred) == 1:
            y_pred = y_pred[0]
        samples = tf.shape(flat[0])[0]
        loss = losses.compute(
            self._model,
            x,
            y,
            y_pred,
            weight,
            samples=samples,
            names=self._state.names,
        )
        return loss, (x, y, weight, y_pred, samples)

    # Backward.

    def _backward_last(self, stage, totals):
        def body(part, drawn):
            arguments, others = part
            given = self._given(stage)
            with tf.GradientTape() as tape:
                sources = self._watched(tape, stage, arguments, given)
                values = self._run.again(stage, arguments, given, drawn)
                loss, _ = self._loss(values, others)
                target = [
                    value * _share(weight, totals.get(name), value.dtype)
                    for name, (value, weight) in loss.targets.items()
                ]
                target = self._model.optimizer.scale_loss(tf.add_n(target))
            return self._taken(stage, tape, target, sources, None)

        data = self._arguments(stage), (self._x, self._y, self._weight)
        self._add(
            stage,
            self._mapped(
                stage, body, data, self.seeds.pop(), self._specs(stage)
            ),
        )

    def _backward(self, stage):
        seeds = self.seeds.pop()
        outputs = [
            key
            for key in stage.outputs
            if key in self.gradients or key in self._waiting
        ]
        for key in stage.outputs:
            # It is made again.
            del self.kept[key]
        if not outputs:
            return
        known = [self.gradients.pop(key, None) for key in outputs]
        slopes = {p: self._slopes(p) for p in self._reading(outputs)}

        def body(part, drawn):
            arguments, upstream = part
            given = self._given(stage)
            with tf.GradientTape() as tape:
                sources = self._watched(tape, stage, arguments, given)
                values = self._run.again(stage, arguments, given, drawn)
                made = [values[key] for key in outputs]
            upstream = [
                self._through(
                    x, gradient, [slopes[p] for p in self._reading([key])]
                )
                for key, x, gradient in zip(
                    outputs, made, upstream, strict=True
                )
            ]
            return self._taken(stage, tape, made, sources, upstream)

        data = self._arguments(stage), known
        specs = self._specs(stage)
        self._add(stage, self._mapped(stage, body, data, seeds, specs))

    def _slopes(self, position):
        """How the loss depends on the sum and the squares of the inputs."""
        found = self.statistics[position]
        nothing = tf.zeros_like(found.mean)
        mean, variance = self.gradients.pop(
            ("statistics", position), (nothing, nothing)
        )
        call = self._graph.calls[position]
        count = tf.where(
            found.count > 0, found.count, tf.ones_like(found.count)
        )
        return call.operation, found.mean, mean / count, 2 * variance / count

    def _through(self, x, gradient, slopes):
        """The gradient of a tensor and, through the statistics, of its own."""
        for layer, mean, linear, square in slopes:
            wide = tf.cast(x, mean.dtype)
            more = moments.along_axis(layer, square, wide) * (
                wide - moments.along_axis(layer, mean, wide)
            )
            more += moments.along_axis(layer, linear, wide)
            more = tf.cast(more, x.dtype)
            gradient = more if gradient is None else gradient + more
        return gradient

    def _watched(self, tape, stage, arguments, given):
        values = dict(zip(stage.arguments, arguments, strict=True))
        floats = [values[key] for key in self._differentiable(stage)]
        statistics = [x for pair in given.values() for x in pair]
        tape.watch([*floats, *statistics])
        return floats, statistics

    def _taken(self, stage, tape, target, sources, upstream):
        floats, statistics = sources
        weights = self._model.trainable_weights
        found = tape.gradient(
            target,
            [*floats, *statistics, *weights],
            output_gradients=upstream,
        )
        split = len(floats) + len(statistics)
        found[:split] = [
            tf.zeros_like(x) if g is None else g
            for x, g in zip([*floats, *statistics], found, strict=False)
        ]
        self._state.accumulator.add_micro_batch(
            {_GROUP: found[split:]}, {_GROUP: None}
        )
        return found[: len(floats)], found[len(floats) : split]

    def _specs(self, stage):
        floats = self._differentiable(stage)
        return (
            [
                tf.TensorSpec(
                    [None, *self.kept[k].shape[1:]], self.kept[k].dtype
                )
                for k in floats
            ],
            [
                tf.TensorSpec(
                    self.statistics[p].mean.shape, self.statistics[p].mean.dtype
                )
                for p in stage.normalized
                for _ in range(2)
            ],
        )

    def _differentiable(self, stage):
        return [
            key
            for key in stage.arguments
            if self.kept[key].dtype.is_floating
            and key not in self._graph.inputs
        ]

    def _add(self, stage, found):
        rows, others = found
        for key, gradient in zip(
            self._differentiable(stage), rows, strict=True
        ):
            before = self.gradients.get(key)
            self.gradients[key] = (
                gradient if before is None else before + gradient
            )
        sums = _over_replicas(
            {i: tf.reduce_sum(x, 0) for i, x in enumerate(others)}
        )
        for i, position in enumerate(stage.normalized):
            key = "statistics", position
            new = sums[2 * i], sums[2 * i + 1]
            before = self.gradients.get(key)
            if before is not None:
                new = before[0] + new[0], before[1] + new[1]
            self.gradients[key] = new

    # Both.

    def _mapped(self, stage, body, data, each, specs):
        """Maps over micro-batches, or over fewer parts where they fit."""
        parts = self._parts
        if not self._run.generators(stage):
            parts = stages.parts_of(stage, self._largest, parts)
        return mapped.mapped(body, data, each, parts, specs)

    def _arguments(self, stage):
        return [self.kept[key] for key in stage.arguments]

    def _given(self, stage):
        return {
            position: (
                tf.identity(self.statistics[position].mean),
                tf.identity(self.statistics[position].variance),
            )
            for position in stage.normalized
        }

    def _spec(self, key):
        spec = self._graph.specs[key]
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)

    def _spec_of_seeds(self, generators):
        return [tf.TensorSpec(each.shape, each.dtype) for each in generators]

    def _spec_of_moments(self, position):
        call = self._graph.calls[position]
        layer = call.operation
        spec = self._graph.specs[call.feeds[0][1]]
        dtype = normalization.dtype_of(layer, spec.dtype)
        return tf.TensorSpec([3, *layer.moving_mean.shape], dtype)


def _is_normalized(operation):
    kind = keras.layers.BatchNormalization
    return isinstance(operation, kind) and operation.trainable


def _share(weight, total, dtype):
    """What a mean over a micro-batch counts in the mean over the window."""
    if weight is None:
        return tf.ones([], dtype)
    total = tf.where(total == 0, tf.ones_like(total), total)
    return tf.cast(denominators.as_float(weight) / total, dtype)


def _over_replicas(tensors):
    context = tf.distribute.get_replica_context()
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas == 1 or context is None or not tensors:
        return tensors
    names = list(tensors)
    sums = context.all_reduce(
        tf.distribute.ReduceOp.SUM, [tensors[name] for name in names]
    )
    return dict(zip(names, sums, strict=True))
