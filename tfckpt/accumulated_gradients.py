"""Sums of gradients, apart for each number that they are divided by.

A loss of two terms that are divided by different numbers can't be taken apart
afterwards: each such number, called a denominator here, has its gradients
accumulated apart, in a group. Groups are numbered as they are met: "sum_0_3"
is group 0's gradient of variable 3, "weight_0" the weight of group 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfckpt import replica_variables

_UNCONVERTED = tf.autograph.experimental.do_not_convert


class AccumulatedGradients(replica_variables.Totals):
    """The window's sums of gradients and weights, and its micro-batches.

    Args:
        variables: Those whose gradients are added.
    """

    def __init__(self, variables: Sequence[Any] = ()):
        super().__init__("accumulated_gradients")
        self._trained = _Trained(tuple(variables))

    @property
    def variables_of_model(self) -> tuple[Any, ...]:
        """The variables whose gradients are added."""
        return self._trained.variables

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
            for variable in self.variables_by_name.values()
        )

    def build(self, variables: Sequence[Any] | None = None) -> None:
        """Makes the variables for one denominator, if they are not there.

        Args:
            variables: Those whose gradients are added from now on. Others
                than before drop what was accumulated.

        Raises:
            ValueError: What a file held is of other variables.
        """
        before = self.variables_of_model
        if variables is not None and not _same(before, variables):
            self._trained = _Trained(tuple(variables))
            if before:
                self.forget()
            else:
                # A file may have been read before.
                shapes = {
                    name: tuple(variable.shape)
                    for name, variable in self.variables_by_name.items()
                }
                self.check(shapes)
        if not self.variables_of_model:
            return
        self._micro_steps()
        for index in range(len(self.variables_of_model)):
            self._sum("0", index)
        self._weight("0")

    @property
    def micro_steps(self) -> tf.Tensor:
        """Micro-batches in the window, an int64 scalar."""
        return tf.convert_to_tensor(self._micro_steps())

    @_UNCONVERTED
    def add_micro_batch(
        self,
        gradients: Mapping[str, Sequence[Any]],
        weights: Mapping[str, Any],
        where: tf.Tensor | None = None,
        *,
        weighted: bool = False,
    ) -> None:
        """Adds the gradients of a micro-batch.

        Args:
            gradients: By denominator: one for each variable, or None.
            weights: By denominator: what a mean was divided by; None for the
                gradient of a sum.
            where: Whether they are added, and the micro-batch counts.
            weighted: Whether gradients of means are multiplied by the weights
                already.

        Raises:
            ValueError: They are not as many as the variables, are of other
                shapes, or come without a weight.
        """
        _check(gradients, weights, self.variables_of_model)
        self.build()
        for name, each in gradients.items():
            group = self._group(name, divided=weights[name] is not None)
            self._add_group(group, each, weights[name], where, weighted)
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
        self._micro_steps().assign_add(one, read_value=False)

    def is_update_step(self, steps: Any) -> tf.Tensor:
        """Whether the window has `steps` micro-batches, a boolean scalar."""
        return self.micro_steps >= tf.cast(steps, tf.int64)

    def sums(self) -> list[tf.Tensor]:
        """Returns the sums as they are, of which each replica has its own."""
        return [
            tf.convert_to_tensor(self._sum(group, index))
            for group, index in self._connected
        ]

    @_UNCONVERTED
    def totals(
        self, others: Sequence[tf.Tensor] = (), *, in_place: bool = False
    ) -> tuple[list[tf.Tensor | None], list[tf.Tensor]]:
        """Returns the window's gradient and other tensors, over all replicas.

        In a replica of several, one collective operation for each dtype.

        Args:
            others: Tensors that go through the same collective operation.
            in_place: Whether the sums may be divided where they are, which
                saves their memory once; `clear` is to follow.
        """
        self.build()
        keys = self._connected
        divided = self._divided
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
        if not self.variables_by_name:
            return
        # A graph keeps zeros that it knows, or fills, in memory beside the
        # sums: variables share them until something is added. Not these.
        never = self.micro_steps < 0
        for variable in self.variables_by_name.values():
            zero = tf.zeros([], variable.dtype)
            variable.assign(
                tf.where(never, tf.convert_to_tensor(variable), zero),
                read_value=False,
            )

    def holds_something(self) -> bool:
        """Whether a window is open."""
        return bool(self.variables_by_name) and bool(self.micro_steps > 0)

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises a ValueError if sums from a file are of other variables."""
        variables = self.variables_of_model
        for name, shape in shapes.items() if variables else ():
            kind, *place = name.split("_")
            if kind != "sum":
                continue
            index = int(place[1])
            if index >= len(variables):
                expected = f"only {len(variables)} variables are trained"
            elif tuple(variables[index].shape) != shape:
                expected = (
                    f"'{variables[index].name}' has shape "
                    f"{tuple(variables[index].shape)}"
                )
            else:
                continue
            raise ValueError(
                "The file holds gradients accumulated for other variables: "
                f"number {index} has shape {shape}, but {expected}. Expected "
                "a file that the same model has saved, with the same layers "
                "trainable."
            )

    def _group(self, denominator, *, divided):
        groups = self.notes.setdefault("groups", {})
        group, _ = groups.setdefault(denominator, [str(len(groups)), divided])
        return group

    @property
    def _divided(self):
        groups = self.notes.get("groups", {}).values()
        return sorted(group for group, divided in groups if divided)

    @property
    def _connected(self):
        """Group and index of each gradient that there ever was."""
        return sorted(map(tuple, self.notes.get("connected", ())))

    def _sum(self, group, index):
        variable = self.variables_of_model[index]
        dtype = tf.as_dtype(variable.dtype)
        if dtype.size < 4:
            dtype = tf.float32
        return self.variable(f"sum_{group}_{index}", variable.shape, dtype)

    def _weight(self, group):
        return self.variable(f"weight_{group}", dtype=self.weight_dtype)

    def _micro_steps(self):
        return self.variable("micro_steps", dtype=tf.int64, alike=True)

    def _add_group(self, group, gradients, weight, where, weighted):
        connected = self.notes.setdefault("connected", [])
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if [group, index] not in connected:
                connected.append([group, index])
            factor = None if weighted else weight
            _add(self._sum(group, index), gradient, factor, where)
        if weight is not None:
            total = self._weight(group)
            weight = as_dtype(weight, total.dtype)
            if where is not None:
                weight = tf.where(where, weight, tf.zeros_like(weight))
            total.assign_add(weight, read_value=False)


class _Trained:
    """Variables in a plain object, not to be saved with the accumulator."""

    def __init__(self, variables):
        self.variables = variables


def as_dtype(value: Any, dtype: tf.DType) -> tf.Tensor:
    """Casts a number to a dtype (`tf.cast` goes through float32)."""
    if tf.is_tensor(value):
        return tf.cast(value, dtype)
    return tf.constant(value, dtype)


def _check(gradients, weights, variables):
    if not isinstance(weights, Mapping) or set(weights) != set(gradients):
        names = list(weights) if isinstance(weights, Mapping) else weights
        raise ValueError(
            "GradientAccumulator.add takes a weight for each denominator. "
            f"Received: gradients of {list(gradients)}, weights of {names}."
        )
    for name, each in gradients.items():
        of = f" for {name!r}" if name else ""
        if len(each) != len(variables):
            raise ValueError(
                "GradientAccumulator.add takes one gradient for each of its "
                f"{len(variables)} variables, None where there is none. "
                f"Received: {len(each)} gradients{of}."
            )
        for gradient, variable in zip(each, variables, strict=True):
            if gradient is None:
                continue
            shape = tf.TensorShape(gradient.shape)
            if not shape.is_compatible_with(variable.shape):
                raise ValueError(
                    "GradientAccumulator.add takes gradients of its "
                    f"variables' shapes. Received: {shape}{of}, where "
                    f"'{variable.name}' has shape {tuple(variable.shape)}."
                )


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
