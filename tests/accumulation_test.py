"""`GradientAccumulator`: values worked out by hand after every micro-step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests import equality
from tfckpt import accumulated_gradients, distribute


def _values(tensors):
    return [None if x is None else np.asarray(x).tolist() for x in tensors]


def _stepper(accumulator, mode):
    def step(gradient, weight):
        accumulator.add([gradient, None], weight)
        return (
            accumulator.micro_steps,
            accumulator.is_update_step(3),
            accumulator.result()[0],
        )

    return equality.compiled(step, mode)


@pytest.mark.parametrize("mode", equality.MODES)
def test_values_after_every_micro_step(mode):
    variables = [tf.Variable([0.0, 0.0]), tf.Variable(0.0)]
    accumulator = tfckpt.GradientAccumulator(variables)
    step = _stepper(accumulator, mode)
    # Means over 2, 1 and 5 samples; sums 8, 11, 26 and 0, 3, -7.
    for gradient, weight, expected in (
        ([4.0, 0.0], 2.0, [4.0, 0.0]),
        ([3.0, 3.0], 1.0, [11 / 3, 1.0]),
        ([3.0, -2.0], 5.0, [26 / 8, -7 / 8]),
    ):
        count, full, found = step(tf.constant(gradient), tf.constant(weight))
        np.testing.assert_allclose(found, expected, rtol=1e-7)
    assert (int(count), bool(full)) == (3, True)
    assert accumulator.result()[1] is None
    accumulator.clear()
    count, full, found = step(tf.constant([1.0, 2.0]), tf.constant(7.0))
    assert (int(count), bool(full)) == (1, False)
    np.testing.assert_allclose(found, [1.0, 2.0])


def test_sums_are_not_divided():
    variable = tf.Variable([0.0])
    accumulator = tfckpt.GradientAccumulator([variable])
    for value in (2.0, 5.0):
        accumulator.add([tf.constant([value])], weight=None)
    assert _values(accumulator.result()) == [[7.0]]


def test_denominators_are_kept_apart():
    """(1*4 + 3*2) / 4 of one, (10*5 + 20*1) / 6 of the other, 3 + 4 as is."""
    accumulator = tfckpt.GradientAccumulator([tf.Variable(0.0)])
    for samples, tokens, total in (
        ((4.0, 1.0), (10.0, 5.0), 3.0),
        ((2.0, 3.0), (20.0, 1.0), 4.0),
    ):
        accumulator.add(
            {
                "samples": [tf.constant(samples[0])],
                "tokens": [tf.constant(tokens[0])],
                "sum": [tf.constant(total)],
            },
            {"samples": samples[1], "tokens": tokens[1], "sum": None},
        )
    expected = 10 / 4 + 70 / 6 + 7
    np.testing.assert_allclose(accumulator.result()[0], expected, rtol=1e-6)
    # A gradient and a sum for each of three; weights and counter.
    assert accumulator.bytes == 3 * 4 + 2 * 4 + 8


def test_low_precision_is_accumulated_in_float32():
    """In bfloat16 299 additions of 1 give 256."""
    for dtype in ("bfloat16", "float16"):
        variable = keras.Variable(np.zeros(1), dtype=dtype)
        accumulator = tfckpt.GradientAccumulator([variable])
        for _ in range(299):
            accumulator.add([tf.ones(1, dtype)], weight=None)
        (found,) = accumulator.result()
        assert found.dtype == tf.float32
        assert _values([found]) == [[299.0]]


def test_float64_stays_float64():
    accumulator = tfckpt.GradientAccumulator(
        [tf.Variable(0.0, dtype="float64")]
    )
    for _ in range(3):
        accumulator.add([tf.constant(0.1, "float64")], weight=0.1)
    assert float(accumulator.result()[0]) == pytest.approx(0.1, abs=1e-16)


@pytest.mark.parametrize("mode", equality.MODES)
def test_indexed_slices(mode):
    table = tf.Variable(tf.zeros([5, 2]))
    accumulator = tfckpt.GradientAccumulator([table])

    def step(rows, values, weight):
        accumulator.add([tf.IndexedSlices(values, rows)], weight)

    step = equality.compiled(step, mode)
    step(tf.constant([1, 1]), tf.constant([[1.0, 2.0], [3.0, 4.0]]), 2.0)
    step(tf.constant([4, 1]), tf.constant([[1.0, 1.0], [1.0, 1.0]]), 1.0)
    expected = np.zeros([5, 2])
    expected[1], expected[4] = [3.0, 13 / 3], [1 / 3, 1 / 3]
    np.testing.assert_allclose(accumulator.result()[0], expected, rtol=1e-6)


@pytest.mark.parametrize("mode", equality.MODES)
def test_where_false_adds_nothing_of_nan(mode):
    accumulator = tfckpt.GradientAccumulator([tf.Variable(0.0)])

    def step(gradient, weight, where):
        accumulator.add([gradient], weight, where=where)

    step = equality.compiled(step, mode)
    for value, weight, where in (
        (2.0, 1.0, True),
        (np.nan, np.nan, False),
        (np.inf, 3.0, False),
        (5.0, 2.0, True),
    ):
        step(tf.constant(value), tf.constant(weight), tf.constant(where))
    assert int(accumulator.micro_steps) == 2
    assert _values(accumulator.result()) == [4.0]


def test_clear_empties_what_is_nan():
    accumulator = tfckpt.GradientAccumulator([tf.Variable(0.0)])
    accumulator.add([tf.constant(np.nan)], 1.0)
    assert np.isnan(_values(accumulator.result())[0])
    accumulator.clear()
    accumulator.add([tf.constant(3.0)], 1.0)
    assert _values(accumulator.result()) == [3.0]


def test_without_weight_the_gradient_is_zero():
    """As Keras' own losses are when a mask leaves nothing."""
    accumulator = tfckpt.GradientAccumulator([tf.Variable(0.0)])
    accumulator.add([tf.constant(0.0)], 0.0)
    assert _values(accumulator.result()) == [0.0]


def test_a_loop_of_ones_own_equals_the_big_batch():
    random = np.random.default_rng(0)
    x = random.normal(size=(12, 3)).astype("float32")
    weights = tf.Variable(tf.ones([3, 1]))

    def gradient(part):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(part @ weights))
        return tape.gradient(loss, [weights])

    accumulator = tfckpt.GradientAccumulator([weights])

    @tf.function
    def step(part):
        accumulator.add(gradient(part), weight=tf.shape(part)[0])

    for start, stop in ((0, 5), (5, 8), (8, 12)):
        step(tf.constant(x[start:stop]))
    np.testing.assert_allclose(
        accumulator.result()[0], gradient(x)[0], rtol=1e-6
    )


def test_checkpoints_hold_the_window():
    def make():
        return tfckpt.GradientAccumulator([tf.Variable([0.0, 0.0])])

    first = make()
    first.add([tf.constant([1.0, 2.0])], 3.0)
    first.add([tf.constant([4.0, 8.0])], 1.0)
    path = tf.train.Checkpoint(accumulator=first).write(
        "ram://accumulation_test/checkpoint"
    )
    second = make()
    tf.train.Checkpoint(accumulator=second).read(path)
    assert int(second.micro_steps) == 2
    assert _values(second.result()) == [[1.75, 3.5]]
    second.add([tf.constant([0.0, 0.0])], 4.0)
    assert _values(second.result()) == [[7 / 8, 14 / 8]]


def test_other_variables_begin_a_new_window():
    variable, other = tf.Variable(0.0), tf.Variable([0.0, 0.0])
    sums = accumulated_gradients.AccumulatedGradients([variable])
    sums.add_micro_batch({"a": [tf.constant(1.0)]}, {"a": 1.0})
    sums.build([variable])
    assert int(sums.micro_steps) == 1
    sums.build([other])
    assert int(sums.micro_steps) == 0
    sums.add_micro_batch({"a": [tf.constant([1.0, 2.0])]}, {"a": 1.0})
    assert _values(sums.totals()[0]) == [[1.0, 2.0]]


@pytest.mark.parametrize(
    ("gradients", "weight", "match"),
    [
        ([1.0, None], 1.0, "its 1 variables.*Received: 2"),
        (
            {"a": [1.0], "b": [2.0, 3.0]},
            {"a": 1, "b": 1},
            "2 gradients for 'b'",
        ),
        ({"a": [1.0]}, 1.0, "a weight for each.*\\['a'\\], weights of 1.0"),
        ({"a": [1.0], "b": [1.0]}, {"a": 1.0}, "a weight for each denominator"),
        ([[1.0, 2.0]], 1.0, "shape.*Received: \\(2,\\)"),
    ],
)
def test_bad_gradients_change_nothing(gradients, weight, match):
    accumulator = tfckpt.GradientAccumulator([tf.Variable(0.0)])
    accumulator.add([tf.constant(1.0)], 1.0)

    def tensors(each):
        return [None if x is None else tf.constant(x) for x in each]

    if isinstance(gradients, dict):
        gradients = {name: tensors(each) for name, each in gradients.items()}
    else:
        gradients = tensors(gradients)
    with pytest.raises(ValueError, match=match):
        accumulator.add(gradients, weight)
    assert int(accumulator.micro_steps) == 1
    assert _values(accumulator.result()) == [1.0]


def _two_denominators():
    """Sums of two denominators: what was divided by each, a zero, a None."""
    variables = [tf.Variable(0.0), tf.Variable(0.0), tf.Variable(0.0)]
    accumulator = tfckpt.GradientAccumulator(variables)
    zero, one = tf.constant(0.0), tf.constant(1.0)
    accumulator.add(
        {"samples": [one, zero, None], "sum": [3 * one, None, None]},
        {"samples": 2.0, "sum": None},
    )
    return accumulator


def test_a_checkpoint_knows_denominators_and_zeros():
    """A new process asks for none of them before it ends the window."""
    first = _two_denominators()
    assert _values(first.result()) == [4.0, 0.0, None]
    path = tf.train.Checkpoint(a=first).write("ram://accumulation_test/names")
    again = tfckpt.GradientAccumulator([tf.Variable(0.0) for _ in range(3)])
    tf.train.Checkpoint(a=again).read(path)
    assert _values(again.result()) == [4.0, 0.0, None]


def test_a_file_knows_denominators_and_zeros(tmp_path):
    class Model(keras.Model):
        def __init__(self, accumulator):
            super().__init__()
            self.accumulator = accumulator
            self.dense = keras.layers.Dense(1)
            self.dense.build([None, 1])
            self.built = True

    path = tmp_path / "a.weights.h5"
    Model(_two_denominators()).save_weights(path)
    again = tfckpt.GradientAccumulator([tf.Variable(0.0) for _ in range(3)])
    Model(again).load_weights(path)
    assert int(again.micro_steps) == 1
    assert _values(again.result()) == [4.0, 0.0, None]


def test_a_checkpoint_of_other_variables_is_refused():
    path = tf.train.Checkpoint(a=_two_denominators()).write(
        "ram://accumulation_test/other"
    )
    other = tfckpt.GradientAccumulator([tf.Variable([0.0, 0.0])])
    other.add([tf.constant([1.0, 2.0])], 1.0)
    with pytest.raises(ValueError, match="accumulated for other variables"):
        tf.train.Checkpoint(a=other).read(path)
    assert _values(other.result()) == [[1.0, 2.0]]


def test_replicas_are_added_up_and_saved_as_one(strategy):
    def make():
        with strategy.scope():
            accumulator = tfckpt.GradientAccumulator([tf.Variable([0.0])])
            accumulator.build()
        return accumulator

    def add(accumulator):
        context = tf.distribute.get_replica_context()
        place = tf.cast(context.replica_id_in_sync_group, tf.float32)
        # 10 of 1 sample; 20 of 3.
        accumulator.add([tf.reshape(10 + 10 * place, [1])], 1 + 2 * place)

    def result(accumulator):
        found = strategy.run(lambda: accumulator.result()[0])
        return [float(x[0]) for x in strategy.experimental_local_results(found)]

    first = make()
    strategy.run(lambda: add(first))
    assert result(first) == [17.5, 17.5]
    path = tf.train.Checkpoint(a=first).write("ram://accumulation_test/two")
    alone = tfckpt.GradientAccumulator([tf.Variable([0.0])])
    tf.train.Checkpoint(a=alone).read(path)
    assert int(alone.micro_steps) == 1
    assert _values(alone.result()) == [[17.5]]
    again = make()
    tf.train.Checkpoint(a=again).read(path)
    assert result(again) == [17.5, 17.5]


def test_an_optimizer_in_another_reduces_no_more(strategy):
    """Each replica's gradient is 1, so that a step of SGD is -1."""

    def make(wrap):
        with strategy.scope():
            variable = tf.Variable(0.0)
            optimizer = wrap(keras.optimizers.SGD(1.0))
            accumulator = tfckpt.GradientAccumulator([variable])
            optimizer.build([variable])
            accumulator.build()
        return variable, optimizer, accumulator

    def step(variable, optimizer, accumulator):
        gradient = tf.ones([]) * getattr(optimizer, "initial_scale", 1.0)
        accumulator.add([gradient], 1.0)
        gradients = accumulator.result()
        distribute.apply_reduced(optimizer, gradients, [variable])

    for wrap in (
        lambda inner: inner,
        lambda inner: keras.optimizers.LossScaleOptimizer(
            inner, initial_scale=8.0
        ),
        lambda inner: keras.optimizers.MultiOptimizer(lambda _: inner),
    ):
        made = make(wrap)
        strategy.run(step, made)
        assert float(tf.convert_to_tensor(made[0])) == -1.0
