"""Batch normalization in windows, against one big batch and by hand."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests import equality

L = keras.layers
MODES = {
    "eager": {"run_eagerly": True},
    "graph": {},
    "xla": {"jit_compile": True},
}
SIZES = [5, 3, 4]
X = np.random.default_rng(0).normal(3.0, 2.0, size=(12, 4, 2))
Y = X[:, 0, :1].copy()
WINDOWS = {
    "parts": (12, {"micro_batches": 3}),
    "sizes": (12, {"micro_batches": SIZES}),
    "steps": (5, {"gradient_accumulation_steps": 3}),
}


def first(**options):
    """A batch normalization of what both see alike: the model's input."""
    inputs = keras.Input(X.shape[1:])
    x = L.BatchNormalization(momentum=0.7, name="bn", **options)(inputs)
    x = L.Dense(3, activation="tanh")(x)
    return keras.Model(inputs, L.Dense(1)(L.Flatten()(x)))


def fit(model, batch, mode="graph", x=X, epochs=3, **options):
    with model.distribute_strategy.scope():
        model.compile("sgd", "mse", **MODES[mode], **options)
    model.fit(x, Y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0)
    return model


def make(function, dtype="float64", segmented=True, strategy=None, **options):
    keras.utils.clear_session(free_memory=False)
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    keras.utils.set_random_seed(0)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = function(**options)
        if not segmented:
            return model
        return tfckpt.SegmentedModel.from_model(model, plan=2)


def moving(model, name="bn"):
    layer = model.get_layer(name)
    return np.asarray([layer.moving_mean, layer.moving_variance])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", WINDOWS)
def test_moving_statistics_are_those_of_the_big_batch(mode, window):
    """Once an update; where the inputs are those of the big batch."""
    plain = fit(make(first, segmented=False), 12, mode)
    batch, options = WINDOWS[window]
    model = fit(
        make(first), batch, mode, **options, batch_normalization="micro"
    )
    np.testing.assert_allclose(moving(model), moving(plain), rtol=1e-12)


def masked(**options):
    inputs = keras.Input((None,), dtype="int32")
    x = L.Embedding(9, 4, mask_zero=True)(inputs)
    x = L.BatchNormalization(momentum=0.7, name="bn", **options)(x)
    x = L.Dense(3, activation="tanh")(x)
    return keras.Model(inputs, L.Dense(1)(L.GlobalAveragePooling1D()(x)))


def deep(**options):
    """Nested, shared, under a wrapper of ours, in a layer of one's own."""

    class Holder(L.Layer):
        def __init__(self):
            super().__init__(name="holder")
            self.held = [L.BatchNormalization(name="held", **options)]

        def build(self, shape):
            self.held[0].build(shape)

        def call(self, x, training=None):
            return self.held[0](x, training=training)

    inner = keras.Input((4, 3))
    x = L.BatchNormalization(axis=1, scale=False, name="channel", **options)(
        inner
    )
    x = L.Dense(3, activation="tanh")(x)
    inner = keras.Model(inner, x, name="inner")
    inputs = keras.Input(X.shape[1:])
    x = L.Dense(3, activation="tanh")(inputs)
    shared = L.BatchNormalization(center=False, name="shared", **options)
    x = shared(x) + 2 * shared(inner(x))
    x = Holder()(x)
    x = tfckpt.Recompute(L.BatchNormalization(name="again", **options))(x)
    return keras.Model(inputs, L.Dense(1)(L.Flatten()(x)))


IDS = np.random.default_rng(0).integers(1, 9, (12, 7)).astype("int32")
for row, length in enumerate([7, 1, 2, 6, 3, 7, 5, 1, 1, 4, 2, 6]):
    IDS[row, length:] = 0


def equal_state(model, expected, atol):
    pairs = zip(model.variables, expected.variables, strict=True)
    for found, wanted in pairs:
        np.testing.assert_allclose(
            tf.convert_to_tensor(found.value),
            tf.convert_to_tensor(wanted.value),
            rtol=0,
            atol=atol,
            err_msg=wanted.path,
        )


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(
    ("function", "x"), [(first, X), (masked, IDS), (deep, X)]
)
@pytest.mark.parametrize(
    "options", [{"gradient_accumulation_steps": 2}, {"micro_batches": 2}]
)
def test_synchronized_replicas_are_one(strategy, function, x, options, mode):
    """As one device that sees the micro-batches of all replicas."""
    batch = 6 if "micro_batches" not in options else 12
    # Each replica splits its own part of the batch.
    order = [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11] if batch == 12 else range(12)
    one = make(function)
    one.compile(
        "sgd",
        "mse",
        gradient_accumulation_steps=2,
        batch_normalization="micro",
        **MODES[mode],
    )
    one.fit(
        x[list(order)],
        Y[list(order)],
        batch_size=6,
        epochs=3,
        shuffle=False,
        verbose=0,
    )
    two = make(function, strategy=strategy)
    fit(two, batch, mode, x=x, **options, batch_normalization="sync")
    equal_state(two, one, 1e-11)


def test_one_micro_batch_is_keras_own():
    """To the last bit, also where the mean is large."""
    equality.exact_graphs()
    x = X + 1000.0
    plain = fit(make(deep, "float32", segmented=False), 12, x=x, epochs=1)
    model = fit(
        make(deep, "float32"),
        12,
        x=x,
        epochs=1,
        gradient_accumulation_steps=1,
        batch_normalization="micro",
    )
    pairs = zip(
        model.non_trainable_variables,
        plain.non_trainable_variables,
        strict=True,
    )
    for found, expected in pairs:
        np.testing.assert_array_equal(found, expected, expected.path)


def test_masked_statistics_are_those_of_the_big_batch():
    plain = fit(make(masked, segmented=False), 12, x=IDS, epochs=1)
    model = fit(
        make(masked),
        12,
        x=IDS,
        epochs=1,
        micro_batches=SIZES,
        batch_normalization="micro",
    )
    np.testing.assert_allclose(moving(model), moving(plain), rtol=1e-12)


def test_a_large_mean_leaves_the_variance():
    """In float32 the square of 3000 has no digits left for it.

    The mean of a micro-batch is rounded to 1e-4.
    """
    x = (X + 3000.0).astype("float32")
    model = fit(
        make(first, "float32"),
        12,
        x=x,
        epochs=1,
        micro_batches=SIZES,
        batch_normalization="micro",
    )
    expected = 0.7 + 0.3 * np.var(np.float64(x), (0, 1))
    np.testing.assert_allclose(moving(model)[1], expected, rtol=1e-4)


def test_variances_are_pooled_not_averaged():
    """Within .25, between 1: 1.25, where an average of variances gives .25."""
    x = np.asarray([0.5, 1.5, 2.5, 3.5]).reshape(4, 1, 1)
    keras.utils.set_random_seed(0)
    inputs = keras.Input((1, 1))
    y = L.BatchNormalization(momentum=0.0, name="bn")(inputs)
    model = tfckpt.SegmentedModel(inputs, L.Flatten()(y), plan=None)
    model.compile("sgd", "mse", micro_batches=2, batch_normalization="micro")
    model.fit(x, x[:, 0], batch_size=4, verbose=0)
    np.testing.assert_allclose(moving(model), [[2.0], [1.25]])


def test_replicas_speak_together(strategy):
    """Not synchronized: the statistics that are saved are of both."""
    plain = fit(make(first, segmented=False), 12, epochs=1)
    model = make(first, strategy=strategy)
    fit(
        model,
        5,
        epochs=1,
        gradient_accumulation_steps=3,
        batch_normalization="micro",
    )
    layer = model.get_layer("bn")
    for variable, expected in zip(
        (layer.moving_mean, layer.moving_variance), moving(plain), strict=True
    ):
        for each in strategy.experimental_local_results(variable.value):
            np.testing.assert_allclose(each, expected, rtol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_skipped_micro_batches_move_nothing(mode):
    bad = X.copy()
    bad[4:8] = np.nan
    good = np.concatenate([X[:4], X[8:]])
    plain = make(first, segmented=False)
    plain.compile("sgd", "mse", **MODES[mode])
    plain.fit(good, Y[:8], batch_size=8, verbose=0, shuffle=False)
    model = make(first)
    model.compile(
        "sgd",
        "mse",
        micro_batches=3,
        skip_nonfinite=True,
        batch_normalization="micro",
        **MODES[mode],
    )
    with pytest.warns(UserWarning, match="left out"):
        model.fit(bad, Y, batch_size=12, verbose=0, shuffle=False)
    np.testing.assert_allclose(moving(model), moving(plain), rtol=1e-12)


@pytest.mark.parametrize("kind", ["weights", "checkpoint"])
def test_an_open_window_is_saved(tmp_path, kind):
    def new():
        model = make(deep)
        model.compile(
            "sgd",
            "mse",
            gradient_accumulation_steps=3,
            batch_normalization="micro",
        )
        return model

    model, again = new(), new()
    for start in (0, 4):
        model.train_on_batch(X[start:][:4], Y[start:][:4])
    if kind == "weights":
        model.save_weights(tmp_path / "a.weights.h5")
        again.load_weights(tmp_path / "a.weights.h5")
    else:
        path = tf.train.Checkpoint(model=model).write(str(tmp_path / "a"))
        tf.train.Checkpoint(model=again).read(path)
    for each in (model, again):
        each.train_on_batch(X[8:], Y[8:])
        assert int(each.optimizer.iterations) == 1
    equal_state(again, model, 0)


def test_frozen_layers_stay():
    def new(**options):
        model = make(deep, **options)
        model.get_layer("shared").trainable = False
        return model

    model = new()
    before = moving(model, "shared"), moving(model, "again")
    fit(model, 12, micro_batches=3, batch_normalization="micro")
    np.testing.assert_array_equal(moving(model, "shared"), before[0])
    assert not np.array_equal(moving(model, "again"), before[1])


def test_plain_training_is_keras_own_again():
    """After a `compile` without a window, and in models that share layers."""
    plain = fit(make(deep, segmented=False), 12)
    model = make(deep)
    model.compile("sgd", "mse", micro_batches=3, batch_normalization="micro")
    fit(model, 12)
    equal_state(model, plain, 1e-12)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_low_precision(dtype):
    keras.config.set_dtype_policy(dtype)
    inputs = keras.Input(X.shape[1:])
    x = L.BatchNormalization(momentum=0.0, name="bn")(inputs)
    x = L.Dense(1, dtype="float32")(L.Flatten()(x))
    model = tfckpt.SegmentedModel(inputs, x, plan=2)
    fit(model, 12, micro_batches=SIZES, batch_normalization="micro")
    low = np.asarray(tf.cast(tf.cast(X, dtype[6:]), tf.float64))
    expected = [np.mean(low, (0, 1)), np.var(low, (0, 1))]
    np.testing.assert_allclose(moving(model), expected, rtol=1e-5)


def test_the_default_says_what_differs():
    model = make(first)
    with pytest.warns(UserWarning, match="differ from those of the big batch"):
        model.compile("sgd", "mse", micro_batches=3)
    # Nothing differs, or somebody said so.
    model.compile("sgd", "mse", gradient_accumulation_steps=1)
    model.compile("sgd", "mse", micro_batches=3, batch_normalization="micro")
    model.get_layer("bn").trainable = False
    model.compile("sgd", "mse", micro_batches=3)


def _renormalized():
    return first(renorm=True)


class _OwnCall(L.BatchNormalization):
    def call(self, inputs, training=None, mask=None):
        return super().call(inputs, training=training, mask=mask)


def _own():
    inputs = keras.Input(X.shape[1:])
    return keras.Model(inputs, L.Dense(1)(_OwnCall(name="bn")(inputs)))


@pytest.mark.parametrize("function", [_renormalized, _own])
def test_what_cannot_be_followed_is_refused(function):
    model = make(function)
    with pytest.raises(ValueError, match="layer 'bn' of type.*Use 'micro'"):
        model.compile("sgd", "mse", micro_batches=3, batch_normalization="sync")
    with pytest.warns(UserWarning, match=r"\(bn: each micro-batch moves"):
        model.compile("sgd", "mse", micro_batches=3)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch_normalization": "global", "micro_batches": 2}, "one of micro"),
        ({"batch_normalization": "sync"}, "about windows.*Received neither"),
    ],
)
def test_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        make(first).compile("sgd", "mse", **options)


def test_the_option_travels():
    model = make(first)
    model.compile("sgd", "mse", micro_batches=2, batch_normalization="sync")
    assert model.get_compile_config()["batch_normalization"] == "sync"
    again = tfckpt.SegmentedModel.from_model(model, plan=None)
    assert again.window_options()["batch_normalization"] == "sync"


def test_a_layer_frozen_in_an_open_window_stays():
    model = make(first)
    model.compile(
        "sgd",
        "mse",
        gradient_accumulation_steps=2,
        batch_normalization="micro",
        run_eagerly=True,
    )
    before = moving(model)
    model.train_on_batch(X[:4], Y[:4])
    model.get_layer("bn").trainable = False
    for start in (4, 8):
        model.train_on_batch(X[start:][:4], Y[start:][:4])
    assert int(model.optimizer.iterations) == 1
    np.testing.assert_array_equal(moving(model), before)
