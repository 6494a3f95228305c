"""What every planner does to a plan at last."""

import dataclasses
from collections.abc import Iterable

from tfckpt import plan as plan_lib
from tfckpt import simulator as simulator_lib
from tfckpt.planners import blocking
from tfckpt.simulator import walk as walk_lib


def tidy(
    simulator: simulator_lib.Simulator, segments: Iterable[plan_lib.Segment]
) -> plan_lib.Plan:
    """Returns the plan, with what is not worth recomputing left alone.

    A segment in which nothing would run again is left alone, as is the last
    one. Neighbours that are left alone become one, which changes nothing.
    """
    segments = list(segments)
    segments[-1] = dataclasses.replace(
        segments[-1], recomputed=False, kept=(), segments=()
    )
    parts = simulator.parts(plan_lib.Plan(tuple(segments)))
    result = []
    for segment, part in zip(segments, parts, strict=True):
        if segment.recomputed and not walk_lib.needed_again(
            simulator.index, part.again, part.kept
        ):
            segment = plan_lib.Segment(segment.calls, recomputed=False)
        if result and not (segment.recomputed or result[-1].recomputed):
            before = result.pop()
            segment = plan_lib.Segment(
                before.calls + segment.calls, recomputed=False
            )
        result.append(segment)
    return plan_lib.Plan(tuple(result))


def finished(
    simulator: simulator_lib.Simulator,
    plan: plan_lib.Plan,
    least_bytes: int | None = None,
    blocked: bool = False,
) -> plan_lib.Plan:
    """Returns the plan with sizes, boundary names and its prediction."""
    plan = simulator.annotated(plan)
    sentences = blocking.sentences(simulator, plan) if blocked else ()
    return plan_lib.Plan(
        plan.segments,
        dataclasses.replace(
            plan.prediction, least_bytes=least_bytes, blocked=sentences
        ),
    )
