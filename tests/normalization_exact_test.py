"""Batch normalization by the statistics of the whole window."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests import training_zoo as zoo

L = keras.layers
SIZES = [5, 3, 4]
X = np.random.default_rng(0).normal(1.0, 2.0, size=(12, 6, 6, 3))
LABELS = np.random.default_rng(1).integers(0, 3, 12)
TARGETS = np.random.default_rng(2).normal(size=(12, 2))


def _conv(x, filters=4, size=3):
    return L.Conv2D(filters, size, padding="same", use_bias=False)(x)


def residual():
    """Identity skips, a projection, and the end of a ResNet."""
    inputs = keras.Input(X.shape[1:])
    x = L.ReLU()(L.BatchNormalization()(_conv(inputs)))
    for project in (False, True, False):
        y = L.ReLU()(L.BatchNormalization()(_conv(x)))
        y = L.BatchNormalization()(_conv(y))
        if project:
            x = L.BatchNormalization()(_conv(x, size=1))
        x = L.ReLU()(L.Add()([x, y]))
    return keras.Model(inputs, L.Dense(3)(L.GlobalAveragePooling2D()(x)))


def odd():
    """What normalizes the input, by other axes, twice, frozen, nested."""
    inner = keras.Input((6, 6, 4))
    x = L.BatchNormalization(axis=1, scale=False)(inner)
    y = L.BatchNormalization(center=False)(inner)
    inner = keras.Model(inner, _conv(x + y), name="inner")
    inputs = keras.Input(X.shape[1:])
    x = _conv(L.BatchNormalization(momentum=0.5)(inputs))
    shared = L.BatchNormalization(epsilon=0.1)
    frozen = L.BatchNormalization(trainable=False)
    x = frozen(_conv(shared(inner(x)))) + shared(x)
    x = tfckpt.Recompute(L.BatchNormalization())(x)
    return keras.Model(inputs, L.Dense(3)(L.Flatten()(x)))


def plain_dense():
    """No batch normalization: one stage."""
    inputs = keras.Input(X.shape[1:])
    return keras.Model(inputs, L.Dense(3)(L.Flatten()(inputs)))


def two_outputs():
    """One from the first stage; a mean beside a sum, and a regularizer."""
    inputs = keras.Input(X.shape[1:])
    x = _conv(inputs)
    first = L.Dense(2, kernel_regularizer="l2", name="first")(L.Flatten()(x))
    x = L.Flatten()(L.BatchNormalization()(x))
    return keras.Model(inputs, [first, L.Dense(2, name="second")(x)])


def make(function, dtype="float64", strategy=None, segmented=True):
    keras.utils.clear_session(free_memory=False)
    keras.config.set_floatx("float64" if dtype == "float64" else "float32")
    keras.config.set_dtype_policy(dtype)
    keras.utils.set_random_seed(0)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = function()
        if not segmented:
            return model
        return tfckpt.SegmentedModel.from_model(model, plan=2)


def fit(model, optimizer=None, mode="graph", y=LABELS, epochs=5, **options):
    if y is LABELS:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    else:
        loss = [
            keras.losses.MeanSquaredError(reduction="sum"),
            keras.losses.MeanAbsoluteError(),
        ]
    fitted = {
        name: options.pop(name)
        for name in ("sample_weight",)
        if name in options
    }
    with model.distribute_strategy.scope():
        model.compile(
            optimizer or keras.optimizers.Adam(0.01),
            loss,
            metrics=["accuracy"] if y is LABELS else None,
            **zoo.MODES[mode],
            **options,
        )
    return model.fit(
        X,
        y,
        batch_size=12,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        **fitted,
    ).history


EXACT = {"micro_batches": SIZES, "batch_normalization": "exact"}


@pytest.mark.parametrize("mode", zoo.MODES)
@pytest.mark.parametrize(
    ("function", "y", "weights"),
    [
        (residual, LABELS, {}),
        (odd, LABELS, {"sample_weight": np.arange(12.0)}),
        (plain_dense, LABELS, {}),
        (two_outputs, [TARGETS, TARGETS[::-1]], {}),
    ],
)
def test_equals_the_big_batch(function, y, weights, mode):
    """Weights, slots, moving statistics, loss and metrics; float64."""
    plain = make(function, segmented=False)
    expected = fit(plain, mode=mode, y=y, **weights)
    model = make(function)
    found = fit(model, mode=mode, y=y, **weights, **EXACT)
    zoo.assert_equal(plain, model, 1e-12)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("parts", [1, 5, 12])
def test_gradients(parts):
    """A step of 1 along the gradient."""
    plain, model = make(residual, segmented=False), make(residual)
    for each, options in (
        (plain, {}),
        (model, EXACT | {"micro_batches": parts}),
    ):
        fit(each, keras.optimizers.SGD(1.0), epochs=1, **options)
    zoo.assert_equal(plain, model, 1e-13)


def test_float32():
    plain = make(residual, "float32", segmented=False)
    model = make(residual, "float32")
    fit(plain, keras.optimizers.SGD(0.05))
    fit(model, keras.optimizers.SGD(0.05), **EXACT)
    zoo.assert_equal(plain, model, 1e-5)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_low_precision(dtype):
    """To the rounding of the dtype, of which a few are added up."""
    plain, model = make(residual, dtype, segmented=False), make(residual, dtype)
    for each, options in ((plain, {}), (model, EXACT)):
        fit(each, keras.optimizers.SGD(0.1), epochs=1, **options)
    rounding = {"mixed_bfloat16": 2**-8, "mixed_float16": 2**-11}[dtype]
    zoo.assert_equal(plain, model, rounding)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("function", [residual, odd])
def test_replicas(strategy, function, mode):
    plain = make(function, segmented=False)
    fit(plain, mode=mode)
    model = make(function, strategy=strategy)
    options = EXACT | {"micro_batches": 3}
    fit(model, mode=mode, **options)
    zoo.assert_equal(plain, model, 1e-12)


def dropping():
    """Two layers that draw, one after another, in two stages."""
    inputs = keras.Input(X.shape[1:])
    x = L.BatchNormalization()(_conv(inputs))
    x = L.Dropout(0.4, seed=1)(x)
    x = L.BatchNormalization()(_conv(L.ReLU()(x)))
    x = L.Dropout(0.4, seed=2)(L.Flatten()(x))
    return keras.Model(inputs, L.Dense(3)(x))


@pytest.mark.parametrize("mode", zoo.MODES)
def test_random_layers_against_finite_differences(mode):
    """Of the loss of the same draws; each generator draws once for each."""

    def step(weights):
        model = make(dropping)
        for variable, value in zip(
            model.trainable_variables, weights, strict=True
        ):
            variable.assign(value)
        fit(model, keras.optimizers.SGD(1.0), mode, epochs=1, **EXACT)
        after = [np.asarray(each) for each in model.trainable_variables]
        loss = model.get_metrics_result()["loss"]
        seeds = [
            np.asarray(each.seed_generator.state)
            for each in model.layers
            if isinstance(each, L.Dropout)
        ]
        return float(loss), after, seeds

    start = [np.asarray(v) for v in make(dropping).trainable_variables]
    _, after, seeds = step(start)
    gradient = [a - b for a, b in zip(start, after, strict=True)]
    random = np.random.default_rng(0)
    along = [random.normal(size=x.shape) for x in start]
    near = [
        step([x + t * d for x, d in zip(start, along, strict=True)])[0]
        for t in (1e-5, -1e-5)
    ]
    slope = sum(np.sum(g * d) for g, d in zip(gradient, along, strict=True))
    assert slope == pytest.approx((near[0] - near[1]) / 2e-5, rel=1e-5)
    for state in seeds:
        # Keras counts calls in the second number.
        assert state[1] == len(SIZES)


class _RawCounts(L.Layer):
    def __init__(self):
        super().__init__(name="raw")
        self.count = tf.Variable(0)

    def call(self, x):
        self.count.assign_add(1)
        return x


class _Folds(L.Layer):
    """Puts the samples' rows along the first axis."""

    def call(self, x):
        return tf.reshape(x, [-1, 1, x.shape[-1]])


class _Counts(L.Layer):
    def build(self, shape):
        self.count = self.add_weight(shape=(), trainable=False, name="count")

    def call(self, x):
        self.count.assign_add(1.0)
        return x


class _Holder(L.Layer):
    def __init__(self):
        super().__init__(name="holder")
        self.held = L.BatchNormalization(name="held")

    def build(self, shape):
        self.held.build(shape)

    def call(self, x, training=None):
        return self.held(x, training=training)


def _between(layer):
    inputs = keras.Input((4, 3))
    x = L.BatchNormalization(name="bn")(L.Dense(3)(layer(inputs)))
    return keras.Model(inputs, L.Dense(1)(L.GlobalAveragePooling1D()(x)))


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        (lambda: _Holder(), "'holder/held', which is called inside"),
        (lambda: _Counts(name="counts"), "'counts/count' is assigned"),
        (
            lambda: L.Dense(3, activity_regularizer="l2", name="penalized"),
            "'penalized' adds a loss",
        ),
        (lambda: L.Masking(), "has a mask|with a mask"),
        (lambda: L.Lambda(lambda x: x + tf.random.normal([3])), "draws random"),
        (lambda: _RawCounts(), "assigns a tf.Variable"),
        (lambda: L.BatchNormalization(renorm=True), "renorm=True"),
    ],
)
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_what_cannot_be_followed_is_refused(layer, match, mode):
    """By name, and nothing has changed."""
    keras.utils.set_random_seed(0)
    model = tfckpt.SegmentedModel.from_model(_between(layer()), plan=2)
    before = [np.asarray(each) for each in model.variables]
    x = np.ones((6, 4, 3), "float32")
    kinds = (ValueError, tfckpt.RecomputeError)
    with pytest.raises(kinds, match=match):
        model.compile(
            "sgd",
            "mse",
            micro_batches=2,
            batch_normalization="exact",
            **zoo.MODES[mode],
        )
        model.fit(x, x[:, 0, :1], batch_size=6, verbose=0)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value, variable.path)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"gradient_accumulation_steps": 2}, "whole window.*micro_batches in"),
        ({"micro_batches": 2, "skip_nonfinite": True}, "none can be left out"),
    ],
)
def test_options_that_do_not_go_together(options, match):
    with pytest.raises(ValueError, match=match):
        make(residual).compile(
            "sgd", "mse", batch_normalization="exact", **options
        )


def test_a_subclass_is_refused():
    model = zoo.Subclassed()
    with pytest.raises(ValueError, match="needs a tfckpt.SegmentedModel"):
        model.compile(
            "sgd", "mse", micro_batches=2, batch_normalization="exact"
        )


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_rows_that_are_no_samples_are_refused(mode):
    inputs = keras.Input((4, 3))
    x = L.BatchNormalization()(L.Dense(3, name="rows")(_Folds()(inputs)))
    model = tfckpt.SegmentedModel(inputs, L.Dense(1)(L.Flatten()(x)))
    model.compile(
        "sgd",
        None,
        micro_batches=2,
        batch_normalization="exact",
        **zoo.MODES[mode],
    )
    x = np.ones((6, 4, 3), "float32")
    kinds = (ValueError, tf.errors.InvalidArgumentError)
    with pytest.raises(kinds, match="'rows' has not one row for each sample"):
        model.fit(x, batch_size=6, verbose=0)


class _StochasticAdd(L.Add):
    """A sum that leaves out its second part now and then."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, inputs):
        a, b = inputs
        return a + b * keras.random.uniform((), seed=self.seeds)


def test_a_subclass_that_draws_draws_once():
    """Its sum is read in two stages."""
    plain, model = (
        make(_stochastic, segmented=segmented) for segmented in (False, True)
    )
    fit(plain)
    fit(model, **EXACT | {"micro_batches": 1})
    zoo.assert_equal(plain, model, 1e-12)


def _stochastic():
    inputs = keras.Input(X.shape[1:])
    x = _conv(inputs)
    y = L.BatchNormalization()(_conv(x))
    x = _StochasticAdd()([x, y])
    y = L.BatchNormalization()(_conv(x))
    x = L.Flatten()(L.Add()([x, y]))
    return keras.Model(inputs, L.Dense(3)(x))


@pytest.mark.parametrize("dtype", ["float64", "uint8"])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_inputs_of_other_dtypes(dtype, policy):
    """Normalized at once, as the layer converts them."""

    def build():
        inputs = keras.Input(X.shape[1:], dtype=dtype)
        x = L.BatchNormalization()(inputs)
        return keras.Model(inputs, L.Dense(3)(L.Flatten()(x)))

    plain, model = (
        make(build, policy, segmented=segmented) for segmented in (False, True)
    )
    for each, options in ((plain, {}), (model, EXACT)):
        fit(each, keras.optimizers.SGD(0.01), epochs=1, **options)
    rounding = 1e-5 if policy == "float32" else 2**-7
    zoo.assert_equal(plain, model, rounding)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_an_empty_replica(strategy, mode):
    """One sample for two replicas, after four."""
    data = tf.data.Dataset.from_tensor_slices((X[:5], LABELS[:5])).batch(4)
    plain = make(residual, segmented=False)
    model = make(residual, strategy=strategy)
    for each, options in (
        (plain, {}),
        (model, EXACT | {"micro_batches": 2}),
    ):
        with each.distribute_strategy.scope():
            each.compile(
                "sgd",
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                **zoo.MODES[mode],
                **options,
            )
        each.fit(data, epochs=2, shuffle=False, verbose=0)
    zoo.assert_equal(plain, model, 1e-12)


@pytest.mark.sweep
def test_resnet50():
    """Gradients, relative to the largest.

    In float64: at these weights float32 is 1e-2 off in the plain model too.
    """
    random = np.random.default_rng(0)
    x, y = random.normal(size=(16, 64, 64, 3)), random.integers(0, 10, 16)

    def build():
        return keras.applications.ResNet50(
            weights=None, input_shape=(64, 64, 3), classes=10
        )

    found = []
    for options in ({}, EXACT | {"micro_batches": 4}):
        model = make(build, segmented=bool(options))
        before = [np.asarray(v) for v in model.trainable_variables]
        model.compile(
            keras.optimizers.SGD(1.0),
            "sparse_categorical_crossentropy",
            **options,
        )
        model.train_on_batch(x, y)
        after = [np.asarray(v) for v in model.trainable_variables]
        gradients = [a - b for a, b in zip(before, after, strict=True)]
        found.append((gradients, model.non_trainable_variables))
    (gradients, moving), (ours, ours_moving) = found
    largest = max(np.max(np.abs(each)) for each in gradients)
    for a, b in zip(gradients, ours, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-10 * largest)
    for a, b in zip(moving, ours_moving, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-12, err_msg=a.path)


def test_a_window_that_failed_leaves_nothing():
    """What its losses are divided by, too."""
    plain, model = make(residual, segmented=False), make(residual)
    fit(plain, epochs=2)
    fit(model, epochs=1, **EXACT)
    for name in model._progress.divisors.variables_by_name:
        # As after an interrupt in the middle of a step.
        model._progress.divisors.add(name, 7.0)
    model.reset()
    model.fit(X, LABELS, batch_size=12, shuffle=False, verbose=0)
    zoo.assert_equal(plain, model, 1e-12)


def _complex():
    inputs = keras.Input((4, 2))
    x = L.Lambda(lambda x: tf.complex(x, x))(L.Dense(3, name="parts")(inputs))
    y = L.BatchNormalization()(L.Dense(3)(inputs))
    y = L.Lambda(lambda z: tf.math.real(z[0]) * z[1])([x, y])
    return keras.Model(inputs, L.Dense(1)(L.Flatten()(y)))


def _converting():
    """A nested model for float32, given bfloat16."""
    inner = keras.Input((3,), dtype="float32")
    inner = keras.Model(
        inner, L.BatchNormalization(name="bn")(inner), name="in"
    )
    inputs = keras.Input((2,))
    return keras.Model(inputs, L.Dense(1)(inner(L.Dense(3)(inputs))))


class _OwnLoss(tfckpt.SegmentedModel):
    def compute_loss(self, x=None, y=None, y_pred=None, **kwargs):
        return tf.reduce_mean(tf.square(y - y_pred))

    def loss_denominator(self, x, y, y_pred, sample_weight):
        return 1


def _own_loss():
    inputs = keras.Input((2,))
    return _OwnLoss(inputs, L.BatchNormalization()(L.Dense(1)(inputs)))


@pytest.mark.parametrize(
    ("function", "dtype", "match"),
    [
        (_complex, "float32", "is complex, which"),
        (_converting, "mixed_bfloat16", "'in/bn', the first of a nested"),
        (_own_loss, "float32", "computes the loss twice"),
    ],
)
def test_what_would_be_lost_is_refused(function, dtype, match):
    keras.config.set_dtype_policy(dtype)
    model = function()
    if not isinstance(model, tfckpt.SegmentedModel):
        model = tfckpt.SegmentedModel.from_model(model, plan=None)
    x = np.ones((6, *model.input.shape[1:]), "float32")
    with pytest.raises(ValueError, match=match):
        model.compile(
            "sgd", "mse", micro_batches=2, batch_normalization="exact"
        )
        model.fit(x, np.ones((6, 1), "float32"), batch_size=6, verbose=0)
