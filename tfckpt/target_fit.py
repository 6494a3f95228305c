"""A plan whose compiled step fits a device, by the device's own compiler.

The simulator counts what a graph step keeps; a compiler fuses ops and keeps
less. So the simulated budget is only the handle: plans of the frontier are
compiled, and the cheapest one that fits is found by bisection.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfckpt import memory, planners, segmented_model, simulator, units
from tfckpt import plan as plan_lib
from tfckpt import prediction as prediction_lib

MOST_TRIALS = 6
# How the compilers say that a step does not fit their device.
_TOO_BIG = "RESOURCE_EXHAUSTED"
# Numbers of equal segments that are tried where the plan of least simulated
# memory does not fit. A compiler holds what lives across cuts, and fuses what
# lies between them, so that few wide segments can be smaller than many.
_FEW = (8, 6, 12)
# Where the bisection is fine enough, as a part of the plain peak.
_NEAR = 0.02


def gradient_step(model: Any) -> Callable[..., Any]:
    """Returns a training step that hands out its gradients.

    The loss is the mean square of all outputs: which loss it is hardly
    matters for memory.
    """

    def step(*inputs):
        flat = list(inputs)
        with tf.GradientTape() as tape:
            outputs = model(
                keras.tree.pack_sequence_as(model.input, flat), training=True
            )
            loss = sum(
                tf.reduce_mean(tf.cast(x, tf.float32) ** 2)
                for x in keras.tree.flatten(outputs)
            )
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    return step


def compiled_step(
    model: Any, shapes: Sequence[Sequence[int]], target: str
) -> memory.CompiledMemory | None:
    """Returns what a model's step takes as compiled for a target.

    Args:
        model: The model.
        shapes: Shapes of its inputs, flat, with the batch dimension.
        target: Name of the target.

    Returns:
        Its memory without optimizer state; None if the compiler, which knows
        what its device has, finds it too big.
    """
    inputs = [
        tf.TensorSpec(shape, keras.backend.standardize_dtype(x.dtype))
        for shape, x in zip(shapes, model.inputs, strict=True)
    ]
    try:
        return memory.compiled_memory(
            gradient_step(model), *inputs, target=target
        )
    except memory.CompilationError as error:
        if _TOO_BIG in str(error):
            return None
        raise


class _Compiler:
    """Compiles steps of a model for a target, and takes note."""

    def __init__(self, functional, simulated, budget, target, shapes, progress):
        self._functional = functional
        self._costs = simulated.costs
        self._budget = budget
        self._target = target
        self._progress = progress or (lambda line: None)
        self._shapes = shapes
        self.plain: int | None = None
        self.trials: list[prediction_lib.Trial] = []

    def trial(self, plan: plan_lib.Plan | None) -> prediction_lib.Trial:
        """Compiles the step under a plan, or with none."""
        model = segmented_model.SegmentedModel(
            self._functional.input, self._functional.output, plan=plan
        )
        size = self._bytes(model)
        if plan is None and isinstance(self._budget, float):
            if size is None:
                raise plan_lib.PlanError(
                    "A fraction is relative to the plain step, which is too "
                    f"big for {self._target}. Received: memory_budget="
                    f"{self._budget}. Give a size, such as what the device has."
                )
            self.plain = size
        limit = self._budget
        if self.plain is not None:
            limit = self._budget * self.plain
        trial = prediction_lib.Trial(
            target=self._target,
            budget_bytes=plan and plan.prediction.peak_bytes,
            bytes=size,
            extra_time=plan.prediction.extra_time if plan else 0.0,
            fits=size is not None and (limit is None or size <= limit),
        )
        self.trials.append(trial)
        self._progress(
            f"{self._target}, compilation {len(self.trials)}: "
            f"{'too big for it' if size is None else units.format_size(size)} "
            + (
                f"under a plan of {100 * trial.extra_time:.1f} % extra time"
                if plan
                else "without recomputation"
            )
            + (
                ""
                if self._budget is None
                else f", {'fits' if trial.fits else 'does not fit'}"
            )
        )
        return trial

    def _bytes(self, model):
        """What the compiled step takes; None if it's too big for the device."""
        compiled = compiled_step(model, self._shapes, self._target)
        if compiled is None:
            return None
        if isinstance(self._budget, float):
            return compiled.temporaries
        # Gradients are among the outputs; the optimizer is not compiled.
        return compiled.total + self._costs.optimizer_bytes


def fit(
    functional: Any,
    simulated: simulator.Simulator,
    budget: int | float,
    *,
    target: str,
    shapes: Sequence[tuple[int, ...]],
    progress: Callable[[str], None] | None = None,
) -> plan_lib.Plan:
    """Returns the cheapest plan found whose compiled step fits.

    Args:
        functional: The model.
        simulated: The simulator of its costs.
        budget: Bytes for everything on the device, or the fraction of the
            plain step's temporary memory.
        target: Name of the target.
        shapes: Shapes of the inputs, flat.
        progress: Called with a line for each compilation.

    Raises:
        PlanError: None was found in `MOST_TRIALS` compilations.
    """
    compiler = _Compiler(
        functional, simulated, budget, target, shapes, progress
    )
    plain = simulated.plain.peak
    nothing = plan_lib.Plan(
        (plan_lib.Segment(simulated.costs.paths, recomputed=False),)
    )
    if compiler.trial(None).fits:
        return _with_trials(simulated.annotated(nothing), compiler.trials)
    least = planners.min_memory(simulated.costs)
    low, high = least.prediction.peak_bytes, plain
    trial = compiler.trial(least)
    best = least
    for number in _FEW:
        if trial.fits or number > len(simulated.costs.calls):
            break
        best = simulated.annotated(planners.alike(simulated.costs, number))
        trial = compiler.trial(best)
    if not trial.fits:
        trial = min(compiler.trials[1:], key=lambda t: t.bytes or math.inf)
        raise plan_lib.PlanError(
            f"Compiled for {target}, no plan was found within "
            f"{_described(budget)}: the smallest step "
            + (
                "is too big for the device"
                if trial.bytes is None
                else f"takes {units.format_size(trial.bytes)}"
            )
            + (
                f" ({trial.bytes / compiler.plain:.3f} of the plain step)"
                if compiler.plain
                else ""
            )
            + ". Use a smaller batch size or a larger budget."
        )
    tried = {low}
    while len(compiler.trials) < MOST_TRIALS and high - low > _NEAR * plain:
        middle = planners.budget(simulated.costs, (low + high) // 2)
        peak = middle.prediction.peak_bytes
        if peak in tried:
            low = (low + high) // 2
            continue
        tried.add(peak)
        if compiler.trial(middle).fits:
            low = (low + high) // 2
            if middle.prediction.extra_time <= best.prediction.extra_time:
                best = middle
        else:
            high = peak
    return _with_trials(best, compiler.trials)


def checked(
    functional: Any,
    plan: plan_lib.Plan,
    budget: int | float | None,
    simulated: simulator.Simulator,
    *,
    target: str,
    shapes: Sequence[tuple[int, ...]],
    progress: Callable[[str], None] | None = None,
) -> plan_lib.Plan:
    """Returns a plan with what its step and the plain one take on a target.

    Args:
        functional: The model.
        plan: A plan with its prediction.
        budget: See `fit`; None for no limit.
        simulated: See `fit`, and so the others.
        target: Name of the target.
        shapes: Shapes of the inputs, flat.
        progress: Called with a line for each compilation.

    Raises:
        PlanError: The plan's step does not fit.
    """
    compiler = _Compiler(
        functional, simulated, budget, target, shapes, progress
    )
    compiler.trial(None)
    trial = compiler.trial(plan)
    if not trial.fits:
        size = "more than the device has"
        if trial.bytes is not None:
            size = units.format_size(trial.bytes)
        raise plan_lib.PlanError(
            f"Compiled for {target}, the plan takes {size}: not within "
            f'{_described(budget)}. Use strategy="budget", which searches.'
        )
    return _with_trials(plan, compiler.trials)


def _with_trials(plan, trials):
    return dataclasses.replace(
        plan,
        prediction=dataclasses.replace(plan.prediction, trials=tuple(trials)),
    )


def _described(budget):
    if isinstance(budget, float):
        return f"{budget:g} of the plain step's temporary memory"
    return units.format_size(budget)
