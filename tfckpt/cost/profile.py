"""Times of the calls of a model, measured by running them.

For layers whose operations say little about their time: loops, small
matrices, ops that a device does badly. Each kind of call is run by itself,
forward, and forward with its gradient, on random inputs.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfckpt import costs as costs_lib
from tfckpt import graph as graph_lib
from tfckpt.cost import model, tracing

_ROUNDS = 5


def measured(
    graph: graph_lib.Graph,
    costs: costs_lib.Costs,
    *,
    batch_size: int,
    shapes: Sequence[Sequence[int | None] | None] | None = None,
    progress: Callable[[str], None] | None = None,
) -> costs_lib.Costs:
    """Returns the costs with times in seconds, measured on this machine.

    The time that a kept product saves is measured in proportion: its part
    of the counted time. Weights and other variables are left as they are.

    Args:
        graph: The model's graph.
        costs: Its costs as counted.
        batch_size: See `of_graph`.
        shapes: See `of_graph`.
        progress: Called with a line now and then.
    """
    walk = model.Walk(graph, batch_size, shapes)
    walk.costs()  # finds out which tensors have gradients
    kinds: dict[Any, tuple[float, float] | None] = {}
    seconds: list[tuple[float, float] | None] = []
    found = []
    for position, call in enumerate(graph.calls):
        kind = walk.kind(call)
        kind = (call.path,) if kind is None else kind
        if kind not in kinds:
            if progress:
                progress(f"{position + 1} of {len(costs.calls)}: {call.path}")
            kinds[kind] = _seconds(walk, call)
        seconds.append(kinds[kind])
    # A call that can't be run, on ids out of range say, is put in at the
    # measured pace of the others.
    known = [
        (sum(pair), counted.forward_time + counted.backward_time)
        for pair, counted in zip(seconds, costs.calls, strict=True)
        if pair
    ]
    total = sum(count for _, count in known)
    pace = sum(second for second, _ in known) / total if total else 1.0
    missing = []
    for pair, counted in zip(seconds, costs.calls, strict=True):
        if pair is None:
            missing.append(counted.path)
            pair = pace * counted.forward_time, pace * counted.backward_time
        forward, backward = pair
        part = (
            counted.product_time / counted.forward_time
            if counted.forward_time
            else 0.0
        )
        found.append(
            dataclasses.replace(
                counted,
                forward_time=forward,
                backward_time=backward,
                product_time=part * forward,
            )
        )
    notes = ["Times were measured call by call on this machine."]
    if missing:
        notes.append(
            f"Not measured but counted, for they can't be run: {missing[:5]}."
        )
    return dataclasses.replace(
        costs, calls=tuple(found), notes=(*costs.notes, *notes)
    )


def _seconds(walk, call):
    """Median seconds of a call and of its gradient; None if it can't run."""
    function, specs, active, variables = walk.traceable(call)
    inputs = [_random(spec) for spec in specs]
    forward = tf.function(
        tracing.forward_only(function), autograph=False, jit_compile=False
    )
    both = tf.function(
        tracing.with_gradient(function, active, variables),
        autograph=False,
        jit_compile=False,
    )
    try:
        once, twice = _median(forward, inputs), _median(both, inputs)
    except Exception:  # Whatever a user's layer raises.
        return None
    return once, max(0.0, twice - once)


def _median(function, inputs):
    function(*inputs)
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        function(*inputs)
        tf.test.experimental.sync_devices()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _random(spec):
    if spec.dtype.is_floating:
        return tf.cast(
            tf.random.stateless_normal(spec.shape, (0, 0)), spec.dtype
        )
    return tf.zeros(spec.shape, spec.dtype)
