"""Segments of equal bytes, from costs; `equal` says how and after whom."""

from tfckpt import costs as costs_lib
from tfckpt import plan as plan_lib
from tfckpt.planners import cuts, equal
from tfckpt.simulator import index as index_lib


def alike(costs: costs_lib.Costs, segments: int | None = None) -> plan_lib.Plan:
    """Returns a plan of segments whose outputs hold equal bytes.

    Args:
        costs: What the calls of the model cost.
        segments: Number of segments; None for about the square root of the
            number of calls that make something.

    Raises:
        PlanError: `segments` is not a whole number from 1 to that of calls.
    """
    index = index_lib.Index(costs)
    made = [sum(index.sizes[key] for key in c.makes) for c in costs.calls]
    living = cuts.widths(index)[1:]
    if segments is None:
        return equal.sqrt(costs.paths, made, living)
    return equal.uniform(costs.paths, segments, made, living)
