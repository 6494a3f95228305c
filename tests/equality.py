"""Holds a model with recomputation against the same model without it.

A subject is made twice from the same seeds, once with its functions wrapped
and once without, and trained for some steps. Outputs, losses, gradients (also
which are None) and every variable, seed states among them, must agree: to the
bit in eager mode and in a graph, to 32 eps of the largest gradient under XLA,
which compiles two different programs.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

MODES = ("eager", "graph", "xla")
WITHOUT_ONEDNN = os.environ.get("TF_ENABLE_ONEDNN_OPTS") == "0"


@dataclasses.dataclass
class Subject:
    """What is trained: `call(*inputs)` and the state it touches."""

    call: Callable[..., Any]
    variables: Any = ()
    losses: Callable[[], Sequence[Any]] = lambda: ()


@dataclasses.dataclass
class Record:
    """What came out of each step."""

    outputs: list[np.ndarray]
    gradients: list[np.ndarray | None]
    variables: list[np.ndarray]


def exact_graphs() -> None:
    """Switches off the rewriting that treats equal programs differently.

    Where oneDNN, which fuses products with what follows, is off, the fusing
    that Grappler does is off too, and all else that it does.
    """
    options = {"arithmetic_optimization": False}
    if WITHOUT_ONEDNN:
        options["disable_meta_optimizer"] = True
    tf.config.optimizer.set_experimental_options(options)


def compiled(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """`function` in one of `MODES`."""
    if mode == "eager":
        return function
    return tf.function(function, jit_compile=mode == "xla", autograph=False)


def train(subject: Subject, inputs, mode: str, steps: int = 2) -> list[Record]:
    """Steps of gradient descent, as the numbers of each step."""
    exact_graphs()
    unconnected = []
    inputs = [
        x
        if isinstance(x, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor))
        else tf.convert_to_tensor(x)
        for x in inputs
    ]
    if not list(subject.variables):
        subject.call(*inputs)
    trainable = [v for v in subject.variables if v.trainable]

    def step(*inputs):
        watched = [
            x
            for x in inputs
            if isinstance(x, tf.Tensor) and (x.dtype.is_floating)
        ]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            outputs = [
                x
                for x in tf.nest.flatten(
                    subject.call(*inputs), expand_composites=True
                )
                if x is not None
            ]
            losses = [*map(_weighted_sum, outputs), *subject.losses()]
            loss = tf.add_n([tf.cast(x, "float64") for x in losses])
        gradients = tape.gradient(loss, [v.value for v in trainable] + watched)
        unconnected[:] = [g is None for g in gradients]
        return (
            outputs,
            losses,
            [tf.convert_to_tensor(g) for g in gradients if g is not None],
        )

    step = compiled(step, mode)
    records = []
    for _ in range(steps):
        outputs, losses, found = step(*inputs)
        found = iter([g.numpy() for g in found])
        gradients = [None if none else next(found) for none in unconnected]
        for variable, gradient in zip(trainable, gradients, strict=False):
            if gradient is not None:
                variable.assign_sub(
                    tf.cast(0.1 * gradient, variable.value.dtype)
                )
        records.append(
            Record(
                [x.numpy() for x in [*outputs, *losses]],
                gradients,
                [v.numpy() for v in subject.variables],
            )
        )
    return records


def _weighted_sum(tensor):
    """A loss whose gradient differs from element to element."""
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        return tf.constant(0.0, "float64")
    if tensor.dtype.is_complex:
        tensor = tf.math.real(tensor) + 2.0 * tf.math.imag(tensor)
    positions = tf.reshape(
        tf.range(tf.size(tensor), dtype="float64"), tf.shape(tensor)
    )
    weights = tf.cast(tf.cos(positions), tensor.dtype)
    return tf.cast(tf.reduce_sum(weights * tensor), "float64")


def check(
    make: Callable[[Callable[[Any], Any]], Subject],
    inputs: Sequence[Any],
    wrap: Callable[[Any], Any],
    mode: str,
    steps: int = 2,
    eps: float | None = None,
) -> list[Record]:
    """Trains `make(identity)` and `make(wrap)` and compares them.

    Args:
        make: makes a subject; what is to be recomputed goes through its
            argument.
        inputs: arguments of the subject's call.
        wrap: `tfckpt.recompute` or the like.
        mode: one of `MODES`.
        steps: how many steps are trained.
        eps: of the compute dtype, for the comparison under XLA.
    """
    found = []
    policy = keras.config.dtype_policy()
    for wrapper in (lambda x: x, wrap):
        keras.utils.clear_session(free_memory=False)
        keras.config.set_dtype_policy(policy)
        keras.utils.set_random_seed(1)
        found.append(train(make(wrapper), inputs, mode, steps))
    for step, (plain, ours) in enumerate(zip(*found, strict=True)):
        compare(plain, ours, mode, f"step {step}", eps)
    return found[1]


def compare(plain, ours, mode, where, eps=None):
    """Compares two records; the message names what differs."""
    none = [g is None for g in plain.gradients]
    assert [g is None for g in ours.gradients] == none, f"{where}: None"
    scale = max(
        (np.abs(g).max() for g in plain.gradients if g is not None and g.size),
        default=0.0,
    )
    for name in ("outputs", "gradients", "variables"):
        pairs = zip(getattr(plain, name), getattr(ours, name), strict=True)
        for i, (expected, actual) in enumerate(pairs):
            if expected is None:
                continue
            text = f"{where}: {name}[{i}]"
            assert expected.dtype == actual.dtype, text
            if mode != "xla" or expected.dtype.kind in "iubSO":
                np.testing.assert_array_equal(actual, expected, text)
            else:
                bound = eps or np.finfo("float32").eps
                largest = max(scale, np.abs(expected).max(initial=0))
                np.testing.assert_allclose(
                    np.asarray(actual, "float64"),
                    np.asarray(expected, "float64"),
                    rtol=0,
                    atol=32 * bound * float(largest),
                    err_msg=text,
                )
