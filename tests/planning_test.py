"""`make_plan`: budgets kept, strategies, refusals, and plans that are run."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfckpt
from tfckpt import plan as plan_lib
from tfckpt import planners, planning

_MIB = 2**20


def _residual(blocks=6):
    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(8, 3, padding="same")(inputs)
    for _ in range(blocks):
        y = layers.Conv2D(8, 3, padding="same")(x)
        y = layers.ReLU()(layers.BatchNormalization()(y))
        x = layers.Add()([x, y])
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(4)(x))


def _u_net():
    inputs = keras.Input((16, 16, 3))
    x, skips = inputs, []
    for width in (4, 8, 16):
        x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    for width in (16, 8, 4):
        x = layers.UpSampling2D()(x)
        x = layers.Concatenate()([x, skips.pop()])
        x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
    return keras.Model(inputs, x)


@pytest.mark.parametrize("make", [_residual, _u_net])
@pytest.mark.parametrize("fraction", [0.7, 0.9])
def test_a_fraction_is_of_the_activation_memory(make, fraction):
    plan = tfckpt.make_plan(make(), batch_size=32, memory_budget=fraction)
    assert plan.prediction.ratio <= fraction
    assert 0 < plan.prediction.extra_time < 0.5
    assert plan.prediction.least_bytes <= plan.prediction.peak_bytes


def test_a_size_is_everything_on_the_device():
    model = _residual()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    plain = tfckpt.make_plan(model, batch_size=64, strategy=1).prediction
    limit = plain.total_bytes - plain.plain_bytes // 3
    plan = tfckpt.make_plan(model, batch_size=64, memory_budget=limit)
    assert plan.prediction.total_bytes <= limit < plain.total_bytes
    weights = 4 * model.count_params()
    assert plan.prediction.weight_bytes == weights
    trained = 4 * sum(np.prod(v.shape) for v in model.trainable_variables)
    assert plan.prediction.optimizer_bytes == trained
    text = tfckpt.make_plan(
        model, batch_size=64, memory_budget=f"{limit / _MIB:.6f}MiB"
    )
    assert text == plan


def test_a_plan_says_when_gradients_of_weights_set_the_peak():
    def notes(batch_size):
        x = inputs = keras.Input((256,))
        for _ in range(8):
            x = layers.Dense(256, "tanh")(x)
        plan = tfckpt.make_plan(
            keras.Model(inputs, x), batch_size=batch_size, strategy=3
        )
        known = plan.prediction
        assert known.peak_bytes < known.plain_bytes
        return " ".join(known.notes)

    assert "gradients of weights set the peak" in notes(16)
    assert "gradients of weights set the peak" not in notes(4096)


def test_nothing_is_recomputed_where_all_fits():
    plan = tfckpt.make_plan(_residual(), batch_size=8, memory_budget="1GiB")
    assert not any(segment.recomputed for segment in plan.segments)
    assert plan.prediction.extra_time == 0


def test_a_budget_that_cannot_be_met_names_the_least_and_its_layer():
    model = _residual()
    with pytest.raises(tfckpt.PlanError, match="least budget is") as caught:
        tfckpt.make_plan(model, batch_size=32, memory_budget=0.05)
    names = [layer.name for layer in model.layers]
    assert any(f"'{name}' sets it" in str(caught.value) for name in names)
    least = float(re.search(r"least budget is ([\d.]+)", str(caught.value))[1])
    tfckpt.make_plan(model, batch_size=32, memory_budget=least)
    with pytest.raises(tfckpt.PlanError):
        tfckpt.make_plan(model, batch_size=32, memory_budget=least - 0.002)


def test_a_size_that_cannot_be_met_names_the_least_for_everything():
    model = _residual()
    for strategy in ("budget", "sqrt", "recursive"):
        with pytest.raises(tfckpt.PlanError, match="no plan can change: we"):
            tfckpt.make_plan(
                model, batch_size=32, memory_budget=1024, strategy=strategy
            )
    with pytest.raises(tfckpt.PlanError, match="which '.*' sets") as caught:
        tfckpt.make_plan(model, batch_size=32, memory_budget="10KiB")
    least = int(re.search(r"least budget is (\d+)", str(caught.value))[1])
    plan = tfckpt.make_plan(model, batch_size=32, memory_budget=least)
    assert plan.prediction.total_bytes <= least
    with pytest.raises(tfckpt.PlanError, match=f"least budget is {least}"):
        tfckpt.make_plan(model, batch_size=32, memory_budget=least - 1)


@pytest.mark.parametrize(
    "wrong", [0, -1, 1.5, float("nan"), True, "much", "0", [1]]
)
def test_a_budget_that_is_none_is_refused(wrong):
    with pytest.raises(tfckpt.PlanError, match="`memory_budget`.*Received"):
        tfckpt.make_plan(_residual(1), batch_size=2, memory_budget=wrong)


@pytest.mark.parametrize("wrong", [0, -3, 2.5, None, True, "8", 2**62])
def test_a_batch_size_that_is_none_is_refused(wrong):
    with pytest.raises(tfckpt.PlanError, match="`batch_size`.*Received"):
        tfckpt.make_plan(_residual(1), batch_size=wrong)


def test_a_model_that_can_not_be_built_is_refused():
    model = keras.Sequential([layers.Dense(3)])
    with pytest.raises(tfckpt.PlanError, match=r"\(4,\).*with the batch"):
        tfckpt.make_plan(model, batch_size=4, input_shape=(4,))
    model = keras.Sequential([layers.Dense(3)])
    assert tfckpt.make_plan(model, batch_size=4, input_shape=(None, 4)).segments


def test_numbers_of_numpy_are_numbers():
    model = _residual(2)
    assert tfckpt.make_plan(model, batch_size=np.array(8)).segments
    a = tfckpt.make_plan(
        model, batch_size=np.int64(8), memory_budget=np.float64(0.9)
    )
    assert a == tfckpt.make_plan(model, batch_size=8, memory_budget=0.9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "fast"}, "`strategy` is one of sqrt.*Received: 'fast'"),
        ({"strategy": "budget"}, "needs `memory_budget`"),
        ({"strategy": 0}, "number of segments"),
        ({"strategy": ["none"]}, "No call of the model is named 'none'"),
        ({"strategy": lambda costs: 3}, "returns a tfckpt.Plan. Received: 3"),
        (
            {"strategy": "sqrt", "memory_budget": 0.01},
            "by strategy='sqrt' takes .* the budget leaves",
        ),
        ({"target": "v9", "memory_budget": 0.5}, "`target` is one of cpu"),
        ({"input_shape": (3, 3)}, "`input_shape` is the shape"),
        (
            {
                "strategy": lambda costs: plan_lib.Plan(
                    (plan_lib.Segment(("other",)),)
                )
            },
            "plan is for another model",
        ),
    ],
)
def test_arguments_that_are_wrong(options, message):
    with pytest.raises(tfckpt.PlanError, match=message):
        tfckpt.make_plan(_residual(1), batch_size=2, **options)


def test_a_model_without_calls_or_graph_is_refused():
    inputs = keras.Input((3,))
    with pytest.raises(tfckpt.PlanError, match="makes no calls"):
        tfckpt.make_plan(keras.Model(inputs, inputs), batch_size=2)

    class Own(keras.Model):
        def call(self, x):
            return x

    with pytest.raises(TypeError, match="subclassed model"):
        tfckpt.make_plan(Own(), batch_size=2)


@pytest.mark.parametrize(
    "strategy",
    [
        "sqrt",
        3,
        "min_memory",
        "recursive",
        "chen",
        lambda costs: planners.every_k(costs.paths, 4),
        lambda costs: planners.by_type(costs, keep=["Conv2D"]),
        lambda costs: planners.by_type(costs, recompute=["Conv2D"]),
    ],
    ids=["sqrt", "3", "min", "recursive", "chen", "every", "keep", "recompute"],
)
@pytest.mark.parametrize("make", [_residual, _u_net])
def test_every_strategy_makes_a_plan_that_runs_to_the_same_numbers(
    make, strategy
):
    x = np.random.RandomState(0).rand(8, 16, 16, 3).astype("float32")
    found = []
    for planned in (False, True):
        keras.utils.set_random_seed(3)
        model = make()
        if planned:
            plan = tfckpt.make_plan(model, batch_size=4, strategy=strategy)
            assert plan.prediction.peak_bytes > 0
            model = tfckpt.SegmentedModel.from_model(model, plan=plan)
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
        y = np.zeros((8, *model.output.shape[1:]), "float32")
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
        found.append([v.numpy() for v in model.variables])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_sqrt_is_what_the_model_does_by_itself():
    model = _residual()
    plan = tfckpt.make_plan(model, batch_size=4)
    assert plan == tfckpt.SegmentedModel.from_model(model).plan


def test_a_saved_plan_is_the_same_plan(tmp_path):
    plan = tfckpt.make_plan(_residual(), batch_size=16, memory_budget=0.7)
    plan.save(tmp_path / "plan.json")
    loaded = tfckpt.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.prediction == plan.prediction
    for other in (_residual(1), _u_net(), _residual(9)):
        with pytest.raises(tfckpt.PlanError, match="is for another model"):
            tfckpt.SegmentedModel.from_model(other, plan=loaded)
    with pytest.raises(tfckpt.PlanError, match="can't be read"):
        (tmp_path / "bad.json").write_text("{")
        tfckpt.Plan.load(tmp_path / "bad.json")


def test_shapes_with_the_batch_dimension_and_without():
    a, b = keras.Input((None, 4), name="a"), keras.Input((None, 4), name="b")
    x = layers.Concatenate(axis=1)([layers.Dense(4)(a), layers.Dense(4)(b)])
    model = keras.Model({"a": a, "b": b}, layers.Dense(2)(x))
    given = [
        {"a": (7, 4), "b": (5, 4)},
        {"a": (2, 7, 4), "b": (2, 5, 4)},
    ]
    plans = [
        tfckpt.make_plan(model, batch_size=2, input_shape=shape)
        for shape in given
    ]
    assert plans[0].prediction == plans[1].prediction
    assert not any("input_shape" in n for n in plans[0].prediction.notes)


def test_sizes_that_only_a_trace_knows():
    inputs = keras.Input((7, 6))
    x = layers.EinsumDense("abc,cd->abd", (None, 8))(inputs)
    y = layers.EinsumDense("abc,cd->abd", (None, 8))(x)
    x = x + y * 2.0
    x = keras.ops.transpose(x, (1, 0, 2))
    model = keras.Model(inputs, keras.ops.tanh(x))
    costs = planning.costs_of(model, batch_size=4)
    assert costs.sizes[-1] == 4 * 4 * 7 * 8
    assert not any("Guessed" in n or "input_shape" in n for n in costs.notes)
    for strategy in ("sqrt", 2):
        plan = tfckpt.make_plan(model, batch_size=4, strategy=strategy)
        assert len(plan.calls) == len(costs.calls)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: layers.LSTM(8, dropout=0.2, recurrent_dropout=0.2),
        lambda: layers.GRU(8, dropout=0.2),
        lambda: layers.RNN([layers.LSTMCell(4), layers.GRUCell(8)]),
        lambda: layers.Bidirectional(layers.LSTM(4, dropout=0.1)),
    ],
    ids=["lstm", "gru", "stacked", "bidirectional"],
)
def test_a_recurrent_layer_trains_after_it_was_planned(make, masked):
    inputs = keras.Input((9,), dtype="int32")
    x = layers.Embedding(10, 6, mask_zero=masked)(inputs)
    model = keras.Model(inputs, layers.Dense(1)(make()(x)))
    plan = tfckpt.make_plan(model, batch_size=4)
    assert not any("Guessed" in n for n in plan.prediction.notes)
    rnn = planning.costs_of(model, batch_size=4).calls[-2]
    assert rnn.saved > 4 * 4 * 9 * 8
    assert rnn.forward_flops > 9 * 4 * 2 * 4 * (6 + 4)
    model.compile("sgd", "mse", jit_compile=False)
    ids = np.tile(np.arange(9), (4, 1)) + 1
    model.fit(ids % 10, np.zeros((4, 1)), verbose=0)


def test_a_convolution_in_groups_counts_its_operations():
    inputs = keras.Input((8, 8, 8))
    x = layers.Conv2D(8, 3, padding="same")(inputs)
    model = keras.Model(inputs, layers.Conv2D(8, 3, groups=4)(x))
    call = planning.costs_of(model, batch_size=2).calls[-1]
    assert call.forward_flops >= 2 * 2 * 36 * 8 * 9 * 2
    assert call.backward_flops >= 2 * call.forward_flops * 0.9


def test_the_prediction_says_so_when_a_plan_takes_more_than_none():
    model = _residual(3)
    plan = tfckpt.make_plan(model, batch_size=2, strategy=15)
    prediction = plan.prediction
    more = prediction.peak_bytes > prediction.plain_bytes
    said = any("more memory than no" in note for note in prediction.notes)
    assert more == said


def test_a_target_is_asked_and_its_trials_are_listed():
    model = _residual()
    lines = []
    plan = tfckpt.make_plan(
        model,
        batch_size=64,
        memory_budget=0.9,
        target="cpu",
        progress=lines.append,
    )
    trials = plan.prediction.trials
    assert len(lines) == len(trials) <= 6
    assert trials[0].budget_bytes is None
    assert not trials[0].fits
    chosen = [t for t in trials if t.fits]
    assert chosen
    assert all(t.bytes <= 0.9 * trials[0].bytes for t in chosen)
    assert plan.prediction.extra_time == min(t.extra_time for t in chosen)
    with pytest.raises(tfckpt.PlanError, match="no plan was found within 0.01"):
        tfckpt.make_plan(model, batch_size=64, memory_budget=0.01, target="cpu")


def test_a_target_checks_the_plan_of_another_strategy():
    model = _residual(3)
    plan = tfckpt.make_plan(model, batch_size=8, strategy=2, target="cpu")
    plain, ours = plan.prediction.trials
    assert plain.budget_bytes is None
    assert ours.budget_bytes == plan.prediction.peak_bytes
    assert ours.bytes > 0


def test_a_larger_budget_never_takes_longer():
    model = _u_net()
    times = []
    for fraction in (0.65, 0.7, 0.75, 0.8, 0.9, 1.0):
        try:
            plan = tfckpt.make_plan(model, batch_size=8, memory_budget=fraction)
        except tfckpt.PlanError:
            continue
        times.append(plan.prediction.extra_time)
    assert len(times) > 3
    assert times == sorted(times, reverse=True)
    assert times[-1] == 0


@pytest.mark.parametrize("make", [_residual, _u_net])
def test_the_budget_is_no_worse_than_equal_segments(make):
    model = make()
    costs = planning.costs_of(model, batch_size=16)
    for strategy in (2, 4, 8, "chen"):
        other = tfckpt.make_plan(model, batch_size=16, strategy=strategy)
        limit = other.prediction.peak_bytes
        try:
            ours = planners.budget(costs, limit)
        except tfckpt.PlanError:
            assert strategy == "chen"
            continue
        extra = other.prediction.extra_time
        assert ours.prediction.extra_time <= extra + 1e-9


def test_logits_go_through_recomputation():
    """Keras takes the logits of a softmax where it finds them."""
    x = np.float32([[60.0, 120.0], [180.0, -60.0]])
    losses = []
    for wrap in (lambda layer: layer, tfckpt.Recompute):
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((2,)), wrap(layers.Dense(3, activation="softmax"))]
        )
        for eagerly in (True, False):
            model.compile(
                "sgd",
                "sparse_categorical_crossentropy",
                run_eagerly=eagerly,
                jit_compile=False,
            )
            losses.append(float(model.test_on_batch(x, np.array([1, 1]))))
        losses.append(float(model.train_on_batch(x, np.array([1, 1]))))
    assert losses[:3] == losses[3:]
    assert losses[0] > 20


def test_measure_leaves_the_model_alone_and_knows_the_prediction():
    model = _residual(2)
    plan = tfckpt.make_plan(model, batch_size=8, strategy=2)
    ours = tfckpt.SegmentedModel.from_model(model, plan=plan)
    before = [v.numpy() for v in ours.variables]
    measured = ours.measure(
        tf.random.stateless_normal((8, 16, 16, 3), (0, 1)).numpy(), repeats=2
    )
    for a, b in zip(before, ours.variables, strict=True):
        np.testing.assert_array_equal(a, b.numpy())
    assert measured.prediction.peak_bytes == plan.prediction.peak_bytes
    assert len(measured.seconds) == len(measured.plain_seconds) == 2
    assert measured.peak_bytes is not None
