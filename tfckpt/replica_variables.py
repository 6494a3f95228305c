"""Variables in which each replica adds up its own part.

Reading one outside of the replicas gives the total (synchronization ON_READ,
aggregation SUM), so that a checkpoint holds it and may be restored on another
number of replicas. Of all kinds of variables only this one keeps the parts of
all replicas through a checkpoint.
"""

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfckpt import _compat_training as compat

_STRUCTURE = "structure"


class Totals(compat.Saveable, tf.Module):
    """Named variables of zeros, made when first asked for, and saved.

    They are made out of the function that is being traced, and out of its
    loops. Files of Keras' and checkpoints of TensorFlow's hold their names,
    shapes and dtypes too, so that all are there in a new process before
    anybody asks for them there. Like other attributes they are saved with the
    model that has the object as an attribute, and are none of its weights.

    Args:
        name: Name of the object.

    Attributes:
        notes: What else is saved; as JSON has it.

    Example:

    >>> totals = Totals("seen")
    >>> totals.add("samples", 3.0)
    >>> totals.add("samples", 4.0)
    >>> float(totals.value("samples"))
    7.0
    """

    def __init__(self, name: str):
        super().__init__(name=name)
        self._inside = _Inside(tf.distribute.get_strategy())
        self._structure = _Structure(self)

    @property
    def notes(self) -> dict[str, Any]:
        """What else is saved; as JSON has it."""
        return self._inside.notes

    def variable(
        self,
        name: str,
        shape: Sequence[int] = (),
        dtype: Any = "float32",
        *,
        alike: bool = False,
    ) -> tf.Variable:
        """Returns a variable, made if it is not there.

        Args:
            name: Its name.
            shape: Its shape.
            dtype: Its dtype.
            alike: Whether all replicas change it in the same way, so that the
                first one's is its value; else the total is.
        """
        found = self._inside.variables
        if name not in found:
            with self._inside.where_it_is_made():
                found[name] = tf.Variable(
                    tf.zeros(shape, dtype),
                    trainable=False,
                    name=name,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=(
                        tf.VariableAggregation.ONLY_FIRST_REPLICA
                        if alike
                        else tf.VariableAggregation.SUM
                    ),
                )
                # A checkpoint finds it as an attribute.
                setattr(self, f"total_{name}", found[name])
            self._inside.alike[name] = alike
        return found[name]

    def value(self, name: str, **options: Any) -> tf.Tensor:
        """Returns a variable's value: in a replica, its own part."""
        return tf.convert_to_tensor(self.variable(name, **options))

    def add(self, name: str, value: Any, **options: Any) -> None:
        """Adds to a variable."""
        variable = self.variable(name, **options)
        variable.assign_add(tf.cast(value, variable.dtype), read_value=False)

    @property
    def variables_by_name(self) -> dict[str, tf.Variable]:
        """The variables that there are."""
        return dict(self._inside.variables)

    def clear(self) -> None:
        """Makes everything 0, also what was NaN."""
        for variable in self._inside.variables.values():
            variable.assign(
                tf.zeros(variable.shape, variable.dtype), read_value=False
            )

    def forget(self) -> None:
        """Drops all variables and notes."""
        for name in self._inside.variables:
            delattr(self, f"total_{name}")
        self._inside.forget()

    def holds_something(self) -> bool:
        """Whether there is anything to save: some variable is not 0."""
        return any(
            np.any(tf.convert_to_tensor(variable))
            for variable in self._inside.variables.values()
        )

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raises a ValueError if variables from a file don't fit."""

    def structure(self) -> dict[str, Any]:
        """What is to be known of the variables to make them again."""
        return {
            "notes": self.notes,
            "variables": {
                name: [
                    variable.shape.as_list(),
                    variable.dtype.name,
                    self._inside.alike[name],
                ]
                for name, variable in self._inside.variables.items()
            },
        }

    def restructure(self, structure: dict[str, Any]) -> None:
        """Makes the variables of a `structure`, beside those that are there."""
        variables = structure["variables"]
        self.check(
            {name: tuple(shape) for name, (shape, *_) in variables.items()}
        )
        self.clear()
        self.notes.update(structure["notes"])
        for name, (shape, dtype, alike) in variables.items():
            self.variable(name, shape, dtype, alike=alike)

    def save_own_variables(self, store: Any) -> None:
        """Writes the variables into a file of Keras'."""
        if not self.holds_something():
            return
        text = json.dumps(self.structure())
        store[_STRUCTURE] = np.frombuffer(text.encode(), np.uint8)
        for name, variable in self._inside.variables.items():
            store[name] = np.asarray(tf.convert_to_tensor(variable))

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` wrote; 0 if that was nothing."""
        if _STRUCTURE not in store.keys():  # noqa: SIM118
            self.clear()
            return
        structure = json.loads(np.asarray(store[_STRUCTURE]).tobytes())
        self.restructure(structure)
        for name in structure["variables"]:
            self._inside.variables[name].assign(np.asarray(store[name]))


class _Inside:
    """State in a plain object, in which TensorFlow looks for no variables."""

    def __init__(self, strategy):
        self._strategy = strategy
        self.forget()

    def forget(self):
        self.variables, self.alike, self.notes = {}, {}, {}

    @contextlib.contextmanager
    def where_it_is_made(self):
        """Outside of functions, and under the strategy that it was made for."""
        elsewhere = tf.distribute.get_strategy() is not self._strategy
        with tf.init_scope():
            with (
                self._strategy.scope()
                if elsewhere
                else contextlib.nullcontext()
            ):
                yield


class _Structure(tf.train.experimental.PythonState):
    """The structure of totals in a checkpoint of TensorFlow's."""

    def __init__(self, totals):
        super().__init__()
        self._totals = totals

    def serialize(self):
        return json.dumps(self._totals.structure())

    def deserialize(self, string_value):
        self._totals.restructure(json.loads(string_value))
