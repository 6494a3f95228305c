"""`tfckpt.recompute`: arguments and results, gradients, refusals, order."""

import collections
import functools
import gc
import inspect
import threading
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests import equality

modes = pytest.mark.parametrize("mode", equality.MODES)
X = tf.constant(np.random.RandomState(0).randn(4, 3), tf.float32)
Y = tf.constant(np.random.RandomState(1).randn(4, 3), tf.float32)
Pair = collections.namedtuple("Pair", ["a", "b"])


def _gradients(fn, inputs, mode="eager", of=None):
    """Results of `fn` and gradients of their weighted sum."""
    equality.exact_graphs()
    none = []

    def step(*inputs):
        of_ = [x for x in inputs if x.dtype.is_floating or x.dtype.is_complex]
        of_ += list(of or ())
        with tf.GradientTape() as tape:
            tape.watch(of_)
            flat = [
                x
                for x in tf.nest.flatten(fn(*inputs), expand_composites=True)
                if isinstance(x, tf.Tensor)
            ]
            loss = tf.add_n([equality._weighted_sum(x) for x in flat])
        found = tape.gradient(loss, of_)
        none[:] = [g is None for g in found]
        return flat, [tf.convert_to_tensor(g) for g in found if g is not None]

    flat, found = equality.compiled(step, mode)(*inputs)
    found = iter(found)
    return flat, [None if n else next(found) for n in none]


def _check_wrapped(fn, inputs, mode, of=None):
    """Compares `fn(wrap, *inputs)` with and without recomputation."""
    results = [
        _gradients(functools.partial(fn, wrap), inputs, mode, of)
        for wrap in (lambda function: function, tfckpt.recompute)
    ]
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6),
        *results,
    )


def _check(fn, inputs, mode, of=None):
    plain = _gradients(fn, inputs, mode, of)
    ours = _gradients(tfckpt.recompute(fn), inputs, mode, of)
    for expected, actual in zip(
        tf.nest.flatten(plain), tf.nest.flatten(ours), strict=True
    ):
        if expected is None:
            assert actual is None
            continue
        assert expected.dtype == actual.dtype
        if mode == "xla" and not expected.dtype.is_integer:
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(actual, expected)


# ------------------------------------------------------------------ arguments


@modes
def test_keyword_tensors(mode):
    recomputed = tfckpt.recompute(lambda *, a, b: tf.tanh(a) * b)
    plain = _gradients(lambda a, b: tf.tanh(a) * b, [X, Y], mode)
    ours = _gradients(lambda a, b: recomputed(a=a, b=b), [X, Y], mode)
    tf.nest.map_structure(
        lambda p, o: np.testing.assert_allclose(o, p, rtol=1e-6), plain, ours
    )


@modes
def test_python_values_stay_python(mode):
    seen = []

    def fn(x, flag, name, count, scale, function, nothing, *, training=None):
        seen.append(
            [type(v) for v in (flag, name, count, scale, nothing, training)]
        )
        if flag and name == "tanh" and training:
            x = function(x)
        for _ in range(count):
            x = x * scale
        return x

    def call(x):
        return tfckpt.recompute(fn)(
            x, True, "tanh", 2, 0.5, tf.tanh, None, training=True
        )

    def plain(x):
        return fn(x, True, "tanh", 2, 0.5, tf.tanh, None, training=True)

    expected = _gradients(plain, [X], mode)
    actual = _gradients(call, [X], mode)
    for e, a in zip(
        tf.nest.flatten(expected), tf.nest.flatten(actual), strict=True
    ):
        np.testing.assert_allclose(a, e, rtol=1e-6)
    assert all(
        types == [bool, str, int, float, type(None), bool] for types in seen
    )
    assert len(seen) == 3  # once plainly, forward, recomputed


@modes
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: {"b": x * y, "a": [tf.tanh(x), (y,)]},
        lambda x, y: Pair(x + y, Pair(None, tf.sin(x))),
        lambda x, y: x,
        lambda x, y: (x, x, y),
        lambda x, y: (tf.tanh(x), None, 3, "text"),
        lambda x, y: (x * y, tf.argmax(x), x > 0),
        lambda x, y: tf.stop_gradient(x) * y,
        lambda x, y: tf.constant(1.0),
        lambda x, y: [],
    ],
    ids=[
        "dict",
        "namedtuple",
        "identity",
        "same_twice",
        "none_and_python",
        "integers",
        "stopped",
        "constant",
        "empty",
    ],
)
def test_results(fn, mode):
    if fn(X, Y) == []:
        assert tfckpt.recompute(fn)(X, Y) == []
        return
    _check(fn, [X, Y], mode)


@modes
def test_structures_in(mode):
    def fn(x, y):
        def inner(data, pair, *rest):
            data["x"] = tf.tanh(data.pop("x"))
            return data["x"] * pair.a + rest[0][1]

        given = {"x": x, "k": 2}
        result = tfckpt.recompute(inner)(given, Pair(y, 1), [None, y])
        assert set(given) == {"x", "k"}
        assert given["x"] is x
        return result

    def plain(x, y):
        return tf.tanh(x) * y + y

    expected = _gradients(plain, [X, Y], mode)
    actual = _gradients(fn, [X, Y], mode)
    for e, a in zip(
        tf.nest.flatten(expected), tf.nest.flatten(actual), strict=True
    ):
        np.testing.assert_allclose(a, e, rtol=1e-6)


def test_structure_changed_by_the_caller_later():
    given = {"x": X}
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = tfckpt.recompute(lambda data: data["x"] ** 2)(given)
    given["more"] = 1
    np.testing.assert_array_equal(tape.gradient(y, X), 2 * X)


@modes
def test_same_tensor_twice(mode):
    def fn(x):
        return tfckpt.recompute(lambda a, b: a * b + a)(x, x)

    _, (actual,) = _gradients(fn, [X], mode)
    _, (expected,) = _gradients(lambda x: x * x + x, [X], mode)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@modes
@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "int32",
        "int64",
        "uint8",
        "complex64",
        "float16",
        "bfloat16",
        "float64",
    ],
)
def test_dtypes(dtype, mode):
    other = tf.cast(tf.constant([[1, 0, 1]] * 4), dtype)

    def fn(x, other):
        return tf.tanh(x) * tf.math.real(tf.cast(other, "complex64")), other

    _check(fn, [X, other], mode)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_string_tensors(mode):
    words = tf.constant([["a", "b", "a"]] * 4)

    def fn(x, words):
        return tf.where(words == "a", tf.tanh(x), x), words

    _check(fn, [X, words], mode)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_ragged_and_sparse(mode):
    def fn(wrap, x):
        def inner(ragged, sparse):
            values = tf.tanh(ragged.flat_values)
            ragged = ragged.with_flat_values(values)
            return ragged, tf.sparse.reduce_sum(sparse) * values

        ragged = tf.RaggedTensor.from_row_lengths(
            tf.reshape(x, [-1]), [3, 0, 5, 4]
        )
        sparse = tf.sparse.from_dense(tf.nn.relu(x))
        return wrap(inner)(ragged, sparse)

    _check_wrapped(fn, [X], mode)


@modes
def test_negative_zero_and_nan_pass(mode):
    """What makes the recomputation wait does not touch the numbers."""
    x = tf.constant([-0.0, 0.0, np.nan, np.inf, 1.0])

    def fn(x):
        # The angle of -0.0 is -pi, of 0.0 pi, and so is the gradient.
        return x * tf.raw_ops.Atan2(y=x, x=tf.fill([5], -1.0))

    _, (plain,) = _gradients(fn, [x], mode)
    _, (ours,) = _gradients(tfckpt.recompute(fn), [x], mode)
    assert plain[0] < 0.0 < plain[1]
    np.testing.assert_allclose(ours, plain, rtol=1e-6)


def test_empty_upstream():
    """No element at all in the gradient that is waited for."""
    x = tf.zeros([0, 3])

    @tf.function(jit_compile=True)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tfckpt.recompute(tf.tanh)(x)
        return tape.gradient(y, x)

    assert step(x).shape == (0, 3)


# ------------------------------------------------------- read from outside


@modes
def test_captured_tensor(mode):
    def fn(x, y):
        return tfckpt.recompute(lambda x: tf.tanh(x * y))(x)

    _, actual = _gradients(fn, [X, Y], mode)
    _, expected = _gradients(lambda x, y: tf.tanh(x * y), [X, Y], mode)
    for e, a in zip(expected, actual, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5)


def test_captured_tensor_of_a_function_differentiated_from_outside():
    y = tf.Variable(Y)

    @tf.function
    def forward(x):
        scaled = 3.0 * y
        block = tfckpt.recompute(lambda x: tf.tanh(x * scaled))
        return block(block(x))

    with tf.GradientTape() as tape:
        tape.watch(X)
        result = forward(X)
    actual = tape.gradient(result, [X, y])
    with tf.GradientTape() as tape:
        tape.watch(X)
        result = tf.tanh(tf.tanh(X * (3.0 * y)) * (3.0 * y))
    for e, a in zip(tape.gradient(result, [X, y]), actual, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5)


@modes
def test_raw_variables(mode):
    weight, unused = tf.Variable(Y), tf.Variable(1.0)
    frozen = tf.Variable(2.0, trainable=False)

    def fn(x):
        unused.read_value()
        return tf.tanh(x * weight) * frozen.read_value() + weight

    _check(fn, [X], mode, of=[weight, unused, frozen])


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_raw_variable_in_a_loop(mode):
    weight = tf.Variable(Y)

    def fn(x):
        return (
            weight
            + tf.while_loop(
                lambda i, x: i < 3,
                lambda i, x: (i + 1, tf.tanh(x * weight)),
                (0, x),
                maximum_iterations=3,
            )[1]
        )

    _check(fn, [X], mode, of=[weight])


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_raw_variable_assigned_in_between(mode, trainable):
    weight = tf.Variable(Y, name="weight", trainable=trainable)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tfckpt.recompute(lambda x: tf.tanh(x * weight))(x)
        weight.assign(2.0 * weight)
        return tape.gradient(y, x)

    with pytest.raises(
        (tfckpt.RecomputeError, tf.errors.InvalidArgumentError),
        match="assigned between the forward|was assigned",
    ):
        equality.compiled(step, mode)(X)


@modes
def test_argument_that_is_captured_too(mode):
    """A residual by closure."""

    def fn(wrap, x):
        h = tf.sin(x)
        return wrap(lambda z: tf.tanh(z) + h)(h)

    _check_wrapped(fn, [X], mode)


@modes
def test_captured_tensor_that_is_returned(mode):
    def fn(wrap, x, y):
        return wrap(lambda x: (2.0 * x, y))(x)

    _check_wrapped(fn, [X, Y], mode)


@pytest.mark.parametrize("place", ["cond", "while", "map", "function"])
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_captured_from_an_outer_graph(place, mode):
    dense = keras.layers.Dense(3, activation="tanh")
    dense.build((None, 3))

    def fn(wrap, x):
        h = tf.sin(x)
        block = wrap(lambda q: dense(q) * h)
        if place == "cond":
            return tf.cond(x[0, 0] > -9, lambda: block(x), lambda: x)
        if place == "while":
            return tf.while_loop(
                lambda i, q: i < 3,
                lambda i, q: (i + 1, block(q)),
                (tf.constant(0), x),
                maximum_iterations=3,
            )[1]
        if place == "map":
            return tf.map_fn(
                lambda i: block(x[i : i + 1]),
                tf.range(2),
                fn_output_signature=tf.float32,
            )
        return tf.function(lambda q: block(q), autograph=False)(x)

    _check_wrapped(fn, [X], mode, of=[dense.kernel.value])


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_captured_in_the_body_of_a_loop(mode):
    """A residual by closure, of a tensor that the body makes."""
    dense = keras.layers.Dense(3, activation="tanh")
    dense.build((None, 3))

    def fn(wrap, x):
        def body(i, q):
            h = tf.sin(q)
            return i + 1, wrap(lambda z: dense(z) + h)(h)

        return tf.while_loop(
            lambda i, q: i < 3, body, (tf.constant(0), x), maximum_iterations=3
        )[1]

    _check_wrapped(fn, [X], mode, of=[dense.kernel.value])


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_inside_vectorized_map(mode):
    """It rewrites ops and would lose the gradient: run plainly."""

    def fn(x):
        block = tfckpt.recompute(lambda q: q * q)
        return tf.vectorized_map(lambda r: block(tf.sin(r)), x)

    _, (actual,) = _gradients(fn, [X], mode)
    _, (expected,) = _gradients(lambda x: tf.sin(x) ** 2, [X], mode)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@modes
def test_weight_read_by_its_value_too(mode):
    """Tied weights: once through the layer, once through `kernel.value`."""

    def make(wrap):
        dense = keras.layers.Dense(3, activation="tanh")
        dense.build((None, 3))
        kernel = dense.kernel.value
        return equality.Subject(
            wrap(lambda x: tf.matmul(dense(x), kernel)), dense.variables
        )

    found = []
    for wrap in (lambda f: f, tfckpt.recompute):
        keras.utils.set_random_seed(1)
        found += equality.train(make(wrap), [X], mode, steps=1)
    equality.compare(*found, mode="xla", where="tied")


@modes
def test_layer_called_twice_with_losses(mode):
    """The second call of an outermost layer drops the losses of the first."""

    class Regularized(keras.layers.Layer):
        def call(self, x):
            self.add_loss(tf.reduce_sum(x**2))
            return tf.tanh(x)

    def make(wrap):
        layer = Regularized()
        return equality.Subject(
            wrap(lambda x: layer(layer(x))),
            [keras.Variable(0.0)],
            lambda: layer.losses,
        )

    equality.check(make, [X], tfckpt.recompute, mode)


# ------------------------------------------------------------------ gradients


@modes
def test_none_stays_none(mode):
    """Also for what leads only to a result that nobody uses."""
    a, b = keras.Variable([1.0, 2.0, 3.0]), keras.Variable([4.0, 5.0, 6.0])

    def make(wrap):
        def fn(x, y, z):
            unused = z * b
            a.value  # noqa: B018, read but not connected
            return tf.tanh(x), y * 2.0, unused

        def call(x, y, z):
            return wrap(fn)(x, y, z)[0]

        return equality.Subject(call, [a, b])

    records = equality.check(make, [X, Y, X + 1.0], tfckpt.recompute, mode)
    assert [g is None for g in records[0].gradients] == [
        True,
        True,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_embedding_gradient_stays_sparse(mode):
    kinds = []

    def step(ids):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(tfckpt.recompute(embedding)(ids) ** 2)
        gradient = tape.gradient(y, embedding.embeddings.value)
        kinds.append(type(gradient))
        return tf.convert_to_tensor(gradient)

    embedding = keras.layers.Embedding(1000, 4)
    embedding.build((None,))
    equality.compiled(step, mode)(tf.constant([1, 5, 1]))
    assert kinds == [tf.IndexedSlices]


@modes
def test_second_order(mode):
    """A gradient penalty: with respect to inputs and to weights."""

    def make(wrap):
        dense = keras.layers.Dense(4, activation="tanh")
        dense.build((None, 3))
        block = wrap(lambda x: tf.sin(dense(x)))

        def call(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.reduce_sum(block(x) ** 2)
            return y, tape.gradient(y, x)

        return equality.Subject(call, dense.variables)

    # The sums of both orders are grouped differently: rounding.
    found = []
    for wrap in (lambda f: f, tfckpt.recompute):
        keras.utils.set_random_seed(1)
        found += equality.train(make(wrap), [X], mode, steps=1)
    equality.compare(*found, mode="xla", where="second order")


def test_persistent_tape_and_jacobian():
    def jacobians(fn):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(X)
            y, z = fn(X)
        return [
            tape.gradient(y, X),
            tape.gradient(z, X),
            tape.gradient(y, X),
            tape.jacobian(y, X),
            tape.jacobian(z, X, experimental_use_pfor=False),
        ]

    def fn(x):
        return tf.tanh(x) ** 2, tf.reduce_sum(tf.sin(x), 0)

    for e, a in zip(
        jacobians(fn), jacobians(tfckpt.recompute(fn)), strict=True
    ):
        np.testing.assert_allclose(a, e, rtol=1e-6)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_forward_mode(mode):
    dense = keras.layers.Dense(4, activation="tanh")
    dense.build((None, 3))

    def jvp(fn, primal, tangent):
        def step():
            with tf.autodiff.ForwardAccumulator(primal, tangent) as forward:
                y = fn(X)
            return forward.jvp(y)

        return equality.compiled(step, mode)()

    kernel = dense.kernel.value
    for primal in (X, kernel):
        tangent = tf.ones_like(primal)
        expected = jvp(dense, primal, tangent)
        actual = jvp(tfckpt.recompute(dense), primal, tangent)
        assert expected is not None
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_forward_over_reverse():
    def hessian_vector(fn):
        with tf.autodiff.ForwardAccumulator(X, tf.ones_like(X)) as forward:
            with tf.GradientTape() as tape:
                tape.watch(X)
                y = tf.reduce_sum(fn(X))
            gradient = tape.gradient(y, X)
        return forward.jvp(gradient)

    def fn(x):
        return tf.sin(x) ** 2

    np.testing.assert_allclose(
        hessian_vector(tfckpt.recompute(fn)), hessian_vector(fn), rtol=1e-6
    )


@modes
def test_tensor_returned_twice(mode):
    """A layer that returns its input: one tensor under two names."""

    def make(wrap):
        first, second = (keras.layers.Dense(6) for _ in range(2))
        for layer in (first, second):
            layer.build((None, 3 if layer is first else 6))

        def block(x):
            x = first(x)
            return x, x

        def call(x):
            x, z = wrap(block)(x)
            return tf.tanh(x), z * second(z) + z

        return equality.Subject(call, first.variables + second.variables)

    equality.check(make, [X], tfckpt.recompute, mode)


# ------------------------------------------------------- when it recomputes


class _Log:
    """Counts runs of a function in eager mode, or traces of it."""

    def __init__(self):
        self.entries = []

    def wrap(self, name, fn=tf.tanh):
        def logged(x):
            again = tfckpt.is_recomputing()
            self.entries.append(name + "'" * again)
            return fn(x)

        return tfckpt.recompute(logged)


def test_order_of_recomputation():
    log = _Log()
    a, b, c = (log.wrap(name) for name in "abc")
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = c(b(a(X)))
    tape.gradient(y, X)
    assert log.entries == ["a", "b", "c", "c'", "b'", "a'"]


def test_order_of_nested_recomputation():
    """A block within a block: run, rerun with its parent, rerun."""
    log = _Log()
    inner = log.wrap("i")
    outer = log.wrap("o", lambda x: inner(tf.sin(x)))
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = outer(X)
    tape.gradient(y, X)
    assert log.entries == ["o", "i", "o'", "i'", "i'"]


def test_nothing_records_nothing_runs_twice():
    log = _Log()
    fn = log.wrap("a")
    fn(X)
    with tf.GradientTape() as tape:
        fn(X)  # not watched
        with tape.stop_recording():
            fn(X)
    assert log.entries == ["a"] * 3


def test_records_with_training_false():
    log = _Log()
    dense = keras.layers.Dense(3)
    dense.build((None, 3))
    fn = log.wrap("a", lambda x: dense(x, training=False))
    with tf.GradientTape() as tape:
        y = fn(X)
    tape.gradient(y, dense.trainable_variables)
    assert log.entries == ["a", "a'"]


def test_no_recompute():
    log = _Log()
    fn = log.wrap("a")
    with tf.GradientTape() as tape:
        tape.watch(X)
        with tfckpt.no_recompute():
            y = fn(X)
    tape.gradient(y, X)
    assert log.entries == ["a"]


def test_function_traced_without_a_tape_recomputes_under_one():
    log = _Log()
    fn = tf.function(log.wrap("a"))
    fn(X)
    assert log.entries == ["a"]
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = fn(X)
    np.testing.assert_allclose(tape.gradient(y, X), 1 - tf.tanh(X) ** 2, 1e-5)
    assert log.entries == ["a", "a'"]


def test_one_trace_for_one_shape():
    log = _Log()

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = log.wrap("a")(x)
        return tape.gradient(y, x)

    for _ in range(20):
        step(X)
    assert log.entries == ["a", "a'"]


@pytest.mark.parametrize("step", ["test_step", "predict_step", "export"])
def test_no_op_is_added_for_inference(step, tmp_path):
    counts = []
    for wrap in (lambda layer: layer, tfckpt.Recompute):
        model = keras.Sequential(
            [
                keras.Input((3,)),
                wrap(keras.layers.Dense(3)),
                wrap(keras.layers.BatchNormalization()),
            ]
        )
        model.compile(loss="mse", jit_compile=False)
        if step == "export":
            path = str(tmp_path / str(len(counts)))
            model.export(path, verbose=False)
            loaded = tf.saved_model.load(path)
            graph = loaded.signatures["serving_default"].graph
        else:
            data = (X, X) if step == "test_step" else (X,)
            function = tf.function(getattr(model, step))
            graph = function.get_concrete_function(data).graph
        types = collections.Counter()
        for definition in [
            graph.as_graph_def(),
        ]:
            types.update(node.op for node in definition.node)
            for inner in definition.library.function:
                types.update(node.op for node in inner.node_def)
        counts.append(types)
    assert counts[0] == counts[1]


def test_inputs_and_results_die_without_the_garbage_collector():
    class Layer(keras.layers.Layer):
        def call(self, x):
            return tf.tanh(x)

    gc.collect()
    gc.disable()
    try:
        x = tf.random.stateless_uniform([10], [1, 2])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tfckpt.recompute(lambda x: tf.tanh(x))(x)
        tape.gradient(y, x)
        refs = [weakref.ref(x), weakref.ref(y)]
        del x, y, tape
        assert [ref() is None for ref in refs] == [True, True]
    finally:
        gc.enable()


# ------------------------------------------------------------------- refusals


GENERATOR = None


def _generator():
    global GENERATOR
    if GENERATOR is None:
        GENERATOR = tf.random.Generator.from_seed(1)
    return GENERATOR


@modes
@pytest.mark.parametrize(
    ("draw", "op"),
    [
        (lambda x: x * tf.random.uniform([3]), "RandomUniform"),
        (lambda x: x * tf.random.normal([3], seed=1), "RandomStandardNormal"),
        (lambda x: tf.nn.dropout(x, 0.5), "RandomUniform"),
        (lambda x: tf.random.shuffle(x), "RandomShuffle"),
        (lambda x: x * _generator().uniform([3]), "RngReadAndSkip|Stateful"),
        (
            lambda x: tf.cond(
                x[0, 0] > -100, lambda: x * tf.random.uniform([3]), lambda: x
            ),
            "RandomUniform",
        ),
        (
            lambda x: tf.function(lambda x: x * tf.random.uniform([3]))(x),
            "RandomUniform",
        ),
    ],
    ids=[
        "uniform",
        "seeded",
        "dropout",
        "shuffle",
        "generator",
        "branch",
        "function",
    ],
)
def test_random_state_that_is_not_keras_is_refused(draw, op, mode):
    _generator()

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tfckpt.recompute(draw)(x)
        return tape.gradient(y, x)

    with pytest.raises(tfckpt.RecomputeError, match=op):
        equality.compiled(step, mode)(X)


@modes
def test_refusal_names_the_layer(mode):
    class Noise(keras.layers.Layer):
        def call(self, x):
            return x + tf.random.normal(tf.shape(x))

    model = keras.Sequential([keras.layers.Dense(3), Noise(name="my_noise")])
    model.build((None, 3))

    def step(x):
        with tf.GradientTape():
            return tfckpt.recompute(model)(x)

    with pytest.raises(tfckpt.RecomputeError, match="my_noise"):
        equality.compiled(step, mode)(X)


@modes
def test_assigned_raw_variable_is_refused(mode):
    counter = tf.Variable(0.0)

    def fn(x):
        counter.assign_add(1.0)
        return tf.tanh(x)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            return tfckpt.recompute(fn)(x)

    with pytest.raises(tfckpt.RecomputeError, match="assigns a tf.Variable"):
        equality.compiled(step, mode)(X)


@modes
def test_state_inside_a_function_of_its_own_is_refused(mode):
    dropout = keras.layers.Dropout(0.5)
    compiled = tf.function(lambda x: dropout(x, training=True))
    compiled(X)  # traced before

    def step(x, fn):
        with tf.GradientTape() as tape:
            tape.watch(x)
            return tfckpt.recompute(fn)(x)

    for fn in (compiled, tf.function(lambda x: dropout(x, training=True))):
        with pytest.raises(tfckpt.RecomputeError, match="assigns"):
            equality.compiled(lambda x, fn=fn: step(x, fn), mode)(X)


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_weights_inside_a_function_of_its_own(mode):
    def make(wrap):
        dense = keras.layers.Dense(3, activation="tanh")
        dense.build((None, 3))
        return equality.Subject(wrap(tf.function(dense)), dense.variables)

    equality.check(make, [X], tfckpt.recompute, mode)


def test_weights_inside_a_function_differentiated_from_outside():
    dense = keras.layers.Dense(3, activation="tanh")
    dense.build((None, 3))
    inner = tf.function(dense)
    forward = tf.function(lambda x: tfckpt.recompute(inner)(x))
    gradients = []
    for fn in (inner, forward):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(fn(X) ** 2)
        gradients.append(tape.gradient(y, dense.trainable_variables))
    for plain, ours in zip(*gradients, strict=True):
        assert plain is not None
        np.testing.assert_allclose(ours, plain, rtol=1e-6)


def test_weights_inside_a_function_in_eager_mode_are_refused():
    dense = keras.layers.Dense(3)
    dense.build((None, 3))
    fn = tfckpt.recompute(tf.function(dense))
    np.testing.assert_array_equal(fn(X), dense(X))  # nothing records
    with (
        tf.GradientTape(),
        pytest.raises(
            tfckpt.RecomputeError, match="tf.function that reads a variable"
        ),
    ):
        fn(X)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_weight_inside_a_gradient_of_its_own_is_refused(mode):
    """There, TensorFlow would not see that the function has weights."""
    dense = keras.layers.Dense(3)
    dense.build((None, 3))

    @tf.custom_gradient
    def custom(x):
        def gradient(upstream, variables=None):
            return upstream, [tf.ones_like(v) for v in variables]

        return dense(x), gradient

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            return tfckpt.recompute(fn)(x)

    functions = [tf.recompute_grad(dense)]
    if mode == "eager":
        # Without tfckpt TensorFlow refuses a plain layer in a graph.
        functions.append(custom)
    for fn in functions:  # noqa: B007, `step` reads it
        with pytest.raises(tfckpt.RecomputeError, match="recompute_grad"):
            equality.compiled(step, mode)(X)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_other_shape_the_second_time_is_refused(mode):
    def my_segment(x):
        return x[: 2 - tfckpt.is_recomputing()] * 2.0

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tfckpt.recompute(my_segment)(x)
        return tape.gradient(y, x)

    with pytest.raises(tfckpt.RecomputeError, match=r"my_segment.*\[2, 3\]"):
        equality.compiled(step, mode)(X)


@modes
@pytest.mark.parametrize(
    "kind",
    ["number", "array", "branch", "counter", "attribute", "integers", "swap"],
)
def test_choices_in_python_are_refused(kind, mode):
    """Randomness that is neither Keras' nor TensorFlow's."""
    random = np.random.RandomState(0)
    runs = []

    def fn(x):
        runs.append(0)
        if kind == "number":
            return tf.tanh(x) * random.rand()
        if kind == "array":
            return tf.tanh(x) * random.rand(3).astype("float32")
        if kind == "counter":
            return tf.tanh(x) * float(len(runs))
        if kind == "attribute":
            return tf.nn.leaky_relu(x, alpha=random.rand())
        if kind == "integers":
            return tf.gather(tf.tanh(x), random.permutation(3), axis=1)
        if kind == "swap":
            a, b = (2.0, 3.0) if len(runs) % 2 else (3.0, 2.0)
            return tf.tanh(x * a) + b
        return tf.tanh(x) if len(runs) % 2 else tf.sin(x)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tfckpt.recompute(fn)(x)
        return tape.gradient(y, x)

    with pytest.raises(tfckpt.RecomputeError, match="something in Python"):
        equality.compiled(step, mode)(X)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(
    "kind", ["numpy_function", "py_function", "iterator", "timestamp", "table"]
)
def test_other_state_is_refused(kind, mode):
    iterator = iter(tf.data.Dataset.from_tensor_slices(X).repeat())
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    def fn(x):
        if kind == "numpy_function":
            value = tf.numpy_function(np.random.rand, [], tf.float64)
            return x * tf.cast(value, "float32")
        if kind == "py_function":
            return x * tf.py_function(lambda: 2.0, [], tf.float32)
        if kind == "iterator":
            return x * next(iterator)
        if kind == "timestamp":
            return x * tf.cast(tf.timestamp(), "float32")
        table.insert(tf.constant([1], "int64"), [1.0])
        return tf.tanh(x)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tfckpt.recompute(fn)(x)
        return tape.gradient(y, x)

    # In eager mode a function of numpy just runs; its numbers tell.
    with pytest.raises(
        tfckpt.RecomputeError, match="runs the op|in Python that has changed"
    ):
        equality.compiled(step, mode)(X)


def test_iterator_as_argument_is_refused():
    with tf.GradientTape() as tape, pytest.raises(TypeError, match="iterator"):
        tape.watch(X)
        tfckpt.recompute(lambda x, more: x * next(more))(X, iter([1.0]))


def test_array_that_is_filled_again():
    array = np.ones(3, "float32")
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = tfckpt.recompute(lambda x, a: x * a)(X, array)
    array[:] = 5.0
    np.testing.assert_array_equal(tape.gradient(y, X), np.ones([4, 3]))


@pytest.mark.parametrize("fn", [None, 3, "tanh"])
def test_not_callable(fn):
    with pytest.raises(TypeError, match="takes a function.*Received"):
        tfckpt.recompute(fn)


# ------------------------------------------------- loops, functions, threads


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_inside_a_while_loop(mode):
    def make(wrap):
        dense = keras.layers.Dense(3, activation="tanh")
        dense.build((None, 3))

        def call(x):
            block = wrap(dense)
            return tf.while_loop(
                lambda i, x: i < 3,
                lambda i, x: (i + 1, block(x)),
                [0, x],
                maximum_iterations=3,
            )[1]

        return equality.Subject(call, dense.variables)

    equality.check(make, [X], tfckpt.recompute, mode)


def test_loop_inside_differentiated_from_outside():
    """There the recomputation is built in another graph."""
    weight = tf.Variable(Y)

    def fn(x):
        return tf.while_loop(
            lambda i, x: i < 3,
            lambda i, x: (i + 1, tf.tanh(x * weight)),
            (0, x),
            maximum_iterations=3,
        )[1]

    gradients = []
    for function in (fn, tf.function(tfckpt.recompute(fn))):
        with tf.GradientTape() as tape:
            tape.watch(X)
            y = tf.reduce_sum(function(X) ** 2)
        gradients.append(tape.gradient(y, [X, weight]))
    for plain, ours in zip(*gradients, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


@modes
def test_loop_inside(mode):
    """Weights read in the body of a loop belong to the function."""

    def make(wrap):
        dense = keras.layers.Dense(3, activation="tanh")
        dense.build((None, 3))

        def fn(x):
            return tf.while_loop(
                lambda i, x: i < 3,
                lambda i, x: (i + 1, dense(x)),
                (tf.constant(0), x),
                maximum_iterations=3,
            )[1]

        return equality.Subject(wrap(fn), dense.variables)

    equality.check(make, [X], tfckpt.recompute, mode)


@modes
def test_inside_a_function_of_its_own(mode):
    def make(wrap):
        dense = keras.layers.Dense(3, activation="tanh")
        dropout = keras.layers.Dropout(0.5, seed=1)
        dense.build((None, 3))
        block = wrap(lambda x: dropout(dense(x), training=True))
        inner = tf.function(lambda x: block(block(x)), autograph=False)
        return equality.Subject(inner, [*dense.variables, *dropout.variables])

    equality.check(make, [X], tfckpt.recompute, mode)


@pytest.mark.parametrize("mode", ["forward", "recomputed"])
def test_autograph(mode):
    """Python conditions on tensors, as in any function of a tf.function."""

    def fn(x, k=1.0):
        if tf.reduce_sum(x) > 0:
            y = tf.tanh(x)
        else:
            y = k * tf.sin(x)
        return y

    for function in (fn, functools.partial(fn, k=2.0)):

        @tf.function
        def step(x, function=function):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tfckpt.recompute(function)(x)
            return y if mode == "forward" else tape.gradient(y, x)

        for x in (tf.abs(X), -tf.abs(X)):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = function(x)
            expected = y if mode == "forward" else tape.gradient(y, x)
            np.testing.assert_allclose(step(x), expected, rtol=1e-5)


def test_threads_do_not_disturb_each_other():
    dense = keras.layers.Dense(3, activation="tanh")
    dense.build((None, 3))
    block = tfckpt.recompute(lambda x: dense(dense(x)))
    results, errors = {}, []

    def work(i):
        try:
            for _ in range(20):
                with tf.GradientTape() as tape:
                    y = tf.reduce_sum(block(X + float(i)) ** 2)
                results[i] = tape.gradient(y, dense.kernel.value)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for i in range(4):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(dense(dense(X + float(i))) ** 2)
        np.testing.assert_array_equal(
            results[i], tape.gradient(y, dense.kernel.value)
        )


@modes
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("activation", "loss"),
    [
        (tf.nn.softmax, keras.losses.categorical_crossentropy),
        (tf.nn.sigmoid, keras.losses.binary_crossentropy),
        (tf.nn.sigmoid, keras.losses.categorical_crossentropy),
        (keras.ops.softmax, keras.losses.categorical_crossentropy),
        (lambda x: tf.nn.softmax(x, axis=0), keras.losses.binary_crossentropy),
    ],
)
def test_losses_find_the_logits_of_probabilities(
    activation, loss, nested, mode
):
    """Keras looks for the op, or an attribute, and clips other values."""

    def fn(wrap, x):
        block = wrap(lambda x: (activation(60.0 * x), x))
        if nested:
            inner = block
            block = wrap(lambda x: inner(x * 1.5))
        probabilities, _ = block(x)
        return loss(tf.eye(4, 3), probabilities), probabilities

    _check_wrapped(fn, [X], mode)

    def through(wrap, x):
        """As an argument, and handed on."""
        block = wrap(lambda p: (loss(tf.eye(4, 3), p), p, 2.0 * p))
        if nested:
            inner = block
            block = wrap(lambda p: inner(p))
        inside, probabilities, _ = block(activation(60.0 * x))
        return inside, loss(tf.eye(4, 3), probabilities)

    _check_wrapped(through, [X], mode)

    def kept(wrap, x):
        block = wrap(lambda x: tfckpt.keep(activation(tf.sin(60.0 * x))))
        return loss(tf.eye(4, 3), block(x))

    _check_wrapped(kept, [X], mode)


@modes
def test_probabilities_from_outside_keep_their_gradient(mode):
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outside = tf.nn.softmax(x)
            inside = tfckpt.recompute(lambda y: (outside, 2.0 * y))(x)
            loss = tf.reduce_sum(inside[0] ** 2) + tf.reduce_sum(inside[1])
        return tape.gradient(loss, [outside, x])

    of_outside, of_x = equality.compiled(step, mode)(X)
    np.testing.assert_allclose(of_outside, 2 * tf.nn.softmax(X), rtol=1e-6)
    assert of_x is not None


@modes
def test_given_to_a_tf_function_it_is_still_recomputed(mode):
    """A tf.function takes what a decorator wraps, where it finds that."""
    runs = []

    @tfckpt.recompute
    def block(x, scale: float = 2.0):
        runs.append(tfckpt.is_recomputing())
        return tf.sin(scale * x)

    def step(x, run):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(run(x) ** 2)
        return tape.gradient(y, x)

    equality.compiled(step, mode)(X, block)
    assert runs == [False, True]
    assert str(inspect.signature(block)) == "(x, scale: float = 2.0)"
    assert block.__name__ == "block"


@modes
@pytest.mark.parametrize("persistent", [False, True])
def test_raw_variables_that_only_a_recomputed_function_reads(persistent, mode):
    """Tapes find them by themselves, without being told to watch them."""
    weight = tf.Variable(tf.ones([3, 2]))
    fixed = tf.Variable(tf.ones([2]), trainable=False)

    def step(x, wrap, watch):
        with tf.GradientTape(
            persistent=persistent, watch_accessed_variables=watch
        ) as tape:
            y = wrap(lambda x: tf.tanh(x @ weight) * fixed)(x)
            loss = tf.reduce_sum(y**2)
        found = tape.gradient(loss, [weight, fixed])
        return [g if g is None else tf.identity(g) for g in found]

    for watch in (True, False):
        plain, ours = (
            equality.compiled(
                lambda x, wrap=wrap, watch=watch: [
                    tf.zeros([]) if g is None else g
                    for g in step(x, wrap, watch)
                ],
                mode,
            )(X)
            for wrap in (lambda fn: fn, tfckpt.recompute)
        )
        assert plain[0].shape == ([3, 2] if watch else [])
        for a, b in zip(plain, ours, strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_tf_function_is_traced_in_the_first_run_alone():
    scale = tf.constant(2.0)
    inner = tf.function(lambda x: tf.sin(x * scale) * 3.0)
    for _ in range(2):
        with tf.GradientTape() as tape:
            tape.watch(X)
            y = tfckpt.recompute(inner)(X)
        np.testing.assert_allclose(
            tape.gradient(y, X), 6 * tf.cos(2 * X), rtol=1e-6
        )


@modes
def test_probabilities_as_arguments_have_a_gradient_of_their_own(mode):
    """As in the plain graph, where their logits have another one."""

    def step(x, wrap):
        equality.exact_graphs()
        with tf.GradientTape() as tape:
            tape.watch(x)
            p = tf.nn.softmax(3.0 * x)
            used, lost = wrap(
                lambda p: (
                    p**2,
                    keras.losses.categorical_crossentropy(tf.eye(4, 3), p),
                )
            )(p)
            loss = tf.reduce_sum(used) + tf.reduce_sum(lost)
        return tape.gradient(loss, [p, x])

    plain, ours = (
        equality.compiled(lambda x, wrap=wrap: step(x, wrap), mode)(X)
        for wrap in (lambda fn: fn, tfckpt.recompute)
    )
    for a, b in zip(plain, ours, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
