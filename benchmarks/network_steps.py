"""Measures a training step of a network, for `networks.py`.

Each function runs in a fresh process: arguments and results are JSON. `path`
is the file of a plan with the plan's name before it ("sqrt=plans/x.json"), or
None for the plain step.
"""

import hashlib
import itertools
import json
import os
import pathlib
import time

import compiled_memory
import keras
import memory as chains
import network_zoo as zoo
import numpy as np
import tensorflow as tf

import tfckpt
from tfckpt import memory, planning

# What is noted of a prediction.
EXPECTED = (
    "peak_bytes",
    "plain_bytes",
    "peak_above_gradients",
    "plain_above_gradients",
    "least_bytes",
    "extra_time",
    "extra_flops",
    "step_flops",
)


def make_plan(network, sizes, plan, path):
    """Makes a plan, writes it to a file and returns what it promises."""
    model = zoo.make_model(network, sizes)
    budget, keep = zoo.BUDGET.fullmatch(plan), zoo.KEEP.fullmatch(plan)
    strategy = "budget" if budget else plan
    if alike := zoo.ALIKE.fullmatch(plan):
        strategy = int(alike[1])
    if keep:
        names = keep[1].split("+")

        def strategy(costs):
            return tfckpt.planners.by_type(costs, keep=names)

    start = time.perf_counter()
    made = planning.make_plan(
        model,
        batch_size=sizes["batch_size"],
        strategy=strategy,
        memory_budget=float(budget[1]) if budget else None,
    )
    seconds = time.perf_counter() - start
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save(path)
    segments = json.dumps(made.get_config()["segments"], sort_keys=True)
    return {
        "digest": hashlib.sha256(segments.encode()).hexdigest()[:12],
        "planning_seconds": seconds,
        "calls": len(made.calls),
        "segments": len(made.segments),
    } | {
        name: made.prediction and getattr(made.prediction, name)
        for name in EXPECTED
    }


def _follow(model, path):
    """The model as a function for training, under the plan in a file."""
    if path is None:
        return lambda x: model(x, training=True)
    name, _, path = path.rpartition("=")
    plan = tfckpt.Plan.load(path)
    if name != "recompute_grad":
        ours = tfckpt.SegmentedModel.from_model(model, plan=plan)
        return lambda x: ours(x, training=True)
    ends = [segment.calls[-1] for segment in plan.segments[:-1]]
    tensors = [
        model.input,
        *(model.get_layer(end).output for end in ends),
        model.output,
    ]
    parts = [
        keras.Model(first, last) for first, last in itertools.pairwise(tensors)
    ]
    parts = [lambda x, part=part: part(x, training=True) for part in parts]
    parts = [*map(tf.recompute_grad, parts[:-1]), parts[-1]]

    def call(x):
        for part in parts:
            x = part(x)
        return x

    return call


def _optimizer(model):
    # Small, so that nothing overflows in however many steps.
    optimizer = keras.optimizers.SGD(1e-5, momentum=0.9)
    optimizer.build(model.trainable_variables)
    return optimizer


def _inputs(model, sizes):
    shape = (sizes["batch_size"], *model.input.shape[1:])
    return tf.random.stateless_normal(shape, (0, 0))


def process_peak(network, sizes, path):
    """Bytes that the process rises by, as two figures.

    Returns:
        `warm`: in a step, above what the process holds before it: tensors,
        where it gives them back. `cold`: in the first two steps above inputs
        and weights: with the graph, and what a pool has kept.
    """
    model = zoo.make_model(network, sizes)
    call = _follow(model, path)
    step = chains.training_step(call, model, _optimizer(model))
    x = _inputs(model, sizes)
    peaks = []
    for _ in range(2):
        with memory.process_peak() as peak:
            step(x)
        peaks.append(peak)
    first, second = peaks
    highest = max(each.baseline + each.bytes for each in peaks)
    return {"warm": second.bytes, "cold": highest - first.baseline}


def compiled(network, sizes, path, target):
    """Activation memory of the step as compiled for a target, in bytes."""
    model = zoo.make_model(network, sizes)
    step = chains.gradient_step(_follow(model, path), model)
    x = tf.TensorSpec((sizes["batch_size"], *model.input.shape[1:]))
    needed = memory.compiled_memory(step, x, target=target)
    return {
        "bytes": compiled_memory.activations(needed, model.weights),
        "temporaries": needed.temporaries,
        "total": needed.total,
    }


def step_seconds(network, sizes, path, rounds):
    """Seconds of plain steps and of those under a plan, by turns."""
    model = zoo.make_model(network, sizes)
    optimizer = _optimizer(model)
    steps = [
        chains.training_step(_follow(model, each), model, optimizer)
        for each in (None, path)
    ]
    x = _inputs(model, sizes)
    seconds = [], []
    for round_ in range(rounds + 1):
        for step, own in zip(steps, seconds, strict=True):
            start = time.perf_counter()
            step(x)
            if round_:  # The first traces.
                own.append(time.perf_counter() - start)
    plain, ours = seconds
    return {"plain": plain, "ours": ours, "load": os.getloadavg()[0]}


def unfused_difference(network, sizes, path):
    """`gradient_difference` without Grappler, for a process of its own.

    It fuses ops of the two graphs differently, and an untrained deep network
    makes much of that.
    """
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": True}
    )
    return gradient_difference(network, sizes, path)


def gradient_difference(network, sizes, path):
    """Largest difference of a gradient, relative to the largest gradient."""
    model = zoo.make_model(network, sizes)
    x = _inputs(model, sizes)
    plain, ours = (
        tf.function(chains.gradient_step(_follow(model, each), model))(x)
        for each in (None, path)
    )
    if [g is None for g in plain] != [g is None for g in ours]:
        raise ValueError("Other gradients than the plain model's are None.")
    pairs = [
        (a.numpy(), b.numpy())
        for a, b in zip(plain, ours, strict=True)
        if a is not None
    ]
    largest = max(float(np.abs(a).max()) for a, _ in pairs)
    difference = max(float(np.abs(a - b).max()) for a, b in pairs)
    return {"difference": difference, "largest": largest}
