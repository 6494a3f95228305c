"""A window of micro-batches against one big batch of the plain model."""

import dataclasses
import functools
import warnings

import keras
import numpy as np
import pytest

from tests import training_zoo as zoo

L = keras.layers
# Windows over calls: batches of `fit`, and what is to come of 12 samples.
WINDOWS = {
    "steps": (4, {"gradient_accumulation_steps": 3}),
    "uneven steps": (5, {"gradient_accumulation_steps": 3}),
    "flushed": (5, {"gradient_accumulation_steps": 8}),
    "parts": (12, {"micro_batches": 3}),
    "uneven parts": (12, {"micro_batches": 5}),
    "sizes": (12, {"micro_batches": [5, 3, 4]}),
}
EPOCHS = 4


def _cast(structure, dtype):
    def cast(x):
        return x.astype(dtype) if x.dtype.kind == "f" else x

    return keras.tree.map_structure(cast, structure)


def _train(case, batch, mode, policy, convert, optimizer, **options):
    """Trains a case and returns the model and its history."""
    dtype = "float64" if policy == "float64" else "float32"
    keras.utils.clear_session(free_memory=False)
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(0)
    model = convert(case.model())
    arguments = {"loss": lambda: "mse"} | case.compile
    arguments["loss"] = arguments["loss"]()
    with warnings.catch_warnings():
        # Of variables without gradient, and windows longer than an epoch.
        warnings.simplefilter("ignore", UserWarning)
        model.compile(optimizer(), **arguments, **options, **zoo.MODES[mode])
        if model.built:
            # Made within the first step of a graph, ScheduleFreeAdamW begins
            # anew in each.
            model.optimizer.build(model.trainable_variables)
        history = model.fit(
            _cast(case.x, dtype),
            _cast(case.y, dtype),
            batch_size=batch,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            **_cast(case.fit, dtype)
            if "sample_weight" in case.fit
            else case.fit,
        )
    return model, history.history


def _plain(case, optimizer, policy="float64"):
    """One big batch, in a graph: what every mode and window is held against."""
    return _train(case, 12, "graph", policy, lambda m: m, optimizer)


def _windowed(
    case, window, optimizer, mode="graph", policy="float64", convert=zoo.ours
):
    batch, options = WINDOWS[window]
    return _train(case, batch, mode, policy, convert, optimizer, **options)


def _unsegmented(model):
    return zoo.ours(model, plan=None)


def _compare(plain, found, atol, logs=None):
    (expected, history), (model, ours) = plain, found
    assert int(model.optimizer.iterations) == EPOCHS
    zoo.assert_equal(expected, model, atol)
    if logs is not None:
        for name, values in history.items():
            np.testing.assert_allclose(
                ours[name], values, rtol=0, atol=logs, err_msg=name
            )


def _adam():
    return zoo.Adam(0.01)


def _sgd():
    return keras.optimizers.SGD(0.05, momentum=0.5)


# One of each kind: one denominator, that is one of masks, two of them, a sum
# that has none, a gradient of rows, a loss that belongs to no output.
_KINDS = (
    "mean",
    "masks",
    "two outputs, two denominators",
    "a sum beside a mean",
    "a table",
    "added losses",
)


@pytest.mark.parametrize("name", zoo.CASES)
def test_losses(name):
    """In float64 to 1e-12, weights and slots; logs where they are exact."""
    case = zoo.CASES[name]
    cells = [("graph", "flushed"), ("graph", "sizes")]
    # What the loss is divided by is decided when a graph is traced; eager mode
    # and XLA run what was decided.
    if name in _KINDS:
        cells += [
            ("eager", "uneven steps"),
            ("xla", "uneven parts"),
        ]
    plain = _plain(case, _adam)
    for mode, window in cells:
        found = _windowed(case, window, _adam, mode)
        # A window over calls logs its micro-batches, as Keras would.
        within_call = "micro_batches" in WINDOWS[window][1]
        _compare(plain, found, 1e-12, 1e-5 if within_call else None)


def _small():
    """What a window or an optimizer does is shown by few layers as well."""
    inputs = keras.Input((4,))
    x = L.Dense(3, activation="tanh", kernel_regularizer="l2")(inputs)
    return keras.Model(inputs, L.Dense(1)(x))


_SMALL = zoo.Case(_small, zoo.X, zoo.Y)
_WEIGHTED = dataclasses.replace(zoo.CASES["weighted mean"], model=_small)


@functools.cache
def _plain_in_float32():
    return _plain(_WEIGHTED, _sgd, "float32")


@pytest.mark.parametrize("mode", zoo.MODES)
def test_float32(mode):
    """Every window in every mode; each micro-batch has a weight of its own."""
    for window in WINDOWS:
        found = _windowed(
            _WEIGHTED, window, _sgd, mode, "float32", _unsegmented
        )
        _compare(_plain_in_float32(), found, 1e-6)


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_float16"])
def test_half_precision(policy):
    """To the rounding of the compute dtype; the loss scale to the bit."""

    def optimizer():
        sgd = keras.optimizers.SGD(0.1)
        if policy == "bfloat16":
            return sgd
        return keras.optimizers.LossScaleOptimizer(
            sgd, initial_scale=256.0, dynamic_growth_steps=2
        )

    case = zoo.CASES["masks"]
    plain, _ = _plain(case, optimizer, policy)
    # Half a unit in the last place, some times in each update.
    atol = {"bfloat16": 2.0**-5, "mixed_float16": 2.0**-10}[policy]
    for window in ("flushed", "sizes"):
        model, _ = _windowed(case, window, optimizer, policy=policy)
        assert int(model.optimizer.iterations) == EPOCHS
        for a, b in zip(plain.weights, model.weights, strict=True):
            assert a.dtype == b.dtype
            a, b = (zoo.value(v).astype("float32") for v in (a, b))
            most = atol * np.abs(a).max()
            np.testing.assert_allclose(b, a, rtol=0, atol=most)
        if policy == "mixed_float16":
            scales = [
                float(zoo.value(m.optimizer.dynamic_scale))
                for m in (plain, model)
            ]
            # Doubled after updates 2 and 4.
            assert scales == [1024.0, 1024.0]


_EVERY = sorted(
    name
    for name, kind in vars(keras.optimizers).items()
    if isinstance(kind, type)
    and issubclass(kind, keras.optimizers.Optimizer)
    and kind is not keras.optimizers.Optimizer
)


@pytest.mark.parametrize("name", _EVERY)
def test_every_optimizer(name):
    def make():
        kind = getattr(keras.optimizers, name)
        if kind is keras.optimizers.LossScaleOptimizer:
            return kind(_adam(), initial_scale=8.0, dynamic_growth_steps=3)
        if name == "MultiOptimizer":
            parts = {True: _adam(), False: _sgd()}
            return kind(lambda variable: parts["bias" in variable.path])
        return kind(0.01)

    found = _windowed(_SMALL, "flushed", make, convert=_unsegmented)
    # The loss scale is a float32, the counters are integers.
    _compare(_plain(_SMALL, make), found, 1e-12)


_OPTIMIZERS = {
    "clipnorm": lambda: keras.optimizers.Adam(0.01, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.Adam(
        0.01, global_clipnorm=0.05
    ),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.02),
    "weight_decay": lambda: keras.optimizers.SGD(0.1, weight_decay=0.1),
    "use_ema": lambda: keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.5
    ),
    "ema_overwrite": lambda: keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "loss_scale_factor": lambda: keras.optimizers.SGD(
        0.1, loss_scale_factor=64.0, clipvalue=0.02
    ),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.CosineDecay(
            0.0, 5, warmup_target=0.1, warmup_steps=2
        )
    ),
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_what_optimizers_do_beside(name):
    make = _OPTIMIZERS[name]
    plain = _plain(_SMALL, make)
    for window in ("flushed", "uneven parts"):
        found = _windowed(_SMALL, window, make, convert=_unsegmented)
        # A schedule computes in float32, rounded as the compiler has it.
        _compare(plain, found, 1e-8 if name == "schedule" else 1e-12)


def test_a_large_table():
    """Right, and its gradient takes what `bytes` says."""
    rows = 100_000
    case = zoo.Case(
        lambda: zoo.table(rows),
        np.random.default_rng(1).integers(0, rows, (12, 3)).astype("int32"),
        zoo.Y,
    )
    model, _ = found = _windowed(case, "flushed", _sgd, policy="float32")
    _compare(_plain(case, _sgd, "float32"), found, 1e-6)
    # A float32 for each weight, the sum of weights, the micro-batches.
    assert model.gradient_accumulator.bytes == 4 * model.count_params() + 4 + 8
