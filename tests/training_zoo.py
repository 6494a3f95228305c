"""What the tests of training in micro-batches share.

Modes of `compile`, the comparison of two trained models, and models with data
on which a window is held against the big batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfckpt

L = keras.layers
MODES = {
    "eager": {"run_eagerly": True},
    "graph": {},
    "xla": {"jit_compile": True},
}
SAMPLES = 12


def value(variable: Any) -> np.ndarray:
    """What a variable holds, on the first replica if there are several."""
    return np.asarray(tf.convert_to_tensor(variable.value))


def variables(model: keras.Model) -> dict[str, np.ndarray]:
    """Every variable of a model and of its optimizer."""
    return {
        f"{index} {each.path}": value(each)
        for index, each in enumerate(
            [*model.variables, *model.optimizer.variables]
        )
    }


def assert_equal(
    expected: keras.Model, found: keras.Model, atol: float = 0.0
) -> None:
    """Compares every variable, slots and counters among them."""
    pairs = zip(
        variables(expected).items(), variables(found).values(), strict=True
    )
    for (name, a), b in pairs:
        np.testing.assert_allclose(b, a, rtol=0, atol=atol, err_msg=name)


class Subclassed(tfckpt.AccumulatingTrainer, keras.Model):
    """What has no graph."""

    def __init__(self):
        super().__init__()
        self.first = L.Dense(5, activation="tanh")
        self.second = L.Dense(1)

    def call(self, x, training=None):
        return self.second(self.first(x))


@dataclasses.dataclass
class Case:
    """A model, how it is compiled, and its data."""

    model: Callable[[], keras.Model]
    x: Any
    y: Any
    compile: dict[str, Any] = dataclasses.field(default_factory=dict)
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)


def _random(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape)


def _dense(regularized=False, activity=False):
    options = {}
    if regularized:
        options["kernel_regularizer"] = keras.regularizers.L1L2(0.1, 0.2)
    if activity:
        options["activity_regularizer"] = keras.regularizers.L2(0.3)
    inputs = keras.Input((4,))
    x = L.Dense(5, activation="tanh", **options)(inputs)
    x = L.Dense(5, activation="gelu", **options)(x)
    return keras.Model(inputs, L.Dense(1)(x))


def _sequences(outputs=1):
    inputs = keras.Input((None,), dtype="int32")
    x = L.Embedding(9, 4, mask_zero=True)(inputs)
    x = L.Dense(5, activation="tanh")(x)
    x = [L.Dense(3, name=f"out{i}")(x) for i in range(outputs)]
    return keras.Model(inputs, x if outputs > 1 else x[0])


def _ids():
    ids = np.random.default_rng(0).integers(1, 9, (SAMPLES, 7)).astype("int32")
    for row, length in enumerate([7, 1, 2, 6, 3, 7, 5, 1, 1, 4, 2, 6]):
        ids[row, length:] = 0
    return ids


def _two_outputs():
    inputs = keras.Input((4,))
    x = L.Dense(5, activation="tanh")(inputs)
    return keras.Model(
        inputs, [L.Dense(1, name="a")(x), L.Dense(6, name="b")(x)]
    )


def _mixed_outputs():
    """One output with a mask, one for each sequence."""
    inputs = keras.Input((None,), dtype="int32")
    x = L.Embedding(9, 4, mask_zero=True)(inputs)
    x = L.Dense(5, activation="tanh")(x)
    mean = L.GlobalAveragePooling1D()(x)
    return keras.Model(
        inputs, [L.Dense(3, name="each")(x), L.Dense(1, name="whole")(mean)]
    )


class _AddsLoss(L.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return x * 2.0


def _added():
    inputs = keras.Input((4,))
    x = L.Dense(5, activation="tanh", activity_regularizer="l2")(inputs)
    return keras.Model(inputs, L.Dense(1)(_AddsLoss()(x)))


def table(rows=50):
    inputs = keras.Input((3,), dtype="int32")
    x = L.Embedding(rows, 4)(inputs)
    return keras.Model(inputs, L.Dense(1)(L.Flatten()(x)))


def _disconnected():
    inputs = keras.Input((4,))
    x = L.Dense(5, activation="tanh")(inputs)
    place = keras.ops.argmax(L.Dense(5, name="cut_off")(x), axis=-1)
    z = L.Embedding(5, 5)(place)
    return keras.Model(inputs, L.Dense(1)(x + z))


X, Y = _random(SAMPLES, 4), _random(SAMPLES, 1)
TARGETS = _random(SAMPLES, 7, 3)
WEIGHTS = np.abs(_random(SAMPLES))
CLASSES = np.random.default_rng(3).integers(0, 3, (SAMPLES, 7))


def _loss(name, **options):
    return getattr(keras.losses, name)(**options)


CASES = {
    "mean": Case(_dense, X, Y),
    "sum": Case(
        _dense,
        X,
        Y,
        {"loss": lambda: _loss("MeanSquaredError", reduction="sum")},
    ),
    "reduction mean": Case(
        _dense,
        X,
        Y,
        {"loss": lambda: _loss("Huber", reduction="mean")},
        {"sample_weight": WEIGHTS},
    ),
    "weighted mean": Case(
        _dense,
        X,
        Y,
        {
            "loss": lambda: _loss(
                "MeanSquaredError", reduction="mean_with_sample_weight"
            )
        },
        {"sample_weight": WEIGHTS},
    ),
    "no reduction": Case(
        _dense,
        X,
        Y,
        {"loss": lambda: _loss("MeanSquaredError", reduction="none")},
    ),
    "sample weights": Case(_dense, X, Y, {}, {"sample_weight": WEIGHTS}),
    "class weights": Case(
        _dense,
        X,
        (Y > 0).astype("int32"),
        {"loss": lambda: _loss("BinaryCrossentropy", from_logits=True)},
        {"class_weight": {0: 0.3, 1: 2.0}},
    ),
    "weight regularizers": Case(lambda: _dense(True), X, Y),
    "activity regularizers": Case(lambda: _dense(True, True), X, Y),
    "sum and regularizers": Case(
        lambda: _dense(True, True),
        X,
        Y,
        {"loss": lambda: _loss("MeanSquaredError", reduction="sum")},
    ),
    "masks": Case(_sequences, _ids(), TARGETS),
    "masks and weights": Case(
        _sequences, _ids(), TARGETS, {}, {"sample_weight": WEIGHTS[:, None]}
    ),
    "weighted mean of masks": Case(
        _sequences,
        _ids(),
        TARGETS,
        {
            "loss": lambda: _loss(
                "MeanSquaredError", reduction="mean_with_sample_weight"
            )
        },
        {"sample_weight": np.abs(_random(SAMPLES, 7))},
    ),
    "sum of masks": Case(
        _sequences,
        _ids(),
        TARGETS,
        {"loss": lambda: _loss("MeanSquaredError", reduction="sum")},
    ),
    "ignored classes": Case(
        _sequences,
        _ids(),
        CLASSES,
        {
            "loss": lambda: _loss(
                "SparseCategoricalCrossentropy",
                from_logits=True,
                ignore_class=1,
            )
        },
    ),
    "two outputs": Case(
        _two_outputs,
        X,
        [Y, _random(SAMPLES, 6)],
        {"loss": lambda: ["mse", "mae"], "loss_weights": [0.3, 2.0]},
    ),
    "two outputs, each with weights": Case(
        _two_outputs,
        X,
        [Y, _random(SAMPLES, 6)],
        {
            "loss": lambda: [
                _loss(name, reduction="mean_with_sample_weight")
                for name in ("MeanSquaredError", "MeanAbsoluteError")
            ],
        },
        {"sample_weight": [WEIGHTS, WEIGHTS[::-1] ** 2]},
    ),
    "two outputs, two denominators": Case(
        _mixed_outputs,
        _ids(),
        [TARGETS, Y],
        {"loss": lambda: ["mse", "mae"], "loss_weights": [0.3, 2.0]},
    ),
    "two outputs, one mask": Case(
        lambda: _sequences(2),
        _ids(),
        [TARGETS, TARGETS[::-1]],
        {"loss": lambda: {"out0": "mse", "out1": "mae"}},
    ),
    "a sum beside a mean": Case(
        _two_outputs,
        X,
        [Y, _random(SAMPLES, 6)],
        {
            "loss": lambda: [
                _loss("MeanSquaredError", reduction="sum"),
                "mae",
            ],
        },
    ),
    "added losses": Case(_added, X, Y),
    "a table": Case(
        table,
        np.random.default_rng(1).integers(0, 50, (SAMPLES, 3)).astype("int32"),
        Y,
    ),
    "no gradient": Case(_disconnected, X, Y),
    "subclassed": Case(Subclassed, X, Y),
}


class Adam(keras.optimizers.Adam):
    """Adam as it is defined, on the gradient summed by rows of a table.

    Keras' squares each occurrence of a row on its own.
    """

    def apply(self, grads, trainable_variables=None):
        grads = [None if g is None else tf.convert_to_tensor(g) for g in grads]
        super().apply(grads, trainable_variables)


def ours(model: keras.Model, plan: int | None = 2) -> keras.Model:
    """The same model, trained by us and recomputed where it can be."""
    if isinstance(model, tfckpt.AccumulatingTrainer):
        return model
    return tfckpt.SegmentedModel.from_model(model, plan=plan)
