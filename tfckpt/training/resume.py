"""Training that goes on in another process, in the middle of an epoch."""

import os

import keras
import tensorflow as tf

from tfckpt import _compat_training as compat
from tfckpt.training import settings


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
        window = getattr(model, "window_state", dict)
        return tf.train.Checkpoint(
            **window(),
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
