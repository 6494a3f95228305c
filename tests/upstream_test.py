"""The faults of TensorFlow and Keras that tfckpt is there for.

Each test shows a fault as it is today. One that fails tells that upstream has
mended it: the text in the documentation then needs a look, the tests of
tfckpt stay.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

X = tf.constant(np.random.RandomState(0).randn(8, 6), tf.float32)


def _gradients(fn, sources):
    with tf.GradientTape() as tape:
        tape.watch([s for s in sources if not isinstance(s, tf.Variable)])
        y = tf.reduce_sum(tf.cos(fn(X)))
    return tape.gradient(y, sources)


def test_dropout_gets_another_mask():
    gradients = []
    for recompute in (lambda f: f, tf.recompute_grad):
        dropout = keras.layers.Dropout(0.5, seed=1)
        fn = recompute(lambda x, layer=dropout: layer(x, training=True))
        gradients += _gradients(fn, [X])
    assert np.abs(gradients[0] - gradients[1]).max() > 0.1


def test_batch_normalization_moves_twice():
    means = []
    for recompute in (lambda f: f, tf.recompute_grad):
        norm = keras.layers.BatchNormalization()
        norm.build((None, 6))
        fn = recompute(lambda x, layer=norm: layer(x, training=True))
        _gradients(fn, [X])
        means.append(norm.moving_mean.numpy())
    assert np.abs(means[1] - means[0]).max() > 1e-3


def test_captured_tensor_gets_no_gradient():
    y = tf.constant(2.0)
    assert _gradients(lambda x: x * y, [y])[0] is not None
    assert _gradients(tf.recompute_grad(lambda x: x * y), [y])[0] is None


def test_unconnected_weight_gets_zero():
    used, unused = tf.Variable(1.0), tf.Variable(2.0)

    def fn(x):
        unused.read_value()
        return x * used

    assert _gradients(fn, [unused])[0] is None
    assert _gradients(tf.recompute_grad(fn), [unused])[0] == 0.0


def test_embedding_gradient_becomes_dense():
    table = tf.Variable(tf.ones([10, 4]))

    def fn(x):
        return tf.gather(table, tf.cast(x[0, :2] > 0, "int32"))

    assert isinstance(_gradients(fn, [table])[0], tf.IndexedSlices)
    assert isinstance(_gradients(tf.recompute_grad(fn), [table])[0], tf.Tensor)


def test_boolean_argument_fails_in_a_graph():
    fn = tf.recompute_grad(lambda x, mask: tf.where(mask, x, 0.0))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = fn(x, x > 0)
        return tape.gradient(y, x)

    with pytest.raises((TypeError, ValueError)):
        step(X)


def test_remat_scope_fails_in_fit():
    if not hasattr(keras, "RematScope"):
        pytest.skip("this version of Keras has no RematScope")
    with keras.RematScope("full"):
        layer = keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((6,)), layer])
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(Exception, match="keyword|kwargs|arguments"):
        model.fit(X, X[:, :1], verbose=0)
