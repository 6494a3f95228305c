"""One training step of a saved model, run to measure it.

`tfckpt.measurement` writes the folder that is read here, and has these
functions run in fresh processes: what a process once freed it uses again, so
that a second figure from the same one would be too small.
"""

import contextlib
import gc
import importlib
import math
import pathlib
import pickle
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfckpt import memory, segmented_model
from tfckpt import plan as plan_lib

MODEL, DATA, PLAN = "model.keras", "data.pickle", "plan.json"


def peak_bytes(
    folder: str, plain: bool, examples: int | None, device: str | None
) -> int:
    """Returns how many bytes training takes above inputs and weights.

    Args:
        folder: Where the model, its data and its plan are.
        plain: Whether nothing is recomputed.
        examples: So many examples of the data; None for all.
        device: A GPU or TPU; None for the process.
    """
    model, data = _load(folder, plain, examples)
    step = _step(model, data)
    measured = memory.device_peak(device) if device else memory.process_peak()
    gc.collect()
    with measured as peak:
        # The first one traces; both make what an optimizer makes once.
        for _ in range(2):
            step()
    return peak.bytes


def step_seconds(
    folder: str, repeats: int, compare: bool
) -> dict[str, list[float]]:
    """Returns seconds of steps with the plan and without, run by turns.

    Args:
        folder: Where the model, its data and its plan are.
        repeats: Steps of each, besides the first, which traces.
        compare: Whether to run those without the plan too.
    """
    steps = {"plan": _step(*_load(folder, False, None))}
    if compare:
        steps["plain"] = _step(*_load(folder, True, None))
    seconds = {name: [] for name in steps}
    for number in range(repeats + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            tf.test.experimental.sync_devices()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _load(folder, plain, examples):
    folder = pathlib.Path(folder)
    with open(folder / DATA, "rb") as file:
        modules, x, y, compiled = pickle.load(file)
    for name in modules:
        # What can't be imported may not be needed.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # It is the caller's own model, saved a moment ago: its lambdas may run.
    # Its optimizer is made anew, as one that was never built can't be read.
    model = keras.saving.load_model(
        folder / MODEL, compile=False, safe_mode=False
    )
    kind = type(model)
    if not issubclass(kind, segmented_model.SegmentedModel):
        kind = segmented_model.SegmentedModel
    if plain:
        model = kind.from_model(model, plan=None)
    elif (folder / PLAN).exists():
        model = kind.from_model(model, plan=plan_lib.Plan.load(folder / PLAN))
    if compiled:
        model.compile_from_config(compiled)
    data = keras.tree.map_structure(
        lambda each: (
            each if each is None else tf.convert_to_tensor(each[:examples])
        ),
        (x, y),
    )
    return model, (*data, compiled)


def _step(model: Any, data: Any) -> Callable[[], Any]:
    """Returns a function that trains the model once, in a graph."""
    x, y, compiled = data
    if compiled:
        model.optimizer.build(model.trainable_variables)
        model.jit_compile = model.run_eagerly = False
        return lambda: model.train_on_batch(x, y)
    # Small, so that nothing overflows in however many steps.
    optimizer = keras.optimizers.SGD(1e-5, momentum=0.9)
    optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=False, autograph=False)
    def step():
        with tf.GradientTape() as tape:
            outputs = keras.tree.flatten(model(x, training=True))
            losses = [_mean_square(output) for output in outputs]
            loss = tf.add_n([*losses, *_as_float32(model.losses)])
        weights = [v.value for v in model.trainable_variables]
        optimizer.apply(tape.gradient(loss, weights), model.trainable_variables)

    return step


def _mean_square(output):
    (output,) = _as_float32([output])
    return tf.reduce_sum(output**2) / max(1, math.prod(output.shape))


def _as_float32(tensors):
    return [tf.cast(each, tf.float32) for each in tensors]
