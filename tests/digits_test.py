"""The main job, 50 steps of `fit`, to the same numbers as without tfckpt."""

import numpy as np
import pytest

from tfckpt import memory

_STEPS = 50


def train(plan, mode, folder):
    """Runs in a process of its own: losses, and all variables in a file.

    Grappler rewrites the two programs differently, and TensorFlow adds up in
    the order in which its threads come, in a plain model too.
    """
    import keras
    import tensorflow as tf

    from examples import train_digits

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": True}
    )
    keras.utils.set_random_seed(0)
    (images, labels), _ = train_digits.load_data("digits")
    model = train_digits.build_model(images.shape[1:], depth=6, plan=plan)
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=mode == "xla",
        run_eagerly=mode == "eager",
    )
    losses = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(logs["loss"])
    )
    model.fit(
        images[: 16 * _STEPS],
        labels[: 16 * _STEPS],
        batch_size=16,
        shuffle=False,
        verbose=0,
        callbacks=[record],
    )
    path = f"{folder}/{plan}-{mode}.npz"
    np.savez(path, *[v.numpy() for v in model.variables])
    return losses, path


@pytest.mark.parametrize("mode", ["graph", "xla", "eager"])
def test_fifty_steps(mode, tmp_path):
    (plain, plain_file), (ours, our_file) = (
        memory.measure_in_process(train, plan, mode, str(tmp_path))
        for plan in (None, "sqrt")
    )
    assert len(plain) == _STEPS
    with np.load(plain_file) as expected, np.load(our_file) as actual:
        assert len(expected.files) > 50
        if mode == "xla":
            np.testing.assert_allclose(ours, plain, rtol=1e-3)
            return
        assert ours == plain
        for name in expected.files:
            np.testing.assert_array_equal(actual[name], expected[name], name)
