"""`tf.Variable`s that recomputed code reads and that are no Keras variables.

The recomputation reads them again, so they are held to the value of the
forward pass.
"""

import tensorflow as tf

from tfckpt import _compat
from tfckpt.recomputation import errors


class RawVariable:
    """A `tf.Variable` that a recomputed function reads.

    The recomputation reads it again; `check` holds it to the value that the
    forward pass read. (XLA drops assertions: a compiled function must not
    assign such a variable between the forward pass and the gradient.)

    Attributes:
        handle: what a tape of the replay watches.
        value: what the forward pass read, as a tensor that tapes follow.
    """

    def __init__(self, label: str, handle: tf.Tensor, name: str):
        self._label = label
        self._name = name
        self._dtype = _compat.variable_dtype(handle)
        self.handle = handle
        self.value = self._read()

    def _read(self) -> tf.Tensor:
        return tf.raw_ops.ReadVariableOp(
            resource=self.handle, dtype=self._dtype
        )

    def check(self) -> None:
        """Raises, or asserts in a graph, if the variable has changed."""
        before, now = self.value, self._read()
        same = tf.reduce_all(
            (now == before) | ((now != now) & (before != before))
        )
        kind = f"{self._dtype.name}{list(before.shape)}"
        message = (
            f"A tf.Variable ({self._name}; {kind}) "
            f"that {self._label} reads was assigned between the forward pass "
            "and its gradient, so that the recomputation would use the new "
            "value. Assign it later, pass its value as an argument, or make "
            "it a keras.Variable, whose value is kept."
        )
        if not tf.executing_eagerly():
            tf.debugging.Assert(same, [message])
        elif not same:
            raise errors.RecomputeError(message)
