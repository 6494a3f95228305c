"""Gradients of micro-batches, added up until the window's end.

The gradient of a mean over many samples is the mean of the micro-batches'
gradients, each weighted by what its own mean was divided by (samples, or sample
weights, or valid tokens). So the gradients are multiplied by these weights and
added, the weights are added, and the sum is divided once. A mean of means
would be wrong as soon as two micro-batches differ in weight.

A loss of two terms that are divided by different numbers can't be taken apart
afterwards: each such number, called a denominator here, has its gradients
accumulated apart.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfckpt import _compat_training as compat
from tfckpt import gradient_names as names
from tfckpt import replica_variables

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

    def __init__(self, variables: Sequence[Any] = ()):
        super().__init__(name="gradient_accumulator")
        # A plain object, in which TensorFlow does not look for variables.
        self._book = names.Book(tuple(variables))

    @property
    def variables_of_model(self) -> tuple[Any, ...]:
        """The variables whose gradients are added."""
        return self._book.variables

    @property
    def weight_dtype(self) -> tf.DType:
        """The dtype of sums of weights."""
        dtypes = {
            tf.as_dtype(variable.dtype).real_dtype
            for variable in self.variables_of_model
        }
        # A dtype of its own would be a collective operation of its own.
        return tf.float64 if dtypes == {tf.float64} else tf.float32

    @property
    def bytes(self) -> int:
        """Bytes that its variables take on each replica."""
        return sum(
            variable.shape.num_elements() * variable.dtype.size
            for variable in self._all()
        )

    def build(self, variables: Sequence[Any] | None = None) -> None:
        """Makes the variables for one denominator, if they are not there.

        Args:
            variables: Those whose gradients are added from now on. Others
                than before drop what was accumulated.
        """
        if variables is not None and not _same(self._book.variables, variables):
            for name in self._book.state:
                delattr(self, f"_{name}")
            self._book = names.Book(tuple(variables), self._book.pending)
        if not self._book.variables:
            return
        self._counter("micro_steps")
        for index in range(len(self._book.variables)):
            self._sum("0", index)
        self._weight("0")
        if self._book.pending:
            pending, self._book.pending = self._book.pending, {}
            self._restore(pending)

    @property
    def micro_steps(self) -> tf.Tensor:
        """Micro-batches in the window, an int64 scalar."""
        return tf.convert_to_tensor(self._counter("micro_steps"))

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
            ValueError: The number of gradients is not that of the variables.
        """
        if not isinstance(gradients, Mapping):
            gradients, weight = {_ONE: gradients}, {_ONE: weight}
        for name, each in gradients.items():
            if len(each) != len(self.variables_of_model):
                raise ValueError(
                    "GradientAccumulator.add takes one gradient for each of "
                    f"its {len(self.variables_of_model)} variables, None where "
                    f"there is none. Received: {len(each)} gradients"
                    + (f" for {name!r}." if name else ".")
                )
        self.build()
        for name, each in gradients.items():
            group = self._book.group(name, divided=weight[name] is not None)
            self._add_group(group, each, weight[name], where)
        self.count(where)

    @_UNCONVERTED
    def count(self, where: tf.Tensor | None = False) -> None:
        """Counts a micro-batch of which nothing is added.

        Args:
            where: Whether anything was added. If not, it counts only on
                several replicas.
        """
        one = tf.constant(1, tf.int64)
        if where is not None and _replicas() == 1:
            one = tf.cast(where, tf.int64)
        self._counter("micro_steps").assign_add(one, read_value=False)

    def sums(self) -> list[tf.Tensor]:
        """Returns the sums as they are, of which each replica has its own."""
        return [
            tf.convert_to_tensor(self._sum(group, index))
            for group, index in self._connected()
        ]

    def is_update_step(self, steps: Any) -> tf.Tensor:
        """Whether the window has `steps` micro-batches, a boolean scalar."""
        return self.micro_steps >= tf.cast(steps, tf.int64)

    def result(self) -> list[tf.Tensor | None]:
        """Returns the gradient of the window, over all replicas.

        In a replica of several it adds up gradients and weights of all in one
        collective operation for each dtype. There an optimizer must not do so
        again, see `tfckpt.distribute.apply_reduced`.

        Returns:
            For each variable a tensor of its shape in the accumulator's
            dtype, or None if it never had a gradient.
        """
        return self.totals()[0]

    @_UNCONVERTED
    def totals(
        self, others: Sequence[tf.Tensor] = (), *, in_place: bool = False
    ) -> tuple[list[tf.Tensor | None], list[tf.Tensor]]:
        """Returns `result()`, and other tensors added up over the replicas.

        Args:
            others: Tensors that go through the same collective operation.
            in_place: Whether the sums may be divided where they are, which
                saves their memory once; `clear` is to follow.
        """
        self.build()
        keys = self._connected()
        divided = self._book.divided()
        values = self.sums()
        values += [tf.convert_to_tensor(self._weight(each)) for each in divided]
        values = _over_replicas([*values, *others])
        sums, rest = values[: len(keys)], values[len(keys) :]
        weights = dict(zip(divided, rest, strict=False))
        found = [None] * len(self.variables_of_model)
        for (group, index), value in zip(keys, sums, strict=True):
            if group in weights:
                # Without any weight the sum is 0, or NaN and stays so.
                weight = weights[group]
                weight = tf.where(weight == 0, tf.ones_like(weight), weight)
                value /= tf.cast(weight, value.dtype)
                if in_place and _replicas() == 1:
                    total = self._sum(group, index)
                    total.assign(value, read_value=False)
                    value = tf.convert_to_tensor(total)
            before = found[index]
            found[index] = value if before is None else before + value
        return found, rest[len(divided) :]

    @_UNCONVERTED
    def clear(self) -> None:
        """Empties the window: everything is 0, also where it was NaN."""
        # A graph keeps zeros that it knows, or fills, in memory beside the
        # sums: variables share them until something is added. Not these.
        never = self.micro_steps < 0
        for variable in self._all():
            zero = tf.zeros([], variable.dtype)
            variable.assign(
                tf.where(never, tf.convert_to_tensor(variable), zero),
                read_value=False,
            )

    # How Keras saves it with a model.

    def save_own_variables(self, store: Any) -> None:
        """Writes the open window; nothing if it is empty."""
        if not self._book.state or not int(self.micro_steps):
            return
        for name, variable in self._book.state.items():
            store[name] = np.asarray(tf.convert_to_tensor(variable))

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` wrote."""
        values = {key: np.asarray(store[key]) for key in store.keys()}  # noqa: SIM118
        if not self.variables_of_model:
            self._book.pending = values
            return
        self.build()
        self._restore(values)

    def _restore(self, values):
        names.check(values, self.variables_of_model)
        self.clear()
        for group, index, _ in names.sums(values):
            self._sum(group, index)
        for group, _ in names.weights(values):
            self._weight(group)
        for name, value in values.items():
            variable = self._book.state[name]
            variable.assign(tf.cast(value, variable.dtype))
        self._book.note_connected(values)

    # The variables, made when they are first needed.

    def _all(self):
        return self._book.state.values()

    def _sum(self, group, index):
        variable = self.variables_of_model[index]
        dtype = tf.as_dtype(variable.dtype)
        if dtype.size < 4:
            dtype = tf.float32
        name = names.of_sum(group, index)
        return self._made(name, replica_variables.total, variable.shape, dtype)

    def _weight(self, group):
        name = names.of_weight(group)
        return self._made(name, replica_variables.total, [], self.weight_dtype)

    def _counter(self, name):
        return self._made(name, replica_variables.alike, tf.int64)

    def _made(self, name, make, *args):
        state = self._book.state
        if name not in state:
            state[name] = make(*args, name)
            with tf.init_scope():
                # A checkpoint finds it as an attribute.
                setattr(self, f"_{name}", state[name])
        return state[name]

    def _connected(self):
        """Denominator and index of each gradient that there ever was."""
        if not self._book.connected:
            # A checkpoint of TensorFlow's may have been restored.
            with tf.init_scope():
                self._book.note_connected(
                    {
                        name: np.asarray(tf.convert_to_tensor(variable))
                        for name, variable in self._book.state.items()
                    }
                )
        return sorted(self._book.connected)

    def _add_group(self, group, gradients, weight, where):
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            self._book.connected.add((group, index))
            _add(self._sum(group, index), gradient, weight, where)
        if weight is not None:
            total = self._weight(group)
            weight = as_dtype(weight, total.dtype)
            if where is not None:
                weight = tf.where(where, weight, tf.zeros_like(weight))
            total.assign_add(weight, read_value=False)


def as_dtype(value: Any, dtype: tf.DType) -> tf.Tensor:
    """Casts a number to a dtype (`tf.cast` goes through float32)."""
    if tf.is_tensor(value):
        return tf.cast(value, dtype)
    return tf.constant(value, dtype)


def _replicas():
    return tf.distribute.get_strategy().num_replicas_in_sync


def _over_replicas(values):
    context = tf.distribute.get_replica_context()
    if context is None or _replicas() == 1 or not values:
        return values
    return context.all_reduce(tf.distribute.ReduceOp.SUM, values)


def _same(before, now):
    return len(before) == len(now) and all(
        a is b for a, b in zip(before, now, strict=True)
    )


def _add(total, gradient, weight, where):
    if isinstance(gradient, tf.IndexedSlices):
        if not isinstance(total, tf.distribute.DistributedValues):
            values = _weighted(gradient.values, weight, where, total.dtype)
            total.scatter_add(tf.IndexedSlices(values, gradient.indices))
            return
        gradient = tf.convert_to_tensor(gradient)
    total.assign_add(
        _weighted(gradient, weight, where, total.dtype), read_value=False
    )


def _weighted(gradient, weight, where, dtype):
    gradient = tf.cast(gradient, dtype)
    if weight is not None:
        gradient *= as_dtype(weight, dtype)
    if where is not None:
        # 0 times NaN is NaN.
        gradient = tf.where(where, gradient, tf.zeros([], dtype))
    return gradient
