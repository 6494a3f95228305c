"""What surrounds a call and decides what it computes.

The `training` of the enclosing Keras call, automatic casting, the device and
name scopes are gone when the gradient is computed; the recomputation needs
them as they were.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfckpt import _compat


class Ambient:
    """The surroundings of the moment in which it is made."""

    def __init__(self):
        self._keras = _compat.ambient_state()
        self._device = _compat.device_name()
        self._name_scope = tf.get_current_name_scope()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Puts the surroundings back for a while."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_compat.restored_ambient_state(self._keras))
            if self._device:
                stack.enter_context(tf.device(self._device))
            if self._name_scope:
                stack.enter_context(tf.name_scope(f"{self._name_scope}/"))
            yield
