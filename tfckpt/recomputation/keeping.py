"""Tensors inside a recomputed function that are kept, not computed again.

Also called selective activation recomputation (Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models",
https://arxiv.org/abs/2205.05198); JAX names such tensors
(`checkpoint_name`), PyTorch has policies for ops.

The forward pass puts them aside. In the recomputation each stands in for the
result of the op that would make it again: later ops, and the tape, take it
for that op's output. So the gradient goes through the op as ever, while its
fresh output and whatever led to it alone is dead code, which a graph and a
compiler drop. In eager mode nothing would be dropped, so nothing is kept.

Not kept: what an op inside a loop, a branch or an inner `tf.function` makes.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfckpt import _compat
from tfckpt.recomputation import errors, probabilities

# What is dear to compute for what it takes to hold: products, and reductions
# (the moments of a normalization).
PRODUCTS = frozenset(
    [
        "BatchMatMul",
        "BatchMatMulV2",
        "BatchMatMulV3",
        "Conv2D",
        "Conv2DBackpropInput",
        "Conv3D",
        "Conv3DBackpropInputV2",
        "DepthwiseConv2dNative",
        "Einsum",
        "MatMul",
        "SparseTensorDenseMatMul",
        "XlaConvV2",
        "XlaDotV2",
    ]
)
REDUCTIONS = frozenset(["Max", "Mean", "Min", "Sum"])
# A shape, say, is no longer than this.
_MOST_SIZES = 16


class _Local(threading.local):
    runs = 0  # how many recomputed functions run in this thread
    keeping = False  # whether `keep` makes its op now
    products = False  # whether products are kept now


_local = _Local()


def keep(tensor: Any) -> Any:
    """Keeps a tensor from the forward pass for the recomputation.

    In a recomputed function or layer (`tfckpt.recompute`, `tfckpt.Recompute`, a
    segment of a `SegmentedModel`), in a graph or compiled by XLA, the tensor
    is not computed again, nor what leads to it alone; it takes its memory
    until the gradient is computed (integers that may be sizes, 16 or fewer,
    are computed again in any case). Keep what is dear to compute and small:
    matrix products and convolutions, before the activation and normalization
    that follow them. Elsewhere, in eager mode, and inside of a loop, a branch
    or an inner `tf.function` of the recomputed function this does nothing.
    The numbers are the same with it and without, but for the last bit where
    TensorFlow fuses the op that makes the tensor with the next one (bias,
    activation), which it can't do when the tensor itself is needed.

    Args:
        tensor: a tensor of any shape and dtype, or a nested structure of
            tensors (also sparse or ragged ones).

    Returns:
        `tensor`, or equal tensors in its place.

    Example:

    >>> kernel = tf.Variable(tf.ones([3, 2]))
    >>> @tfckpt.recompute
    ... def block(x, kernel):
    ...     return keras.activations.gelu(tfckpt.keep(x @ kernel))
    >>> @tf.function
    ... def gradient(x):
    ...     with tf.GradientTape() as tape:
    ...         loss = tf.reduce_sum(block(x, kernel.value()))
    ...     return tape.gradient(loss, kernel)
    >>> gradient(tf.ones([4, 3])).shape
    TensorShape([3, 2])
    """
    if not _local.runs or tf.executing_eagerly():
        return tensor
    return tf.nest.map_structure(_keep, tensor, expand_composites=True)


def _keep(tensor):
    if not tf.is_tensor(tensor) or isinstance(tensor, keras.KerasTensor):
        return tensor
    found = probabilities.logits_of(tensor)
    if found:
        make, logits = found
        return make(_keep(logits))
    _local.keeping, outer = True, _local.keeping
    try:
        kept = tf.identity(tensor)
    finally:
        _local.keeping = outer
    for put, get in _compat.CARRIED:
        carried = get(tensor)
        if carried is not None:
            put(kept, carried)
    return kept


@contextlib.contextmanager
def products() -> Iterator[None]:
    """Keeps the products and reductions that ops in this block make."""
    before, _local.products = _local.products, True
    try:
        yield
    finally:
        _local.products = before


class Keeper:
    """What one run of a recomputed function keeps, or is given.

    Args:
        label: names the function in errors.
        forward: the keeper of the forward pass, for a recomputation.
        kept: what that one kept, to be handed out.
    """

    def __init__(
        self,
        label: str,
        forward: "Keeper | None" = None,
        kept: Sequence[tf.Tensor] = (),
    ):
        self._label = label
        # A jacobian's recomputation may run in a graph, where it can't be
        # given what no eager forward pass kept.
        self._hands_out = forward is not None and not forward._eager
        self._eager = tf.executing_eagerly()
        self._products = forward._products if forward else _local.products
        self.tensors = list(kept)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While the function runs."""
        before, _local.products = _local.products, self._products
        _local.runs += 1
        try:
            yield
        finally:
            _local.runs -= 1
            _local.products = before
        if self._hands_out and self.tensors:
            self._refuse([])

    def outputs(
        self, op_type: str, outputs: Sequence[tf.Tensor]
    ) -> Sequence[tf.Tensor]:
        """What an op of the function returns."""
        if not _is_kept(op_type) or any(map(_may_be_a_size, outputs)):
            return outputs
        if not self._hands_out:
            self.tensors.extend(outputs)
            return outputs
        kept = self.tensors[: len(outputs)]
        del self.tensors[: len(outputs)]
        if len(kept) != len(outputs) or any(
            a.dtype != b.dtype or not a.shape.is_compatible_with(b.shape)
            for a, b in zip(kept, outputs, strict=True)
        ):
            self._refuse(outputs)
        return kept

    def _refuse(self, found):
        raise errors.RecomputeError(
            f"The recomputation of {self._label} keeps other tensors than its "
            f"forward pass. Forward: {self.tensors}. Recomputed: {found}. It "
            "must do the same both times: no counters or random choices in "
            "Python."
        )


def _may_be_a_size(tensor):
    """Whether a compiler may have to know its value beforehand."""
    if tensor.dtype.is_floating or tensor.dtype.is_complex:
        return False
    elements = tensor.shape.num_elements()
    return elements is None or elements <= _MOST_SIZES


def _is_kept(op_type):
    if _local.keeping and op_type == "Identity":
        return True
    return _local.products and (op_type in PRODUCTS or op_type in REDUCTIONS)
