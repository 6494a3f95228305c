r"""Trains a deep residual network on handwritten digits, with recomputation.

The images come with scikit-learn, so nothing is downloaded:

    python examples/train_digits.py
    python examples/train_digits.py --compare
    python examples/train_digits.py --plan=block12_out,block24_out --depth=36

The one line that is about `tfckpt` is in `build_model`.
"""

import types

import comparison
import keras
import numpy as np
import tensorflow as tf
from absl import flags

import tfckpt

_TEST_IMAGES = 360


def define_flags(values=flags.FLAGS):
    comparison.define_flags(
        values,
        batch_size=128,
        learning_rate=0.1,
        steps=None,
        steps_help="Training steps, in place of --epochs.",
    )
    flags.adopt_module_key_flags(comparison, values)
    options = {"flag_values": values}
    flags.DEFINE_string(
        "plan",
        "sqrt",
        "What is recomputed: none, sqrt, a number of segments, or the call "
        "paths at which segments end, such as block12_out,block24_out.",
        **options,
    )
    flags.DEFINE_enum(
        "dataset",
        "digits",
        ["digits", "cifar10"],
        "digits comes with scikit-learn; cifar10 is downloaded.",
        **options,
    )
    flags.DEFINE_integer(
        "depth", 36, "Residual blocks.", lower_bound=3, **options
    )
    flags.DEFINE_integer("epochs", 12, "Epochs.", lower_bound=1, **options)


def load_data(name):
    """Returns `(images, labels)` to train on, and to test on."""
    if name == "cifar10":
        return _load_cifar10()
    try:
        from sklearn import datasets
    except ImportError as error:
        raise comparison.UserError(
            "--dataset=digits needs scikit-learn: "
            "python -m pip install scikit-learn"
        ) from error
    digits = datasets.load_digits()
    # 8 x 8 pixels of 0 to 16, enlarged so that three resolutions fit.
    images = np.kron(digits.images, np.ones((2, 2)))[..., np.newaxis]
    order = np.random.default_rng(0).permutation(len(images))
    images = (images[order] / 8 - 1).astype("float32")
    labels = digits.target[order].astype("int32")
    return (
        (images[:-_TEST_IMAGES], labels[:-_TEST_IMAGES]),
        (images[-_TEST_IMAGES:], labels[-_TEST_IMAGES:]),
    )


def _load_cifar10():
    try:
        train, test = keras.datasets.cifar10.load_data()
    except Exception as error:  # Keras raises a bare Exception.
        raise comparison.UserError(
            f"CIFAR-10 could not be downloaded ({error}); "
            "--dataset=digits needs no network"
        ) from error
    return tuple(
        ((images / 127.5 - 1).astype("float32"), labels[:, 0].astype("int32"))
        for images, labels in (train, test)
    )


def parse_plan(text):
    """Returns the `plan` of `SegmentedModel` that the flag stands for."""
    if text in ("none", "sqrt"):
        return {"none": None, "sqrt": "sqrt"}[text]
    try:
        return int(text)
    except ValueError:
        return [path.strip() for path in text.split(",")]


def residual_block(inputs, width, *, stride, name):
    """Two convolutions beside a shortcut."""

    def convolution(x, size, stride, part, gamma="ones"):
        x = keras.layers.Conv2D(
            width,
            size,
            strides=stride,
            padding="same",
            use_bias=False,
            kernel_initializer="he_normal",
            name=f"{name}_conv{part}",
        )(x)
        return keras.layers.BatchNormalization(
            momentum=0.9, gamma_initializer=gamma, name=f"{name}_norm{part}"
        )(x)

    shortcut = inputs
    if stride > 1 or inputs.shape[-1] != width:
        shortcut = convolution(inputs, 1, stride, 0)
    x = convolution(inputs, 3, stride, 1)
    x = keras.layers.ReLU(name=f"{name}_relu")(x)
    x = keras.layers.SpatialDropout2D(0.1, name=f"{name}_dropout")(x)
    # A block that begins as the identity lets very deep networks learn.
    x = convolution(x, 3, 1, 2, gamma="zeros")
    x = keras.layers.Add(name=f"{name}_add")([shortcut, x])
    return keras.layers.ReLU(name=f"{name}_out")(x)


def build_model(shape, *, depth, plan, width=16):
    """Builds a network of `depth` residual blocks at three resolutions."""
    inputs = x = keras.Input(shape)
    x = keras.layers.Conv2D(width, 3, padding="same", name="stem_conv")(x)
    for block in range(depth):
        stage = 3 * block // depth
        starts = stage > 0 and 3 * (block - 1) // depth < stage
        x = residual_block(
            x,
            width * 2**stage,
            stride=2 if starts else 1,
            name=f"block{block + 1}",
        )
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    x = keras.layers.Dropout(0.2, name="dropout")(x)
    # float32 under mixed precision too: the loss needs the digits.
    outputs = keras.layers.Dense(10, dtype="float32", name="logits")(x)
    model = keras.Model(inputs, outputs, name="digits")
    if plan is None:
        return model
    return tfckpt.SegmentedModel.from_model(model, plan=plan)


def build(options, images):
    """Builds the model for the flags; a plan it has not is the user's error."""
    try:
        return build_model(
            images.shape[1:], depth=options.depth, plan=parse_plan(options.plan)
        )
    except ValueError as error:
        raise comparison.UserError(
            f"--plan={options.plan}: {error} (It is none, sqrt, a number of "
            "segments, or call paths with commas between.)"
        ) from error


def train(model, images, labels, options, callbacks=()):
    """Trains the model; returns the last epoch's loss."""
    batch_size = min(options.batch_size, len(images))
    batches = tf.data.Dataset.from_tensor_slices((images, labels))
    batches = batches.shuffle(len(images), seed=options.seed)
    # Batches of one size are traced once.
    batches = batches.batch(batch_size, drop_remainder=True).prefetch(2)
    epochs, steps = options.epochs, len(images) // batch_size * options.epochs
    if options.steps:
        epochs, steps = 1, options.steps
        batches = batches.repeat().take(steps)
    schedule = keras.optimizers.schedules.CosineDecay(
        options.learning_rate / 10,
        steps,
        warmup_target=options.learning_rate,
        warmup_steps=steps // 10,
    )
    model.compile(
        optimizer=keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=options.jit_compile,
    )
    history = model.fit(
        batches, epochs=epochs, shuffle=False, verbose=2, callbacks=callbacks
    )
    return history.history["loss"][-1]


def run(options, callbacks=()):
    """Trains and tests as the flags say; returns the model and the outcome."""
    (images, labels), test = load_data(options.dataset)
    model = build(options, images)
    loss = train(model, images, labels, options, callbacks)
    _, accuracy = model.evaluate(*test, batch_size=256, verbose=0)
    return model, {"final loss": loss, "test accuracy": accuracy}


def measured(options, folder, limit):
    """What a fresh process of `--compare` does."""
    del limit
    options = types.SimpleNamespace(**options)
    comparison.set_up(options)
    meter = comparison.Meter()
    model, outcome = run(options, [meter])
    comparison.save_variables(model, folder)
    return meter.figures() | {"outcome": outcome}


def main(options):
    comparison.set_up(options)
    if not options.compare:
        _, outcome = run(options)
        print(f"Test accuracy: {outcome['test accuracy']:.2%}")
        return
    if parse_plan(options.plan) is None:
        raise comparison.UserError("--compare needs a --plan other than none")
    # Mistakes show here, before anything is trained.
    build(options, load_data(options.dataset)[0][0])
    comparison.compare(
        __file__,
        comparison.as_dict(options),
        plain={"plan": "none"},
        ours={},
        smallest={"batch_size": 1, "steps": 3},
    )


if __name__ == "__main__":
    comparison.run(define_flags, main)
