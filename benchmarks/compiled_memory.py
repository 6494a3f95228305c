"""The memory of a training step as the compilers of CPU, TPU and GPU plan it.

Prints what the step takes without recomputation, with `tf.recompute_grad`
where that can be applied, and with tfckpt. No accelerator is needed, but
`pip install "tfckpt[compile]"` for all targets except "cpu".

    python benchmarks/compiled_memory.py
    python benchmarks/compiled_memory.py --model=resnet50 --targets=cpu,v5e

The step returns the gradients of all weights. What counts as activation
memory are the executable's temporaries. XLA:CPU holds the gradients among
its results or its temporaries as it sees fit, so there it is everything but
the weights and as much again for their gradients.
"""

import math
import time

import keras
import rich.console
import rich.table
import tensorflow as tf
from absl import app, flags

import tfckpt
from tfckpt import memory

_METHODS = ("none", "recompute_grad", "tfckpt")


def define_flags(values=flags.FLAGS):
    options = {"flag_values": values}
    flags.DEFINE_enum(
        "model",
        "chain",
        ["chain", "resnet50", "transformer"],
        "What is trained.",
        **options,
    )
    flags.DEFINE_list(
        "targets",
        ["cpu", "v5e", "a100-40gb"],
        f"Devices: {', '.join(memory.targets())}, or the path of a GPU's "
        "description.",
        **options,
    )
    flags.DEFINE_multi_enum(
        "method",
        list(_METHODS),
        _METHODS,
        "How; tf.recompute_grad fits the chain only.",
        **options,
    )
    for name, default, what in (
        ("batch_size", None, "Examples; 4096 for the chain, 16, 8."),
        ("image_size", 96, "Height and width of ResNet50's images."),
        ("length", 512, "Tokens of the transformer's sequences."),
        ("width", None, "Units: 1024 for the chain, 256 for the transformer."),
        ("depth", None, "Layers of the chain (36), blocks (12)."),
        ("segments", 6, "Segments of the chain."),
    ):
        flags.DEFINE_integer(name, default, what, lower_bound=1, **options)
    flags.DEFINE_string(
        "plan",
        "sqrt",
        "How a Keras model is cut: sqrt, or a number of segments.",
        **options,
    )


def chain_step(
    method, *, depth=36, width=1024, batch_size=4096, segments=6, keep_last=True
):
    """Returns a step of Dense layers in equal segments, and its weights."""
    layers = [
        keras.layers.Dense(width, activation="tanh") for _ in range(depth)
    ]
    for layer in layers:
        layer.build([None, width])
    size = -(-depth // segments)

    def segment(part):
        def run(x):
            for layer in part:
                x = layer(x)
            return x

        return run

    functions = [
        segment(layers[start : start + size]) for start in range(0, depth, size)
    ]
    wrap = {
        "none": lambda function: function,
        "recompute_grad": tf.recompute_grad,
        "tfckpt": tfckpt.recompute,
    }[method]
    last = len(functions) - keep_last
    functions = [wrap(each) for each in functions[:last]] + functions[last:]
    weights = [weight for layer in layers for weight in layer.weights]

    def step(x):
        with tf.GradientTape() as tape:
            for function in functions:
                x = function(x)
            loss = tf.reduce_mean(x**2)
        return tape.gradient(loss, [weight.value for weight in weights])

    return step, [tf.TensorSpec([batch_size, width])], weights


def resnet50(image_size=96):
    return keras.applications.ResNet50(
        weights=None, input_shape=(image_size, image_size, 3), classes=10
    )


def transformer(*, depth=12, width=256, length=512, heads=8, words=1000):
    """Returns a classifier of pre-normalized encoder blocks."""
    inputs = keras.Input([length], dtype="int32")
    x = keras.layers.Embedding(words, width)(inputs)
    for _ in range(depth):
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.MultiHeadAttention(heads, width // heads)(y, y)
        x = keras.layers.Add()([x, y])
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(4 * width, activation="gelu")(y)
        y = keras.layers.Dense(width)(y)
        x = keras.layers.Add()([x, y])
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(10, activation="softmax")(x))


def model_step(model, method, *, batch_size, plan="sqrt"):
    """Returns a classifier's step, its inputs and its weights."""
    if method == "recompute_grad":
        raise app.UsageError("tf.recompute_grad fits --model=chain only.")
    inputs = model.inputs[0]
    if method == "tfckpt":
        model = tfckpt.SegmentedModel.from_model(model, plan=plan)
    loss_of = keras.losses.SparseCategoricalCrossentropy()

    def step(x, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(x, training=True))
        weights = [weight.value for weight in model.trainable_variables]
        return tape.gradient(loss, weights)

    specs = [
        tf.TensorSpec([batch_size, *inputs.shape[1:]], inputs.dtype),
        tf.TensorSpec([batch_size], "int32"),
    ]
    return step, specs, model.weights


def make_step(options, method):
    """Returns a step, the specifications of its inputs, and the weights."""
    if options.model == "chain":
        return chain_step(
            method,
            depth=options.depth or 36,
            width=options.width or 1024,
            batch_size=options.batch_size or 4096,
            segments=options.segments,
        )
    if options.model == "resnet50":
        model, batch_size = resnet50(options.image_size), 16
    else:
        batch_size = 8
        model = transformer(
            depth=options.depth or 12,
            width=options.width or 256,
            length=options.length,
        )
    plan = options.plan
    return model_step(
        model,
        method,
        batch_size=options.batch_size or batch_size,
        plan=int(plan) if plan.isdigit() else plan,
    )


def activations(needed, weights):
    """Activation memory in bytes; see the top of this file."""
    if needed.target != "cpu":
        return needed.temporaries
    own = sum(
        math.prod(weight.shape) * tf.as_dtype(weight.dtype).size
        for weight in weights
    )
    return needed.total - 2 * own


def main(argv):
    del argv
    options = flags.FLAGS
    table = rich.table.Table(title=f"{options.model}, MiB")
    for column in ("target", "method"):
        table.add_column(column, no_wrap=True)
    for column in ("activations", "ratio", "temporary", "total", "compiled"):
        table.add_column(column, justify="right")
    methods = [
        method
        for method in options.method
        if method != "recompute_grad" or options.model == "chain"
    ]
    for target in options.targets:
        plain = None
        for method in methods:
            keras.utils.clear_session()
            step, inputs, weights = make_step(options, method)
            start = time.perf_counter()
            needed = memory.compiled_memory(step, *inputs, target=target)
            seconds = time.perf_counter() - start
            saved = activations(needed, weights)
            plain = saved if method == "none" else plain
            table.add_row(
                target,
                method,
                f"{saved / 2**20:.1f}",
                f"{saved / plain:.3f}" if plain else "",
                f"{needed.temporaries / 2**20:.1f}",
                f"{needed.total / 2**20:.1f}",
                f"{seconds:.0f} s",
            )
    rich.console.Console().print(table)


if __name__ == "__main__":
    define_flags()
    app.run(main)
