"""State that a micro-batch which does not count leaves alone.

A forward pass moves statistics and random generators before anybody knows that
its gradient is NaN. So what it assigns is held back, and assigned or forgotten
when that is known.
"""

from typing import Any

import keras
import tensorflow as tf

from tfckpt import _compat


class HeldUpdates(keras.StatelessScope):
    """A scope in which Keras variables keep their values for all others.

    What is assigned in it is read in it. Raw `tf.Variable`s are assigned at
    once, as Keras knows nothing of them.

    Example:

    >>> variable = keras.Variable(1.0)
    >>> with HeldUpdates() as held:
    ...     _ = variable.assign(2.0)
    >>> held.commit(where=tf.constant(False))
    >>> float(variable)
    1.0
    """

    def __init__(self):
        super().__init__(collect_losses=True)
        self._held = {}
        self._layer_losses = []

    def __exit__(self, *args, **kwargs):
        super().__exit__(*args, **kwargs)
        # Layers forget losses of a scope that has ended.
        kept = {id(loss) for loss in self.losses}
        for layer, loss in self._layer_losses:
            if id(loss) in kept:
                layer.add_loss(loss)

    def add_loss(self, loss: tf.Tensor) -> None:
        """Called by `Layer.add_loss`, and for activity regularizers."""
        super().add_loss(loss)
        self._layer_losses.append((_compat.calling_layer(), loss))

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Called by Keras when a variable is assigned."""
        self._held[id(update[0])] = update

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Called by Keras when a variable is read."""
        if id(variable) in self._held:
            return self._held[id(variable)][1]
        return None

    def commit(self, where: tf.Tensor) -> None:
        """Assigns what was held back where a boolean scalar is True."""
        for variable, value in self._held.values():
            now = tf.convert_to_tensor(variable.value)
            value = tf.cast(value, now.dtype)
            # 0 times NaN is NaN.
            variable.assign(tf.where(where, value, now))
