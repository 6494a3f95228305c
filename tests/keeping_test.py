"""Kept tensors: the same numbers, fewer products, and what can't be kept."""

import collections
import contextlib
import re

import equality
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tfckpt import plan as plan_lib
from tfckpt.recomputation import keeping

# Which ops ran is what the executor itself says; nothing public hands it out.
from tensorflow.python.eager import context  # isort: skip

_DEPTH = 4


def ops_run(function, *args):
    """Counts the ops of a `tf.function` as it is run, by type."""
    context.enable_graph_collection()
    try:
        function(*args)
        metadata = context.export_run_metadata()
    finally:
        context.disable_graph_collection()
    # With oneDNN the ops have other names: _MklMatMul, _MklNativeConv2D,
    # _MklNativeFusedConv2D.
    return collections.Counter(
        re.sub(r"^_(Mkl)?(Native)?(Fused)?", "", node.op)
        # Those before are of what else ran.
        for node in metadata.partition_graphs[-1].node
    )


def _weights(depth=_DEPTH):
    random = np.random.RandomState(0)
    return [
        tuple(
            tf.Variable(random.normal(0, 0.3, shape).astype("float32"))
            for shape in ((6, 24), (24, 6))
        )
        for _ in range(depth)
    ]


def _gradients(weights, *, keep, recompute=True):
    def block(x, first, second):
        hidden = x @ first
        if keep:
            hidden = tfckpt.keep(hidden)
        return x + keras.activations.gelu(hidden) @ second

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for first, second in weights:
                run = tfckpt.recompute(block) if recompute else block
                y = run(y, first.value(), second.value())
            loss = tf.reduce_sum(y**2)
        return tape.gradient(loss, [x, *(w for pair in weights for w in pair)])

    return step


def _x():
    return tf.constant(
        np.random.RandomState(1).normal(size=(8, 6)).astype("float32")
    )


@pytest.mark.parametrize("mode", equality.MODES)
def test_gradients_are_those_of_the_plain_function(mode):
    weights, x = _weights(), _x()

    def run(step):
        if mode == "eager":
            return step(x)
        return tf.function(step, jit_compile=mode == "xla")(x)

    plain = run(_gradients(weights, keep=False, recompute=False))
    kept = run(_gradients(weights, keep=True))
    largest = max(np.abs(each).max() for each in plain)
    bound = 0 if mode == "eager" else 32 * 2**-23 * largest
    for a, b in zip(plain, kept, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=bound)


def test_a_graph_runs_as_many_products_as_without_recomputation():
    weights, x = _weights(), _x()
    counts = [
        ops_run(tf.function(_gradients(weights, **options)), x)["MatMul"]
        for options in (
            {"keep": False, "recompute": False},
            {"keep": False},
            {"keep": True},
        )
    ]
    # The second product of a block is dead code in any case.
    assert counts == [6 * _DEPTH, 7 * _DEPTH, 6 * _DEPTH]


def test_a_compiled_step_makes_as_many_products_as_without():
    weights, x = _weights(), _x()
    counts = []
    for options in (
        {"keep": False, "recompute": False},
        {"keep": False},
        {"keep": True},
    ):
        compiled = tf.function(_gradients(weights, **options), jit_compile=True)
        text = compiled.experimental_get_compiler_ir(x)(stage="optimized_hlo")
        counts.append(text.count(" dot(") + text.count("__onednn$matmul"))
    assert counts[0] == counts[2] < counts[1]


class _Counted(keras.layers.Layer):
    """A product, a normalization, an activation; and dropout."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.product = keras.layers.Dense(units)
        self.norm = keras.layers.BatchNormalization()
        self.drop = keras.layers.Dropout(0.3, seed=3)

    def call(self, x):
        y = tfckpt.keep(self.product(x))
        return self.drop(keras.ops.gelu(self.norm(y)))


@pytest.mark.parametrize("mode", equality.MODES)
@pytest.mark.parametrize("nested", [False, True])
def test_in_a_layer_and_in_recomputation_inside_recomputation(mode, nested):
    def make(recompute):
        keras.utils.set_random_seed(5)
        inputs = keras.Input((6,))
        x = inputs
        for _ in range(3):
            layer = _Counted(8)
            x = (tfckpt.Recompute(layer) if recompute else layer)(x)
        outputs = keras.layers.Dense(2)(x)
        if recompute and nested:
            return tfckpt.SegmentedModel(inputs, outputs, plan=2)
        return keras.Model(inputs, outputs)

    data = np.random.RandomState(2).normal(size=(16, 6)).astype("float32")
    results = []
    for recompute in (False, True):
        model = make(recompute)
        model.compile(
            keras.optimizers.SGD(0.1),
            "mse",
            run_eagerly=mode == "eager",
            jit_compile=mode == "xla",
        )
        model.fit(data, data[:, :2], batch_size=8, epochs=2, verbose=0)
        results.append([v.numpy() for v in model.variables])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)


def _model(depth=3):
    inputs = x = keras.Input((8, 8, 3))
    for i in range(depth):
        x = keras.layers.Conv2D(4, 3, padding="same", name=f"conv{i}")(x)
        x = keras.layers.BatchNormalization(name=f"norm{i}")(x)
        x = keras.layers.Activation("relu", name=f"act{i}")(x)
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, keras.layers.Dense(2, name="out")(x))


def _plan(model, kept):
    calls = [layer.name for layer in model.layers[1:]]
    return plan_lib.Plan(
        (
            plan_lib.Segment(calls[:6], kept=kept),
            plan_lib.Segment(calls[6:], recomputed=False),
        )
    )


def _step(model):
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    return step


def test_kept_calls_of_a_plan_are_not_run_again():
    model = _model()
    x = tf.constant(np.random.RandomState(0).rand(4, 8, 8, 3), "float32")
    found = {}
    for name, kept in {
        "none": (),
        "convolutions": ("conv0", "conv1"),
        "both": ("conv0", "norm0", "conv1", "norm1"),
    }.items():
        ours = tfckpt.SegmentedModel.from_model(model, plan=_plan(model, kept))
        found[name] = ops_run(tf.function(_step(ours)), x)
    plain = ops_run(tf.function(_step(model)), x)

    assert plain["Conv2D"] == 3
    assert found["none"]["Conv2D"] == plain["Conv2D"] + 2
    assert found["convolutions"]["Conv2D"] == plain["Conv2D"]
    assert found["none"]["Mean"] > plain["Mean"]
    assert found["both"]["Mean"] == plain["Mean"]


@pytest.mark.parametrize("mode", equality.MODES)
def test_kept_calls_of_a_plan_give_the_same_numbers(mode):
    x = np.random.RandomState(0).rand(16, 8, 8, 3).astype("float32")
    y = np.random.RandomState(1).rand(16, 2).astype("float32")
    results = []
    # A call without products keeps nothing.
    for kept in (None, ("conv0", "norm0", "act0", "conv1")):
        keras.utils.set_random_seed(4)
        model = _model()
        if kept:
            model = tfckpt.SegmentedModel.from_model(
                model, plan=_plan(model, kept)
            )
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            "mse",
            run_eagerly=mode == "eager",
            jit_compile=mode == "xla",
        )
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
        results.append([v.numpy() for v in model.variables])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)


def test_a_kept_tensor_carries_its_mask():
    def block(x):
        x = keras.layers.Masking(0.0)(x)
        return keras.layers.GlobalAveragePooling1D()(tfckpt.keep(x))

    x = tf.constant([[[1.0], [3.0], [0.0]]])

    @tf.function
    def gradient(x, run):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = run(x)
        return y, tape.gradient(y, x)

    for a, b in zip(
        gradient(x, block), gradient(x, tfckpt.recompute(block)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_outside_of_recomputation_the_tensor_itself_comes_back():
    x = tf.ones([2])
    assert tfckpt.keep(x) is x
    symbolic = keras.Input((3,))
    assert tfckpt.keep(symbolic) is symbolic
    found = []
    tf.function(lambda y: found.append(tfckpt.keep(y) is y))(x)
    assert found == [True]


def test_in_a_loop_nothing_is_kept_and_the_gradient_is_right():
    def block(x, keep):
        hold = tfckpt.keep if keep else (lambda y: y)
        return tf.while_loop(
            lambda i, _: i < 3,
            lambda i, y: (i + 1, tf.sin(hold(y * 1.5))),
            (0, x),
        )[1]

    @tf.function
    def gradient(x, run):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(run(x))
        return tape.gradient(y, x)

    x = tf.constant([0.1, 0.2])
    plain = gradient(x, lambda x: block(x, False))
    np.testing.assert_array_equal(
        plain, gradient(x, tfckpt.recompute(lambda x: block(x, True)))
    )


def test_inside_a_loop_a_recomputed_function_keeps():
    w = tf.Variable([[0.5, 0.1], [0.2, 0.4]])

    @tf.function
    def gradient(x, run):
        with tf.GradientTape() as tape:
            tape.watch(x)
            weights = w.value()
            y = tf.while_loop(
                lambda i, _: i < 3,
                lambda i, y: (i + 1, run(y, weights)),
                (0, x),
            )[1]
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, x)

    def block(x, w):
        return tf.sin(tfckpt.keep(x @ w)) + x

    x = tf.constant([[0.3, 0.6]])
    plain = gradient(x, lambda x, w: tf.sin(x @ w) + x)
    np.testing.assert_allclose(plain, gradient(x, tfckpt.recompute(block)))


def test_second_order():
    w = tf.Variable([[0.5, 0.1], [0.2, 0.4]])
    x = tf.constant([[0.3, 0.6]])

    def block(x, w):
        return tf.sin(tfckpt.keep(x @ w)) @ w

    @tf.function
    def penalty(run):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.reduce_sum(run(x, w.value()))
            gradient = tape.gradient(y, x)
            value = tf.reduce_sum(gradient**2)
        return outer.gradient(value, w)

    np.testing.assert_allclose(
        penalty(block), penalty(tfckpt.recompute(block)), rtol=1e-6
    )


def test_a_jacobian_of_an_eager_forward_pass_keeps_nothing():
    x = tf.constant([[0.3, 0.6]])
    block = tfckpt.recompute(lambda x: tf.sin(tfckpt.keep(x * 2.0)))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = block(x)
    np.testing.assert_allclose(
        tape.jacobian(y, x)[0, :, 0, :], np.diag(2 * np.cos(2 * x[0]))
    )


def _refused_in_the_gradient(block):
    """What two runs of a function keep may not differ."""
    calls = []

    @tfckpt.recompute
    def recomputed(x):
        calls.append(1)
        return block(x, len(calls) > 1)

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = recomputed(x)
        return tape.gradient(y, x)

    with pytest.raises(tfckpt.RecomputeError, match="keeps other tensors"):
        gradient(tf.ones([2, 3]))


def test_keeping_more_the_second_time_is_refused():
    def block(x, again):
        y = tf.identity(tf.sin(x))
        return tf.cos(tfckpt.keep(y) if again else y)

    _refused_in_the_gradient(block)


def test_keeping_less_the_second_time_is_refused():
    def block(x, again):
        y = tf.identity(tf.sin(x))
        return tf.cos(y if again else tfckpt.keep(y))

    _refused_in_the_gradient(block)


@pytest.mark.parametrize(
    "other",
    [lambda y: tf.transpose(y), lambda y: tf.cast(y, tf.float16)],
    ids=["shape", "dtype"],
)
def test_keeping_something_else_the_second_time_is_refused(other):
    def block(x, again):
        kept = tfckpt.keep(other(tf.sin(x)) if again else tf.sin(x))
        return tf.cast(tf.reshape(kept, [2, 3]), tf.float32)

    _refused_in_the_gradient(block)


def _products_run(block, *args):
    """Matrix products of a graph step, recomputed and plain."""
    found = []
    for run in (tfckpt.recompute(block), block):

        @tf.function
        def gradient(x, *weights, run=run):
            with tf.GradientTape() as tape:
                tape.watch([x, *weights])
                y = tf.reduce_sum(run(x, *weights) ** 2)
            return tape.gradient(y, [x, *weights])

        found.append((ops_run(gradient, *args)["MatMul"], gradient(*args)))
    (ours, gradients), (plain, expected) = found
    for a, b in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    return ours - plain


_SQUARE = tf.constant(
    np.random.RandomState(3).normal(0, 0.4, (4, 4)).astype("float32")
)


def test_only_products_of_the_kept_call_are_kept():
    def block(x, first, second):
        with keeping.products():
            x = tf.sin(x @ first)
        return tf.sin(tf.sin(x @ second) @ first)

    assert _products_run(block, _SQUARE, _SQUARE + 1, _SQUARE - 1) == 2


@pytest.mark.parametrize("inside", [True, False])
def test_a_recomputed_function_in_a_kept_call_keeps_its_products(inside):
    """Its gradient is taken where the call is over, and the other way."""

    def block(x, weight):
        return tf.sin(tf.sin(x @ weight) @ weight)

    recomputed = tfckpt.recompute(block)

    @tf.function
    def gradient(x, weight, run):
        with tf.GradientTape() as tape:
            tape.watch([x, weight])
            with keeping.products() if inside else contextlib.nullcontext():
                y = run(x, weight)
            loss = tf.reduce_sum(y**2)
        with contextlib.nullcontext() if inside else keeping.products():
            return tape.gradient(loss, [x, weight])

    # Four backward, and two forward once or twice.
    count = ops_run(gradient, _SQUARE, _SQUARE + 1, recomputed)["MatMul"]
    assert count == (6 if inside else 8)
    for a, b in zip(
        gradient(_SQUARE, _SQUARE + 1, recomputed),
        gradient(_SQUARE, _SQUARE + 1, block),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("mode", ["graph", "xla"])
@pytest.mark.parametrize("named", [True, False])
def test_sizes_are_not_kept(named, mode):
    """A compiler has to know them beforehand."""

    def block(x):
        with keeping.products():
            size = tf.reduce_sum(tf.shape(x) - [0, 2])
        if named:
            size = tfckpt.keep(size)
        return tf.sin(tf.reshape(x, [size, 2]))

    def gradient(x, run):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(run(x))
        return tape.gradient(y, x)

    def compiled(run):
        return equality.compiled(lambda x: gradient(x, run), mode)

    x = _SQUARE[:, :2]
    np.testing.assert_allclose(
        compiled(block)(x), compiled(tfckpt.recompute(block))(x), rtol=1e-6
    )


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_many_integers_are_kept(mode):
    def block(x):
        places = tf.argsort(x)
        return tf.gather(tf.sin(x), tfckpt.keep(places), batch_dims=1)

    def gradient(x, run):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(run(x) * tf.range(3.0))
        return tape.gradient(y, x)

    x = _SQUARE[:, :3]
    plain, ours = (
        equality.compiled(lambda x, run=run: gradient(x, run), mode)(x)
        for run in (block, tfckpt.recompute(block))
    )
    np.testing.assert_allclose(plain, ours, rtol=1e-6)
    if mode == "graph":
        run = tf.function(lambda x: gradient(x, tfckpt.recompute(block)))
        assert ops_run(run, x)["TopKV2"] == 1


def test_what_is_kept_is_named_by_ops_that_exist():
    for name in keeping.PRODUCTS | keeping.REDUCTIONS:
        with tf.Graph().as_default() as graph:
            known = graph.op_def_for_type(name)
        assert known.name == name
