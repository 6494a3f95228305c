"""Peak memory, time and loss of a training's steps."""

import contextlib
import time

import entry_point  # noqa: F401  Before what imports TensorFlow.
import keras
import numpy as np
import tensorflow as tf

from tfckpt import memory


class Meter(keras.callbacks.Callback):
    """Measures a `fit`: its peak memory, every step's seconds and loss.

    The memory is that of the first GPU or, without one, of the process. The
    baseline is what is held when the training begins: inputs and weights.

    Args:
        batches: How many make a step.

    Attributes:
        losses: The loss of each step so far.
    """

    def __init__(self, batches=1):
        super().__init__()
        self._batches = batches
        self.losses = []
        self._before = 0.0
        self._stack = contextlib.ExitStack()
        self._peak = None
        self._start = 0.0
        self._seconds = []

    def on_train_begin(self, logs=None):
        # On a GPU, activations are in its memory.
        gpus = tf.config.list_logical_devices("GPU")
        peak = memory.device_peak("GPU:0") if gpus else memory.process_peak()
        self._peak = self._stack.enter_context(peak)

    def on_train_end(self, logs=None):
        self._stack.close()

    def on_train_batch_begin(self, batch, logs=None):
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self._seconds.append(time.perf_counter() - self._start)
        done, rest = divmod(batch + 1, self._batches)
        if rest == 0:
            # What is logged is the mean of the epoch so far.
            total = done * logs["loss"]
            self.losses.append(total - (self._before if done > 1 else 0.0))
            self._before = total

    def figures(self):
        """Returns bytes, and seconds and losses of the steps."""
        whole = len(self._seconds) // self._batches * self._batches
        seconds = np.reshape(self._seconds[:whole], [-1, self._batches])
        seconds = seconds.sum(axis=1).tolist()
        return {
            "above baseline": self._peak.bytes,
            "total": self._peak.baseline + self._peak.bytes,
            # The first steps trace and warm up.
            "seconds": seconds[2:] or seconds,
            "losses": self.losses,
        }
