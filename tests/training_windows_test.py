"""When a window ends, and who is told."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests import training_zoo as zoo

L = keras.layers
X = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")
Y = X[:, :1].copy()


def _model(**options):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    x = L.Dense(4, activation="tanh")(inputs)
    model = keras.Model(inputs, L.Dense(1)(x))
    if options:
        model = zoo.ours(model, plan=None)
    options = {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse"} | options
    model.compile(**options)
    return model


def _fit(model, batch=2, **options):
    options = {"verbose": 0, "shuffle": False} | options
    return model.fit(X, Y, batch_size=batch, **options)


class _Record(tfckpt.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_micro_batch_end(self, micro_batch, logs=None):
        self.seen.append(("micro", micro_batch, logs["micro_batches"]))

    def on_update_end(self, update, logs=None):
        self.seen.append(("update", update, logs["updates"]))

    def on_test_begin(self, logs=None):
        self.seen.append("validation")

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append("epoch")


def test_hooks_and_the_flush_before_validation():
    model = _model(gradient_accumulation_steps=4)
    record = _Record()
    _fit(model, 4, callbacks=[record], validation_data=(X, Y))
    micro = [("micro", i, 1) for i in range(1, 6)]
    assert record.seen == [
        *micro[:4],
        ("update", 1, 1),
        micro[4],
        ("update", 2, 1),
        "validation",
        "epoch",
    ]


def test_hooks_fire_once_for_several_steps():
    model = _model(gradient_accumulation_steps=4, steps_per_execution=6)
    record = _Record()
    _fit(model, callbacks=[record])
    assert record.seen == [
        ("micro", 6, 6),
        ("update", 1, 1),
        ("micro", 10, 4),
        ("update", 2, 1),
        ("update", 3, 1),
        "epoch",
    ]
    plain = _model(gradient_accumulation_steps=4)
    _fit(plain)
    zoo.assert_equal(plain, model)


def test_hooks_within_a_call():
    model = _model(micro_batches=5)
    record = _Record()
    _fit(model, 10, callbacks=[record])
    assert record.seen == [
        ("micro", 5, 5),
        ("update", 1, 1),
        ("micro", 10, 5),
        ("update", 2, 1),
        "epoch",
    ]


def test_hooks_in_a_callback_list():
    model = _model(gradient_accumulation_steps=4)
    record = _Record()
    callbacks = keras.callbacks.CallbackList(
        [record], add_history=True, model=model, epochs=1, steps=5, verbose=0
    )
    for _ in range(2):
        _fit(model, 4, callbacks=callbacks)
    assert [x for x in record.seen if x[0] == "update"] == [
        ("update", i, 1) for i in range(1, 5)
    ]


def test_validation_sees_the_last_update():
    model = _model(gradient_accumulation_steps=4)
    history = _fit(model, 4, epochs=2, validation_data=(X, Y)).history
    assert history["val_loss"][-1] == pytest.approx(
        model.evaluate(X, Y, verbose=0), rel=1e-6
    )


@pytest.mark.parametrize("mode", [{}, {"run_eagerly": True}])
def test_evaluate_inside_a_window_leaves_it_alone(mode):
    class Evaluate(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.evaluate(X, Y, verbose=0)

    found = []
    for callbacks in ([], [Evaluate()]):
        model = _model(gradient_accumulation_steps=4, **mode)
        _fit(model, callbacks=callbacks)
        found.append(model)
    assert int(found[0].optimizer.iterations) == 3
    zoo.assert_equal(*found)


def test_fit_twice_is_two_epochs():
    once, twice = (_model(gradient_accumulation_steps=4) for _ in range(2))
    _fit(once, epochs=2)
    for _ in range(2):
        _fit(twice)
    zoo.assert_equal(once, twice)


def test_an_epoch_stopped_early_is_flushed():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 2

    model = _model(gradient_accumulation_steps=8)
    _fit(model, callbacks=[Stop()])
    plain = _model()
    plain.fit(X[:6], Y[:6], batch_size=6, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 1
    zoo.assert_equal(plain, model, 1e-6)


def test_train_on_batch_flush_and_reset():
    model, plain = _model(gradient_accumulation_steps=4), _model()
    before = model.get_weights()
    for part in (slice(0, 5), slice(5, 7)):
        model.train_on_batch(X[part], Y[part])
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert model.flush()
    assert not model.flush()
    plain.train_on_batch(X[:7], Y[:7])
    zoo.assert_equal(plain, model, 1e-6)
    model.train_on_batch(1e3 * X, Y)
    model.reset()
    assert not model.flush()
    zoo.assert_equal(plain, model, 1e-6)
    for part in (slice(0, 5), slice(5, 7)):
        model.train_on_batch(X[part], Y[part])
    model.flush()
    plain.train_on_batch(X[:7], Y[:7])
    zoo.assert_equal(plain, model, 1e-6)


def test_the_length_changes_without_a_retrace():
    traces = []

    class Traced(L.Layer):
        def call(self, x):
            traces.append(1)
            return x

    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    model = tfckpt.SegmentedModel(inputs, L.Dense(1)(Traced()(inputs)))
    model.compile("sgd", "mse", gradient_accumulation_steps=2)
    counts = []
    for steps in (2, 5, 1):
        model.gradient_accumulation_steps = steps
        assert model.gradient_accumulation_steps == steps
        traces.clear()
        _fit(model)
        counts.append((int(model.optimizer.iterations), bool(traces)))
    assert counts == [(5, True), (7, False), (17, False)]


def test_the_length_as_a_schedule_of_updates():
    model = _model(
        gradient_accumulation_steps=keras.optimizers.schedules.PiecewiseConstantDecay(
            [1, 3], [1, 2, 3]
        )
    )
    record = _Record()
    _fit(model, callbacks=[record], epochs=2)
    updates = [
        record.seen[i - 1][1]
        for i, each in enumerate(record.seen)
        if each[0] == "update"
    ]
    # Updates 0 and 1 of one micro-batch, 2 and 3 of two, then of three.
    assert updates == [1, 2, 4, 6, 9, 10, 3, 6, 9, 10]
    settings = model.get_compile_config()["gradient_accumulation_steps"]
    assert settings["class_name"] == "PiecewiseConstantDecay"


@pytest.mark.filterwarnings("ignore:gradient_accumulation_steps=8 is more")
@pytest.mark.parametrize("batch", [2, 10])
def test_logs_do_not_depend_on_the_window(batch):
    """With weights that stand still, so that only the logs can differ."""
    found = []
    for options in (
        {},
        {"gradient_accumulation_steps": 8},
        {"micro_batches": 2},
    ):
        model = _model(
            optimizer=keras.optimizers.SGD(0.0), metrics=["mae"], **options
        )
        found.append(_fit(model, batch).history)
    for history in found[1:]:
        assert history.keys() == found[0].keys()
        for name, values in history.items():
            np.testing.assert_allclose(values, found[0][name], rtol=1e-6)


def test_callbacks_that_count_updates():
    rates = []

    class Note(tfckpt.Callback):
        def on_update_end(self, update, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    model = _model(gradient_accumulation_steps=5)
    _fit(
        model,
        epochs=3,
        callbacks=[
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / 2**epoch),
            Note(),
        ],
    )
    np.testing.assert_allclose(rates, [0.1] * 2 + [0.05] * 2 + [0.025] * 2)


@pytest.mark.parametrize("window", ["over calls", "within a call"])
def test_the_rate_falls_on_a_plateau_as_without_a_window(window):
    """What the callback monitors is that of the big batch, updates flushed."""
    batch, options, monitor = {
        "over calls": (7, {"gradient_accumulation_steps": 3}, "val_loss"),
        "within a call": (20, {"micro_batches": 3}, "loss"),
    }[window]
    found = []
    for each, arguments in ((20, {}), (batch, options)):
        model = _model(**arguments)
        plateau = keras.callbacks.ReduceLROnPlateau(
            monitor, factor=0.5, patience=2, min_delta=0.1
        )
        history = _fit(
            model,
            each,
            epochs=12,
            callbacks=[plateau],
            validation_data=(X, Y) if monitor == "val_loss" else None,
        ).history
        found.append((model, history["learning_rate"]))
    (plain, expected), (model, rates) = found
    # It fell, and not in every epoch.
    assert 1 < len(set(expected)) < 6
    assert rates == expected
    zoo.assert_equal(plain, model, 1e-6)


def test_a_failed_run_leaves_no_window():
    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                raise KeyboardInterrupt

    model = _model(gradient_accumulation_steps=4)
    with pytest.raises(KeyboardInterrupt):
        _fit(model, callbacks=[Fail()])
    assert int(model.optimizer.iterations) == 1
    plain = _model(gradient_accumulation_steps=4)
    plain.fit(X[:8], Y[:8], batch_size=2, shuffle=False, verbose=0)
    zoo.assert_equal(plain, model)
    assert not model.flush()


def test_compile_again_and_other_layers_trainable():
    model = _model(gradient_accumulation_steps=4)
    model.train_on_batch(X, Y)
    model.layers[1].trainable = False
    model.compile("sgd", "mse", gradient_accumulation_steps=2)
    before = model.get_weights()
    _fit(model, 5)
    after = model.get_weights()
    assert int(model.optimizer.iterations) == 2
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        assert np.array_equal(a, b) == (i < 2)


def test_the_settings_travel_with_the_model(tmp_path):
    model = _model(micro_batches=[5, 15], skip_nonfinite=True)
    _fit(model, 20)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.get_compile_config()["micro_batches"] == [5, 15]
    assert loaded.get_compile_config()["skip_nonfinite"] is True
    for each in (model, loaded):
        _fit(each, 20)
    zoo.assert_equal(model, loaded)
    segmented = tfckpt.SegmentedModel.from_model(loaded, plan=None)
    assert segmented.get_compile_config()["micro_batches"] == [5, 15]
    model = _model(gradient_accumulation_steps=3)
    model.gradient_accumulation_steps = 7
    config = model.get_compile_config()
    assert config["gradient_accumulation_steps"] == 7
    assert "micro_batches" in config


def test_without_window_it_is_keras_training():
    plain = _model()
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    x = L.Dense(4, activation="tanh")(inputs)
    ours = tfckpt.SegmentedModel(inputs, L.Dense(1)(x))
    ours.compile(keras.optimizers.SGD(0.1), "mse")
    assert "micro_batches" not in ours.get_compile_config()
    for model in (plain, ours):
        _fit(model)
    zoo.assert_equal(plain, ours, 1e-7)


def test_two_models_in_turn_have_windows_of_their_own():
    models = [_model(gradient_accumulation_steps=2) for _ in range(2)]
    plain = _model()
    for part in (slice(0, 4), slice(4, 10)):
        for sign, model in zip((1, -1), models, strict=True):
            model.train_on_batch(sign * X[part], Y[part])
    plain.train_on_batch(X[:10], Y[:10])
    zoo.assert_equal(plain, models[0], 1e-6)
    plain = _model()
    plain.train_on_batch(-X[:10], Y[:10])
    zoo.assert_equal(plain, models[1], 1e-6)


def test_it_is_none_of_the_weights():
    model, plain = _model(gradient_accumulation_steps=2), _model()
    for each in (model, plain):
        _fit(each)
    assert [w.path for w in model.weights] == [w.path for w in plain.weights]
    assert [v.path for v in model.variables] == [
        v.path for v in plain.variables
    ]
    assert model.count_params() == plain.count_params()
    assert len(model.metrics_variables) == len(plain.metrics_variables)


# --- Bad input --------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"gradient_accumulation_steps": 0}, ValueError, "at least 1.*=0"),
        ({"gradient_accumulation_steps": -2}, ValueError, "at least 1.*=-2"),
        ({"gradient_accumulation_steps": 2.5}, TypeError, "whole.*=2.5"),
        ({"gradient_accumulation_steps": True}, TypeError, "whole.*=True"),
        ({"gradient_accumulation_steps": "4"}, TypeError, "whole.*='4'"),
        ({"micro_batches": 0}, ValueError, "at least 1.*=0"),
        ({"micro_batches": 1.5}, TypeError, "whole.*=1.5"),
        ({"micro_batches": []}, TypeError, "list of their sizes.*=\\[\\]"),
        ({"micro_batches": [3, 0]}, ValueError, "at least 1.*\\[3, 0\\]"),
        ({"micro_batches": "44"}, TypeError, "list of their sizes.*'44'"),
        (
            {"micro_batches": 2, "gradient_accumulation_steps": 2},
            ValueError,
            "not both.*steps=2, micro_batches=2",
        ),
        ({"skip_nonfinite": True}, ValueError, "gradient_accumulation_steps=1"),
        (
            {"skip_nonfinite": 1, "micro_batches": 2},
            TypeError,
            "True or False.*=1",
        ),
        (
            {
                "gradient_accumulation_steps": 2,
                "optimizer": keras.optimizers.SGD(
                    gradient_accumulation_steps=4
                ),
            },
            ValueError,
            "optimizer 'SGD'.*steps=4.*that of `compile`",
        ),
        (
            {
                "micro_batches": 2,
                "optimizer": keras.optimizers.LossScaleOptimizer(
                    keras.optimizers.Adam(gradient_accumulation_steps=3)
                ),
            },
            ValueError,
            "optimizer 'adam'.*steps=3",
        ),
    ],
)
def test_bad_arguments(options, error, text):
    model = _model(gradient_accumulation_steps=2)
    optimizer = model.optimizer
    arguments = {"optimizer": "sgd", "loss": "mae"} | options
    with pytest.raises(error, match=f"(?is){text}"):
        model.compile(**arguments)
    # Nothing was changed.
    assert model.optimizer is optimizer
    assert model.gradient_accumulation_steps == 2


def test_a_batch_that_cannot_be_split():
    model = _model(micro_batches=[5, 14])
    before = model.get_weights()
    with pytest.raises(ValueError, match="micro_batches.*19, samples: 20"):
        _fit(model, 20)
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not model.flush()


def test_a_short_last_batch():
    """20 samples are batches of 9, 9 and 2."""
    model, plain = _model(micro_batches=4), _model()
    for each in (model, plain):
        _fit(each, 9, epochs=2)
    assert int(model.optimizer.iterations) == 6
    zoo.assert_equal(plain, model, 1e-6)


def test_a_window_longer_than_an_epoch_is_said_once():
    model = _model(gradient_accumulation_steps=11)
    with pytest.warns(
        UserWarning, match="=11 is more than the 10 batches"
    ) as w:
        _fit(model, epochs=3)
    assert len(w) == 1
    assert int(model.optimizer.iterations) == 3


def test_what_needs_a_window_says_so():
    model = _model(gradient_accumulation_steps=2)
    model.compile("sgd", "mse")
    for call in (model.flush, model.reset):
        with pytest.raises(ValueError, match="has none"):
            call()
    with pytest.raises(ValueError, match="has none"):
        model.gradient_accumulation_steps = 3
    model.compile("sgd", "mse", micro_batches=2)
    with pytest.raises(ValueError, match="was given a number"):
        model.gradient_accumulation_steps = 3
    assert model.nonfinite_micro_batches == 0


def test_methods_of_the_users_own():
    class OwnStep(tfckpt.AccumulatingTrainer, keras.Model):
        def train_step(self, data):
            return {}

    class OwnLoss(tfckpt.AccumulatingTrainer, keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = L.Dense(1)

        def call(self, x):
            return self.dense(x)

        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            # A mean over pairs of samples that share nothing.
            return keras.ops.mean(keras.ops.abs(y - y_pred) ** 3)

    class Weighted(OwnLoss):
        def loss_denominator(self, x, y, y_pred, sample_weight):
            return keras.ops.shape(y)[0]

    with pytest.raises(ValueError, match="OwnStep.train_step.*Accumulator"):
        OwnStep().compile("sgd", "mse", micro_batches=2)
    with pytest.raises(ValueError, match="OwnLoss.compute_loss.*denominator"):
        OwnLoss().compile("sgd", micro_batches=2)
    found = []
    for options, batch in (
        ({}, 20),
        ({"gradient_accumulation_steps": 3}, 7),
        ({"micro_batches": 3}, 20),
    ):
        keras.utils.set_random_seed(0)
        model = Weighted()
        model.compile("sgd", **options)
        _fit(model, batch)
        found.append(model)
    for model in found[1:]:
        zoo.assert_equal(found[0], model, 1e-6)

    with pytest.raises(TypeError, match="AccumulatingTrainer, keras.Model"):
        type("Wrong", (keras.Model, tfckpt.AccumulatingTrainer), {})


def test_a_loss_that_is_no_sum_over_samples_is_said():
    def spread(y_true, y_pred):
        return tf.math.reduce_std(y_true - y_pred)

    model = _model(loss=spread, micro_batches=2)
    with pytest.warns(UserWarning, match="'spread' gives one number"):
        _fit(model, 10)


def test_keras_distribution_is_refused():
    model = _model()
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=["cpu:0"])
    )
    try:
        with pytest.raises(ValueError, match="keras.distribution"):
            tfckpt.SegmentedModel.from_model(model).compile(
                "sgd", "mse", micro_batches=2
            )
    finally:
        keras.distribution.set_distribution(None)


# --- Faults found by attacking it -------------------------------------------


class _AddsLoss(L.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return x * 1.0


def _adding(**options):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    x = L.Dense(4, activation="tanh", activity_regularizer="l2")(inputs)
    model = keras.Model(inputs, L.Dense(1)(_AddsLoss()(x)))
    if options:
        model = zoo.ours(model)
    model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    return model


@pytest.mark.parametrize("mode", [{}, {"run_eagerly": True}])
@pytest.mark.parametrize(
    "window", [{"gradient_accumulation_steps": 4}, {"micro_batches": 4}]
)
def test_held_back_state_keeps_added_losses(mode, window):
    plain = _adding()
    model = _adding(skip_nonfinite=True, **window, **mode)
    _fit(plain, 20)
    _fit(model, 5 if "gradient_accumulation_steps" in window else 20)
    zoo.assert_equal(plain, model, 1e-6)


def test_added_losses_on_replicas_with_an_uneven_batch(strategy):
    plain = _adding()
    plain.fit(X[:18], Y[:18], batch_size=18, shuffle=False, verbose=0)
    with strategy.scope():
        model = _adding(gradient_accumulation_steps=5)
    model.fit(X[:18], Y[:18], batch_size=4, shuffle=False, verbose=0)
    zoo.assert_equal(plain, model, 1e-6)


def _sequences(**options):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None, 3))
    outputs = L.Dense(1)(L.Dense(4, activation="tanh")(inputs))
    model = tfckpt.SegmentedModel(inputs, outputs, plan=None)
    model.compile(keras.optimizers.SGD(0.1), **options)
    return model


@pytest.mark.parametrize("mode", [{}, {"run_eagerly": True}])
def test_lengths_that_change_between_batches(mode):
    model = _sequences(loss="mse", gradient_accumulation_steps=2, **mode)
    plain = _sequences(loss="mse")
    random = np.random.default_rng(0)
    for length in (5, 7):
        x = random.normal(size=(4, length, 3)).astype("float32")
        for part in (slice(0, 1), slice(1, 4)):
            model.train_on_batch(x[part], x[part, :, :1])
        plain.train_on_batch(x, x[..., :1])
    zoo.assert_equal(plain, model, 1e-6)


@pytest.mark.parametrize("mode", [{}, {"run_eagerly": True}])
def test_sample_weights_in_later_batches_only(mode):
    def make(**options):
        loss = keras.losses.MeanSquaredError(
            reduction="mean_with_sample_weight"
        )
        return _model(loss=loss, **options)

    model = make(gradient_accumulation_steps=2, **mode)
    weights = np.linspace(0.1, 3.0, 10)
    model.train_on_batch(X[:10], Y[:10])
    model.train_on_batch(X[10:], Y[10:], sample_weight=weights)
    plain = make()
    plain.train_on_batch(
        X, Y, sample_weight=np.concatenate([np.ones(10), weights])
    )
    zoo.assert_equal(plain, model, 1e-6)


def test_denominators_that_part_are_refused():
    class Two(tfckpt.AccumulatingTrainer, keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = L.Dense(1)

        def call(self, x):
            y = self.dense(x)
            return [y, keras.ops.mean(y, axis=1)]

    model = Two()
    model.compile(
        "sgd", ["mse", "mse"], gradient_accumulation_steps=2, run_eagerly=True
    )
    x = np.ones((2, 5, 3), "float32")
    model.train_on_batch(x, [x[..., :1], x[:, 0, :1]])
    x = np.ones((2, 7, 3), "float32")
    with pytest.raises(ValueError, match="output 0 is divided.*7 elements"):
        model.train_on_batch(x, [x[..., :1], x[:, 0, :1]])


def test_xla_drops_no_samples():
    """Sizes that leave some over: a further micro-batch takes them."""
    plain = _model()
    model = _model(micro_batches=[4, 4], jit_compile=True)
    for each in (plain, model):
        _fit(each, 16, epochs=2)
    zoo.assert_equal(plain, model, 1e-6)


def test_a_call_that_failed_leaves_nothing():
    calls_left = [100]

    class Breaks(L.Layer):
        def call(self, x):
            calls_left[0] -= 1
            if calls_left[0] == 0:
                raise MemoryError
            return x

    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    model = tfckpt.SegmentedModel(
        inputs, L.Dense(1)(Breaks()(inputs)), plan=None
    )
    model.compile("sgd", "mse", micro_batches=4, run_eagerly=True)
    before = model.get_weights()
    calls_left[0] = 3
    with pytest.raises(MemoryError):
        model.train_on_batch(1e3 * X, Y)
    calls_left[0] = 100
    loss = model.train_on_batch(X, Y)
    plain = keras.Model(model.inputs, model.outputs)
    after = model.get_weights()
    plain.set_weights(before)
    plain.compile("sgd", "mse")
    assert plain.train_on_batch(X, Y) == pytest.approx(float(loss), rel=1e-5)
    for a, b in zip(plain.get_weights(), after, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_trainable_toggled_between_fits():
    """As Keras does, it goes on with what it was compiled for."""
    found = []
    for options, batch in (({}, 20), ({"gradient_accumulation_steps": 4}, 5)):
        model = _model(**options)
        _fit(model, batch)
        model.layers[1].trainable = False
        _fit(model, batch)
        found.append(model)
    assert int(found[1].optimizer.iterations) == 2
    zoo.assert_equal(*found, 1e-6)


def test_trainable_toggled_in_an_open_window_of_eager_mode():
    """The window begins anew: its gradient is that of other variables."""
    model = _model(gradient_accumulation_steps=2, run_eagerly=True)
    model.train_on_batch(1e3 * X[:4], Y[:4])
    model.layers[1].trainable = False
    for part in (slice(4, 9), slice(9, 20)):
        assert int(model.optimizer.iterations) == 0
        model.train_on_batch(X[part], Y[part])
    assert int(model.optimizer.iterations) == 1
    plain = _model()
    plain.layers[1].trainable = False
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    plain.train_on_batch(X[4:], Y[4:])
    for a, b in zip(plain.weights, model.weights, strict=True):
        np.testing.assert_allclose(b, a, atol=1e-6, err_msg=a.path)


def test_methods_of_a_base_that_take_anything():
    class Base(keras.Model):
        def compile(self, *args, **kwargs):
            super().compile(*args, **kwargs)

        def fit(self, *args, **kwargs):
            return super().fit(*args, **kwargs)

    class Own(tfckpt.AccumulatingTrainer, Base):
        def __init__(self):
            super().__init__()
            self.dense = L.Dense(1)

        def call(self, x):
            return self.dense(x)

    model = Own()
    model.compile("sgd", "mse", gradient_accumulation_steps=4)
    record = _Record()
    _fit(model, callbacks=[record])
    assert int(model.optimizer.iterations) == 3
    assert ("update", 3, 1) in record.seen


def test_a_loss_of_one_element():
    def largest(y_true, y_pred):
        return tf.reduce_mean(tf.square(y_true - y_pred), keepdims=True)[0]

    model = _model(loss=largest, micro_batches=[1, 15, 4])
    plain = _model(loss=largest)
    with pytest.warns(UserWarning, match="'largest' gives one number"):
        _fit(model, 20)
    _fit(plain, 20)
    zoo.assert_equal(plain, model, 1e-6)


@pytest.mark.parametrize(
    "options", [{"gradient_accumulation_steps": 2}, {"micro_batches": 2}]
)
def test_shuffled_data_come_in_the_order_of_plain_training(options):
    """Whoever looks at them before shuffles them once more."""

    def order(**options):
        # Its seed is the data's too.
        model, seen = _model(**options), []
        data = (
            tf.data.Dataset.range(8)
            .shuffle(8, seed=1)
            .map(
                lambda x: tf.numpy_function(
                    lambda x: seen.append(int(x)) or np.float32(x),
                    [x],
                    tf.float32,
                )
            )
        )
        data = data.map(lambda x: (tf.fill([3], x), tf.fill([1], x)))
        model.fit(data.batch(4), epochs=2, shuffle=False, verbose=0)
        return seen

    assert order(**options) == order()
