"""States of a model's random generators, to be saved with an open window.

Keras counts them among a model's variables, but writes them into no file, and
a checkpoint of TensorFlow's does not find them. Training that goes on in the
middle of an epoch needs them to draw what it would have drawn.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfckpt import _compat_training as compat


class RandomState(compat.Saveable, tf.Module):
    """Saves the generators of a model that has it as an attribute.

    Args:
        is_open: Whether a window is open. Files of Keras' hold the state only
            then, for a model's weights to be loaded without it.
    """

    def __init__(self, is_open: Callable[[], bool]):
        super().__init__(name="random_state")
        self._is_open = is_open
        self._generators = []

    def build(self, model: keras.Model) -> None:
        """Finds the generators of a built model."""
        weights = {id(variable) for variable in model.weights}
        found = [
            variable.value
            for variable in model.variables
            if id(variable) not in weights
        ]
        if len(found) != len(self._generators):
            self._generators = found

    def save_own_variables(self, store: Any) -> None:
        """Writes the states, while a window is open."""
        if self._is_open():
            for index, state in enumerate(self._generators):
                store[str(index)] = np.asarray(tf.convert_to_tensor(state))

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` wrote."""
        if len(store.keys()) == len(self._generators):
            for index, state in enumerate(self._generators):
                state.assign(np.asarray(store[str(index)]))
