"""Keras' training methods, with windows of micro-batches."""

import inspect
from typing import Any

import keras
import tensorflow as tf

from tfckpt import _compat_training as compat
from tfckpt.training import (
    batches,
    callbacks,
    micro_step,
    progress,
    sweep,
    updates,
)
from tfckpt.training import settings as settings_lib


class AccumulatingTrainer:
    """Adds exact gradient accumulation to a Keras model.

    Write it before `keras.Model` among the bases of a class. Without one of
    the arguments of `compile` below, the model trains as Keras does.

    An update from a window of k micro-batches equals that from one batch of
    all their samples (Keras' own `gradient_accumulation_steps` averages their
    means instead): losses of each `reduction`, sample and class weights,
    masks, several outputs, regularizers; clipping, weight decay, moving
    averages of weights and loss scaling see the window's gradient, and
    `optimizer.iterations`, which schedules follow, counts updates. Equal up to
    the rounding of a sum in another order. It can't be equal where samples of
    a batch see each other: a loss that compares samples, and batch
    normalization unless `batch_normalization="exact"`. `add_loss` counts as a
    mean over the micro-batch. Dropout draws for each micro-batch.

    A class with a `compute_loss` of its own needs a method `loss_denominator(
    x, y, y_pred, sample_weight)` too: what the loss of the batch that it is
    given was divided by, a number or a scalar tensor, such as
    `keras.ops.shape(y)[0]`; None for a sum.

    Example:

    >>> class Regression(AccumulatingTrainer, keras.Model):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.dense = keras.layers.Dense(1)
    ...
    ...     def call(self, x):
    ...         return self.dense(x)
    >>> model = Regression()
    >>> model.compile("sgd", "mse", gradient_accumulation_steps=4)
    >>> x = keras.ops.ones((12, 3))
    >>> _ = model.fit(x, x[:, :1], batch_size=2, verbose=0)
    >>> int(model.optimizer.iterations)  # 6 micro-batches: 4 and 2
    2
    """

    # What is saved with the model is an attribute of it.
    _progress = None
    _accumulated_gradients = None
    _random_state = None
    _skipped_micro_batches = None
    _window_statistics = None

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        order = [AccumulatingTrainer, keras.Model]
        if sorted(order, key=cls.__mro__.index) != order:
            raise TypeError(
                f"{cls.__name__} has keras.Model before AccumulatingTrainer "
                "among its bases, so that Keras' training would be used. "
                f"Write class {cls.__name__}(tfckpt.AccumulatingTrainer, "
                "keras.Model)."
            )

    def compile(
        self,
        *args: Any,
        gradient_accumulation_steps: Any = None,
        micro_batches: Any = None,
        skip_nonfinite: bool = False,
        batch_normalization: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Configures the model for training; see `keras.Model.compile`.

        An open window is dropped.

        Args:
            *args: As for `keras.Model.compile`.
            gradient_accumulation_steps: Each batch of `fit` is a micro-batch,
                and so many of them make an update; what is left at the end of
                an epoch makes one too, before validation. An int, or a
                function of the number of updates so far (an int64 tensor)
                such as `keras.optimizers.schedules.PiecewiseConstantDecay`.
                The int may be changed later, by the attribute of this name.
            micro_batches: Each batch of `fit` is split into so many
                micro-batches of nearly equal size, or into a list of sizes,
                that run one after another, and makes an update.
            skip_nonfinite: Whether a micro-batch whose gradient has NaN or
                inf counts as not seen: its gradient, the statistics and
                counters that it moved, metrics. It is counted in
                `nonfinite_micro_batches`. With a `LossScaleOptimizer` the
                scale falls once at the end of the window. On several replicas
                each leaves out its own part.
            batch_normalization: By which statistics a micro-batch is
                normalized in training. "micro", the default: its own. "sync":
                those of all replicas, also where Keras does not synchronize
                (masks). "exact": those of the whole window, so that all
                numbers are those of one big batch; for a `SegmentedModel`
                with `micro_batches`, in about one more forward pass, and
                with the inputs of the batch normalizations in memory. The
                moving statistics move once an update, with mean and variance
                of the whole window on all replicas.
            **kwargs: As for `keras.Model.compile`.

        Raises:
            TypeError: An argument is of the wrong type.
            ValueError: An argument is out of range, both windows are given,
                the optimizer accumulates too, or the model has a `train_step`
                or `compute_loss` of its own that can't be followed.
        """
        options = settings_lib.checked(
            gradient_accumulation_steps,
            micro_batches,
            skip_nonfinite,
            batch_normalization,
        )
        if options is not None:
            args, kwargs, given = _taken(
                super().compile, args, kwargs, "optimizer", "rmsprop"
            )
            given = keras.optimizers.get(given)
            settings_lib.check_model(self, given, AccumulatingTrainer)
            settings_lib.check_normalization(self, options)
            kwargs["optimizer"] = given
        super().compile(*args, **kwargs)
        state = None
        if options is not None:
            compat.split_losses(self)
            state = progress.Progress(self, options)
            if self.built:
                state.random_state.build(self)
        self._progress = state
        self._accumulated_gradients = state and state.accumulator
        self._random_state = state and state.random_state
        self._skipped_micro_batches = state and state.skipped_micro_batches
        self._window_statistics = state and state.statistics.totals

    def get_compile_config(self) -> dict[str, Any]:
        """Returns the arguments of `compile`, serialized."""
        config = super().get_compile_config()
        if config and self._progress is not None:
            config |= {
                name: keras.saving.serialize_keras_object(value)
                for name, value in self.window_options().items()
            }
        return config

    def window_options(self) -> dict[str, Any]:
        """Returns the arguments of `compile` that are about windows."""
        if self._progress is None:
            return {}
        options = self._progress.settings.config()
        if self._progress.steps is not None:
            steps = self.gradient_accumulation_steps
            options["gradient_accumulation_steps"] = steps
        return options

    def window_state(self) -> dict[str, tf.Module]:
        """Returns what of the window is saved, by names for a checkpoint.

        `tf.train.Checkpoint(model=model)` finds it by itself.
        """
        if self._progress is None:
            return {}
        return {
            "window": self._progress.accumulator,
            "skipped": self._progress.skipped_micro_batches,
            "statistics": self._progress.statistics.totals,
        }

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles the model as `get_compile_config` says."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built and self.optimizer is not None:
            self.optimizer.build(self.trainable_variables)

    @property
    def gradient_accumulation_steps(self) -> Any:
        """Micro-batches in a window over calls; None if there is none."""
        state = self._progress
        if state is None or state.steps is None:
            return None if state is None else state.settings.steps
        return int(tf.convert_to_tensor(state.steps))

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        state = self._compiled_window("gradient_accumulation_steps")
        if state.steps is None:
            raise ValueError(
                "gradient_accumulation_steps can be changed where `compile` "
                "was given a number. Received: "
                f"{value!r}, for {state.settings}. Call `compile` again."
            )
        checked = settings_lib.checked_steps(value)
        if not settings_lib.is_int(checked):
            raise TypeError(
                "gradient_accumulation_steps can be changed to another number "
                f"only. Received: {value!r}. Give a schedule to `compile`."
            )
        state.steps.assign(checked)

    @property
    def gradient_accumulator(self) -> Any:
        """What the open window holds: its `micro_steps`, and its `bytes`.

        None if there is no window. `flush` and `reset` end it.
        """
        return self._accumulated_gradients

    @property
    def nonfinite_micro_batches(self) -> int:
        """Micro-batches left out since `compile`, over all replicas."""
        return 0 if self._progress is None else self._progress.skipped

    def make_train_function(self, force: bool = False) -> Any:
        """Makes the function that `fit` calls; see `keras.Model`."""
        state = self._progress
        # A function that is traced goes on with the variables that it knows.
        if state is not None and not state.accumulator.variables_of_model:
            with self.distribute_strategy.scope():
                state.build(self)
        return super().make_train_function(force=force)

    def train_step(self, data: Any) -> dict[str, Any]:
        """Trains on one batch; see `keras.Model.train_step`."""
        state = self._progress
        if state is None:
            return super().train_step(data)
        if not state.settings.within_call:
            logs = micro_step.run(self, state, data, within_call=False)
            updates.update(
                self,
                state,
                state.accumulator.is_update_step(
                    state.window_length(self.optimizer)
                ),
            )
            return self.get_metrics_result() if logs is None else logs
        parts = state.settings.parts
        batches.check(parts, batches.size_of(data), self._is_first_batch())

        if state.settings.batch_normalization == "exact":
            graph = self.graph_of_calls()
            sweep.Sweep(self, state, graph).run(data)
            state.means.log(self)
            updates.update(self, state, state.accumulator.is_update_step(1))
            return self.get_metrics_result()

        def one(part):
            micro_step.run(self, state, part, within_call=True)
            return state.accumulator.sums()

        batches.for_each(
            one,
            data,
            parts,
            unrolled=state.communicates(self),
        )
        state.means.log(self)
        # Nothing is applied if nothing was seen.
        updates.update(self, state, state.accumulator.is_update_step(1))
        return self.get_metrics_result()

    def graph_of_calls(self) -> Any:
        """Returns the calls that the model makes, if they are known."""
        return None

    def flush(self) -> bool:
        """Makes an update from the micro-batches of the open window.

        `fit` does so at the end of each epoch. After `train_on_batch` and in
        loops of your own call it before you look at the weights.

        Returns:
            Whether there were any.
        """
        state = self._compiled_window("flush()")
        if not state.accumulator.variables_of_model:
            # What a file holds is read when there is a place for it.
            with self.distribute_strategy.scope():
                state.build(self)
        if not state.is_open():
            return False
        if state.flush is None:
            strategy = self.distribute_strategy

            def end_window():
                strategy.run(lambda: updates.update(self, state))

            if not self.run_eagerly:
                end_window = tf.function(
                    end_window, jit_compile=self.jit_compile, autograph=False
                )
            state.flush = end_window
        state.flush()
        return True

    def reset(self) -> None:
        """Drops the open window: its micro-batches count as not seen."""
        self._compiled_window("reset()").clear()

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Trains on one batch; see `keras.Model.train_on_batch`."""
        try:
            return super().train_on_batch(*args, **kwargs)
        except BaseException:
            if self._progress and self._progress.settings.within_call:
                # The batch is to be one window, or none.
                self.reset()
            raise

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Trains the model; see `keras.Model.fit`.

        Callbacks may be `tfckpt.Callback`s. If it fails or is interrupted,
        the open window is dropped.
        """
        if self._progress is None:
            return super().fit(*args, **kwargs)
        args, kwargs, given = _taken(
            super().fit, args, kwargs, "callbacks", None
        )
        kwargs["callbacks"] = callbacks.with_window(self, given)
        try:
            return super().fit(*args, **kwargs)
        except BaseException:
            if self._progress is not None:
                self.reset()
            raise

    def _compiled_window(self, what):
        if self._progress is None:
            raise ValueError(
                f"{what} is about a window of micro-batches, and '{self.name}' "
                "has none. Give gradient_accumulation_steps or micro_batches "
                "to `compile` first."
            )
        return self._progress

    def _is_first_batch(self):
        first = tf.convert_to_tensor(self.optimizer.iterations.value) == 0
        return bool(first) if tf.executing_eagerly() else first

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        # A private method of Keras, overridden because it builds the model
        # under a strategy from the mean of the replicas' batches, which fails
        # where these differ in size. Elsewhere it draws nothing: data that
        # are shuffled would come in another order.
        state = self._progress
        if state is not None and state.replicas > 1 and iterator is not None:
            for _, _, each in iterator:
                data_batch = keras.tree.map_structure(
                    self._of_one_replica, next(each)
                )
                break
            iterator = None
        super()._maybe_symbolic_build(iterator, data_batch)

    def _of_one_replica(self, value):
        return self.distribute_strategy.experimental_local_results(value)[0]


def _taken(method, args, kwargs, name, default):
    """Takes an argument out of a call, however it was given."""
    kwargs = dict(kwargs)
    if name in kwargs:
        return args, kwargs, kwargs.pop(name)
    names = list(inspect.signature(method).parameters)
    if name not in names:
        # It takes anything, and hands it on to Keras.
        keras_method = getattr(keras.Model, method.__name__)
        names = list(inspect.signature(keras_method).parameters)[1:]
    place = names.index(name) if name in names else len(args)
    if place >= len(args):
        return args, kwargs, default
    # What comes after it has to be given by name.
    kwargs |= dict(zip(names[place + 1 :], args[place + 1 :], strict=False))
    return args[:place], kwargs, args[place]
