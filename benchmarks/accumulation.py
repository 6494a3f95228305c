"""What gradient accumulation costs and saves, on this machine.

A chain of dense layers under Adam in `model.fit`, as a graph:

- time: seconds a sample of windows of 1, 4 and 16 micro-batches, relative to
  the plain model that makes an update of each, and of Keras' own
  `gradient_accumulation_steps`; all by turns in one process, ratios within
  each round; median, lowest and highest.
- memory: how far a fresh process rises in a warm epoch, in MiB, with weights,
  optimizer and accumulators already there; and what the accumulators take.
- collectives: collective operations of a training step on two replicas, in
  the branch that makes an update and outside of it, on each replica.

    python benchmarks/accumulation.py
    python benchmarks/accumulation.py --measure=memory --batch_size=256
"""

import collections
import statistics
import time

import keras
import numpy as np
import rich.console
import rich.progress
import rich.table
import tensorflow as tf
from absl import app, flags

import tfckpt
from tfckpt import memory

_MEASURES = ("time", "memory", "collectives")
_INPUTS = 8
_WINDOWS = (1, 4, 16)
# Without oneDNN's pool, which gives nothing back.
_NO_POOL = {"TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"}


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
        ("batch_size", 512, "Samples of a micro-batch."),
        ("depth", 16, "Layers."),
        ("width", 512, "Units of each."),
        ("rounds", 7, "Rounds of timing."),
    ):
        flags.DEFINE_integer(name, default, what, lower_bound=1, **options)


def methods(batch_size):
    """Returns for each method the batches of `fit` and how it compiles."""
    most = max(_WINDOWS)
    found = {"plain, micro-batch": (batch_size, {})}
    for k in _WINDOWS:
        found[f"window of {k}"] = (
            batch_size,
            {"gradient_accumulation_steps": k},
        )
    for k in _WINDOWS[1:]:
        found[f"Keras' own, {k}"] = (batch_size, {"keras": k})
    found["micro_batches=8"] = (8 * batch_size, {"micro_batches": 8})
    found[f"micro_batches={most}"] = (
        most * batch_size,
        {"micro_batches": most},
    )
    found["plain, 8 times the batch"] = (8 * batch_size, {})
    return found


def make_model(depth, width, options):
    """Builds and compiles the model with all its variables."""
    keras.utils.set_random_seed(0)
    options = dict(options)
    x = inputs = keras.Input((_INPUTS,))
    for _ in range(depth):
        x = keras.layers.Dense(width, activation="tanh")(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    own = options.pop("keras", None)
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=own)
    if options:
        model = tfckpt.SegmentedModel.from_model(model, plan=None)
    model.compile(optimizer, "mse", **options)
    optimizer.build(model.trainable_variables)
    model.make_train_function()
    return model


def make_data(samples, batch_size):
    x = np.random.default_rng(0).normal(size=(samples, _INPUTS))
    x = x.astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
    return data.batch(batch_size, drop_remainder=True)


def _fit(model, data):
    model.fit(data, shuffle=False, verbose=0)


def epoch_peak(batch_size, depth, width, options):
    """Returns bytes: the rise in a warm epoch, and the accumulators."""
    model = make_model(depth, width, options)
    samples = max(2 * batch_size, max(_WINDOWS) * 2 * 64)
    data = make_data(samples // batch_size * batch_size, batch_size)
    _fit(model, data)
    with memory.process_peak() as peak:
        _fit(model, data)
    accumulator = getattr(model, "gradient_accumulator", None)
    return peak.bytes, accumulator.bytes if accumulator else 0


def collectives():
    """Returns how many a step has, in each graph, on two replicas."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = make_model(4, 8, {"gradient_accumulation_steps": 4})
    data = make_data(8, 8)
    _fit(model, data)
    step = tf.function(
        lambda batch: strategy.run(model.train_step, args=(batch,)),
        autograph=False,
    )
    batch = next(iter(strategy.experimental_distribute_dataset(data)))
    graph = step.get_concrete_function(batch).graph.as_graph_def()
    count = collections.Counter(outside=_reduces(graph.node), update=0)
    for function in graph.library.function:
        count["update"] += _reduces(function.node_def)
    return {name: number / 2 for name, number in count.items()}


def _reduces(nodes):
    return sum("CollectiveReduce" in node.op for node in nodes)


def seconds_per_sample(batch_size, depth, width, rounds, track):
    """Returns a list of seconds for each method, round by round."""
    samples = 2 * max(_WINDOWS) * batch_size
    ready = {}
    for name, (batch, options) in methods(batch_size).items():
        ready[name] = (
            make_model(depth, width, options),
            make_data(samples, batch),
        )
        _fit(*ready[name])
    found = collections.defaultdict(list)
    for _ in track(range(rounds)):
        for name, each in ready.items():
            start = time.perf_counter()
            _fit(*each)
            found[name].append((time.perf_counter() - start) / samples)
    return found


def _time_table(found):
    table = rich.table.Table(title="Seconds a sample, relative to plain")
    for name in ("", "median", "lowest", "highest"):
        table.add_column(name, justify="right" if name else "left")
    plain = found["plain, micro-batch"]
    for name, seconds in found.items():
        ratios = [a / b for a, b in zip(seconds, plain, strict=True)]
        figures = statistics.median(ratios), min(ratios), max(ratios)
        table.add_row(name, *(f"{each:.2f}" for each in figures))
    return table


def _memory_table(found):
    table = rich.table.Table(title="Memory of an epoch, MiB")
    for name in ("", "rise", "relative to plain", "accumulators"):
        table.add_column(name, justify="right" if name else "left")
    plain = found["plain, micro-batch"][0]
    for name, (peak, held) in found.items():
        table.add_row(
            name,
            f"{peak / 2**20:.0f}",
            f"{peak / plain:.2f}",
            f"{held / 2**20:.0f}",
        )
    return table


def main(options):
    console = rich.console.Console()
    sizes = options.depth, options.width

    def track(items):
        return rich.progress.track(items, console=console, transient=True)

    if "memory" in options.measure:
        found = {}
        for name, (batch, how) in track(
            list(methods(options.batch_size).items())
        ):
            found[name] = memory.measure_in_process(
                f"{__file__}:epoch_peak",
                batch,
                *sizes,
                how,
                environment=_NO_POOL,
            )
        console.print(_memory_table(found))
    if "collectives" in options.measure:
        count = memory.measure_in_process(f"{__file__}:collectives")
        console.print(
            "Collective operations on each of two replicas: "
            f"{count['update']:g} in an update, {count['outside']:g} outside."
        )
    if "time" in options.measure:
        found = seconds_per_sample(
            options.batch_size, *sizes, options.rounds, track
        )
        console.print(_time_table(found))


if __name__ == "__main__":
    define_flags()
    app.run(lambda argv: main(flags.FLAGS))
