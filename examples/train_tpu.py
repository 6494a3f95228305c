r"""Trains a vision transformer on a TPU, or on what there is.

On a TPU VM, and with a TPU's address from elsewhere:

    python examples/train_tpu.py --tpu=local --model_dir=gs://bucket/model \
        --data_dir=gs://bucket/imagenet --classes=1000 --first_label=1
    python examples/train_tpu.py --tpu=grpc://10.0.0.2:8470

Here, on images that are made up:

    python examples/train_tpu.py --strategy=one_device --layers=2 --width=32 \
        --batch_size=32 --steps=20 --epochs=2 --micro_batches=2

Run again with the same `--model_dir`, it goes on where it was ended. Data are
TFRecords named `train*` and `validation*`, with the features `image/encoded`
and `image/class/label` as in ImageNet's. Every shape is known to the compiler.
"""

import math

import entry_point
import example_flags
import keras
import numpy as np
import tensorflow as tf
from absl import flags

import tfckpt

_SHUFFLED = 4096
_FILES_AT_ONCE = 8
_TEST_BATCHES = 4


def define_flags(values=flags.FLAGS):
    example_flags.define_flags(
        values,
        batch_size=256,
        learning_rate=1e-3,
        steps=100,
        steps_help="Training steps an epoch.",
        compares=False,
    )
    # What a TPU multiplies fastest.
    values.set_default("mixed_precision", True)
    example_flags.define_plan(values, "block4_out,block8_out")
    flags.adopt_module_key_flags(example_flags, values)
    options = {"flag_values": values}
    for name, default, what in (
        ("data_dir", None, "Folder of TFRecords, gs:// too; else made up."),
        ("model_dir", None, "Folder for checkpoints, gs:// too."),
    ):
        flags.DEFINE_string(name, default, what, **options)
    for name, default, what in (
        ("epochs", 5, "Epochs; after each a checkpoint is saved."),
        ("steps_per_execution", 20, "Batches from one call of the TPU on."),
        ("image_size", 64, "Rows and columns."),
        ("patch_size", 8, "Rows and columns of what makes one token."),
        ("layers", 12, "Transformer blocks."),
        ("width", 192, "Features of each token."),
        ("heads", 3, "Attention heads."),
        ("classes", 10, "Classes of images."),
    ):
        flags.DEFINE_integer(name, default, what, lower_bound=1, **options)
    flags.DEFINE_integer(
        "first_label", 0, "The label of the first class.", **options
    )


def check(options, strategy):
    """Raises the error of flags that do not go together."""
    replicas = strategy.num_replicas_in_sync
    for whole, part in (
        ("image_size", "patch_size"),
        ("width", "heads"),
    ):
        if getattr(options, whole) % getattr(options, part):
            raise entry_point.UserError(
                f"--{whole}={getattr(options, whole)} must be a multiple of "
                f"--{part}={getattr(options, part)}"
            )
    if options.batch_size % (replicas * (options.micro_batches or 1)):
        raise entry_point.UserError(
            f"--batch_size={options.batch_size} must be a multiple of the "
            f"{replicas} replicas, times --micro_batches"
        )
    # Mistakes show here, before anything is built.
    if options.data_dir is not None:
        for split in "train", "validation":
            files_of(options.data_dir, split)
    if options.model_dir is not None:
        try:
            tf.io.gfile.makedirs(options.model_dir)
        except tf.errors.OpError as error:
            raise entry_point.UserError(
                f"--model_dir={options.model_dir} can't be made: "
                f"{error.message}"
            ) from error


# Data.


def made_up(options, *, first, seed):
    """Returns endless images, of each class a pattern under noise.

    Args:
        options: The flags.
        first: The number of the first image.
        seed: Of the noise.
    """
    shape = (options.image_size, options.image_size, 3)

    def example(number):
        label = number % options.classes
        pattern = tf.random.stateless_normal(shape, (label, 0))
        noise = tf.random.stateless_normal(shape, (number, seed + 1))
        return (pattern + noise) / 2, tf.cast(label, tf.int32)

    return tf.data.Dataset.counter(first).map(
        example, num_parallel_calls=tf.data.AUTOTUNE
    )


def files_of(folder, split):
    """Returns the paths of TFRecords, sorted."""
    try:
        found = tf.io.gfile.glob(f"{folder.rstrip('/')}/{split}*")
    except tf.errors.OpError as error:
        raise entry_point.UserError(
            f"--data_dir={folder} can't be read: {error.message}"
        ) from error
    if not found:
        raise entry_point.UserError(
            f"--data_dir={folder} has no files {split}*; leave it out to "
            "train on made-up images"
        )
    return sorted(found)


def recorded(files, options):
    """Returns the images of TFRecords in their order, once."""

    def example(record):
        parts = tf.io.parse_single_example(
            record,
            {
                "image/encoded": tf.io.FixedLenFeature([], tf.string),
                "image/class/label": tf.io.FixedLenFeature([], tf.int64),
            },
        )
        image = tf.io.decode_image(
            parts["image/encoded"], channels=3, expand_animations=False
        )
        image = tf.image.resize(image, [options.image_size] * 2) / 127.5 - 1
        image.set_shape((options.image_size, options.image_size, 3))
        label = parts["image/class/label"] - options.first_label
        return image, tf.cast(label, tf.int32)

    return (
        tf.data.Dataset.from_tensor_slices(files)
        .interleave(
            tf.data.TFRecordDataset,
            cycle_length=_FILES_AT_ONCE,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )
        .map(example, num_parallel_calls=tf.data.AUTOTUNE)
    )


def shuffled(files, options, *, seed):
    """Returns the images of TFRecords in another order every time."""
    order = np.random.default_rng(seed).permutation(len(files))
    examples = recorded([files[index] for index in order], options)
    return examples.shuffle(_SHUFFLED, seed=seed)


def data(options, *, first_epoch):
    """Returns what to train on from an epoch on, and what to test on."""
    size = options.batch_size
    images = batches_an_epoch(options) * size
    if options.data_dir is None:
        first = first_epoch * images
        train = made_up(options, first=first, seed=options.seed)
        test = made_up(options, first=0, seed=options.seed + 1)
    else:
        files = files_of(options.data_dir, "train")
        # Each epoch is known by its number, for training to be taken up again.
        # One at least: a dataset is made for no epoch more, too.
        train = None
        for number in range(first_epoch, max(options.epochs, first_epoch + 1)):
            epoch = shuffled(files, options, seed=options.seed + number)
            epoch = epoch.repeat().take(images)
            train = epoch if train is None else train.concatenate(epoch)
        test = recorded(files_of(options.data_dir, "validation"), options)
        test = test.repeat()
    return tuple(
        # One shape only: another one would be compiled anew.
        part.batch(size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
        for part in (train, test)
    )


# Model.


class Positions(keras.layers.Layer):
    """Adds a learned vector at each place."""

    def build(self, shape):
        self.table = self.add_weight(
            name="table", shape=shape[1:], initializer="random_normal"
        )

    def call(self, x):
        return x + self.table


def build_model(options):
    """Builds the network for the flags, recomputed as `--plan` says."""
    size, width = options.image_size, options.width
    inputs = keras.Input((size, size, 3))
    patch = options.patch_size
    x = keras.layers.Conv2D(width, patch, strides=patch, name="patches")(inputs)
    x = keras.layers.Reshape((-1, width), name="tokens")(x)
    x = Positions(name="positions")(x)
    for number in range(1, options.layers + 1):
        name = f"block{number}"
        y = keras.layers.LayerNormalization(name=f"{name}_norm1")(x)
        y = keras.layers.MultiHeadAttention(
            options.heads, width // options.heads, name=f"{name}_attention"
        )(y, y)
        x = keras.layers.Add(name=f"{name}_add")([x, y])
        y = keras.layers.LayerNormalization(name=f"{name}_norm2")(x)
        y = keras.layers.Dense(
            4 * width, activation="gelu", name=f"{name}_expand"
        )(y)
        y = keras.layers.Dense(width, name=f"{name}_project")(y)
        x = keras.layers.Add(name=f"{name}_out")([x, y])
    x = keras.layers.LayerNormalization(name="norm")(x)
    x = keras.layers.GlobalAveragePooling1D(name="pool")(x)
    # float32 under mixed precision too: the loss needs the digits.
    outputs = keras.layers.Dense(
        options.classes, dtype="float32", name="logits"
    )(x)
    model = keras.Model(inputs, outputs, name="vision_transformer")
    with example_flags.mistakes_of_plan(options.plan):
        return tfckpt.SegmentedModel.from_model(
            model, plan=example_flags.parse_plan(options.plan)
        )


def batches_an_epoch(options):
    return options.steps * (options.gradient_accumulation_steps or 1)


def batches_a_call(options, strategy):
    """Returns a number of batches that divides those of an epoch.

    Keras would begin a whole call for the rest of an epoch, and its loop over
    batches does not run under MirroredStrategy.
    """
    if isinstance(strategy, tf.distribute.MirroredStrategy):
        return 1
    batches = batches_an_epoch(options)
    most = min(options.steps_per_execution, batches)
    return max(k for k in range(1, most + 1) if batches % k == 0)


def compile_model(model, options):
    window = example_flags.window(options)
    # Counts updates, not batches.
    steps = options.steps * options.epochs
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0,
        steps,
        warmup_target=options.learning_rate,
        warmup_steps=steps // 10,
    )
    model.compile(
        optimizer=keras.optimizers.AdamW(schedule, weight_decay=0.05),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=batches_a_call(options, model.distribute_strategy),
        # A TPU's programs are compiled anyway.
        jit_compile=options.jit_compile,
        **window,
    )
    model.optimizer.build(model.trainable_variables)


# Training.


class Checkpoints(keras.callbacks.Callback):
    """Saves weights, optimizer and epoch after each epoch.

    By then the last window of micro-batches has become an update.
    """

    def __init__(self, model, folder):
        super().__init__()
        self._epoch = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._checkpoint = tf.train.Checkpoint(model=model, epoch=self._epoch)
        self._manager = tf.train.CheckpointManager(
            self._checkpoint, folder, max_to_keep=3
        )

    def restore(self):
        """Restores the latest, if any; returns the epoch to go on with."""
        path = self._manager.latest_checkpoint
        if path is not None:
            # Made at once, or a refusal is followed by warnings about it.
            _ = self._checkpoint.save_counter
            try:
                status = self._checkpoint.restore(path)
                # Not made yet are the window's sums; else it is an error.
                status.expect_partial()
                status.assert_existing_objects_matched()
            except (ValueError, AssertionError) as error:
                raise entry_point.UserError(
                    f"{path} was saved by another model; use its flags, or "
                    "another --model_dir"
                ) from error
        return int(self._epoch)

    def on_epoch_end(self, epoch, logs=None):
        self._epoch.assign(epoch + 1)
        self._manager.save()


def run(options, strategy):
    """Trains as the flags say; returns the model and the test's figures."""
    check(options, strategy)
    with strategy.scope():
        model = build_model(options)
        compile_model(model, options)
    callbacks, first_epoch = [], 0
    if options.model_dir is not None:
        callbacks = [Checkpoints(model, options.model_dir)]
        first_epoch = callbacks[0].restore()
        if first_epoch:
            print(f"Goes on after epoch {first_epoch}.")
    first_epoch = min(first_epoch, options.epochs)
    train, test = data(options, first_epoch=first_epoch)
    model.fit(
        train,
        epochs=options.epochs,
        initial_epoch=first_epoch,
        steps_per_epoch=batches_an_epoch(options),
        shuffle=False,
        verbose=2,
        callbacks=callbacks,
    )
    calls = math.ceil(_TEST_BATCHES / model.steps_per_execution)
    figures = model.evaluate(
        test,
        steps=calls * model.steps_per_execution,
        verbose=0,
        return_dict=True,
    )
    return model, figures


def main(options):
    strategy = entry_point.set_up(options)
    replicas = strategy.num_replicas_in_sync
    print(f"{type(strategy).__name__}, {replicas} x the model")
    _, figures = run(options, strategy)
    print(f"Test accuracy: {figures['accuracy']:.2%}")


if __name__ == "__main__":
    entry_point.run(define_flags, main)
