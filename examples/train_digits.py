r"""Trains a deep residual network on handwritten digits, with recomputation.

The images come with scikit-learn, so nothing is downloaded:

    python examples/train_digits.py
    python examples/train_digits.py --compare
    python examples/train_digits.py --plan=block12_out,block24_out --depth=36
    python examples/train_digits.py --micro_batches=4 --compare

The line that is about recomputation is in `build_model`, that about gradient
accumulation is an argument of `compile`.
"""

import big_batch
import comparison
import entry_point
import example_flags
import keras
import measuring
import numpy as np
import tensorflow as tf
from absl import flags

import tfckpt

_TEST_IMAGES = 360


def define_flags(values=flags.FLAGS):
    example_flags.define_flags(
        values,
        batch_size=128,
        learning_rate=0.1,
        steps=None,
        steps_help="Training steps, in place of --epochs.",
    )
    example_flags.define_plan(values, "block12_out,block24_out")
    flags.adopt_module_key_flags(example_flags, values)
    options = {"flag_values": values}
    flags.DEFINE_enum(
        "batch_normalization",
        "micro",
        ["micro", "sync", "exact"],
        "What it takes its moments of. micro: each micro-batch on its "
        "replica; sync: on all replicas; exact: the whole batch, with "
        "--micro_batches.",
        **options,
    )
    flags.register_multi_flags_validator(
        ["batch_normalization", "micro_batches"],
        lambda given: (
            given["batch_normalization"] != "exact" or given["micro_batches"]
        ),
        "--batch_normalization=exact needs --micro_batches, and no "
        "--gradient_accumulation_steps",
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
    flags.DEFINE_bool("dropout", True, "Drop features at random.", **options)
    flags.DEFINE_integer("epochs", 12, "Epochs.", lower_bound=1, **options)


def load_data(name):
    """Returns `(images, labels)` to train on, and to test on."""
    if name == "cifar10":
        return _load_cifar10()
    try:
        from sklearn import datasets
    except ImportError as error:
        raise entry_point.UserError(
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
        raise entry_point.UserError(
            f"CIFAR-10 could not be downloaded ({error}); "
            "--dataset=digits needs no network"
        ) from error
    return tuple(
        ((images / 127.5 - 1).astype("float32"), labels[:, 0].astype("int32"))
        for images, labels in (train, test)
    )


def residual_block(inputs, width, *, stride, rate, name):
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
    x = keras.layers.SpatialDropout2D(rate, name=f"{name}_dropout")(x)
    # A block that begins as the identity lets very deep networks learn.
    x = convolution(x, 3, 1, 2, gamma="zeros")
    x = keras.layers.Add(name=f"{name}_add")([shortcut, x])
    return keras.layers.ReLU(name=f"{name}_out")(x)


def build_model(
    shape, *, depth, plan, width=16, dropout=True, accumulates=False
):
    """Builds a network of `depth` residual blocks at three resolutions."""
    rate = 0.1 if dropout else 0.0
    inputs = x = keras.Input(shape)
    x = keras.layers.Conv2D(width, 3, padding="same", name="stem_conv")(x)
    for block in range(depth):
        stage = 3 * block // depth
        starts = stage > 0 and 3 * (block - 1) // depth < stage
        x = residual_block(
            x,
            width * 2**stage,
            stride=2 if starts else 1,
            rate=rate,
            name=f"block{block + 1}",
        )
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    x = keras.layers.Dropout(2 * rate, name="dropout")(x)
    # float32 under mixed precision too: the loss needs the digits.
    outputs = keras.layers.Dense(10, dtype="float32", name="logits")(x)
    model = keras.Model(inputs, outputs, name="digits")
    if plan is None and not accumulates:
        return model
    return tfckpt.SegmentedModel.from_model(model, plan=plan)


def window(options):
    """Returns the arguments of `compile` that the flags ask for."""
    found = example_flags.window(options)
    if found:
        found["batch_normalization"] = options.batch_normalization
    return found


def build(options, images):
    """Builds the model for the flags; a plan it has not is the user's error."""
    with example_flags.mistakes_of_plan(options.plan):
        return build_model(
            images.shape[1:],
            depth=options.depth,
            plan=example_flags.parse_plan(options.plan),
            dropout=options.dropout,
            accumulates=bool(window(options)),
        )


def batches_of(images, labels, options):
    """Returns the batches to train on, epochs, and the number of steps."""
    gathered = options.gradient_accumulation_steps or 1
    batch_size = min(options.batch_size, len(images))
    steps = len(images) // (batch_size * gathered)
    if not steps:
        raise entry_point.UserError(
            f"--gradient_accumulation_steps={gathered} of --batch_size="
            f"{batch_size} are {batch_size * gathered} images a step, but "
            f"there are {len(images)}"
        )
    batches = tf.data.Dataset.from_tensor_slices((images, labels))
    batches = batches.shuffle(len(images), seed=options.seed)
    # Batches of one size are traced once.
    batches = batches.batch(batch_size, drop_remainder=True)
    # The images of a step are the same, however many batches it has.
    batches = batches.take(steps * gathered)
    if options.steps:
        batches = batches.repeat().take(options.steps * gathered)
        return batches.prefetch(2), 1, options.steps
    return batches.prefetch(2), options.epochs, steps * options.epochs


def train(model, images, labels, options, callbacks=(), *, verbose=2):
    """Trains the model; returns the last epoch's loss."""
    batches, epochs, steps = batches_of(images, labels, options)
    # Counts updates, not batches.
    schedule = keras.optimizers.schedules.CosineDecay(
        options.learning_rate / 10,
        steps,
        warmup_target=options.learning_rate,
        warmup_steps=steps // 10,
    )
    with model.distribute_strategy.scope():
        model.compile(
            optimizer=keras.optimizers.SGD(
                schedule, momentum=0.9, nesterov=True
            ),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=options.jit_compile,
            **window(options),
        )
    history = model.fit(
        batches,
        epochs=epochs,
        shuffle=False,
        verbose=verbose,
        callbacks=callbacks,
    )
    return history.history["loss"][-1]


def run(options, strategy, callbacks=(), *, verbose=2):
    """Trains and tests as the flags say; returns the model and the outcome."""
    (images, labels), test = load_data(options.dataset)
    with strategy.scope():
        model = build(options, images)
    loss = train(model, images, labels, options, callbacks, verbose=verbose)
    _, accuracy = model.evaluate(*test, batch_size=256, verbose=0)
    return model, {"final loss": loss, "test accuracy": accuracy}


def measured(options, folder, limit):
    """What a fresh process of `--compare` does."""
    return measuring.train(run, options, folder, limit)


def main(options):
    strategy = entry_point.set_up(options)
    if not options.compare:
        _, outcome = run(options, strategy)
        print(f"Test accuracy: {outcome['test accuracy']:.2%}")
        return
    windows = window(options)
    if example_flags.parse_plan(options.plan) is None and not windows:
        raise entry_point.UserError("--compare needs a --plan other than none")
    # Mistakes show here, before anything is trained.
    train_set, _ = load_data(options.dataset)
    build(options, train_set[0])
    batches_of(*train_set, options)
    if windows:
        differs = options.batch_normalization != "exact"
        big_batch.compare(
            __file__,
            measuring.as_dict(options),
            both={"dropout": False},
            note="Batch normalization takes its moments from each batch that "
            "the model sees, so the losses of this network differ."
            if differs
            else None,
        )
        return
    comparison.compare(
        __file__,
        measuring.as_dict(options),
        plain={"plan": "none"},
        ours={},
        smallest={"batch_size": 1, "steps": 3},
    )


if __name__ == "__main__":
    entry_point.run(define_flags, main)
