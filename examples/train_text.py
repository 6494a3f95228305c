r"""Trains a transformer on bytes of Python's own source, with recomputation.

The text is the standard library, which every machine with Python has. A line
of `Recompute` around each block is all that is about `tfckpt`:

    python examples/train_text.py
    python examples/train_text.py --compare
    python examples/train_text.py --memory_limit=2GiB
    python examples/train_text.py --gradient_accumulation_steps=8 --compare

The third searches for the longest sequence that can be trained within so
much memory, with and without recomputation.
"""

import math
import pathlib
import sysconfig

import big_batch
import comparison
import entry_point
import example_flags
import keras
import measuring
import memory_limit
import numpy as np
import tensorflow as tf
from absl import flags

import tfckpt

_CORPUS_BYTES = 4 * 2**20
# Shorter than the text that is held out.
_LONGEST = _CORPUS_BYTES // 40
_STEPS_A_LINE = 20


def define_flags(values=flags.FLAGS):
    example_flags.define_flags(
        values,
        batch_size=4,
        learning_rate=2e-3,
        steps=200,
        steps_help="Training steps; beyond 20 rounded up to a multiple of 20.",
    )
    flags.adopt_module_key_flags(example_flags, values)
    options = {"flag_values": values}
    for name, default, what in (
        ("sequence_length", 512, "Bytes that the model sees at once."),
        ("layers", 6, "Transformer blocks."),
        ("width", 128, "Features of each byte."),
        ("heads", 4, "Attention heads."),
    ):
        flags.DEFINE_integer(name, default, what, lower_bound=1, **options)
    flags.DEFINE_bool("dropout", True, "Drop features at random.", **options)
    flags.DEFINE_bool(
        "recompute", True, "Recompute each block's activations.", **options
    )
    flags.DEFINE_string(
        "memory_limit",
        None,
        "Search for the longest sequence within this memory of the process, "
        "such as 2GiB, TensorFlow itself included.",
        **options,
    )


def load_text(folder=None, size=_CORPUS_BYTES):
    """Returns source files one after the other, in the order of their paths.

    Args:
        folder: Where to look; the standard library unless given.
        size: The number of bytes after which to stop.
    """
    folder = pathlib.Path(folder or sysconfig.get_path("stdlib"))
    parts, total = [], 0
    for path in sorted(folder.rglob("*.py")):
        # Not what was installed later, and no tests.
        folders = path.relative_to(folder).parts
        if {"site-packages", "dist-packages", "test", "tests"} & set(folders):
            continue
        parts.append(path.read_bytes())
        total += len(parts[-1])
        if total >= size:
            break
    if not parts:
        raise entry_point.UserError(
            f"there is no Python source under {folder}; this Python comes "
            "without its library's source, so use another"
        )
    return np.frombuffer(b"".join(parts)[:size], np.uint8)


class Block(keras.layers.Layer):
    """Causal self-attention and a two-layer network, each beside a shortcut."""

    def __init__(self, width, heads, rate, **kwargs):
        super().__init__(**kwargs)
        self.norm1 = keras.layers.LayerNormalization()
        self.attention = keras.layers.MultiHeadAttention(
            heads, width // heads, dropout=rate
        )
        self.norm2 = keras.layers.LayerNormalization()
        self.expand = keras.layers.Dense(4 * width, activation="gelu")
        self.project = keras.layers.Dense(width)
        self.dropout = keras.layers.Dropout(rate)

    def build(self, shape):
        for layer in (self.norm1, self.norm2, self.expand):
            layer.build(shape)
        self.attention.build(shape, shape)
        self.project.build((*shape[:-1], self.expand.units))

    def call(self, x, training=None):
        y = self.norm1(x)
        y = self.attention(y, y, use_causal_mask=True, training=training)
        x = x + self.dropout(y, training=training)
        y = self.project(self.expand(self.norm2(x)))
        return x + self.dropout(y, training=training)


class Embed(keras.layers.Layer):
    """A learned vector for each byte, and one for each position."""

    def __init__(self, length, width, **kwargs):
        super().__init__(**kwargs)
        self.bytes = keras.layers.Embedding(256, width)
        self.positions = keras.layers.Embedding(length, width)

    def build(self, shape):
        self.bytes.build(shape)
        self.positions.build(shape)

    def call(self, x):
        positions = keras.ops.arange(keras.ops.shape(x)[1])
        # The product makes the gradient dense. That of an embedding has a row
        # for each use of a byte, and Keras' optimizers square and clip these
        # before they are added up.
        table = self.bytes.embeddings * 1.0
        return keras.ops.take(table, x, axis=0) + self.positions(positions)


def build_model(
    length,
    *,
    layers,
    width,
    heads,
    recompute,
    dropout=True,
    accumulates=False,
):
    """Builds a model from bytes to the logits of each next byte."""
    if width % heads:
        raise entry_point.UserError(
            f"--width={width} must be a multiple of --heads={heads}"
        )
    inputs = keras.Input((None,), dtype="int32")
    x = Embed(length, width, name="embed")(inputs)
    for number in range(layers):
        block = Block(
            width, heads, 0.1 if dropout else 0.0, name=f"block{number + 1}"
        )
        if recompute:
            block = tfckpt.Recompute(block)
        x = block(x)
    x = keras.layers.LayerNormalization(name="norm")(x)
    # float32 under mixed precision too: the loss needs the digits.
    outputs = keras.layers.Dense(256, dtype="float32", name="logits")(x)
    model = keras.Model(inputs, outputs, name="text")
    if accumulates:
        # It trains in micro-batches, and here recomputes nothing itself.
        return tfckpt.SegmentedModel.from_model(model, plan=None)
    return model


def windows(text, length, *, batch_size, seed):
    """Returns an endless dataset of `(bytes, the same one further)`."""
    if len(text) <= length:
        raise entry_point.UserError(
            f"--sequence_length={length} is too long for {len(text)} bytes "
            "of text"
        )

    def window(start):
        part = tf.cast(text[start : start + length + 1], tf.int32)
        part = tf.ensure_shape(part, (length + 1,))
        return part[:-1], part[1:]

    text = tf.constant(text)
    starts = tf.data.Dataset.counter().map(
        lambda step: tf.random.stateless_uniform(
            (), (seed, step), 0, len(text) - length, tf.int64
        )
    )
    return starts.map(window).batch(batch_size).prefetch(2)


def bits_per_byte(targets, logits):
    losses = keras.losses.sparse_categorical_crossentropy(
        targets, logits, from_logits=True
    )
    return losses / np.log(2)


def run(options, strategy, callbacks=(), *, verbose=2):
    """Trains as the flags say; returns the model and the outcome."""
    text = load_text()
    held_out = len(text) // 20
    length, batch_size = options.sequence_length, options.batch_size
    train = windows(
        text[:-held_out], length, batch_size=batch_size, seed=options.seed
    )
    test = windows(text[-held_out:], length, batch_size=batch_size, seed=0)
    # Counts updates, not batches.
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0,
        options.steps,
        warmup_target=options.learning_rate,
        warmup_steps=options.steps // 10,
    )
    window = example_flags.window(options)
    with strategy.scope():
        model = build_model(
            length,
            layers=options.layers,
            width=options.width,
            heads=options.heads,
            recompute=options.recompute,
            dropout=options.dropout,
            accumulates=bool(window),
        )
        model.compile(
            optimizer=keras.optimizers.AdamW(schedule, clipnorm=1.0),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[bits_per_byte],
            jit_compile=options.jit_compile,
            **window,
        )
    lines = min(_STEPS_A_LINE, options.steps)
    history = model.fit(
        train,
        epochs=math.ceil(options.steps / lines),
        steps_per_epoch=lines * (options.gradient_accumulation_steps or 1),
        shuffle=False,
        verbose=verbose,
        callbacks=callbacks,
    )
    _, bits = model.evaluate(test, steps=10, verbose=0)
    return model, {
        "final bits per byte": history.history["bits_per_byte"][-1],
        "on other text": bits,
    }


def sample(model, prompt, *, length, context, seed):
    """Returns the prompt and `length` bytes that the model adds to it."""
    generator = np.random.default_rng(seed)
    predict = tf.function(lambda x: model(x, training=False))
    text = list(prompt)
    for _ in range(length):
        seen = text[-context:]
        # Zeros after the text change nothing: attention looks back only.
        x = np.zeros((1, context), "int32")
        x[0, : len(seen)] = seen
        logits = predict(tf.constant(x))[0, len(seen) - 1].numpy() / 0.7
        odds = np.exp(logits.astype("float64") - logits.max())
        text.append(int(generator.choice(256, p=odds / odds.sum())))
    return bytes(text).decode("utf-8", "replace")


def measured(options, folder, limit):
    """What a fresh process of `--compare` and `--memory_limit` does."""
    return measuring.train(run, options, folder, limit)


def main(options):
    strategy = entry_point.set_up(options)
    # Mistakes show here, before anything is trained.
    values = measuring.as_dict(options)
    build_model(
        options.sequence_length,
        layers=1,
        width=options.width,
        heads=options.heads,
        recompute=False,
    )
    if options.memory_limit is not None:
        memory_limit.search(
            __file__,
            values,
            memory_limit.parse_size(options.memory_limit),
            most=_LONGEST,
        )
    elif options.compare and example_flags.window(options):
        big_batch.compare(__file__, values, both={"dropout": False})
    elif options.compare:
        comparison.compare(
            __file__,
            values,
            plain={"recompute": False},
            ours={"recompute": True},
            smallest={"batch_size": 1, "sequence_length": 8, "steps": 3},
        )
    else:
        model, outcome = run(options, strategy)
        print(f"Bits per byte of other text: {outcome['on other text']:.2f}")
        print(
            sample(
                model,
                b"def ",
                length=160,
                context=min(128, options.sequence_length),
                seed=options.seed,
            )
        )


if __name__ == "__main__":
    entry_point.run(define_flags, main)
