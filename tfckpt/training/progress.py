"""How far a model's training in micro-batches is."""

from typing import Any

import keras
import tensorflow as tf

from tfckpt import _compat_training as compat
from tfckpt import accumulated_gradients, normalization, replica_variables
from tfckpt.training import logs, random_state, settings

# Float, to go with the gradients of the window.
_IN_WINDOW, _EVER = "in_window", "ever"


class Progress:
    """What a compiled model keeps between calls of `train_step`.

    Attributes:
        settings: How it is trained.
        accumulator: The gradients of the open window.
        skipped_micro_batches: How many were left out.
        divisors: What the losses of a window within a call are divided by.
        statistics: What batch normalizations have seen in the open window.
        random_state: The states of random generators.
        means: The losses of a window within a call.
        steps: A variable, the length of the window; None if it is no number.
        denominators: By how many numbers parts of the loss are divided; 0
            while that is not known.
        names: The denominators of the outputs' losses, as first found.
        normalizations: The model's batch normalizations.
        replicas: In how many replicas the model runs.
        flush: The function that ends the window, once it is made.
    """

    def __init__(self, model: keras.Model, options: settings.Settings):
        self.settings = options
        self.normalizations = normalization.layers_of(model)
        normalization.listen(model)
        self.random_state = random_state.RandomState(self.is_open)
        self.denominators = 0
        self.names = {}
        self.flush = None
        self._strategy = model.distribute_strategy
        self.replicas = self._strategy.num_replicas_in_sync
        self.steps = None
        with self._strategy.scope():
            self.accumulator = accumulated_gradients.AccumulatedGradients()
            self.skipped_micro_batches = replica_variables.Totals("skipped")
            self.means = logs.WindowMeans()
            self.divisors = replica_variables.Totals("divisors")
            self.statistics = normalization.WindowStatistics(
                self.normalizations
            )
            if settings.is_int(options.steps):
                self.steps = tf.Variable(
                    options.steps, dtype=tf.int64, trainable=False
                )
            for name in (_IN_WINDOW, _EVER):
                self.skipped_micro_batches.variable(name)

    @property
    def may_ask_twice(self) -> bool:
        """Whether several gradients may be asked of one forward pass."""
        return not tf.executing_eagerly() or self.denominators != 1

    @property
    def skipped(self) -> int:
        """Micro-batches that were left out since `compile`."""
        return int(self.skipped_micro_batches.value(_EVER))

    def window_length(self, optimizer: Any) -> tf.Tensor:
        """Returns the number of micro-batches in the open window, int64."""
        if self.steps is not None:
            return tf.convert_to_tensor(self.steps)
        updates = tf.convert_to_tensor(optimizer.iterations.value)
        length = self.settings.steps(updates)
        length = tf.convert_to_tensor(length)
        if length.dtype.is_floating:
            length = tf.round(length)
        return tf.cast(length, tf.int64)

    def is_open(self) -> bool:
        """Whether the window holds micro-batches."""
        return bool(self.accumulator.micro_steps > 0)

    def build(self, model: keras.Model, x: Any = None) -> None:
        """Makes the variables of optimizer and accumulator.

        Args:
            model: The model.
            x: A batch, for a model that is to be built first.
        """
        if x is not None and not model.built:
            with tf.init_scope():
                model(
                    keras.tree.map_structure(
                        lambda each: keras.Input(
                            batch_shape=each.shape, dtype=each.dtype.name
                        ),
                        x,
                    )
                )
        variables = model.trainable_weights
        if not variables or not model.built:
            return
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise ValueError(
                    f"The gradient of '{variable.path}' is its new value "
                    "(float8 layers have such), so that gradients of "
                    "micro-batches can't be added. Leave out "
                    "gradient_accumulation_steps and micro_batches, or "
                    "float8."
                )
        self.random_state.build(model)
        before = self.accumulator.variables_of_model
        self.accumulator.build(variables)
        if before and before is not self.accumulator.variables_of_model:
            # Other layers are trained now: the window begins anew.
            self.clear()
        if not model.optimizer.built:
            # What it assigns is not to be done again in each step.
            with tf.init_scope():
                model.optimizer.build(variables)

    def note_skipped(self, skipped: tf.Tensor) -> None:
        """Counts a micro-batch if a boolean scalar is True."""
        for name in (_IN_WINDOW, _EVER):
            self.skipped_micro_batches.add(name, skipped)

    def communicates(self, model: keras.Model) -> bool:
        """Whether layers wait for other replicas: they can't in a loop."""
        synchronized = self.settings.batch_normalization == "sync"
        return self.replicas > 1 and (
            (synchronized and bool(self.normalizations))
            or any(
                getattr(layer, "synchronized", False)
                for layer in compat.all_layers(model)
            )
        )

    def normalization(self) -> normalization.MicroBatch:
        """Returns how the next micro-batch is normalized."""
        return normalization.MicroBatch(
            self.normalizations,
            synchronized=self.settings.batch_normalization == "sync",
        )

    def totals(self) -> tuple[list[Any], tf.Tensor, list[tf.Tensor]]:
        """Returns what the replicas have seen together in the window.

        Returns:
            The gradients, how often a micro-batch was skipped, and what
            `statistics.move` takes.
        """
        dtype = self.accumulator.weight_dtype
        skipped = self.skipped_micro_batches.value(_IN_WINDOW)
        skipped = tf.cast(skipped, dtype)
        others = [skipped] if self.settings.skip_nonfinite else []
        first = len(others)
        others += self.statistics.tables()
        gradients, others = self.accumulator.totals(others, in_place=True)
        return gradients, others[0] if first else skipped, others[first:]

    def clear(self) -> None:
        """Empties the window."""
        self.accumulator.clear()
        self.means.clear()
        self.divisors.clear()
        self.statistics.totals.clear()
        self.skipped_micro_batches.variable(_IN_WINDOW).assign(tf.zeros([]))
