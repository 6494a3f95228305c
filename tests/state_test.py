"""Keras state inside recomputed code: read as it was, assigned once."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests import equality

layers = keras.layers
modes = pytest.mark.parametrize("mode", equality.MODES)
X = np.random.RandomState(0).randn(8, 6).astype("float32")
SEQUENCE = np.random.RandomState(1).randn(4, 5, 6).astype("float32")
IMAGE = np.random.RandomState(2).randn(4, 8, 8, 3).astype("float32")


def _stack(*stack, training=True):
    """A chain of layers as one recomputed function."""

    def make(wrap):
        model = keras.Sequential([factory() for factory in stack])
        block = wrap(lambda x: model(x, training=training))
        return equality.Subject(block, _Later(model), lambda: model.losses)

    return make


class _Later:
    """The variables of a model that is built at its first call."""

    def __init__(self, model):
        self._model = model

    def __iter__(self):
        return iter(self._model.variables)


class CountingDense(layers.Layer):
    """Counts its calls in a variable, and uses the count."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4))
        self.count = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def call(self, x):
        self.count.assign_add(1.0)
        return keras.ops.tanh(x @ self.kernel) * self.count


class GlobalNoise(layers.Layer):
    """Draws from Keras' global generator."""

    def call(self, x):
        return x * keras.random.uniform(keras.ops.shape(x))


class OwnGenerator(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(7)

    def call(self, x):
        return x + x * keras.random.normal(keras.ops.shape(x), seed=self.seeds)


STACKS = {
    "dropout": (
        X,
        lambda: layers.Dense(8, activation="tanh"),
        lambda: layers.Dropout(0.5, seed=3),
        lambda: layers.Dense(4),
    ),
    "gaussian": (
        X,
        lambda: layers.Dense(8),
        lambda: layers.GaussianNoise(0.5, seed=3),
        lambda: layers.GaussianDropout(0.3, seed=4),
        lambda: layers.AlphaDropout(0.2, seed=5),
        lambda: layers.Activation("tanh"),
    ),
    "batch_normalization": (
        X,
        lambda: layers.Dense(8, activation="tanh"),
        lambda: layers.BatchNormalization(),
        lambda: layers.Dense(4),
    ),
    "spatial": (
        IMAGE,
        lambda: layers.Conv2D(6, 3, activation="relu"),
        lambda: layers.SpatialDropout2D(0.4, seed=6),
        lambda: layers.BatchNormalization(),
        lambda: layers.GlobalAveragePooling2D(),
    ),
    "gru": (
        SEQUENCE,
        lambda: layers.GRU(
            5,
            dropout=0.3,
            recurrent_dropout=0.3,
            seed=8,
            return_sequences=True,
        ),
        lambda: layers.LSTM(4, dropout=0.3, recurrent_dropout=0.2, seed=9),
    ),
    "counter": (X, CountingDense, CountingDense),
    "global_generator": (X, lambda: layers.Dense(6), GlobalNoise, GlobalNoise),
    "own_generator": (X, lambda: layers.Dense(6), OwnGenerator),
    "spectral_normalization": (
        X,
        lambda: layers.SpectralNormalization(
            layers.Dense(6, activation="tanh"), power_iterations=2
        ),
        lambda: layers.Dense(2),
    ),
    "losses": (
        X,
        lambda: layers.Dense(8, activity_regularizer="l2"),
        lambda: layers.Dense(6, kernel_regularizer="l1", activation="tanh"),
        lambda: layers.ActivityRegularization(l1=0.1),
    ),
    "embedding": (
        np.array([[1, 2, 0], [4, 4, 1]]),
        lambda: layers.Embedding(5, 6, mask_zero=True),
        lambda: layers.LSTM(4, return_sequences=True),
        lambda: layers.GRU(3),
    ),
}


@modes
@pytest.mark.parametrize("name", STACKS)
def test_equals_plain(name, mode):
    inputs, *stack = STACKS[name]
    equality.check(_stack(*stack), [inputs], tfckpt.recompute, mode, steps=3)


@modes
@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (policy, name)
        for policy in ("mixed_bfloat16", "mixed_float16", "float64", "bfloat16")
        for name in ("dropout", "spatial", "losses")
        # Keras' own regularizers fail there in versions before 3.14.
        if policy.startswith("mixed") or name != "losses"
    ],
)
def test_equals_plain_in_other_precisions(name, policy, mode):
    keras.config.set_dtype_policy(policy)
    inputs, *stack = STACKS[name]
    compute = keras.config.dtype_policy().compute_dtype
    eps = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float64": 2.0**-52}
    equality.check(
        _stack(*stack),
        [inputs.astype("float64" if policy == "float64" else "float32")],
        tfckpt.recompute,
        mode,
        eps=eps[compute],
    )


@modes
def test_inference_statistics_do_not_move(mode):
    inputs, *stack = STACKS["batch_normalization"]
    equality.check(
        _stack(*stack, training=False), [inputs], tfckpt.recompute, mode
    )


@modes
def test_nested(mode):
    """A recomputed block inside a recomputed block, each with state."""

    def make(wrap):
        inner = keras.Sequential(
            [layers.Dense(6, activation="gelu"), layers.Dropout(0.5, seed=1)]
        )
        norm = layers.BatchNormalization()
        inner_block = wrap(lambda x: inner(x, training=True))

        def outer(x):
            x = inner_block(norm(x, training=True))
            return x + inner_block(x)

        inner.build((None, 6))
        norm.build((None, 6))
        return equality.Subject(wrap(outer), inner.variables + norm.variables)

    equality.check(make, [X], tfckpt.recompute, mode, steps=3)


@modes
def test_training_of_the_enclosing_call(mode):
    """`training` comes from the call around, which is over by then."""

    def make(wrap):
        dropout = layers.Dropout(0.5, seed=2)
        dense = layers.Dense(6)

        class Block(layers.Layer):
            def call(self, x):
                return wrap(lambda x: dropout(dense(x)))(x)

        block = Block()
        block.build((None, 6))
        dense.build((None, 6))
        return equality.Subject(
            lambda x: block(x, training=True),
            dense.variables + dropout.variables,
        )

    equality.check(make, [X], tfckpt.recompute, mode)


@modes
def test_autocast_of_the_enclosing_layer(mode):
    """A function that reads the weights of a mixed-precision layer."""

    def make(wrap):
        class Block(layers.Layer):
            def build(self, shape):
                self.kernel = self.add_weight(shape=(shape[-1], 4))

            def call(self, x):
                return wrap(lambda x: keras.ops.tanh(x @ self.kernel))(x)

        block = Block(dtype="mixed_bfloat16")
        block.build((None, 6))
        return equality.Subject(block, block.variables)

    equality.check(make, [X], tfckpt.recompute, mode, eps=2.0**-7)


@modes
def test_mask_carried_by_the_argument(mode):
    def make(wrap):
        embedding = layers.Embedding(5, 6, mask_zero=True)
        first = layers.LSTM(4, return_sequences=True)
        second = layers.GRU(3)
        for layer, shape in (
            (embedding, (None, 3)),
            (first, (None, 3, 6)),
            (second, (None, 3, 4)),
        ):
            layer.build(shape)
        blocks = wrap(first), wrap(second)
        return equality.Subject(
            lambda ids: blocks[1](blocks[0](embedding(ids))),
            embedding.variables + first.variables + second.variables,
        )

    records = equality.check(
        make, [np.array([[1, 2, 0], [4, 4, 0]])], tfckpt.recompute, mode
    )
    assert not records[0].gradients[0][0].any(), "padding has a gradient"


@modes
def test_frozen_and_thawed(mode):
    def make(wrap):
        first, second = layers.Dense(6), layers.Dense(6, activation="tanh")
        first.build((None, 6))
        second.build((None, 6))
        first.trainable = False
        block = wrap(lambda x: second(first(x)))
        return equality.Subject(block, first.variables + second.variables)

    equality.check(make, [X], tfckpt.recompute, mode)


def test_assignment_after_the_forward_pass():
    """The replay uses the weights and statistics that were read."""
    gradients = []
    for wrap in (lambda f: f, tfckpt.recompute):
        keras.utils.set_random_seed(0)
        dense = layers.Dense(4, activation="tanh")
        dense.build((None, 6))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(wrap(dense)(X) ** 2)
        dense.kernel.assign(dense.kernel * 3.0)
        gradients.append(tape.gradient(loss, dense.trainable_variables))
    for plain, ours in zip(*gradients, strict=True):
        np.testing.assert_array_equal(plain, ours)


def test_state_moves_once_without_gradient():
    norm = layers.BatchNormalization(momentum=0.5)
    norm.build((None, 6))
    plain = layers.BatchNormalization(momentum=0.5)
    plain.build((None, 6))
    with tf.GradientTape():
        tfckpt.recompute(norm)(X, training=True)
    plain(X, training=True)
    np.testing.assert_array_equal(norm.moving_mean, plain.moving_mean)
    np.testing.assert_array_equal(norm.moving_variance, plain.moving_variance)


def test_failed_call_changes_nothing():
    counter = CountingDense()
    counter.build((None, 6))

    def fails(x):
        counter(x)
        raise ValueError("after the count")

    with tf.GradientTape(), pytest.raises(ValueError, match="after the"):
        tfckpt.recompute(fails)(tf.constant(X))
    assert float(counter.count.numpy()) == 0.0


@modes
def test_layer_is_built_at_the_first_call(mode):
    """Unbuilt at wrap time: the same variables in both passes."""
    inputs, *stack = STACKS["dropout"]

    def make(wrap):
        made = [factory() for factory in stack]

        def block(x):
            for layer in made:
                x = layer(x, training=True)
            return x

        if mode != "eager":
            # As in `fit`, which builds first.
            block(tf.constant(inputs))
        return equality.Subject(wrap(block), _Variables(made))

    equality.check(make, [inputs], tfckpt.recompute, mode)


class _Variables:
    def __init__(self, made):
        self._made = made

    def __iter__(self):
        return (v for layer in self._made for v in layer.variables)


def test_variable_made_in_the_recomputation_is_refused():
    def block(x):
        return layers.Dense(3)(x)

    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(tfckpt.recompute(block)(x))
    with pytest.raises(tfckpt.RecomputeError, match="must not be created"):
        tape.gradient(loss, x)


@modes
def test_stateless_call(mode):
    """Inside an outer `StatelessScope`."""
    results = []
    for wrap in (lambda f: f, tfckpt.Recompute):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                wrap(
                    keras.Sequential(
                        [
                            layers.Dense(6, activation="tanh"),
                            layers.BatchNormalization(),
                            layers.Dropout(0.5, seed=1),
                        ]
                    )
                ),
                layers.Dense(1),
            ]
        )
        model.build((None, 6))
        equality.exact_graphs()

        def step(trainable, others, x, model=model):
            with tf.GradientTape() as tape:
                tape.watch(trainable)
                y, others = model.stateless_call(
                    trainable, others, x, training=True
                )
                loss = tf.reduce_sum(y**2)
            return loss, others, tape.gradient(loss, trainable)

        step = equality.compiled(step, mode)
        before = [v.numpy() for v in model.variables]
        results.append(
            step(
                [tf.constant(v.numpy()) for v in model.trainable_variables],
                [tf.constant(v.numpy()) for v in model.non_trainable_variables],
                tf.constant(X),
            )
        )
        for value, variable in zip(before, model.variables, strict=True):
            np.testing.assert_array_equal(value, variable.numpy())
    flat = [tf.nest.flatten(result) for result in results]
    for plain, ours in zip(*flat, strict=True):
        np.testing.assert_allclose(
            plain, ours, rtol=1e-5 if mode == "xla" else 0
        )


class CallCounter(keras.layers.Layer):
    """Adds the number of calls that were made before."""

    def build(self, shape):
        self.calls = self.add_weight(name="calls", trainable=False)

    def call(self, x):
        y = x * (1.0 + self.calls)
        self.calls.assign_add(1.0)
        return y


_STATEFUL = {
    "dropout": lambda: keras.layers.Dropout(0.5, seed=3),
    "counter": CallCounter,
    "norm": keras.layers.BatchNormalization,
    "dense": lambda: keras.layers.Dense(4, activation="tanh"),
}


def _gradients(call, variables, x):
    trained = [v.value for v in variables if v.trainable]
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(call(x) ** 2)
    return tape.gradient(loss, [x, *trained])


@pytest.mark.parametrize("mode", equality.MODES)
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("name", _STATEFUL)
def test_a_layer_called_often_in_recomputation_inside_recomputation(
    name, count, mode
):
    def make(recompute):
        keras.utils.set_random_seed(7)
        layer = _STATEFUL[name]()
        dense = [keras.layers.Dense(4, activation="tanh") for _ in range(count)]
        inner = tfckpt.recompute if recompute else (lambda call: call)

        def both(dense, x):
            return layer(dense(x), training=True)

        def block(x):
            for each in dense:
                x = inner(functools.partial(both, each))(x)
            return x

        block(tf.ones((8, 4)))  # builds
        for variable in layer.variables:
            # As before it was built by calls.
            if not variable.trainable and "seed" not in variable.path:
                is_scale = "variance" in variable.path
                variable.assign(tf.fill(variable.shape, float(is_scale)))
        outer = tfckpt.recompute(block) if recompute else block
        variables = [*layer.variables, *(v for d in dense for v in d.variables)]
        return outer, variables

    x = tf.constant(np.random.RandomState(0).normal(size=(8, 4)), "float32")
    found = []
    for recompute in (False, True):
        call, variables = make(recompute)
        step = functools.partial(_gradients, call, variables)
        gradients = equality.compiled(step, mode)(x)
        found.append(
            ([g.numpy() for g in gradients], [v.numpy() for v in variables])
        )
    (plain, before), (ours, after) = found
    largest = max(np.abs(g).max() for g in plain)
    bound = 0 if mode == "eager" else 32 * 2**-23 * largest
    for a, b in zip(plain, ours, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=bound)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 if bound else 0)
