"""Recompute, or keep, what the user names.

"Selective activation recomputation" after Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models",
https://arxiv.org/abs/2205.05198.
"""

from collections.abc import Sequence

from tfckpt import costs as costs_lib
from tfckpt import plan as plan_lib
from tfckpt import simulator as simulator_lib
from tfckpt.planners import budgets, finish, names


def by_type(
    costs: costs_lib.Costs,
    *,
    recompute: Sequence[str] | None = None,
    keep: Sequence[str] | None = None,
) -> plan_lib.Plan:
    """Returns a plan by classes or names of layers.

    A name is the class of a layer ("Conv2D"), the name of a layer, the path of
    a call, or the name of a nested model for all that is inside.

    Args:
        costs: What the calls of the model cost.
        recompute: These calls are recomputed, neighbours together; the rest
            is left alone.
        keep: The products (matrix products, convolutions) of these calls are
            kept and all the rest is recomputed, in segments that need least
            memory. Products that nothing would make again are not kept.

    Raises:
        PlanError: Not exactly one of both is given, a name is unknown, or
            nothing that it names can be recomputed or kept.

    Example:

    >>> from tfckpt import costs
    >>> calls = [
    ...     costs.CallCost(
    ...         f"{kind.lower()}_{i}", kind, (i,), (i + 1,), needs=(i,)
    ...     )
    ...     for i, kind in enumerate(["Conv2D", "ReLU", "Conv2D", "Dense"])
    ... ]
    >>> model = costs.Costs(
    ...     tuple(calls), (8,) * 5, (8,) * 5, tuple("abcde"),
    ...     inputs=(0,), outputs=(4,), batch_size=1,
    ... )
    >>> plan = by_type(model, recompute=["Conv2D", "ReLU"])
    >>> [(s.recomputed, len(s.calls)) for s in plan.segments]
    [(True, 3), (False, 1)]
    """
    if (recompute is None) == (keep is None):
        raise plan_lib.PlanError(
            "`by_type` takes either `recompute` or `keep`. Received: "
            f"recompute={recompute!r}, keep={keep!r}."
        )
    if keep is not None:
        return _keep(costs, keep)
    return _recompute(costs, recompute)


def _recompute(costs, asked):
    chosen = set()
    for name, calls in names.positions(costs, asked).items():
        free = [call for call in calls if costs.calls[call].recomputable]
        if not free:
            raise plan_lib.PlanError(
                f"{name!r} names only calls that are never recomputed, because "
                f"they only read ids: {costs.calls[calls[0]].path!r}. Leave "
                "it out."
            )
        chosen.update(free)
    segments, start, paths = [], 0, costs.paths
    for end in range(1, len(paths) + 1):
        inside = start in chosen
        if end == len(paths) or (end in chosen) != inside:
            segments.append(plan_lib.Segment(paths[start:end], inside))
            start = end
    simulator = simulator_lib.Simulator(costs)
    return finish.finished(simulator, finish.tidy(simulator, segments))


def _keep(costs, asked):
    chosen = set()
    for name, calls in names.positions(costs, asked).items():
        having = [call for call in calls if costs.calls[call].product_bytes]
        if not having:
            some = sorted({c.kind for c in costs.calls if c.product_bytes})
            raise plan_lib.PlanError(
                f"{name!r} makes no products that could be kept: "
                f"{costs.calls[calls[0]].path!r} holds no matrix product or "
                "convolution. "
                + (
                    f"These classes do: {', '.join(some)}."
                    if some
                    else "Nothing in this model does."
                )
            )
        chosen.update(having)
    finder = budgets.Finder(costs, [frozenset(chosen)], alone=False)
    return finder.plan(int(finder.least * (1 + budgets.SLACK)))
