"""What the loss of a micro-batch is divided by, worked out by hand."""

import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tfckpt import _compat
from tfckpt.training import losses

L = keras.layers
# Two samples of three steps; their squares are 1, 4, 9 and 16, 25, 36.
STEPS = np.array([[[1], [2], [3]], [[4], [5], [6]]], "float32")
ZEROS = np.zeros_like(STEPS)
# Leaves 1, 4 and 16.
MASK = np.array([[True, True, False], [True, False, False]])
EACH_SAMPLE = np.array([[2], [1]], "float32")
EACH_STEP = np.array([[1, 0, 2], [0, 3, 1]], "float32")


def _model(*shapes, loss="mse", kind=None, kernel=None, **options):
    """A model whose outputs are its inputs, or these times a kernel of 1."""
    inputs = [keras.Input(shape) for shape in shapes]
    layer = L.Identity
    if kind is not None:
        layer = kind
    elif kernel is not None:
        layer = functools.partial(
            L.Dense,
            1,
            use_bias=False,
            kernel_initializer="ones",
            kernel_regularizer=kernel,
        )
    outputs = [layer(name=f"out{i}")(x) for i, x in enumerate(inputs)]
    if len(shapes) == 1:
        inputs, outputs = inputs[0], outputs[0]
    model = tfckpt.SegmentedModel(inputs, outputs, plan=None)
    model.compile("sgd", loss, micro_batches=2, **options)
    return model


def _compute(model, y, y_pred, weight=None, names=None):
    return losses.compute(
        model,
        None,
        y,
        y_pred,
        weight,
        samples=tf.shape(keras.tree.flatten(y_pred)[0])[0],
        names={} if names is None else names,
    )


def _numbers(loss):
    """Each part of the loss with what it was divided by."""
    return sorted(
        (float(value), None if weight is None else float(weight))
        for value, weight in loss.targets.values()
    )


def _assert_parts(loss, expected):
    found = _numbers(loss)
    assert [w for _, w in found] == [w for _, w in expected]
    np.testing.assert_allclose(
        [value for value, _ in found],
        [value for value, _ in expected],
        rtol=1e-6,
    )


def _squares(reduction):
    return keras.losses.MeanSquaredError(reduction=reduction)


_MEAN, _SUM, _WEIGHTED = "sum_over_batch_size", "sum", "mean_with_sample_weight"
_WEIGHTS = {"none": None, "samples": EACH_SAMPLE, "steps": EACH_STEP}


@pytest.mark.parametrize("mode", ["eager", "graph of any size"])
@pytest.mark.parametrize("length", [3, None])
@pytest.mark.parametrize(
    ("reduction", "masked", "weights", "expected"),
    [
        (_MEAN, False, "none", (91 / 6, 6)),
        ("mean", False, "none", (91 / 6, 6)),
        (_MEAN, True, "none", (21 / 3, 3)),
        # Weights count, but are not divided by.
        (_MEAN, False, "samples", (105 / 6, 6)),
        (_MEAN, True, "samples", (26 / 3, 3)),
        (_MEAN, False, "steps", (130 / 6, 6)),
        # Here they are.
        (_WEIGHTED, False, "none", (91 / 6, 6)),
        (_WEIGHTED, False, "samples", (105 / 3, 3)),
        (_WEIGHTED, False, "steps", (130 / 7, 7)),
        (_WEIGHTED, True, "none", (21 / 3, 3)),
        (_WEIGHTED, True, "steps", (1 / 1, 1)),
        (_SUM, False, "none", (91, None)),
        (_SUM, True, "samples", (26, None)),
        ("none", False, "none", (91, None)),
    ],
)
def test_one_output(reduction, masked, weights, expected, length, mode):
    model = _model((length, 1), loss=_squares(reduction))
    weight = _WEIGHTS[weights]

    def compute(y_pred):
        if masked:
            _compat.set_mask(y_pred, tf.constant(MASK))
        found = _compute(model, ZEROS, y_pred, weight)
        keras_loss = model.compute_loss(
            y=ZEROS, y_pred=y_pred, sample_weight=weight
        )
        return found.targets, found.total, tf.reduce_mean(keras_loss)

    if mode != "eager":
        compute = tf.function(
            compute, input_signature=[tf.TensorSpec([None, length, 1])]
        )
    targets, total, keras_loss = compute(tf.constant(STEPS))
    _assert_parts(losses.Loss(targets, []), [expected])
    # What is logged is what Keras logs.
    np.testing.assert_allclose(total, keras_loss, rtol=1e-6)


def test_ignored_classes():
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=1
    )
    classes = np.array([[0, 1, 2], [1, 1, 0]])
    found = _compute(_model((3, 3), loss=loss), classes, tf.zeros([2, 3, 3]))
    _assert_parts(found, [(math.log(3), 3)])


def test_a_loss_of_the_whole_batch_is_one_of_samples():
    def largest(y_true, y_pred):
        return tf.reduce_max(y_pred - y_true)

    model = _model((3, 1), loss=largest)
    with pytest.warns(UserWarning, match="'largest' gives one number"):
        found = _compute(model, ZEROS, tf.constant(STEPS))
    _assert_parts(found, [(6, 2)])


def test_half_precision_counts_far():
    y_pred = tf.ones([70_001, 1], tf.float16)
    found = _compute(_model((1,)), np.zeros([70_001, 1]), y_pred)
    _assert_parts(found, [(1, 70_001)])


# Two outputs: the second is of one number a sample, whose squares are 1, 4.
TWO = [tf.constant(STEPS), tf.constant([[1.0], [2.0]])]
NONE = [ZEROS, np.zeros([2, 1], "float32")]


@pytest.mark.parametrize(
    ("shape", "reductions", "expected"),
    [
        # Elements are samples times a number: one denominator, samples.
        ((3, 1), (_MEAN, _MEAN), [(0.3 * 91 / 6 + 2 * 5 / 2, 2)]),
        # But not where the number may change.
        (
            (None, 1),
            (_MEAN, _MEAN),
            [(0.3 * 91 / 6, 6), (2 * 5 / 2, 2)],
        ),
        ((3, 1), (_SUM, _MEAN), [(2 * 5 / 2, 2), (0.3 * 91, None)]),
        ((3, 1), (_SUM, _SUM), [(0.3 * 91 + 2 * 5, None)]),
    ],
)
def test_two_outputs(shape, reductions, expected):
    model = _model(
        shape, (1,), loss=[*map(_squares, reductions)], loss_weights=[0.3, 2.0]
    )
    found = _compute(model, NONE, TWO)
    _assert_parts(found, sorted(expected))
    total = sum(value for value, _ in expected)
    np.testing.assert_allclose(found.total, total, rtol=1e-6)


@pytest.mark.parametrize("same", [True, False])
def test_masks_of_two_outputs(same):
    """The same mask is the same denominator, an equal one need not stay so."""
    outputs = [tf.identity(STEPS), tf.identity(2 * STEPS)]
    mask = tf.constant(MASK)
    for each in outputs:
        _compat.set_mask(each, mask if same else tf.identity(mask))
    model = _model((3, 1), (3, 1), loss=["mse", "mse"])
    found = _compute(model, [ZEROS, ZEROS], outputs)
    expected = [(7 + 28, 3)] if same else [(7, 3), (28, 3)]
    _assert_parts(found, expected)


@pytest.mark.parametrize(
    ("reduction", "masked", "expected"),
    [
        # Weight regularizers go with any denominator.
        (_MEAN, False, [(91 / 6 + 0.5, 6)]),
        (_MEAN, True, [(7 + 0.5, 3)]),
        # A sum is never divided: they would count once a micro-batch.
        (_SUM, False, [(0.5, 2), (91, None)]),
    ],
)
def test_weight_regularizers(reduction, masked, expected):
    kernel = keras.regularizers.L2(0.5)
    model = _model((3, 1), loss=_squares(reduction), kernel=kernel)
    y_pred = model(STEPS)
    if masked:
        _compat.set_mask(y_pred, tf.constant(MASK))
    _assert_parts(_compute(model, ZEROS, y_pred), expected)


class _Adds(L.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(x))
        return x + 0.0


@pytest.mark.parametrize(
    ("reduction", "masked", "expected"),
    [
        (_MEAN, False, [(91 / 6 + 3.5, 2)]),
        (_MEAN, True, [(3.5, 2), (7, 3)]),
        (_SUM, False, [(3.5, 2), (91, None)]),
    ],
)
def test_added_losses_are_means_over_samples(reduction, masked, expected):
    model = _model((3, 1), loss=_squares(reduction), kind=_Adds)
    y_pred = model(STEPS)
    if masked:
        _compat.set_mask(y_pred, tf.constant(MASK))
    _assert_parts(_compute(model, ZEROS, y_pred), expected)


def test_a_loss_of_the_users_own():
    class Own(tfckpt.AccumulatingTrainer, keras.Model):
        def compute_loss(self, x, y, y_pred, sample_weight, training=True):
            return tf.reduce_sum(y_pred - y) / 5.0

        def loss_denominator(self, x, y, y_pred, sample_weight):
            return 5.0

    model = Own()
    model.compile("sgd", micro_batches=2)
    _assert_parts(_compute(model, ZEROS, tf.constant(STEPS)), [(21 / 5, 5)])


def test_denominators_stay_as_they_were_found():
    """Of one output they may change their kind, of two they are refused."""
    model, names = _model((3, 1), loss=_squares(_WEIGHTED)), {}
    (first,) = _compute(model, ZEROS, STEPS, names=names).targets
    found = _compute(model, ZEROS, STEPS, EACH_STEP, names=names)
    assert [*found.targets] == [first]
    _assert_parts(found, [(130 / 7, 7)])

    model, names = _model((3, 1), (1,), loss=[_squares(_WEIGHTED), "mse"]), {}
    _compute(model, NONE, TWO, names=names)
    with pytest.raises(ValueError, match="output 0 is divided by 'weights"):
        _compute(model, NONE, TWO, [EACH_STEP, None], names=names)
