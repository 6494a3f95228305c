"""What happens between calls of `train_step`: the flush, and hooks."""

import warnings
from typing import Any

import keras
import tensorflow as tf

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

    def __init__(self, others):
        super().__init__()
        self._others = others
        self._hooks = [x for x in others if isinstance(x, Callback)]
        # It needs no batch to be waited for, unless others have hooks.
        self.async_safe = not self._hooks
        self._micro_batches = self._updates = self._skipped = 0

    def on_train_begin(self, logs=None):
        self._updates = _updates(self.model)
        self._skipped = self.model.nonfinite_micro_batches
        parts = self.model.window_options()["micro_batches"] or 1
        self._per_batch = parts if settings.is_int(parts) else len(parts)
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
        steps = (self.params or {}).get("steps") or batch + 1
        # The last call of several steps may have had fewer.
        seen = min(batch + 1, steps) * self._per_batch
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
        if not self.model.window_options()["skip_nonfinite"]:
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
