"""Recomputation on two replicas: as the plain model on two replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tests import equality

L = keras.layers
X = np.random.RandomState(0).randn(32, 6).astype("float32")
Y = X[:, :1]


def _block(units, synchronized, seed):
    return keras.Sequential(
        [
            L.Dense(units, activation="tanh"),
            L.BatchNormalization(synchronized=synchronized),
            L.Dropout(0.5, seed=seed),
        ]
    )


def _model(wrap, synchronized):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((6,)),
            wrap(_block(8, synchronized, 1)),
            wrap(_block(8, synchronized, 2)),
            L.Dense(1),
        ]
    )


def _replicas(strategy, variables):
    """Every variable as each replica has it."""
    return [
        np.asarray(value)
        for variable in variables
        for value in strategy.experimental_local_results(variable.value)
    ]


@pytest.mark.parametrize("synchronized", [False, True])
def test_fit(strategy, synchronized):
    equality.exact_graphs()
    found = []
    for wrap in (lambda layer: layer, tfckpt.Recompute):
        with strategy.scope():
            model = _model(wrap, synchronized)
            model.compile("adam", "mse")
        history = model.fit(
            X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0
        )
        found.append(
            (history.history["loss"], _replicas(strategy, model.variables))
        )
    assert found[0][0] == found[1][0]
    for plain, ours in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_array_equal(plain, ours)


def test_custom_loop_in_eager_replicas(strategy):
    """Replicas in threads, each with its own forward and backward pass."""
    found = []
    for wrap in (lambda layer: layer, tfckpt.Recompute):
        with strategy.scope():
            model = _model(wrap, False)

        def step(x, model=model):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x, training=True) ** 2)
            return tape.gradient(loss, model.trainable_variables)

        values = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(
                X[8 * context.replica_id_in_sync_group :][:8]
            )
        )
        gradients = strategy.run(step, args=(values,))
        found.append(
            [
                np.asarray(value)
                for gradient in gradients
                for value in strategy.experimental_local_results(gradient)
            ]
            + _replicas(strategy, model.variables)
        )
    for plain, ours in zip(*found, strict=True):
        np.testing.assert_array_equal(plain, ours)
