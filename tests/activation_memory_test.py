"""The memory of the process falls, in eager mode and in a graph."""

import pytest

from tfckpt import memory


def measure(mode, method, layers=16, width=512, batch_size=2048):
    """Peak bytes of a step above weights and input, in this process."""
    import keras
    import tensorflow as tf

    import tfckpt

    wrap = tfckpt.recompute if method == "tfckpt" else lambda fn: fn
    chain = [keras.layers.Dense(width, "tanh") for _ in range(layers)]
    for layer in chain:
        layer.build((None, width))
    weights = [v.value for layer in chain for v in layer.trainable_variables]

    def segment(start):
        def run(x):
            for layer in chain[start : start + 4]:
                x = layer(x)
            return x

        return run if start + 4 == layers else wrap(run)

    segments = [segment(start) for start in range(0, layers, 4)]

    def step(x):
        with tf.GradientTape() as tape:
            for each in segments:
                x = each(x)
            loss = tf.reduce_mean(x**2)
        for weight, gradient in zip(
            weights, tape.gradient(loss, weights), strict=True
        ):
            weight.assign_sub(0.1 * gradient)
        return loss

    if mode == "graph":
        step = tf.function(step)
    x = tf.random.stateless_normal([batch_size, width], [0, 1])
    with memory.process_peak() as peak:
        step(x)
    return peak.bytes


@pytest.mark.alone
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_peak_falls(mode):
    plain, ours, small = (
        memory.measure_in_process(measure, mode, *arguments)
        for arguments in (
            ("none",),
            ("tfckpt",),
            ("none", 16, 512, 1),
        )
    )
    # 16 outputs of 4 MiB against 3 boundaries and one segment of 4.
    assert (ours - small) / (plain - small) < 0.65
