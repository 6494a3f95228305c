"""Models that `SegmentedModel.from_model` takes, and those it refuses."""

import keras
import numpy as np
import pytest
from keras import layers

from tests import model_zoo
from tfckpt.segmented_model import SegmentedModel


class _Task(keras.Model):
    """As a KerasHub task: a Functional with methods of its own."""

    def __init__(self, units, **kwargs):
        inputs = keras.Input((2,))
        super().__init__(inputs, layers.Dense(units)(inputs), **kwargs)
        self.units = units

    @property
    def backbone(self):
        return self.layers[0]

    def train_step(self, data):
        return super().train_step(data)

    def get_config(self):
        return {"units": self.units}


class _SegmentedTask(SegmentedModel):
    backbone = _Task.backbone

    def train_step(self, data):
        return {"stepped": 1.0, **super().train_step(data)}


def test_methods_are_not_lost():
    model = _Task(3, name="task")
    with pytest.raises(TypeError) as caught:
        SegmentedModel.from_model(model)
    for part in ("'task'", "_Task", "backbone, train_step", "Recompute"):
        assert part in str(caught.value)
    ours = _SegmentedTask.from_model(model, plan=1)
    assert ours.backbone is model.backbone
    ours.compile("sgd", "mse")
    history = ours.fit(np.ones((4, 2)), np.ones((4, 3)), verbose=0)
    assert history.history["stepped"] == [1.0]


class _OnlyMade(keras.Model):
    """Says how it is made and saved, and has nothing to lose."""

    def __init__(self, units, **kwargs):
        inputs = keras.Input((2,))
        super().__init__(inputs, layers.Dense(units)(inputs), **kwargs)
        self.units = units

    def get_config(self):
        return {"units": self.units}


def test_a_constructor_is_no_method_to_lose():
    assert SegmentedModel.from_model(_OnlyMade(3)).output_shape == (None, 3)


def _unbuilt():
    return keras.Sequential([layers.Dense(2)], name="seq")


class _Subclassed(keras.Model):
    def call(self, x):
        return x


@pytest.mark.parametrize(
    ("make", "error", "parts"),
    [
        (
            lambda: _Subclassed(name="sub"),
            TypeError,
            ["'sub'", "_Subclassed", "tfckpt.Recompute"],
        ),
        (_unbuilt, ValueError, ["'seq'", "not built", "input_shape"]),
        (lambda: layers.Dense(1), TypeError, ["Dense", "tfckpt.Recompute"]),
        (lambda: "model", TypeError, ["'model'", "keras.Model"]),
    ],
)
def test_from_model_refuses(make, error, parts):
    with pytest.raises(error) as caught:
        SegmentedModel.from_model(make())
    for part in parts:
        assert part in str(caught.value)


def test_from_model_refuses_what_hangs_beside_the_graph():
    model = model_zoo.make("chain")
    model.extra = layers.Dense(2, name="beside")
    if model.extra not in model._flatten_layers():
        # Older versions of Keras don't take it for a part of the model.
        SegmentedModel.from_model(model)
        return
    with pytest.raises(TypeError, match="would lose: beside"):
        SegmentedModel.from_model(model)
    model = model_zoo.make("chain")
    model.call = lambda x, training=None, mask=None: x
    with pytest.raises(TypeError, match="would lose: call"):
        SegmentedModel.from_model(model)


def test_unbuilt_sequential_with_input_shape():
    ours = SegmentedModel.from_model(_unbuilt(), input_shape=(None, 4))
    assert ours(np.ones((3, 4), "float32")).shape == (3, 2)


def test_a_model_that_is_compiled_with_objects():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(
        keras.optimizers.Adam(0.1),
        loss=keras.losses.MeanSquaredError(),
        metrics=[keras.metrics.MeanAbsoluteError()],
    )
    x = np.ones((4, 3), "float32")
    model.fit(x, x[:, :2], verbose=0)
    segmented = SegmentedModel.from_model(model)
    assert segmented.optimizer is model.optimizer
    assert segmented.loss is model.loss
    segmented.fit(x, x[:, :2], verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 2
