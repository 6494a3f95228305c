"""Segments as they run: what they compute again, in which order."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfckpt import plan
from tfckpt.segmented_model import SegmentedModel


class _Logs(layers.Layer):
    """Writes its name down whenever it is called, and computes something."""

    log: list = []  # noqa: RUF012

    def call(self, x):
        if tf.executing_eagerly():
            self.log.append(self.name)
        return keras.ops.tanh(x)


def _logging_chain(count):
    x = inputs = keras.Input((2,))
    for i in range(count):
        x = _Logs(name=str(i))(x)
    return keras.Model(inputs, x)


def _logged(model, x=None):
    """Returns names called in the forward and in the backward pass."""
    x = tf.ones([1, 2]) if x is None else x
    _Logs.log.clear()
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = model(x)
    forward = " ".join(_Logs.log)
    _Logs.log.clear()
    tape.gradient(y, x)
    return forward, " ".join(_Logs.log)


@pytest.mark.parametrize(
    ("asked", "backward"),
    [
        (None, ""),
        (1, ""),
        (2, "0 1 2 3"),
        (4, "4 5 2 3 0 1"),
        (8, "6 5 4 3 2 1 0"),
        (["1", "6"], "2 3 4 5 6 0 1"),
        ("sqrt", "3 4 5 0 1 2"),
    ],
)
def test_order_of_recomputation(asked, backward):
    model = SegmentedModel.from_model(_logging_chain(8), plan=asked)
    assert _logged(model) == ("0 1 2 3 4 5 6 7", backward)


def test_a_given_plan_says_what_is_recomputed():
    given = plan.Plan(
        (
            plan.Segment(("0", "1"), recomputed=False),
            plan.Segment(("2",)),
            plan.Segment(("3",)),
        )
    )
    model = SegmentedModel.from_model(_logging_chain(4), plan=given)
    assert model.plan == given
    assert _logged(model)[1] == "3 2"


def test_segments_inside_a_segment_are_recomputed_in_their_turn():
    calls = [str(i) for i in range(8)]
    inner = (
        plan.Segment(calls[:2]),
        plan.Segment(calls[2:4]),
        plan.Segment(calls[4:6], recomputed=False),
    )
    given = plan.Plan(
        (
            plan.Segment(calls[:6], segments=inner),
            plan.Segment(calls[6:], recomputed=False),
        )
    )
    model = SegmentedModel.from_model(_logging_chain(8), plan=given)
    again = "0 1 2 3 4 5"
    assert _logged(model) == ("0 1 2 3 4 5 6 7", f"{again} 2 3 0 1")
    assert model.plan == plan.Plan.from_json(model.plan.to_json())


def test_inside_another_model_the_last_segment_is_recomputed():
    inner = SegmentedModel.from_model(_logging_chain(4), plan=2)
    inputs = keras.Input((2,))
    outer = keras.Model(inputs, layers.Identity()(inner(inputs)))
    assert _logged(outer) == ("0 1 2 3", "2 3 0 1")
    assert _logged(inner) == ("0 1 2 3", "0 1")
    assert _logged(keras.Sequential([inner, layers.Identity()]))[1] == "2 3 0 1"


def test_nothing_is_recomputed_when_nothing_records():
    model = SegmentedModel.from_model(_logging_chain(4), plan=2)
    _Logs.log.clear()
    model(tf.ones([1, 2]))
    assert " ".join(_Logs.log) == "0 1 2 3"


def test_what_a_segment_does_not_use_passes_it_by():
    """In segment "2 3" nothing of the skip is an argument or output."""
    x = inputs = keras.Input((2,))
    x = early = _Logs(name="0")(x)
    for i in range(1, 4):
        x = _Logs(name=str(i))(x)
    model = keras.Model(inputs, x + early)
    segmented = SegmentedModel.from_model(model, plan=["0", "1", "2", "3"])
    parts = segmented._segmentation._parts
    assert [len(part.arguments) for part in parts] == [1, 1, 1, 1, 2]
    # "1" reads the skip too: it goes through.
    assert [len(part.outputs) for part in parts] == [1, 2, 1, 1, 1]
    assert _logged(segmented)[1] == "3 2 1 0"


def test_a_layer_that_declares_another_dtype_than_it_returns():
    class Liar(layers.Layer):
        def call(self, x):
            return keras.ops.cast(x, "int32")

        def compute_output_shape(self, shape):
            return shape

    within = keras.Input((3,))
    core = keras.Model(within, layers.Dense(3)(within), name="core")
    x = keras.Input((3,))
    model = keras.Model(x, core(Liar()(x)))
    ours = SegmentedModel.from_model(model, plan=2)
    with pytest.raises(ValueError, match="'core'.*int32.*compute_output_spec"):
        ours(np.ones((2, 3), "float32"))


def test_an_error_in_a_nested_model_leaves_no_context_behind():
    class Fails(layers.Layer):
        def call(self, x):
            if not isinstance(x, keras.KerasTensor) and tf.is_tensor(x):
                raise RuntimeError("on purpose")
            return x

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, x.dtype)

    within = keras.Input((3,))
    core = keras.Model(within, Fails()(within), name="core")
    x = keras.Input((3,))
    ours = SegmentedModel.from_model(keras.Model(x, core(x)), plan=1)
    with pytest.raises(RuntimeError, match="on purpose"):
        ours.call(np.ones((2, 3), "float32"))
    assert layers.Dropout(0.5)(np.ones(2)).shape == (2,)
    assert (
        _logged(SegmentedModel.from_model(_logging_chain(2), plan=2))[1] == "0"
    )
