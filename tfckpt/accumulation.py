"""Gradients of micro-batches, added up until the window's end.

The gradient of a mean over many samples is the mean of the micro-batches'
gradients, each weighted by what its own mean was divided by (samples, or sample
weights, or valid tokens). So the gradients are multiplied by these weights and
added, the weights are added, and the sum is divided once. A mean of means
would be wrong as soon as two micro-batches differ in weight.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfckpt import _compat_training as compat
from tfckpt import accumulated_gradients

_UNCONVERTED = tf.autograph.experimental.do_not_convert
# What `add` takes for a single denominator.
_ONE = ""


class GradientAccumulator(compat.Saveable, tf.Module):
    """Adds up gradients of micro-batches, exactly as one big batch would.

    For a training loop of your own. `AccumulatingTrainer` has one inside.

    The state is held in `tf.Variable`s: for each variable one of its shape, in
    float32 or the variable's dtype where that is wider; the sum of weights, in
    float32 (float64 if all variables are); the number of micro-batches in the
    window, int64. Each replica adds to its own part without communication
    (synchronization ON_READ, aggregation SUM), so that a checkpoint holds the
    total and may be restored on another number of replicas. They are made at
    the first `add` or by `build`, are saved with a model that has the
    accumulator as an attribute, and are none of its weights.

    Args:
        variables: Those whose gradients are added, in the order of `add`.

    Attributes:
        variables_of_model: The variables, as given.

    Example:

    >>> variable = tf.Variable([0.0, 0.0])
    >>> accumulator = GradientAccumulator([variable])
    >>> accumulator.add([tf.constant([4.0, 0.0])], weight=1)  # one sample
    >>> accumulator.add([tf.constant([1.0, 3.0])], weight=2)  # two samples
    >>> bool(accumulator.is_update_step(2))
    True
    >>> [gradient.numpy().tolist() for gradient in accumulator.result()]
    [[2.0, 2.0]]
    >>> accumulator.clear()
    >>> int(accumulator.micro_steps)
    0
    """

    def __init__(self, variables: Sequence[Any]):
        super().__init__(name="gradient_accumulator")
        self._gradients = accumulated_gradients.AccumulatedGradients(variables)

    @property
    def variables_of_model(self) -> tuple[Any, ...]:
        """The variables whose gradients are added."""
        return self._gradients.variables_of_model

    @property
    def micro_steps(self) -> tf.Tensor:
        """Micro-batches in the window, an int64 scalar."""
        return self._gradients.micro_steps

    @property
    def bytes(self) -> int:
        """Bytes that its variables take on each replica."""
        return self._gradients.bytes

    def build(self) -> None:
        """Makes the variables for one denominator, if they are not there."""
        self._gradients.build()

    @_UNCONVERTED
    def add(
        self,
        gradients: Sequence[Any] | Mapping[str, Sequence[Any]],
        weight: Any = 1.0,
        *,
        where: tf.Tensor | None = None,
    ) -> None:
        """Adds the gradients of a micro-batch.

        Args:
            gradients: Of the micro-batch's mean loss, one for each variable:
                tensors of the variables' shapes, `tf.IndexedSlices` or None.
                Or a mapping from names of denominators to such lists, for a
                loss of terms that are divided by different numbers.
            weight: The number that the mean was divided by, a float scalar;
                None for the gradient of a sum, which is never divided. Or a
                mapping with the same names.
            where: A boolean scalar; where False, nothing is added, not even
                NaN, and the micro-batch does not count. On several replicas
                it counts, as they must agree on the window's end.

        Raises:
            ValueError: Gradients are not as many as the variables, are of
                other shapes, or come without a weight.
        """
        if not isinstance(gradients, Mapping):
            gradients, weight = {_ONE: gradients}, {_ONE: weight}
        self._gradients.add_micro_batch(gradients, weight, where)

    def is_update_step(self, steps: Any) -> tf.Tensor:
        """Whether the window has `steps` micro-batches, a boolean scalar."""
        return self._gradients.is_update_step(steps)

    def result(self) -> list[tf.Tensor | None]:
        """Returns the gradient of the window, over all replicas.

        In a replica of several it adds up gradients and weights of all in one
        collective operation for each dtype. There an optimizer must not do so
        again, see `tfckpt.distribute.apply_reduced`.

        Returns:
            For each variable a tensor of its shape in the accumulator's
            dtype, or None if it never had a gradient.
        """
        return self._gradients.totals()[0]

    def clear(self) -> None:
        """Empties the window: everything is 0, also where it was NaN."""
        self._gradients.clear()
