"""What batch normalization by the window's statistics costs, and is good for.

- memory: how far a fresh process rises in a warm step of ResNet50 on one big
  batch, and on windows of 2, 4 and 8 micro-batches with
  `batch_normalization="micro"` and `"exact"`, and what their accumulators hold
  (the plain step's gradients are part of its rise); less what the plain step
  rises by at batch size 1, relative to the big batch.
- time: seconds of such a step relative to the big batch's, by turns in one
  process; median, lowest and highest of the rounds.
- curves: the loss on the digits of a network trained on batches of 512, as a
  whole and in micro-batches of 8; a picture with `--picture=FILE`.

    python benchmarks/batch_norm.py
    python benchmarks/batch_norm.py --measure=curves --picture=curves.png
"""

import collections
import statistics
import time

import keras
import numpy as np
import rich.console
import rich.progress
import rich.table
from absl import app, flags
from sklearn import datasets

import tfckpt
from tfckpt import memory

_MEASURES = ("memory", "time", "curves")
_PARTS = (2, 4, 8)
_BIG, _ONE = "big batch", "batch of 1"
# Without oneDNN's pool, which gives nothing back.
_NO_POOL = {"TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"}
_CURVES = {
    "big batch": {},
    "micro": {"micro_batches": 64, "batch_normalization": "micro"},
    "exact": {"micro_batches": 64, "batch_normalization": "exact"},
}


def define_flags(values=flags.FLAGS):
    options = {"flag_values": values}
    flags.DEFINE_list("measure", list(_MEASURES), "What.", **options)
    flags.register_validator(
        "measure",
        lambda names: names and all(name in _MEASURES for name in names),
        f"must be some of {', '.join(_MEASURES)}",
        flag_values=values,
    )
    for name, default, what in (
        ("batch_size", 32, "Images in a batch of ResNet50."),
        ("image_size", 96, "Their rows and columns."),
        ("rounds", 5, "Rounds of timing."),
        ("epochs", 40, "Epochs of the digits."),
        ("blocks", 3, "Residual blocks of the network for the digits."),
    ):
        flags.DEFINE_integer(name, default, what, lower_bound=1, **options)
    flags.DEFINE_string("picture", None, "File for the curves.", **options)


def methods(parts=_PARTS):
    """Returns for each method how it compiles."""
    found = {_BIG: {}}
    for kind in ("micro", "exact"):
        for count in parts:
            found[f"{kind}, {count} micro-batches"] = {
                "micro_batches": count,
                "batch_normalization": kind,
            }
    return found


def make_step(batch_size, image_size, options):
    """Returns a model and a function that makes one step."""
    keras.utils.set_random_seed(0)
    model = keras.applications.ResNet50(
        weights=None, input_shape=(image_size, image_size, 3), classes=10
    )
    if options:
        model = tfckpt.SegmentedModel.from_model(model, plan=None)
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", **options)
    optimizer.build(model.trainable_variables)
    random = np.random.default_rng(0)
    x = random.normal(size=(batch_size, *model.input.shape[1:]))
    x, y = x.astype("float32"), random.integers(0, 10, batch_size)
    return model, lambda: model.train_on_batch(x, y)


def step_peak(batch_size, image_size, options):
    """Returns the bytes of a warm step of this process, with accumulators."""
    model, step = make_step(batch_size, image_size, options)
    step()
    with memory.process_peak() as peak:
        step()
    accumulator = getattr(model, "gradient_accumulator", None)
    return peak.bytes + (accumulator.bytes if accumulator else 0)


def step_seconds(batch_size, image_size, rounds, track):
    """Returns a list of seconds for each method, round by round."""
    steps = {
        name: make_step(batch_size, image_size, options)[1]
        for name, options in track(list(methods().items()))
    }
    for step in track(list(steps.values())):
        step()
    found = collections.defaultdict(list)
    for _ in track(range(rounds)):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            found[name].append(time.perf_counter() - start)
    return found


def make_network(shape, blocks, options):
    """Builds a small residual network, and compiles it."""
    keras.utils.set_random_seed(0)

    def convolution(x):
        x = keras.layers.Conv2D(16, 3, padding="same", use_bias=False)(x)
        return keras.layers.BatchNormalization(momentum=0.9)(x)

    inputs = keras.Input(shape)
    x = keras.layers.ReLU()(convolution(inputs))
    for _ in range(blocks):
        y = convolution(keras.layers.ReLU()(convolution(x)))
        x = keras.layers.ReLU()(keras.layers.Add()([x, y]))
    x = keras.layers.GlobalAveragePooling2D()(x)
    model = keras.Model(inputs, keras.layers.Dense(10)(x))
    if options:
        model = tfckpt.SegmentedModel.from_model(model, plan=None)
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **options,
    )
    return model


def losses(blocks, epochs, track):
    """Returns for each method the loss of each epoch on the digits."""
    digits = datasets.load_digits()
    images = (digits.images[:1024, ..., np.newaxis] / 8 - 1).astype("float32")
    labels = digits.target[:1024].astype("int32")
    found = {}
    for name, options in track(list(_CURVES.items())):
        model = make_network(images.shape[1:], blocks, options)
        history = model.fit(
            images,
            labels,
            batch_size=512,
            epochs=epochs,
            shuffle=False,
            verbose=0,
        )
        found[name] = history.history["loss"]
    return found


def draw(curves, path):
    """Draws the losses into a file."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for (name, values), style in zip(
        curves.items(), ("-", "-", ":"), strict=True
    ):
        epochs = range(1, len(values) + 1)
        width = 3 if style == ":" else 1.5
        axes.plot(epochs, values, style, label=name, linewidth=width)
    axes.set_yscale("log")
    axes.set_xlabel("epoch")
    axes.set_ylabel("training loss")
    axes.set_title("Digits, batches of 512: whole, and in micro-batches of 8")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _memory_table(found):
    table = rich.table.Table(title="Memory of a step of ResNet50")
    for name in ("", "MiB", "relative"):
        table.add_column(name, justify="right" if name else "left")
    base = found.pop(_ONE)
    for name, peak in found.items():
        share = (peak - base) / (found[_BIG] - base)
        table.add_row(name, f"{(peak - base) / 2**20:.0f}", f"{share:.3f}")
    return table


def _time_table(found):
    table = rich.table.Table(title="Seconds of a step, relative")
    for name in ("", "median", "lowest", "highest"):
        table.add_column(name, justify="right" if name else "left")
    for name, seconds in found.items():
        ratios = [a / b for a, b in zip(seconds, found[_BIG], strict=True)]
        figures = statistics.median(ratios), min(ratios), max(ratios)
        table.add_row(name, *(f"{each:.2f}" for each in figures))
    return table


def _curves_table(curves):
    table = rich.table.Table(title="Loss on the digits")
    for name in ("", "last", "largest difference from the big batch"):
        table.add_column(name, justify="right" if name else "left")
    big = np.asarray(curves[_BIG])
    for name, values in curves.items():
        largest = np.max(np.abs(np.asarray(values) - big))
        table.add_row(name, f"{values[-1]:.2e}", f"{largest:.1e}")
    return table


def main(options):
    console = rich.console.Console()
    sizes = options.batch_size, options.image_size

    def track(items):
        return rich.progress.track(items, console=console, transient=True)

    if "memory" in options.measure:
        runs = {_ONE: (1, {})} | {
            name: (options.batch_size, how) for name, how in methods().items()
        }
        found = {
            name: memory.measure_in_process(
                f"{__file__}:step_peak",
                batch,
                options.image_size,
                how,
                environment=_NO_POOL,
            )
            for name, (batch, how) in track(list(runs.items()))
        }
        console.print(_memory_table(found))
    if "time" in options.measure:
        console.print(_time_table(step_seconds(*sizes, options.rounds, track)))
    if "curves" in options.measure:
        curves = losses(options.blocks, options.epochs, track)
        console.print(_curves_table(curves))
        if options.picture:
            draw(curves, options.picture)


if __name__ == "__main__":
    define_flags()
    app.run(lambda argv: main(flags.FLAGS))
