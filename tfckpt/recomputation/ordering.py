"""Makes a recomputation wait for the gradient that needs it.

Left alone, the recomputation starts with the forward pass (a graph), or is
merged with it by common subexpression elimination (a compiler), and nothing is
saved. What holds it back differs:

- eager mode: nothing is needed, Python decides the order;
- a graph: control dependencies on the upstream gradients, which Grappler
  keeps and which copy nothing;
- XLA ignores control dependencies. XLA:CPU drops optimization barriers and
  respects data dependencies, and so does the GPU; a TPU merges part of the two
  passes of a convolutional network without a barrier that ties inputs and
  upstream gradients. `benchmarks/compiled_memory.py` measures it.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfckpt import _compat

_BITS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


def ordered(
    tensors: Sequence[tf.Tensor],
    tied: Sequence[bool],
    upstream: Sequence[tf.Tensor],
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Copies of `tensors` that exist only after `upstream`, equal to the bit.

    Args:
        tensors: what the recomputation reads, of any shape and dtype.
        tied: which of them get a data dependency where XLA compiles:
            activations and the state of random generators. Weights need none.
        upstream: gradients of the segment's results.

    Returns:
        The tensors and the upstream gradients, to be used instead of them.
        Gradients pass through unchanged.
    """
    if tf.executing_eagerly():
        return [tf.identity(x) for x in tensors], list(upstream)
    if not _compat.compiled_by_xla():
        with tf.control_dependencies(upstream):
            return [tf.identity(x) for x in tensors], list(upstream)
    if not any(tied):
        tied = [True] * len(tensors)
    count = len(tensors)

    @tf.custom_gradient
    def barrier(*values):
        always = _opaque_true(values[count:])
        held = [
            tf.where(always, x, tf.zeros([], x.dtype)) if tie else x
            for x, tie in zip(values, tied, strict=False)
        ]
        held += values[count:]
        return _barrier(held), lambda *grads: grads

    values = barrier(*tensors, *upstream)
    return list(values[:count]), list(values[count:])


def together(
    gradients: Sequence[tf.Tensor | tf.IndexedSlices | None], count: int
) -> list[tf.Tensor | tf.IndexedSlices | None]:
    """Gradients of which the first `count` are there when all are.

    What comes before in the network waits for them, so that its
    recomputation begins when the activations here are done with. A graph
    would else put off the gradients of weights, which need them too.
    """
    gradients = list(gradients)
    there = [
        x.values if isinstance(x, tf.IndexedSlices) else x
        for x in gradients
        if x is not None
    ]
    if tf.executing_eagerly() or _compat.compiled_by_xla():
        return gradients
    with tf.control_dependencies(there):
        for i, x in enumerate(gradients[:count]):
            if isinstance(x, tf.Tensor):
                gradients[i] = tf.identity(x)
    return gradients


def _barrier(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """XLA's optimization barrier, which `tf.raw_ops` leaves out."""
    types = tf.compat.v1.AttrValue()
    types.list.type.extend(x.dtype.as_datatype_enum for x in tensors)
    op = tf.compat.v1.get_default_graph().create_op(
        "XlaOptimizationBarrier",
        tensors,
        [x.dtype for x in tensors],
        attrs={"T": types},
    )
    return list(op.outputs)


def _opaque_true(upstream: Sequence[tf.Tensor]) -> tf.Tensor:
    """True, but a compiler can't know it before `upstream` is computed.

    (bits | 1) != 0 of one element of each: true for NaN too, and of no
    element at all. `x + 0` with a 0 made from `upstream` would turn -0.0
    into 0.0, and XLA folds a comparison of a value with itself.
    """
    always = tf.constant(True)
    for gradient in upstream:
        if gradient.dtype.is_complex:
            gradient = tf.math.real(gradient)
        bits = tf.bitcast(
            tf.reshape(gradient, [-1])[:1], _BITS[gradient.dtype.size]
        )
        odd = tf.bitwise.bitwise_or(bits, tf.ones([], bits.dtype))
        always &= tf.reduce_all(odd != 0)
    return always
