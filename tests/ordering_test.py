"""What makes a recomputation wait, as the compilers of devices take it."""

import importlib.util

import keras
import pytest
import tensorflow as tf

import tfckpt
from tfckpt import memory

needs_compilers = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the [compile] extra is not installed",
)


def _two_streams(wrap, width=1024, segments=6, layers=3):
    """A step with two streams of activations through each segment."""
    weights = [
        keras.Variable(tf.eye(width), name=f"w{i}")
        for i in range(2 * segments * layers)
    ]

    def segment(start):
        def run(h, k):
            for i in range(start, start + 2 * layers, 2):
                h, k = (
                    tf.tanh(tf.matmul(h, weights[i])),
                    tf.tanh(tf.matmul(k, weights[i + 1])),
                )
            return h, k

        last = start + 2 * layers == len(weights)
        return run if last else wrap(run)

    parts = [segment(2 * layers * i) for i in range(segments)]

    def step(x):
        with tf.GradientTape() as tape:
            h, k = x, 2.0 * x
            for part in parts:
                h, k = part(h, k)
            loss = tf.reduce_mean(h**2) + tf.reduce_mean(3.0 * k)
        return tape.gradient(loss, [w.value for w in weights])

    return step, tf.TensorSpec([4 * width, width])


@needs_compilers
@pytest.mark.compile
@pytest.mark.parametrize(
    ("target", "bar"), [("cpu", 0.6), ("v5e", 0.6), ("a100-40gb", 0.6)]
)
def test_two_streams(target, bar):
    """A data dependency alone is not enough on a GPU, a barrier on a CPU."""
    taken = []
    for wrap in (lambda fn: fn, tfckpt.recompute):
        step, x = _two_streams(wrap)
        found = memory.compiled_memory(step, x, target=target)
        taken.append(found.temporaries)
    assert taken[1] / taken[0] < bar, taken


@pytest.mark.parametrize("jit_compile", [True, False])
def test_the_barrier_is_placed_for_xla_alone(jit_compile):
    """Nothing else has a kernel for it."""

    @tf.function(jit_compile=jit_compile)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tfckpt.recompute(tf.tanh)(x)
        return tape.gradient(y, x)

    graph = step.get_concrete_function(tf.TensorSpec([2])).graph
    types = [op.type for op in graph.get_operations()]
    assert ("XlaOptimizationBarrier" in types) == jit_compile


def test_what_comes_before_waits_for_all_gradients_of_a_segment():
    """Else a graph puts off weights' gradients, and their activations stay."""
    weight = tf.Variable(tf.ones([3, 3]))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tfckpt.recompute(lambda x, w: tf.tanh(x @ w))(x, weight.value())
            loss = tf.reduce_sum(y**2)
        return tape.gradient(loss, [x, weight])

    graph = step.get_concrete_function(tf.TensorSpec([2, 3])).graph
    of_x, of_weight = (x.op for x in graph.outputs)

    def awaited(op, found):
        for before in (*op.control_inputs, *(x.op for x in op.inputs)):
            if before not in found:
                found.add(before)
                awaited(before, found)
        return found

    while of_weight.type == "Identity":
        of_weight = of_weight.inputs[0].op
    assert of_weight.type == "MatMul"
    assert of_weight in awaited(of_x, set())
