"""NaN and inf in a micro-batch: left out, or what a plain model makes of it."""

import contextlib
import functools

import keras
import numpy as np
import pytest

import tfckpt
from tests import training_zoo as zoo

L = keras.layers
GOOD = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")


def _with_bad(place):
    """Four micro-batches of three samples, of which one is NaN."""
    x = np.insert(GOOD, 3 * place, np.full((3, 3), np.nan), axis=0)
    return x[: len(GOOD) + 3]


def _model(mode="graph", **options):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    x = L.Dense(4, activation="tanh")(inputs)
    x = L.BatchNormalization()(x)
    model = tfckpt.SegmentedModel(inputs, L.Dense(1)(x), plan=2)
    optimizer = keras.optimizers.Adam(0.01)
    if keras.config.dtype_policy().name == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(
            optimizer, initial_scale=64.0
        )
    if options:
        options["batch_normalization"] = "micro"
    model.compile(
        optimizer,
        "mse",
        metrics=["mae"],
        **zoo.MODES[mode],
        **options,
    )
    return model


def _fit(model, x, batch=3, **options):
    y = np.nan_to_num(x[:, :1])
    return model.fit(
        x, y, batch_size=batch, shuffle=False, verbose=0, **options
    ).history


def _compare(clean, found, mode):
    (expected, history), (model, ours) = clean, found
    assert model.nonfinite_micro_batches == 2
    zoo.assert_equal(expected, model, 1e-7 if mode == "xla" else 0.0)
    for name, values in history.items():
        if name == "nonfinite_micro_batches":
            assert (values, ours[name]) == ([0, 0], [1, 1])
        else:
            np.testing.assert_allclose(ours[name], values, rtol=1e-6)


@functools.cache
def _clean(mode):
    """What is to come of a run in which a micro-batch is skipped."""
    model = _model(mode, **_SKIPS)
    return model, _fit(model, GOOD, epochs=2)


_SKIPS = {"gradient_accumulation_steps": 3, "skip_nonfinite": True}


@pytest.mark.filterwarnings("ignore:Epoch")
@pytest.mark.parametrize(
    ("mode", "place"),
    [
        *[("graph", place) for place in (0, 1, 3, 4)],
        *[(mode, place) for mode in ("eager", "xla") for place in (0, 4)],
    ],
)
def test_skipped_is_not_seen(mode, place):
    """Weights, slots, moving statistics and metrics."""
    model = _model(mode, **_SKIPS)
    found = model, _fit(model, _with_bad(place), epochs=2)
    _compare(_clean(mode), found, mode)


@pytest.mark.filterwarnings("ignore:Epoch")
@pytest.mark.parametrize("mode", zoo.MODES)
def test_skipped_within_a_call(mode):
    options = {"skip_nonfinite": True}
    clean = _model(mode, micro_batches=4, **options)
    model = _model(mode, micro_batches=5, **options)
    _compare(
        (clean, _fit(clean, GOOD, 12, epochs=2)),
        (model, _fit(model, _with_bad(2), 15, epochs=2)),
        mode,
    )


def test_it_is_reported():
    model = _model(gradient_accumulation_steps=3, skip_nonfinite=True)
    with pytest.warns(UserWarning, match="Epoch 1: 1 micro-batches had"):
        _fit(model, _with_bad(1))


@pytest.mark.parametrize("mode", zoo.MODES)
def test_by_default_it_is_what_a_plain_model_makes(mode):
    """NaN; and the accumulator is clean afterwards."""
    model = _model(mode, gradient_accumulation_steps=3)
    before = model.get_weights()
    _fit(model, _with_bad(0)[:9])
    assert all(np.isnan(np.asarray(v)).all() for v in model.trainable_variables)
    model.set_weights(before)
    for variable in model.optimizer.variables[2:]:
        variable.assign(np.zeros(variable.shape))
    model.optimizer.iterations.assign(0)
    plain = _model(mode, gradient_accumulation_steps=3)
    for each in (plain, model):
        _fit(each, GOOD)
    zoo.assert_equal(plain, model)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_loss_scaling(mode, skip):
    """The scale halves once for a window with an inf in it."""
    keras.config.set_dtype_policy("mixed_float16")
    model = _model(mode, gradient_accumulation_steps=3, skip_nonfinite=skip)
    model.make_train_function()
    scales, updates = [], []

    class Note(tfckpt.Callback):
        def on_train_batch_end(self, batch, logs=None):
            scales.append(float(model.optimizer.dynamic_scale))
            updates.append(int(model.optimizer.iterations))

    x = GOOD.copy()
    x[3:6] = 6e4
    y = x[:, :1].copy()
    y[3:6] = 6e4
    said = (
        pytest.warns(UserWarning, match="Epoch 1: 1 micro")
        if skip
        else contextlib.nullcontext()
    )
    with np.errstate(over="ignore"), said:
        model.fit(
            x, y, batch_size=3, shuffle=False, verbose=0, callbacks=[Note()]
        )
    whole, half = 64.0, 32.0
    if skip:
        # Three good ones make the window; none is left for a flush.
        assert scales == [whole, whole, whole, half]
        assert updates == [0, 0, 0, 1]
    else:
        # The window is dropped; the fourth is flushed.
        assert scales == [whole, whole, half, half]
        assert int(model.optimizer.iterations) == 1
    assert all(
        np.isfinite(np.asarray(v)).all() for v in model.trainable_variables
    )


@pytest.mark.filterwarnings("ignore:Epoch")
def test_a_subclassed_model_is_built_first():
    class Own(tfckpt.AccumulatingTrainer, keras.Model):
        def __init__(self):
            super().__init__()
            self.norm = L.BatchNormalization()
            self.dense = L.Dense(1)

        def call(self, x, training=None):
            return self.dense(self.norm(x, training=training))

    found = []
    for x in (GOOD, _with_bad(0)):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        model = Own()
        model.compile(
            "sgd",
            "mse",
            gradient_accumulation_steps=2,
            skip_nonfinite=True,
            batch_normalization="micro",
        )
        _fit(model, x)
        found.append(model)
    zoo.assert_equal(*found)
