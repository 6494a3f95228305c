"""A window of micro-batches against one big batch of the plain model."""

import warnings

import keras
import numpy as np
import pytest

from tests import training_zoo as zoo

MODES = {
    "eager": {"run_eagerly": True},
    "graph": {},
    "xla": {"jit_compile": True},
}
# Windows over calls: batches of `fit`, and what is to come of 12 samples.
WINDOWS = {
    "steps": (4, {"gradient_accumulation_steps": 3}),
    "uneven steps": (5, {"gradient_accumulation_steps": 3}),
    "flushed": (5, {"gradient_accumulation_steps": 8}),
    "parts": (12, {"micro_batches": 3}),
    "uneven parts": (12, {"micro_batches": 5}),
    "sizes": (12, {"micro_batches": [5, 3, 4]}),
}
EPOCHS = 5


def _cast(structure, dtype):
    def cast(x):
        return x.astype(dtype) if x.dtype.kind == "f" else x

    return keras.tree.map_structure(cast, structure)


def _train(case, batch, mode, dtype, convert, optimizer, **options):
    """Trains a case and returns the model and its history."""
    keras.utils.clear_session(free_memory=False)
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    keras.utils.set_random_seed(0)
    model = convert(case.model())
    arguments = {"loss": lambda: "mse"} | case.compile
    arguments["loss"] = arguments["loss"]()
    with warnings.catch_warnings():
        # Of variables without gradient, and windows longer than an epoch.
        warnings.simplefilter("ignore", UserWarning)
        model.compile(optimizer(), **arguments, **options, **MODES[mode])
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


def _compare(plain, found, atol, logs=1e-12):
    (expected, history), (model, ours) = plain, found
    assert int(model.optimizer.iterations) == EPOCHS
    pairs = zip(expected.variables, model.variables, strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(b, a, rtol=0, atol=atol, err_msg=a.path)
    pairs = zip(
        expected.optimizer.variables, model.optimizer.variables, strict=True
    )
    for a, b in pairs:
        np.testing.assert_allclose(b, a, rtol=0, atol=atol, err_msg=a.path)
    for name, values in history.items():
        if logs is not None:
            np.testing.assert_allclose(
                ours[name], values, atol=logs, err_msg=name
            )


def _adam():
    return zoo.Adam(0.01)


def _sgd():
    return keras.optimizers.SGD(0.05, momentum=0.5)


@pytest.mark.parametrize("name", zoo.CASES)
@pytest.mark.parametrize("mode", MODES)
def test_losses(name, mode):
    """In float64 to 1e-12, weights and slots; logs where they are exact."""
    case = zoo.CASES[name]
    plain = _train(case, 12, mode, "float64", lambda m: m, _adam)
    # What a window does beside its loss is tested in a graph.
    windows = ["uneven steps", "uneven parts"]
    if mode == "graph":
        windows = ["steps", "flushed", "uneven parts", "sizes"]
    for batch, options in map(WINDOWS.get, windows):
        found = _train(case, batch, mode, "float64", zoo.ours, _adam, **options)
        # A window over calls logs its micro-batches, as Keras would.
        logs = 1e-5 if "micro_batches" in options else None
        _compare(plain, found, 1e-12, logs)


@pytest.mark.parametrize("mode", MODES)
def test_float32(mode):
    case = zoo.CASES["two outputs, two denominators"]
    plain = _train(case, 12, mode, "float32", lambda m: m, _sgd)
    for batch, options in WINDOWS.values():
        found = _train(case, batch, mode, "float32", zoo.ours, _sgd, **options)
        _compare(plain, found, 1e-6, None)


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

    case = zoo.CASES["weight regularizers"]
    plain = _train(case, 12, "graph", "float64", lambda m: m, make)
    for window in ("uneven steps", "sizes"):
        batch, options = WINDOWS[window]
        found = _train(
            case, batch, "graph", "float64", zoo.ours, make, **options
        )
        # The loss scale is a float32, the counters are integers.
        _compare(plain, found, 1e-12, None)


_SCHEDULES = {
    "cosine": lambda: keras.optimizers.schedules.CosineDecay(0.1, 5),
    "warm-up": lambda: keras.optimizers.schedules.CosineDecay(
        0.0, 5, warmup_target=0.1, warmup_steps=2
    ),
    "piecewise": lambda: keras.optimizers.schedules.PiecewiseConstantDecay(
        [1, 3], [0.1, 0.01, 0.5]
    ),
}
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
    **{
        name: lambda make=make: keras.optimizers.SGD(make())
        for name, make in _SCHEDULES.items()
    },
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_what_optimizers_do_beside(name):
    case = zoo.CASES["mean"]
    make = _OPTIMIZERS[name]
    plain = _train(case, 12, "graph", "float64", lambda m: m, make)
    for batch, options in WINDOWS.values():
        found = _train(
            case, batch, "graph", "float64", zoo.ours, make, **options
        )
        # A schedule computes in float32, rounded as the compiler has it.
        atol = 1e-8 if name in _SCHEDULES else 1e-12
        _compare(plain, found, atol, None)
