"""Costs against what is known of layers, and that finding them is harmless."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfckpt import cost, graph, planning
from tfckpt import plan as plan_lib

layers = keras.layers


def _costs(model, batch_size=4, **options):
    return planning.costs_of(model, batch_size=batch_size, **options)


def _call_of(model, path, **options):
    costs = _costs(model, **options)
    return costs, next(call for call in costs.calls if call.path == path)


def _around(layer, shape, dtype="float32"):
    """A model in which a gradient flows into the layer's input."""
    inputs = keras.Input(shape, dtype=dtype)
    x = layers.Dense(shape[-1], name="before")(inputs)
    return keras.Model(inputs, layer(x))


# What the gradient of each layer reads, by its formula: its input, its
# output, and how many floats an example besides.
_KEPT = [
    (layers.Dense(5), (6,), True, False, 0),
    (layers.Dense(5, activation="relu"), (6,), True, True, 0),
    (layers.Dense(5, activation="sigmoid"), (6,), True, True, 0),
    (layers.EinsumDense("abc,cd->abd", (None, 5)), (7, 6), True, False, 0),
    (layers.Conv1D(5, 3), (8, 6), True, False, 0),
    (layers.Conv2D(5, 3), (8, 8, 3), True, False, 0),
    (layers.Conv3D(5, 2), (4, 4, 4, 3), True, False, 0),
    (layers.DepthwiseConv2D(3), (8, 8, 3), True, False, 0),
    (layers.Conv2DTranspose(5, 3), (8, 8, 3), True, False, 0),
    (layers.ReLU(), (6,), False, True, 0),
    (layers.Activation("tanh"), (6,), False, True, 0),
    (layers.Activation("sigmoid"), (6,), False, True, 0),
    (layers.Softmax(), (6,), False, True, 0),
    (layers.MaxPooling2D(2), (8, 8, 3), True, True, 0),
    (layers.AveragePooling2D(2), (8, 8, 3), False, False, 0),
    (layers.GlobalAveragePooling2D(), (8, 8, 3), False, False, 0),
    (layers.Flatten(), (8, 3), False, False, 0),
    (layers.Permute((2, 1)), (8, 3), False, False, 0),
]


@pytest.mark.parametrize(
    ("layer", "shape", "reads_input", "reads_output", "besides"),
    _KEPT,
    ids=lambda value: getattr(value, "name", None),
)
def test_what_the_gradient_of_a_layer_keeps(
    layer, shape, reads_input, reads_output, besides
):
    model = _around(layer, shape)
    costs, call = _call_of(model, layer.name)
    read = {costs.names[key] for key in call.needs}
    assert ("before" in read) == reads_input
    assert (layer.name in read) == reads_output
    # Shapes and the like.
    assert call.saved - 4 * 4 * besides < 64
    gradients = [costs.gradients[key] for key in call.reads]
    assert gradients == [costs.sizes[key] for key in call.reads]


@pytest.mark.parametrize(
    ("layer", "shape", "macs"),
    [
        (layers.Dense(5), (6,), 6 * 5),
        (layers.Dense(5), (7, 6), 7 * 6 * 5),
        (layers.EinsumDense("abc,cd->abd", (None, 5)), (7, 6), 7 * 6 * 5),
        (layers.Conv1D(5, 3), (8, 6), 6 * 5 * 3 * 6),
        (layers.Conv2D(5, 3), (8, 8, 3), 36 * 5 * 9 * 3),
        (layers.Conv2D(5, 3, strides=2), (9, 9, 3), 16 * 5 * 9 * 3),
        (layers.Conv3D(5, 2), (4, 4, 4, 3), 27 * 5 * 8 * 3),
        (layers.DepthwiseConv2D(3), (8, 8, 3), 36 * 3 * 9),
        (layers.Conv2DTranspose(5, 3), (8, 8, 3), 64 * 5 * 9 * 3),
        (
            layers.SeparableConv2D(5, 3),
            (8, 8, 3),
            36 * 3 * 9 + 36 * 3 * 5,
        ),
        (
            layers.Attention(),
            None,
            2 * 7 * 7 * 6,
        ),
        (
            layers.MultiHeadAttention(2, 3),
            None,
            4 * 7 * 6 * 6 + 2 * 7 * 7 * 6,
        ),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_operations_of_products_by_their_formula(layer, shape, macs):
    if shape is None:
        inputs = keras.Input((7, 6))
        x = layers.Dense(6, name="before")(inputs)
        attended = (
            layer([x, x])
            if isinstance(layer, layers.Attention)
            else layer(x, x)
        )
        model = keras.Model(inputs, attended)
    else:
        model = _around(layer, shape)
    _, call = _call_of(model, layer.name)
    # What a product saves to run again is its operations, two a pair.
    assert call.product_flops >= 2 * 4 * macs
    assert call.product_flops < 2 * 4 * macs * 1.3
    assert call.forward_flops >= call.product_flops
    # Two products of the same size, for the input and for the weight.
    assert call.backward_flops >= 2 * 2 * 4 * macs


def test_a_gradient_that_nobody_asks_for_is_not_counted():
    inputs = keras.Input((6,))
    first, second = layers.Dense(6, name="first"), layers.Dense(5, name="two")
    model = keras.Model(inputs, second(first(inputs)))
    _, call = _call_of(model, "first")
    # The gradient of the weight only.
    assert 2 * 4 * 36 <= call.backward_flops < 2 * 2 * 4 * 36
    first.trainable = False
    _, frozen = _call_of(model, "first")
    assert (frozen.backward_flops, frozen.needs) == (0, ())
    costs, second_call = _call_of(model, "two")
    assert costs.gradients[second_call.reads[0]] == 0
    assert second_call.needs == second_call.reads


def test_dropout_keeps_a_mask_and_normalization_its_input():
    costs, call = _call_of(_around(layers.Dropout(0.5, name="d"), (64,)), "d")
    assert not call.needs
    assert 4 * 64 <= call.saved <= 4 * 64 * 4
    norm = layers.BatchNormalization(name="n")
    costs, call = _call_of(_around(norm, (8, 8, 64)), "n")
    assert [costs.names[key] for key in call.needs] == ["before"]
    assert call.saved < 5 * 64 * 4


def test_tensors_in_the_same_memory_are_one():
    inputs = keras.Input((4, 3))
    x = layers.Dense(3, name="before")(inputs)
    x = layers.Reshape((12,), name="reshape")(x)
    model = keras.Model(inputs, layers.Dense(2, name="after")(x))
    costs = _costs(model)
    reshape, after = costs.calls[1:]
    assert reshape.makes == ()
    assert after.reads == reshape.reads == costs.calls[0].makes
    assert sum(costs.sizes) == 4 * 4 * (12 + 12 + 2)


def test_an_embedding_is_not_recomputed():
    inputs = keras.Input((7,), dtype="int32")
    x = layers.Embedding(10, 6, name="embedding")(inputs)
    model = keras.Model(inputs, layers.Dense(2, name="dense")(x))
    costs = _costs(model)
    assert [call.recomputable for call in costs.calls] == [False, True]


def test_mixed_precision_halves_activations_and_keeps_weights():
    def make(policy):
        inputs = keras.Input((64,))
        x = inputs
        for _ in range(3):
            x = layers.Dense(64, activation="relu", dtype=policy)(x)
        return keras.Model(inputs, x)

    single, mixed = (
        _costs(make(policy), batch_size=256)
        for policy in ("float32", "mixed_bfloat16")
    )
    assert sum(mixed.sizes[1:]) == sum(single.sizes[1:]) / 2
    assert mixed.weight_bytes == single.weight_bytes


@pytest.mark.parametrize("layer", [layers.LSTM, layers.GRU, layers.SimpleRNN])
def test_a_recurrent_layer_costs_its_cell_for_each_step(layer):
    found = {}
    for steps in (10, 20, 30):
        model = _around(layer(8, name="rnn"), (steps, 6))
        _, found[steps] = _call_of(model, "rnn")
    for name in ("saved", "forward_flops", "backward_flops", "forward_time"):
        ten, twenty, thirty = (getattr(found[n], name) for n in found)
        assert thirty - twenty == twenty - ten > 0
        assert ten == pytest.approx(twenty / 2, rel=0.1)
    gates = {layers.LSTM: 4, layers.GRU: 3, layers.SimpleRNN: 1}[layer]
    assert found[10].forward_flops > 10 * 4 * 2 * gates * 8 * (6 + 8)
    # The states and gates of each step.
    assert found[10].saved >= 10 * 4 * 4 * gates * 8


def test_ops_take_memory_for_themselves():
    """A convolution copies its filter, max-pooling looks for maxima again."""

    def workspaces(layer):
        _, call = _call_of(_around(layer, (8, 8, 64)), layer.name)
        return call.forward_workspace, call.backward_workspace

    for filters in (64, 128):
        layer = layers.Conv2D(filters, 3, padding="same", name="conv")
        forward, backward = workspaces(layer)
        assert forward == 4 * 9 * 64 * filters
        # The gradients of input and filter come one after the other.
        assert 0 < backward <= 4 * 9 * 64 * filters
    _, backward = workspaces(layers.MaxPooling2D(name="pool"))
    # The maxima as float32, and their places as int64.
    assert backward == 4 * 4 * 4 * 64 * (4 + 8)


def test_dropout_masks_are_drawn_once_for_all_steps():
    def of_a_step(**options):
        few, many = (
            _call_of(
                _around(layers.LSTM(8, name="rnn", **options), (steps, 6)),
                "rnn",
            )[1].saved
            for steps in (10, 20)
        )
        return (many - few) / 10

    # With dropout Keras runs its four gates one by one.
    plain = of_a_step(implementation=1)
    masked = of_a_step(dropout=0.3, recurrent_dropout=0.3) - plain
    # For each gate the masked input and state instead of the state; the batch
    # is 4.
    assert masked == 4 * 4 * (4 * (6 + 8) - 8)


def test_both_ways_of_a_bidirectional_layer_count():
    _, one = _call_of(_around(layers.GRU(8, name="rnn"), (10, 6)), "rnn")
    both = layers.Bidirectional(layers.GRU(8), name="both")
    _, two = _call_of(_around(both, (10, 6)), "both")
    assert two.forward_flops == 2 * one.forward_flops
    assert two.saved == 2 * one.saved


class _Custom(keras.layers.Layer):
    def call(self, x):
        return keras.ops.sin(x) * keras.ops.cos(x)


class _Untraceable(keras.layers.Layer):
    def call(self, x):
        raise NotImplementedError("only on Tuesdays")

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


def test_a_custom_layer_is_traced():
    costs, call = _call_of(_around(_Custom(name="custom"), (64,)), "custom")
    assert costs.notes[0].startswith("The model is not compiled")
    # sin and cos for the product, x for their gradients.
    assert [costs.names[key] for key in call.needs] == ["before"]
    assert call.saved == 2 * 4 * 64 * 4


def test_what_can_not_be_traced_is_guessed_and_can_be_registered():
    model = _around(_Untraceable(name="odd"), (64,))
    costs, call = _call_of(model, "odd")
    assert "odd (NotImplementedError: only on Tuesdays)" in costs.notes[0]
    assert {costs.names[key] for key in call.needs} == {"before", "odd"}

    def rule(layer, inputs, active):
        assert active == [True]
        return cost.Traced(
            outputs=(4 * inputs[0].shape.num_elements(),),
            aliases=(None,),
            saved=123,
            forward_flops=7.0,
        )

    class Registered(_Untraceable):
        pass

    cost.register(Registered, rule)
    costs, call = _call_of(_around(Registered(name="odd"), (64,)), "odd")
    assert (call.saved, call.forward_flops) == (123, 7.0)
    with pytest.raises(TypeError, match="class of layers"):
        cost.register(Registered(), rule)
    with pytest.raises(TypeError, match="which of them are differentiated"):
        cost.register(Registered, lambda layer: None)


@pytest.mark.parametrize(
    "found",
    [
        None,
        {"outputs": ()},
        {"outputs": (4.5,)},
        {"outputs": (-4,)},
        {"aliases": (3,)},
        {"aliases": ()},
        {"needs_inputs": (1,)},
        {"needs_outputs": (-1,)},
        {"saved": -1},
        {"saved": "12"},
        {"forward_time": float("nan")},
        {"forward_flops": float("inf")},
    ],
    ids=str,
)
def test_a_rule_that_returns_no_costs_is_refused(found):
    class Odd(_Untraceable):
        pass

    right = {"outputs": (4,), "aliases": (None,)}
    cost.register(Odd, lambda *_: found and cost.Traced(**{**right, **found}))
    with pytest.raises(plan_lib.PlanError, match="Odd 'odd'.*1 outputs"):
        _costs(_around(Odd(name="odd"), (64,)))


def test_a_rule_that_fails_is_not_taken_for_a_layer_that_can_not_be_traced():
    class Failing(_Untraceable):
        pass

    def rule(layer, inputs, active):
        return inputs[5]

    cost.register(Failing, rule)
    with pytest.raises(plan_lib.PlanError, match="'odd' failed: IndexError"):
        _costs(_around(Failing(name="odd"), (64,)))


def test_finding_costs_changes_nothing():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, kernel_regularizer="l2")(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.Dropout(0.5, seed=3)(x)
    x = layers.ActivityRegularization(0.1)(x)
    x = layers.GaussianNoise(0.5)(x)
    model = keras.Model(inputs, layers.Flatten()(x))
    before = [v.numpy() for v in model.variables]
    losses = len(model.losses)
    _costs(model)
    planning.costs_of(model, batch_size=2, measure=True)
    for a, b in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(a, b.numpy())
    assert len(model.losses) == losses


def test_equal_layers_are_traced_once_and_unequal_ones_not():
    inputs = x = keras.Input((6,))
    for units in (6, 6, 6, 5):
        x = layers.Dense(units)(x)
    costs = _costs(keras.Model(inputs, x))
    flops = [call.forward_flops for call in costs.calls]
    assert flops[1] == flops[2] != flops[3]
    # No gradient flows to the model's input.
    assert costs.calls[0].backward_flops < costs.calls[1].backward_flops


def test_nested_models_and_shared_layers():
    inner_inputs = keras.Input((6,))
    shared = layers.Dense(6, name="shared")
    inner = keras.Model(inner_inputs, shared(shared(inner_inputs)), name="in")
    inputs = keras.Input((6,))
    model = keras.Model(inputs, layers.Dense(2, name="out")(inner(inputs)))
    costs = _costs(model)
    assert costs.paths == graph.read(model).paths
    # The second call has an input that a gradient flows to.
    first, second = costs.calls[:2]
    assert first.forward_flops == second.forward_flops
    assert first.makes == second.reads


def test_sizes_that_are_not_known_are_noted():
    inputs = keras.Input((None, 6))
    model = keras.Model(inputs, layers.Dense(2)(inputs))
    assert "give input_shape" in _costs(model).notes[0]
    known = _costs(model, input_shape=(9, 6))
    assert all("input_shape" not in note for note in known.notes)
    assert known.sizes[0] == 4 * 4 * 9 * 6


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        ("sgd", 0),
        (keras.optimizers.SGD(0.1, momentum=0.9), 1),
        ("adam", 2),
        ("rmsprop", 1),
    ],
)
@pytest.mark.parametrize("built", [False, True])
def test_state_of_the_optimizer(optimizer, slots, built):
    inputs = keras.Input((100,))
    x = layers.Dense(100)(inputs)
    model = keras.Model(inputs, layers.BatchNormalization()(x))
    if not isinstance(optimizer, str):
        optimizer = optimizer.from_config(optimizer.get_config())
    model.compile(optimizer, "mse")
    if built:
        model.optimizer.build(model.trainable_variables)
    costs = _costs(model)
    trained = 4 * (100 * 100 + 100 + 2 * 100)
    assert costs.gradient_bytes == trained
    assert costs.weight_bytes == trained + 4 * 2 * 100
    assert abs(costs.optimizer_bytes - slots * trained) <= 64


def test_measured_times_are_seconds_of_this_machine():
    inputs = keras.Input((256,))
    x = layers.Dense(2048, name="large")(inputs)
    x = layers.Dense(2048, name="larger")(x)
    model = keras.Model(inputs, layers.Dense(2, name="small")(x))
    lines = []
    costs = planning.costs_of(
        model, batch_size=64, measure=True, progress=lines.append
    )
    times = {call.path: call.forward_time for call in costs.calls}
    assert 0 < times["small"] < times["larger"] < 1
    assert lines
    assert "measured" in costs.notes[0]
    counted = planning.costs_of(model, batch_size=64)
    for a, b in zip(costs.calls, counted.calls, strict=True):
        assert a.product_time <= a.forward_time
        assert (a.saved, a.needs, a.forward_flops) == (
            b.saved,
            b.needs,
            b.forward_flops,
        )


def test_a_call_that_can_not_be_run_is_counted_at_the_pace_of_the_others():
    inputs = keras.Input((8,), dtype="int32")
    x = layers.Lambda(
        lambda ids: tf.reshape(tf.repeat(ids, ids[0] + 1), (-1, 8)),
        output_shape=(8,),
        name="odd",
    )(inputs)
    x = (
        layers.Embedding(3, 16, name="embedding")(inputs)
        + 0.0 * (keras.ops.cast(x, "float32")[:, :, None])
    )
    model = keras.Model(inputs, layers.Dense(4, name="dense")(x))
    counted = planning.costs_of(model, batch_size=16)
    costs = planning.costs_of(model, batch_size=16, measure=True)
    assert "can't be run: ['odd']" in " ".join(costs.notes)
    measured, count = (
        sum(
            call.forward_time + call.backward_time
            for call in each.calls
            if call.path != "odd"
        )
        for each in (costs, counted)
    )
    odd, before = (
        next(c for c in each.calls if c.path == "odd")
        for each in (costs, counted)
    )
    assert before.forward_time > 0
    assert odd.forward_time == pytest.approx(
        before.forward_time * measured / count
    )


def test_saved_bytes_are_what_the_gradient_of_the_whole_model_reads():
    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(8, 3, padding="same", name="conv")(inputs)
    x = layers.BatchNormalization(name="norm")(x)
    x = layers.ReLU(name="relu")(x)
    x = layers.MaxPooling2D(name="pool")(x)
    x = layers.Conv2D(8, 3, padding="same", name="conv2")(x)
    x = layers.Activation("gelu", name="gelu")(x)
    model = keras.Model(inputs, layers.Flatten()(x))
    costs = _costs(model, batch_size=4)
    counted = sum(
        costs.sizes[key] for key in {k for c in costs.calls for k in c.needs}
    ) + sum(call.saved for call in costs.calls)

    def forward(x):
        with keras.StatelessScope():
            return model(x, training=True)

    whole = _handed_over(forward, tf.zeros((4, 16, 16, 3)), model)
    assert counted == pytest.approx(whole, rel=0.05)


def _handed_over(forward, x, model):
    """Bytes that the gradient of the whole model reads, from one graph."""
    sizes = {}

    @tf.function
    def step(x):
        graph = tf.compat.v1.get_default_graph()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(forward(x))
        start = len(graph.get_operations())
        tape.gradient(loss, [v.value for v in model.trainable_variables])
        every = graph.get_operations()
        made = set(every[:start])
        for op in every[start:]:
            if op.type in ("Shape", "ShapeN", "ZerosLike", "OnesLike"):
                continue
            for tensor in op.inputs:
                while tensor.op.type in ("Identity", "Reshape"):
                    tensor = tensor.op.inputs[0]
                if (
                    tensor.op in made
                    and tensor.op.type not in ("Const", "ReadVariableOp")
                    and tensor.dtype.is_floating
                ):
                    sizes[tensor.name] = (
                        tensor.shape.num_elements() * tensor.dtype.size
                    )
        return loss

    step.get_concrete_function(x)
    return sum(sizes.values())
