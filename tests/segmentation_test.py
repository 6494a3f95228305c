"""Which plan a model ends up with, and when."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests import model_zoo
from tfckpt import plan, planners
from tfckpt.segmented_model import SegmentedModel


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        (0, ["0", "None"]),
        (-1, ["-1"]),
        (99, ["99", "15 calls"]),
        (True, ["True", "bool"]),
        (2.5, ["2.5", "float"]),
        ("sqr", ["'sqr'", "sqrt"]),
        ("dense_1", ["Did you mean ['dense_1']"]),
        ("plan.json", ["Plan.load('plan.json')"]),
        ("min_memory", ["make_plan(model, strategy='min_memory'"]),
        (["dense_99"], ["'dense_99'", "Near matches: dense_"]),
        (planners.uniform(["a", "b"], 2), ["another model", "'a'", "2 calls"]),
        (
            plan.Plan((plan.Segment(("dense_0",), kept=("dense_0",)),)),
            ["another model"],
        ),
    ],
)
def test_plans_that_cannot_be(asked, parts):
    with pytest.raises(plan.PlanError) as caught:
        SegmentedModel.from_model(model_zoo.make("chain"), plan=asked)
    for part in parts:
        assert part in str(caught.value)


def test_plan_is_settled_at_the_first_batch():
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(9, 4)(inputs)
    for _ in range(4):
        x = layers.Dense(4, activation="tanh")(x)
    model = keras.Model(inputs, layers.GlobalAveragePooling1D()(x))
    ours = SegmentedModel.from_model(model)
    assert isinstance(ours.plan, plan.Unsettled)
    assert "embedding" in str(ours.plan)
    assert "input_shape" in str(ours.plan)
    ours(np.ones((2, 7), "int32"))
    assert isinstance(ours.plan, plan.Plan)
    assert ours.plan.segments[0].boundary_bytes == 2 * 7 * 4 * 4
    earlier = SegmentedModel.from_model(model, input_shape=(2, 7))
    assert earlier.plan == ours.plan
    # Unknown sizes in a trace settle it too.
    traced = SegmentedModel.from_model(model)
    tf.function(lambda x: traced(x)).get_concrete_function(
        tf.TensorSpec([None, None], "int32")
    )
    assert traced.plan == ours.plan
    with pytest.raises(plan.PlanError, match="batch dimension"):
        SegmentedModel.from_model(model, input_shape=(7,))
    with pytest.raises(plan.PlanError, match="batch dimension"):
        SegmentedModel.from_model(model, input_shape=[(2, 7), (2, 7)])
    for shape in (5, ("a", 7), (-1, 7), (0, 7)):
        with pytest.raises(plan.PlanError, match="`input_shape` is the shape"):
            SegmentedModel.from_model(model, input_shape=shape)


def test_plan_of_a_deep_network_prefers_cheap_cuts():
    """At the cuts of a residual network one tensor is alive."""
    x = inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same")(x)
    for _ in range(8):
        y = layers.Conv2D(4, 3, padding="same")(x)
        y = layers.Activation("relu")(y)
        y = layers.Conv2D(4, 3, padding="same")(y)
        x = layers.Add()([x, y])
    ours = SegmentedModel.from_model(keras.Model(inputs, x))
    assert len(ours.plan.segments) == 6
    assert {len(s.boundary) for s in ours.plan.segments} == {1}
