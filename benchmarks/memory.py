"""What recomputation saves and costs in a training step, on this machine.

For a chain of layers, a residual network and a transformer, each plainly,
with `tf.recompute_grad` around the same segments, and with tfckpt:

- process: activation memory of a graph step, which applies its gradients by
  SGD with momentum. It is the peak of the process above its inputs and
  weights, less the same of the plain step at batch size 1, each in a fresh
  process. What the weights, the optimizer and the program take cancels out.
- XLA:CPU: the compiler's plan of a step that returns its gradients, less the
  weights and as much again for the gradients.
- time: seconds of the graph step, all methods by turns in one process. The
  ratios are taken within each round; median, lowest and highest.

    python benchmarks/memory.py
    python benchmarks/memory.py --network=chain --measure=process,time

`tf.recompute_grad` assigns moving statistics twice, and would draw dropout
anew: it is a yardstick for memory and time, not for numbers.
"""

import functools
import importlib.util
import itertools
import json
import math
import pathlib
import statistics
import sys
import time

import keras
import rich.console
import rich.table
import tensorflow as tf
from absl import app, flags

import tfckpt
from tfckpt import memory

_METHODS = ("none", "recompute_grad", "tfckpt")
_MEASURES = ("process", "plan", "time")
_SIZES = {
    "chain": {
        "batch_size": 4096,
        "depth": 36,
        "width": 1024,
        "segments": 6,
    },
    "resnet": {
        "batch_size": 32,
        "depth": 36,
        "width": 16,
        "size": 32,
        "segments": 9,
    },
    "transformer": {
        "batch_size": 8,
        "depth": 12,
        "width": 256,
        "size": 512,
        "segments": 12,
    },
}
# Upper bounds of the ratios at the sizes above.
_BARS = {"chain": {"process": 0.30, "plan": 0.35, "time": 1.35}}
_HEADS = 8
_MIB = 2**20


def define_flags(values=flags.FLAGS):
    options = {"flag_values": values}
    flags.DEFINE_multi_enum(
        "network", list(_SIZES), list(_SIZES), "What is trained.", **options
    )
    flags.DEFINE_list(
        "measure", list(_MEASURES), "What is measured.", **options
    )
    flags.register_validator(
        "measure",
        lambda names: names and set(names) <= set(_MEASURES),
        f"must be some of {', '.join(_MEASURES)}",
        flag_values=values,
    )
    for name, what in (
        ("batch_size", "Examples."),
        ("depth", "Layers of the chain, blocks of the others."),
        ("width", "Units, channels, features."),
        ("size", "Height and width of images; tokens of sequences."),
        ("segments", "Segments; the last one is never recomputed."),
    ):
        flags.DEFINE_integer(
            name,
            None,
            f"{what} Each network's own by default.",
            lower_bound=1,
            **options,
        )
    flags.DEFINE_integer(
        "repeats", 5, "Rounds of timing.", lower_bound=1, **options
    )
    flags.DEFINE_string("json", None, "Write the figures here.", **options)
    flags.DEFINE_string(
        "plot", None, "Draw them into this .png, by matplotlib.", **options
    )


def _chain(sizes):
    inputs = x = keras.Input((sizes["width"],))
    for number in range(sizes["depth"]):
        x = keras.layers.Dense(
            sizes["width"], activation="tanh", name=f"block{number}"
        )(x)
    return inputs, x


def _resnet(sizes):
    def convolution(x, width, size, stride):
        x = keras.layers.Conv2D(
            width, size, stride, padding="same", use_bias=False
        )(x)
        return keras.layers.BatchNormalization()(x)

    depth = sizes["depth"]
    inputs = keras.Input((sizes["size"], sizes["size"], 3))
    x = keras.layers.Conv2D(sizes["width"], 3, padding="same")(inputs)
    for number in range(depth):
        stage = 3 * number // depth
        width = sizes["width"] * 2**stage
        stride = 2 if width > x.shape[-1] else 1
        y = convolution(x, width, 3, stride)
        y = convolution(keras.layers.ReLU()(y), width, 3, 1)
        if stride > 1:
            x = convolution(x, width, 1, stride)
        x = keras.layers.Add()([x, y])
        x = keras.layers.ReLU(name=f"block{number}")(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return inputs, keras.layers.Dense(10)(x)


def _transformer(sizes):
    width = sizes["width"]
    inputs = keras.Input((sizes["size"], width))
    x = inputs
    for number in range(sizes["depth"]):
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.MultiHeadAttention(_HEADS, width // _HEADS)(y, y)
        x = keras.layers.Add()([x, y])
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(4 * width, activation="gelu")(y)
        y = keras.layers.Dense(width)(y)
        x = keras.layers.Add(name=f"block{number}")([x, y])
    x = keras.layers.GlobalAveragePooling1D()(x)
    return inputs, keras.layers.Dense(10)(x)


def boundaries(sizes):
    """Returns the names of the blocks at which all but the last segment end."""
    depth, segments = sizes["depth"], min(sizes["segments"], sizes["depth"])
    return [f"block{k * depth // segments - 1}" for k in range(1, segments)]


def make_model(network, sizes):
    """Returns a Keras model of the network."""
    make = {"chain": _chain, "resnet": _resnet, "transformer": _transformer}
    return keras.Model(*make[network](sizes), name=network)


def with_method(model, method, sizes):
    """Returns a function of the model's input, for training."""
    ends = boundaries(sizes)
    if method == "tfckpt":
        model = tfckpt.SegmentedModel.from_model(model, plan=ends or None)
    if method != "recompute_grad":
        return lambda x: model(x, training=True)
    tensors = [model.get_layer(name).output for name in ends]
    tensors = [model.input, *tensors, model.output]
    parts = [
        functools.partial(keras.Model(first, last), training=True)
        for first, last in itertools.pairwise(tensors)
    ]
    parts = [*map(tf.recompute_grad, parts[:-1]), parts[-1]]

    def call(x):
        for part in parts:
            x = part(x)
        return x

    return call


def gradient_step(call, model):
    """Returns a function from inputs to the gradients of all weights."""

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(call(x) ** 2)
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    return step


def training_step(call, model, optimizer):
    """Returns a graph function that trains the model."""
    gradients = gradient_step(call, model)

    @tf.function(jit_compile=False)
    def step(x):
        optimizer.apply(gradients(x), model.trainable_variables)

    return step


def _optimizer(model):
    # Small, so that nothing overflows in however many steps.
    optimizer = keras.optimizers.SGD(1e-5, momentum=0.9)
    optimizer.build(model.trainable_variables)
    return optimizer


def _inputs(model, sizes):
    shape = (sizes["batch_size"], *model.input.shape[1:])
    return tf.random.stateless_normal(shape, (0, 0))


def process_peak(network, method, sizes):
    """Bytes that training takes above the inputs and weights."""
    model = make_model(network, sizes)
    step = training_step(
        with_method(model, method, sizes), model, _optimizer(model)
    )
    x = _inputs(model, sizes)
    with memory.process_peak() as peak:
        for _ in range(2):
            step(x)
    return peak.bytes


def planned_bytes(network, method, sizes):
    """Bytes of XLA:CPU's plan, net of weights and gradients."""
    model = make_model(network, sizes)
    step = gradient_step(with_method(model, method, sizes), model)
    x = tf.TensorSpec((sizes["batch_size"], *model.input.shape[1:]))
    weights = sum(
        math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in model.weights
    )
    total = memory.compiled_memory(step, x, target="cpu").total
    return total - 2 * weights


def step_seconds(network, sizes, repeats):
    """Seconds of each method's steps, by turns."""
    model = make_model(network, sizes)
    optimizer = _optimizer(model)
    x = _inputs(model, sizes)
    steps = {
        method: training_step(
            with_method(model, method, sizes), model, optimizer
        )
        for method in _METHODS
    }
    seconds = {method: [] for method in _METHODS}
    for round_ in range(repeats + 1):
        for method, step in steps.items():
            start = time.perf_counter()
            step(x)
            if round_:  # The first traces.
                seconds[method].append(time.perf_counter() - start)
    return seconds


def _fresh(function, *args):
    return memory.measure_in_process(f"{__file__}:{function}", *args)


def _by_method(function, network, sizes, *, floor=0):
    figures = [
        _fresh(function, network, method, sizes) - floor for method in _METHODS
    ]
    return [
        {"method": method, "figure": figure, "ratio": figure / figures[0]}
        for method, figure in zip(_METHODS, figures, strict=True)
    ]


def measure_process(network, sizes):
    """Returns a record of activation memory for each method."""
    smallest = sizes | {"batch_size": 1}
    floor = _fresh("process_peak", network, "none", smallest)
    return _by_method("process_peak", network, sizes, floor=floor)


def measure_plan(network, sizes):
    """Returns a record of planned memory for each method."""
    return _by_method("planned_bytes", network, sizes)


def measure_time(network, sizes, repeats):
    """Returns a record of the seconds of a step for each method."""
    seconds = _fresh("step_seconds", network, sizes, repeats)
    records = []
    for method, own in seconds.items():
        ratios = [a / b for a, b in zip(own, seconds["none"], strict=True)]
        records.append(
            {
                "method": method,
                "figure": statistics.median(own),
                "ratio": statistics.median(ratios),
                "spread": [min(ratios), max(ratios)],
            }
        )
    return records


def records_of(network, sizes, measures, *, repeats, log=lambda line: None):
    """Measures a network; returns what `--json` writes, as a list."""
    found = []
    for measure in measures:
        log(f"{network}: {measure} ...")
        records = {
            "process": measure_process,
            "plan": measure_plan,
            "time": functools.partial(measure_time, repeats=repeats),
        }[measure](network, sizes)
        # The bars are about the full size only.
        bars = _BARS.get(network, {}) if sizes == _SIZES[network] else {}
        common = {"network": network, "measure": measure, "sizes": sizes}
        for record in records:
            bar = bars.get(measure) if record["method"] == "tfckpt" else None
            found.append(common | record | {"bar": bar})
    return found


def as_table(records):
    """Returns the records as a table."""
    table = rich.table.Table(title="A training step")
    for column in ("network", "measure", "method"):
        table.add_column(column, no_wrap=True)
    for column in ("figure", "ratio", "lowest to highest", "bar"):
        table.add_column(column, justify="right")
    previous = None
    for record in records:
        group = record["network"], record["measure"]
        if previous and group != previous:
            table.add_section()
        spread, bar = record.get("spread"), record["bar"]
        table.add_row(
            *(("", "") if group == previous else group),
            record["method"],
            f"{record['figure']:.2f} s"
            if record["measure"] == "time"
            else f"{record['figure'] / _MIB:.0f} MiB",
            f"{record['ratio']:.3f}",
            "{:.3f} to {:.3f}".format(*spread) if spread else "",
            f"{bar:.2f} {'met' if record['ratio'] <= bar else 'MISSED'}"
            if bar
            else "",
        )
        previous = group
    return table


def draw(records, path):
    """Draws the ratios as bars into a file."""
    from matplotlib import figure

    groups = list(
        dict.fromkeys((each["network"], each["measure"]) for each in records)
    )
    canvas = figure.Figure(
        figsize=(2 + 1.1 * len(groups), 4), layout="constrained"
    )
    axes = canvas.subplots()
    width = 0.8 / len(_METHODS)
    names = ("no recomputation", "tf.recompute_grad", "tfckpt")
    colors = ("#b0b0b0", "#e6a04b", "#2f6db0")
    for number, method in enumerate(_METHODS):
        chosen = [each for each in records if each["method"] == method]
        places = [
            groups.index((each["network"], each["measure"]))
            + (number - 1) * width
            for each in chosen
        ]
        bars = axes.bar(
            places,
            [each["ratio"] for each in chosen],
            width,
            label=names[number],
            color=colors[number],
        )
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
        for place, each in zip(places, chosen, strict=True):
            if each["bar"]:
                axes.hlines(
                    each["bar"],
                    place - width / 2,
                    place + width / 2,
                    color="black",
                    linewidth=2,
                )
    axes.set_xticks(
        range(len(groups)),
        ["\n".join(group) for group in groups],
    )
    axes.set_ylabel("relative to no recomputation")
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    limits = "; black: upper bounds" if any(r["bar"] for r in records) else ""
    axes.set_title(f"A training step{limits}", loc="left")
    canvas.legend(loc="outside lower center", ncols=3, frameon=False)
    canvas.savefig(path, dpi=150)


def main(options):
    if options.plot and not importlib.util.find_spec("matplotlib"):
        sys.exit('--plot needs matplotlib: pip install "tfckpt[plot]"')
    console = rich.console.Console()
    records = []
    for network in dict.fromkeys(options.network):
        sizes = {
            name: getattr(options, name) or value
            for name, value in _SIZES[network].items()
        }
        try:
            records += records_of(
                network,
                sizes,
                options.measure,
                repeats=options.repeats,
                log=console.print,
            )
        except (memory.MeasurementError, NotImplementedError) as error:
            sys.exit(f"{network} could not be measured: {error}")
    console.print(as_table(records))
    if options.json:
        text = json.dumps(records, indent=2)
        pathlib.Path(options.json).write_text(text + "\n", encoding="utf-8")
    if options.plot:
        draw(records, options.plot)


if __name__ == "__main__":
    define_flags()
    app.run(lambda argv: main(flags.FLAGS))
