"""What happens between calls of `train_step`: flush, hooks, resuming."""

import os
import warnings
from typing import Any

import keras
import tensorflow as tf

from tfckpt import _compat_training as compat
from tfckpt.training import settings


class Callback(keras.callbacks.Callback):
    """A Keras callback with hooks for micro-batches and updates.

    They are called after the batch in which they happened; with
    `steps_per_execution` once for all that happened since the last call.

    Example:

    >>> class Count(Callback):
    ...     updates = 0
    ...
    ...     def on_update_end(self, update, logs=None):
    ...         self.updates += logs["updates"]
    """

    def on_micro_batch_end(
        self, micro_batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Called after micro-batches.

        Args:
            micro_batch: How many the epoch has had.
            logs: As for `on_train_batch_end`, and "micro_batches": how many
                there were since the last call.
        """

    def on_update_end(
        self, update: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Called after updates, also after that at the end of an epoch.

        Args:
            update: `optimizer.iterations`, the number of updates so far.
            logs: As for `on_train_batch_end`, and "updates": how many there
                were since the last call.
        """


def with_window(model: keras.Model, callbacks: Any) -> Any:
    """Returns the callbacks of `fit` with one in front that ends windows."""
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        others = keras.tree.flatten(callbacks) if callbacks else []
        return [_Window(others), *others]
    others = [
        each for each in callbacks.callbacks if not isinstance(each, _Window)
    ]
    window = _Window(others)
    window.set_model(model)
    window.set_params(callbacks.params)
    callbacks.callbacks[:] = [window, *others]
    return callbacks


class _Window(keras.callbacks.Callback):
    """Ends the window of an epoch before anybody else sees its end."""

    # It needs no batch to be waited for, unless others have hooks.
    async_safe = True

    def __init__(self, others):
        super().__init__()
        self._others = others
        self._hooks = [x for x in others if _has_hooks(x)]
        self.async_safe = not self._hooks
        self._micro_batches = self._updates = self._skipped = 0

    def on_train_begin(self, logs=None):
        self._updates = _updates(self.model)
        self._skipped = self.model.nonfinite_micro_batches
        count, epoch = self.model.gradient_accumulation_steps, self.params
        epoch = (epoch or {}).get("steps")
        if settings.is_int(count) and epoch and count > epoch:
            warnings.warn(
                f"gradient_accumulation_steps={count} is more than the "
                f"{epoch} batches of an epoch: each epoch makes one update, "
                "at its end.",
                stacklevel=2,
            )

    def on_epoch_begin(self, epoch, logs=None):
        if self._micro_batches == 0 and any(
            isinstance(each, keras.callbacks.BackupAndRestore)
            for each in self._others
        ):
            # It begins the epoch anew, so that the window would be seen twice.
            self.model.reset()
        self._micro_batches = 0

    def on_train_batch_end(self, batch, logs=None):
        if not self._hooks:
            return
        parts = self.model._progress.settings.count
        per_batch = parts if self.model._progress.settings.within_call else 1
        steps = (self.params or {}).get("steps") or batch + 1
        # The last call of several steps may have had fewer.
        seen = min(batch + 1, steps) * per_batch
        news = dict(logs or {}, micro_batches=seen - self._micro_batches)
        self._micro_batches = seen
        for each in self._hooks:
            each.on_micro_batch_end(seen, news)
        self._tell_updates(logs)

    def on_test_begin(self, logs=None):
        # Validation comes before the end of the epoch.
        self._flush()

    def on_epoch_end(self, epoch, logs=None):
        self._flush()
        if not self.model._progress.settings.skip_nonfinite:
            return
        skipped = self.model.nonfinite_micro_batches - self._skipped
        self._skipped += skipped
        if logs is not None:
            logs["nonfinite_micro_batches"] = skipped
        if skipped:
            warnings.warn(
                f"Epoch {epoch + 1}: {skipped} micro-batches had a gradient "
                "with NaN or inf and were left out.",
                stacklevel=2,
            )

    def _flush(self):
        self.model.flush()
        self._tell_updates(None)

    def _tell_updates(self, logs):
        if not self._hooks:
            return
        now = _updates(self.model)
        if now > self._updates:
            news = dict(logs or {}, updates=now - self._updates)
            self._updates = now
            for each in self._hooks:
                each.on_update_end(now, news)


def _updates(model):
    # Under a strategy a Keras variable is no number.
    return int(tf.convert_to_tensor(model.optimizer.iterations.value))


def _has_hooks(callback):
    return hasattr(callback, "on_update_end") or hasattr(
        callback, "on_micro_batch_end"
    )


class ResumeTraining(keras.callbacks.Callback):
    """Saves the training, and goes on at the saved batch in a new process.

    The run is then identical to one that was never stopped, if the data come
    in the same order: weights, optimizer, the open window, random generators
    of layers and metrics are saved with the number of the batch, and the
    epoch's first batches are drawn and left out. (Keras' `BackupAndRestore`
    begins the epoch anew, without the open window.)

    Args:
        directory: Where checkpoints of TensorFlow's are written. A new one
            replaces the last when it is complete.
        save_freq: After how many batches it saves. It saves at the end of
            each epoch too.

    Raises:
        ValueError: `save_freq` is no positive int, or `directory` is empty.

    Example:

    >>> callback = ResumeTraining("/tmp/training", save_freq=100)
    """

    def __init__(self, directory: str, *, save_freq: int):
        super().__init__()
        if not settings.is_int(save_freq) or save_freq < 1:
            raise ValueError(
                "save_freq must be a positive number of batches. Received: "
                f"save_freq={save_freq!r}"
            )
        if not directory:
            raise ValueError(
                "ResumeTraining needs a directory for its checkpoints. "
                f"Received: directory={directory!r}"
            )
        self._directory = os.fspath(directory)
        self._save_freq = save_freq
        self._resumed = False
        self._since = self._to_skip = self._begun = 0

    def on_train_begin(self, logs=None):
        """Restores the last checkpoint, if there is one."""
        self._position = {
            name: tf.Variable(0, dtype=tf.int64) for name in ("epoch", "batch")
        }
        self._resumed = self._restore(metrics=False)
        self._to_skip = int(self._position["batch"])
        if self._resumed:
            compat.begin_at(self.model, int(self._position["epoch"]))

    def on_epoch_begin(self, epoch, logs=None):
        """Prepares to leave out the batches that were seen."""
        self._begun = epoch
        self._since = 0
        if not self._resumed or not self._to_skip:
            return
        model, left = self.model, self._to_skip
        train = model.train_function

        def skip(iterator):
            nonlocal left
            for _ in range(min(model.steps_per_execution, left)):
                batch = next(iterator)
                if left == self._to_skip:
                    # `fit` has reset the metrics by now.
                    compat.build_metrics(model, batch)
                    self._restore(metrics=True)
                left -= 1
            if not left:
                model.train_function = train
            return model.get_metrics_result()

        model.train_function = skip

    def on_train_batch_end(self, batch, logs=None):
        """Saves every `save_freq` batches."""
        if self._resumed and batch < int(self._position["batch"]):
            return
        self._resumed = False
        if batch + 1 - self._since >= self._save_freq:
            self._since = batch + 1
            self._save(self._begun, batch + 1)

    def on_epoch_end(self, epoch, logs=None):
        """Saves at the end of the epoch."""
        self._resumed = False
        self._save(epoch + 1, 0)

    def _checkpoint(self, metrics):
        model = self.model
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        state = {
            "weights": model.variables,
            "optimizer": model.optimizer.variables,
        }
        if metrics:
            state["metrics"] = model.metrics_variables
        window = getattr(model, "_gradient_accumulator", None)
        return tf.train.Checkpoint(
            **({} if window is None else {"window": window}),
            **self._position,
            **{
                name: [variable.value for variable in variables]
                for name, variables in state.items()
            },
        )

    def _restore(self, metrics):
        path = tf.train.latest_checkpoint(self._directory)
        if path is None:
            return False
        try:
            status = self._checkpoint(metrics).restore(path)
            if metrics:
                status.assert_existing_objects_matched()
            status.expect_partial()
        except (
            AssertionError,
            IndexError,
            ValueError,
            tf.errors.OpError,
        ) as error:
            raise ValueError(
                f"The checkpoint {path} can't be restored: it is damaged, or "
                "of another model or optimizer. Expected one that "
                "ResumeTraining wrote for the same model. Give another "
                f"directory, or delete it. ({error})"
            ) from error
        return True

    def _save(self, epoch, batch):
        self._position["epoch"].assign(epoch)
        self._position["batch"].assign(batch)
        manager = tf.train.CheckpointManager(
            self._checkpoint(metrics=True), self._directory, max_to_keep=1
        )
        manager.save()
