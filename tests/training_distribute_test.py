"""Two replicas against one device with the big batch; and what they send."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests import training_zoo as zoo

L = keras.layers
X = np.random.default_rng(0).normal(size=(23, 4)).astype("float32")
Y = X[:, :1].copy()
MODES = {"eager": {"run_eagerly": True}, "graph": {}}
WINDOWS = {
    # 23 samples in global batches of 6: the last has 5, 3 and 2 of them.
    "steps": (6, {"gradient_accumulation_steps": 4}),
    # The last has 1: one replica has none.
    "an empty replica": (11, {"gradient_accumulation_steps": 3}),
    "flushed": (6, {"gradient_accumulation_steps": 7}),
    "parts": (23, {"micro_batches": 3}),
    "sizes": (23, {"micro_batches": [2, 3, 7]}),
}


def _model(loss="mse", synchronized=False):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    x = L.Dense(5, activation="tanh", kernel_regularizer="l2")(inputs)
    if synchronized:
        x = L.BatchNormalization(synchronized=True)(x)
    model = keras.Model(inputs, L.Dense(1)(x))
    return tfckpt.SegmentedModel.from_model(model, plan=2)


def _optimizer():
    return keras.optimizers.Adam(0.01, global_clipnorm=0.1, weight_decay=0.1)


def _fit(model, batch, x=X, y=Y, **options):
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)
    return model.fit(data, shuffle=False, verbose=0, **options).history


def _optimized(reduction):
    """Optimizer, loss and metrics, as `compile` takes them."""
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    return {"optimizer": _optimizer(), "loss": loss, "metrics": ["mae"]}


@functools.cache
def _one(reduction):
    """What the big batch on one device makes, and its history."""
    model = _model()
    model.compile(**_optimized(reduction))
    return model, _fit(model, 23, epochs=4)


@pytest.mark.filterwarnings("ignore:gradient_accumulation_steps=7 is more")
@pytest.mark.parametrize(
    ("reduction", "mode", "window"),
    [
        *[("sum_over_batch_size", "graph", window) for window in WINDOWS],
        # What is not divided goes by its own way, and so does eager mode.
        *[
            (reduction, mode, window)
            for reduction, mode in (
                ("sum", "graph"),
                ("sum_over_batch_size", "eager"),
            )
            for window in ("an empty replica", "sizes")
        ],
    ],
)
def test_equals_one_device_with_the_big_batch(
    strategy, reduction, mode, window
):
    batch, options = WINDOWS[window]
    with strategy.scope():
        two = _model()
        two.compile(**_optimized(reduction), **options, **MODES[mode])
    found = _fit(two, batch, epochs=4)
    one, expected = _one(reduction)
    zoo.assert_equal(one, two, 1e-6)
    np.testing.assert_allclose(found["mae"][0], expected["mae"][0], rtol=1e-5)


@pytest.mark.filterwarnings("ignore:gradient_accumulation_steps=4 is more")
def test_an_open_window_goes_on_on_one_device(strategy, tmp_path):
    """Saved by two replicas after 6 of 8 batches, 2 of a window of 4."""
    options = {"gradient_accumulation_steps": 4}

    class Save(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                checkpoint = tf.train.Checkpoint(model=self.model)
                self.path = checkpoint.write(str(tmp_path / "checkpoint"))

    save = Save()
    with strategy.scope():
        two = _model()
        two.compile(**_optimized("sum_over_batch_size"), **options)
    _fit(two, 3, callbacks=[save])
    one = _model()
    one.compile(**_optimized("sum_over_batch_size"), **options)
    one.make_train_function()
    tf.train.Checkpoint(model=one).read(save.path).assert_consumed()
    assert int(one.optimizer.iterations) == 1
    assert int(one.gradient_accumulator.micro_steps) == 2
    _fit(one, 3, X[18:], Y[18:])
    zoo.assert_equal(two, one, 1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_inf_on_one_replica_with_loss_scaling(strategy, mode):
    """All replicas drop the window, and the scale halves once."""
    keras.config.set_dtype_policy("mixed_float16")
    with strategy.scope():
        model = _model()
        model.compile(
            keras.optimizers.SGD(0.1),
            "mse",
            gradient_accumulation_steps=2,
            **MODES[mode],
        )
    before = [zoo.value(v) for v in model.trainable_variables]
    x, y = X[:8].copy(), Y[:8].copy()
    # The second replica's part of the first global batch.
    x[2:4], y[2:4] = 6e4, 6e4
    _fit(model, 4, x, y)
    assert zoo.value(model.optimizer.dynamic_scale) == 2.0**14
    for variable, value in zip(model.trainable_variables, before, strict=True):
        for each in strategy.experimental_local_results(variable.value):
            np.testing.assert_array_equal(np.asarray(each), value)
    _fit(model, 4)
    assert all(np.isfinite(zoo.value(v)).all() for v in model.variables)


@pytest.mark.filterwarnings("ignore:Epoch")
@pytest.mark.parametrize("mode", MODES)
def test_nan_on_one_replica_is_skipped_there(strategy, mode):
    x = X[:8].copy()
    x[2:4] = np.nan
    with strategy.scope():
        two = _model()
        two.compile(
            _optimizer(),
            "mse",
            gradient_accumulation_steps=2,
            skip_nonfinite=True,
            **MODES[mode],
        )
    _fit(two, 4, x, Y[:8])
    assert two.nonfinite_micro_batches == 1
    one = _model()
    one.compile(_optimizer(), "mse")
    kept = [0, 1, 4, 5, 6, 7]
    _fit(one, 6, X[kept], Y[kept])
    zoo.assert_equal(one, two, 1e-6)


def test_synchronized_batch_normalization_within_a_call(strategy):
    """It can't run in a loop; it moves once, by the whole window."""
    with strategy.scope():
        model = _model(synchronized=True)
        model.compile(
            keras.optimizers.SGD(0.0),
            "mse",
            micro_batches=4,
            batch_normalization="micro",
        )
    kernel, bias = (zoo.value(v) for v in model.layers[1].weights)
    norm = model.get_layer("batch_normalization")
    _fit(model, 12, X[:12], Y[:12], epochs=2)
    mean, variance = np.zeros(5), np.ones(5)
    batch = np.tanh(X[:12] @ kernel + bias)
    for _ in range(2):
        mean = 0.99 * mean + 0.01 * batch.mean(0)
        variance = 0.99 * variance + 0.01 * batch.var(0)
    np.testing.assert_allclose(zoo.value(norm.moving_mean), mean, atol=1e-6)
    np.testing.assert_allclose(
        zoo.value(norm.moving_variance), variance, atol=1e-6
    )


def _reduces(nodes):
    return sum("CollectiveReduce" in node.op for node in nodes)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "float64"])
def test_one_collective_an_update_and_none_outside(strategy, dtype):
    keras.config.set_dtype_policy(dtype)
    if dtype == "float64":
        keras.config.set_floatx(dtype)
    with strategy.scope():
        model = _model()
        model.compile(_optimizer(), "mse", gradient_accumulation_steps=4)
    _fit(model, 6)
    data = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)
    )
    step = tf.function(
        lambda batch: strategy.run(model.train_step, args=(batch,)),
        autograph=False,
    )
    definition = step.get_concrete_function(
        next(iter(data))
    ).graph.as_graph_def()
    # One for each replica, all within one branch.
    assert _reduces(definition.node) == 0
    branches = {
        function.signature.name: _reduces(function.node_def)
        for function in definition.library.function
        if _reduces(function.node_def)
    }
    assert list(branches.values()) == [2], branches
    (name,) = branches
    (branch,) = [
        node
        for node in definition.node
        if any(value.func.name == name for value in node.attr.values())
    ]
    assert branch.op in ("If", "StatelessIf")
    assert branch.attr["then_branch"].func.name == name


def test_a_custom_loop(strategy):
    with strategy.scope():
        variable = tf.Variable([1.0, 1.0])
        accumulator = tfckpt.GradientAccumulator([variable])
        accumulator.build()
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([variable])

    def micro_step():
        place = tf.distribute.get_replica_context().replica_id_in_sync_group
        place = tf.cast(place, tf.float32)
        # 10 of 1 sample; 20 of 3.
        accumulator.add([10.0 + 10.0 * place + tf.zeros(2)], 1 + 2 * place)

    def update():
        tfckpt.distribute.apply_reduced(
            optimizer, accumulator.result(), [variable]
        )
        accumulator.clear()

    for function in (micro_step, micro_step, update):
        tf.function(lambda function=function: strategy.run(function))()
    np.testing.assert_allclose(np.asarray(variable), [1 - 17.5] * 2)


def test_strategies_without_replicas_that_wait_are_refused():
    # Making one needs a cluster; that `compile` knows it by class does not.
    kind = tf.distribute.experimental.ParameterServerStrategy
    model = _model()
    model._distribute_strategy = object.__new__(kind)
    with pytest.raises(ValueError, match="ParameterServerStrategy, whose"):
        model.compile("sgd", "mse", micro_batches=2)
