"""A plan for a model: its graph, its costs, a planner, the compiler's check."""

import dataclasses
import difflib
import math
import operator
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tfckpt import _compat_graph as compat
from tfckpt import (
    conversion,
    cost,
    memory,
    planners,
    segmentation,
    simulator,
    target_fit,
    units,
)
from tfckpt import costs as costs_lib
from tfckpt import graph as graph_lib
from tfckpt import plan as plan_lib

# Bytes of all tensors are to be counted in 64 bits.
_MOST_EXAMPLES = 2**31
# What is asked for by name. With "budget", `memory_budget` says which.
STRATEGIES = ("sqrt", "min_memory", "budget", "recursive", "chen")


def make_plan(
    model: keras.Model,
    *,
    batch_size: int,
    input_shape: Any = None,
    strategy: Any = None,
    memory_budget: str | int | float | None = None,
    target: str | None = None,
    measure: bool = False,
    progress: Callable[[str], None] | None = None,
) -> plan_lib.Plan:
    """Plans which calls of a model are recomputed, before anything runs.

    Args:
        model: A Functional or Sequential model, a `SegmentedModel` too.
            Where it is compiled its optimizer counts, else Adam does.
        batch_size: Examples in a training step.
        input_shape: Shape of the input, or a structure of shapes like the
            model's inputs, where the model leaves sizes open. With the batch
            dimension or without.
        strategy: How to choose. `"sqrt"` (the default where there is no
            budget), a number of segments, or a list of call paths, as for
            `SegmentedModel`. `"min_memory"`: least peak. `"budget"` (the
            default where there is one): least time within `memory_budget`.
            `"recursive"`: segments in segments, for less memory at more
            time, within `memory_budget` if given. `"chen"`: Chen's search.
            Or a function that takes a `tfckpt.costs.Costs` and returns a
            plan: `lambda costs: planners.by_type(costs, keep=["Conv2D"])`.
        memory_budget: A size, in bytes or as text such as `"2GiB"`, that
            everything on the device shall fit in: weights, gradients,
            optimizer state, inputs, activations. Or a fraction such as 0.4:
            activation memory relative to no recomputation.
        target: Name of a device, as for `tfckpt.memory.compiled_memory`: the
            plan is compiled by the device's own compiler and chosen so that
            the compiled step is within the budget, in at most
            `target_fit.MOST_TRIALS` compilations.
        measure: Whether to measure the time of each kind of call by running
            it, in place of counting operations.
        progress: Called with a line for each step that takes long.

    Returns:
        The plan, with its `prediction`.

    Raises:
        PlanError: No plan is within the budget (it says what the least is);
            an argument is wrong.
        TypeError: `model` has no graph.

    Example:

    >>> inputs = x = keras.Input((64,))
    >>> for i in range(9):
    ...     x = keras.layers.Dense(64, "tanh", name=f"dense_{i}")(x)
    >>> model = keras.Model(inputs, x)
    >>> plan = make_plan(model, batch_size=256, memory_budget=0.7)
    >>> plan.prediction.ratio <= 0.7
    True
    >>> segmented = tfckpt.SegmentedModel.from_model(model, plan=plan)
    """
    budget = _checked_budget(memory_budget)
    if strategy is None:
        strategy = "sqrt" if budget is None else "budget"
    _check_strategy(strategy, budget)
    _check_target(target)
    batch_size = _checked_size(batch_size)
    functional, shapes = _read(model, batch_size, input_shape)
    costs = costs_of(
        model,
        batch_size=batch_size,
        input_shape=input_shape,
        measure=measure,
        progress=progress,
    )
    if not costs.calls:
        raise plan_lib.PlanError(
            f"The model '{model.name}' makes no calls, so there is nothing to "
            "plan. Use plan=None."
        )
    simulated = simulator.Simulator(costs)
    limit = _limit(budget, simulated)
    if limit is not None and limit < 0:
        raise _too_small(budget, simulated)
    if target is not None and strategy == "budget":
        plan = target_fit.fit(
            functional,
            simulated,
            budget,
            target=target,
            shapes=shapes,
            progress=progress,
        )
    else:
        try:
            plan = _choose(strategy, costs, limit, functional, shapes)
        except plan_lib.PlanError as error:
            if strategy == "budget" and isinstance(budget, int):
                raise _too_small(budget, simulated) from error
            raise
        if target is None:  # else its compiler decides
            _check_fits(plan, strategy, simulated, limit)
        if target is not None:
            plan = target_fit.checked(
                functional,
                simulated.annotated(plan),
                budget,
                simulated,
                target=target,
                shapes=shapes,
                progress=progress,
            )
    return _reported(plan, simulated)


def costs_of(
    model: keras.Model,
    *,
    batch_size: int,
    input_shape: Any = None,
    measure: bool = False,
    progress: Callable[[str], None] | None = None,
) -> costs_lib.Costs:
    """Returns what a training step of a model costs, call by call.

    Args:
        model: See `make_plan`, and so the others.
        batch_size: Examples in a step.
        input_shape: Shapes that the model leaves open.
        measure: Whether to measure times.
        progress: Called with a line for each step that takes long.
    """
    batch_size = _checked_size(batch_size)
    functional, shapes = _read(model, batch_size, input_shape)
    graph = graph_lib.read(functional)
    costs = cost.of_graph(graph, batch_size=batch_size, shapes=shapes)
    if measure:
        costs = cost.measured(
            graph,
            costs,
            batch_size=batch_size,
            shapes=shapes,
            progress=progress,
        )
    optimizer, note = cost.optimizer_bytes(model)
    return dataclasses.replace(
        costs,
        weight_bytes=cost.variable_bytes(model.variables),
        gradient_bytes=cost.variable_bytes(model.trainable_variables),
        optimizer_bytes=optimizer,
        notes=costs.notes + ((note,) if note else ()),
    )


def _checked_size(batch_size):
    try:
        size = operator.index(batch_size)
    except TypeError:
        size = 0
    if isinstance(batch_size, bool) or not 1 <= size <= _MOST_EXAMPLES:
        raise plan_lib.PlanError(
            "`batch_size` is a whole number of examples, 1 or more, up to "
            f"{_MOST_EXAMPLES}. Received: {batch_size!r}."
        )
    return size


def _read(model, batch_size, input_shape):
    """The Functional that runs the model, and the shapes of its inputs."""
    functional = compat.functional_of(model)
    if functional is None:
        try:
            functional = conversion.checked_functional(
                keras.Model, model, input_shape
            )
        except plan_lib.PlanError:
            raise
        except ValueError as error:
            raise plan_lib.PlanError(
                f"The model '{model.name}', which is not built, can't be built "
                f"for input_shape={input_shape!r}: {error} Give the shape with "
                "the batch dimension, or build the model first."
            ) from error
    shapes = segmentation.flat_shapes(
        functional, _with_batch(functional, input_shape)
    )
    shapes = [
        (batch_size, *shape[1:])
        for shape in shapes or [tuple(x.shape) for x in functional.inputs]
    ]
    return functional, shapes


def _with_batch(functional, input_shape):
    """A shape without the batch dimension gets one."""
    known = iter(functional.inputs)

    def one(shape):
        expected = next(known, None)
        if expected is not None and len(shape) == len(expected.shape) - 1:
            return (None, *shape)
        return tuple(shape)

    try:
        return keras.tree.map_shape_structure(one, input_shape)
    except TypeError:  # No structure of shapes: refused where it is checked.
        return input_shape


def _checked_budget(memory_budget):
    if memory_budget is None:
        return None
    if isinstance(memory_budget, np.generic):
        memory_budget = memory_budget.item()
    try:
        return units.parse_size(memory_budget)
    except ValueError as error:
        raise plan_lib.PlanError(f"`memory_budget`: {error}") from error


def _check_strategy(strategy, budget):
    if isinstance(strategy, str) and strategy not in STRATEGIES:
        near = difflib.get_close_matches(strategy, STRATEGIES, n=1, cutoff=0.5)
        raise plan_lib.PlanError(
            f"`strategy` is one of {', '.join(STRATEGIES)}, a number of "
            "segments, a list of call paths or a function of the costs. "
            f"Received: {strategy!r}."
            + (f" Did you mean {near[0]!r}?" if near else "")
        )
    if strategy == "budget" and budget is None:
        raise plan_lib.PlanError(
            'strategy="budget" needs `memory_budget`, such as "2GiB" or 0.4.'
        )


def _check_target(target):
    if target is None or target in memory.targets():
        return
    if not os.path.isfile(target):
        raise plan_lib.PlanError(
            f"`target` is one of {', '.join(memory.targets())}, or the path of "
            f"a GPU's description. Received: {target!r}."
        )


def _limit(budget, simulated):
    """Activation memory in bytes that is within the budget."""
    if budget is None:
        return None
    if isinstance(budget, float):
        return math.floor(budget * simulated.plain.peak)
    return budget - _fixed_bytes(simulated)


def _fixed_bytes(simulated):
    """Bytes that are the same under every plan."""
    paths = simulated.costs.paths
    nothing = plan_lib.Plan((plan_lib.Segment(paths, recomputed=False),))
    return simulated.predict(nothing).fixed_bytes


def _too_small(budget, simulated):
    """The error for a size: it is for everything, and so is the least one."""
    costs = simulated.costs
    least = planners.min_memory(costs).prediction.least_bytes
    walk = simulated.walk(planners.budget(costs, least))
    needed = least + _fixed_bytes(simulated)
    size = units.format_size
    return plan_lib.PlanError(
        f"No plan fits a step into {size(budget)}. The least budget is "
        f"{needed} bytes ({size(needed)}): activations {size(least)}, which "
        f"{costs.paths[walk.peak_call]!r} sets ({walk.peak_phase} pass), and "
        "what no plan can change: "
        f"weights {size(costs.weight_bytes)}, "
        f"gradients {size(costs.gradient_bytes)}, "
        f"optimizer state {size(costs.optimizer_bytes)}, "
        f"inputs {size(costs.input_bytes)}. Give that, or use a smaller batch "
        "size, model or optimizer state."
        + (
            f" As a fraction of activation memory {budget} is written "
            f"{float(budget)}."
            if budget <= 1
            else ""
        )
    )


def _choose(strategy, costs, limit, functional, shapes):
    if callable(strategy):
        plan = strategy(costs)
        if not isinstance(plan, plan_lib.Plan):
            raise plan_lib.PlanError(
                "A `strategy` that is a function returns a tfckpt.Plan. "
                f"Received: {plan!r} of type {type(plan).__name__}."
            )
        return plan
    if strategy == "min_memory":
        return planners.min_memory(costs)
    if strategy == "budget":
        return planners.budget(costs, limit)
    if strategy == "recursive":
        return planners.recursive(costs, limit)
    if strategy == "chen":
        return planners.chen(costs)
    plan = segmentation.Segmentation(functional, strategy, shapes).plan
    if isinstance(plan, plan_lib.Unsettled):
        # The traces know sizes that Keras doesn't.
        number = None if strategy == "sqrt" else strategy
        return planners.alike(costs, number)
    return plan


def _check_fits(plan, strategy, simulated, limit):
    peak = simulated.predict(plan).peak_bytes
    if limit is not None and peak > limit:
        raise plan_lib.PlanError(
            f"The plan by strategy={strategy!r} takes "
            f"{units.format_size(peak)} of activation memory, and the budget "
            f'leaves {units.format_size(limit)}. Use strategy="budget", which '
            "looks for a plan that fits."
        )


def _reported(plan, simulated):
    """The plan with what the report says besides."""
    trials = plan.prediction.trials if plan.prediction else ()
    plan = simulated.annotated(plan)
    frontier = tuple(planners.frontier(simulated.costs))
    notes = plan.prediction.notes
    if plan.prediction.peak_bytes > plan.prediction.plain_bytes:
        notes += ("This plan takes more memory than no recomputation does.",)
    known = plan.prediction
    saved = known.plain_bytes - known.peak_bytes
    saved_of_step = known.plain_step_bytes - known.step_bytes
    if saved > 0 and saved_of_step < saved / 2:
        notes += (
            "The gradients of weights set the peak of a step, which is lower "
            f"by {units.format_size(max(0, saved_of_step))}, not by the "
            f"{units.format_size(saved)} of activations. Larger batches gain "
            "more.",
        )
    return dataclasses.replace(
        plan,
        prediction=dataclasses.replace(
            plan.prediction,
            frontier=frontier,
            least_bytes=min(
                plan.prediction.peak_bytes, *(size for size, _ in frontier)
            ),
            blocked=tuple(planners.blocked(simulated.costs, plan)),
            trials=trials,
            notes=notes,
        ),
    )
