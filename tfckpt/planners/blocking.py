"""Why a segment was not cut: the tensors that live across its cuts."""

from tfckpt import costs as costs_lib
from tfckpt import plan as plan_lib
from tfckpt import simulator as simulator_lib
from tfckpt.planners import cuts

# A segment is called blocked when the best cut inside it leaves so much of
# what it holds, and when it holds so much of what the largest one does.
_LEAVES = 0.8
_LARGE = 0.5
_NAMED = 3


def blocked(costs: costs_lib.Costs, plan: plan_lib.Plan) -> tuple[str, ...]:
    """Returns for each large segment that no cut would help why not.

    Args:
        costs: What the calls of the model cost.
        plan: A plan for that model.

    Returns:
        Sentences that name the tensors which live across the best cut inside,
        and one for calls that are never run again.

    Raises:
        PlanError: The plan is for another model.
    """
    return sentences(simulator_lib.Simulator(costs), plan)


def sentences(
    simulator: simulator_lib.Simulator, plan: plan_lib.Plan
) -> tuple[str, ...]:
    """The same, for a simulator that is there already."""
    index = simulator.index
    held = cuts.held_bytes(index)
    parts = simulator.parts(plan)
    sizes = [held[part.start : part.stop].sum() for part in parts]
    result = []
    for part, size in zip(parts, sizes, strict=True):
        if part.parts or not size or size < _LARGE * max(sizes):
            continue
        best = (
            min(
                (
                    max(
                        held[part.start : cut].sum(),
                        held[cut : part.stop].sum() + _new(index, part, cut)[0],
                    ),
                    cut,
                )
                for cut in range(part.start + 1, part.stop)
            )
            if part.stop - part.start > 1
            else None
        )
        if best and best[0] >= _LEAVES * size:
            result.append(_sentence(index, part, size, best[1]))
    fixed = [c.path for c in index.costs.calls if not c.recomputable]
    if fixed:
        result.append(
            f"Never run again, because they only read ids: {_some(fixed)}."
        )
    return tuple(result)


def _new(index, part, cut):
    """Returns bytes and keys that only a cut there would keep."""
    keys = [
        key
        for key in cuts.live(index, cut)
        if part.start <= index.made[key] and index.last_read[key] < part.stop
    ]
    return sum(index.sizes[key] for key in keys), keys


def _sentence(index, part, size, cut):
    paths, names = index.costs.paths, index.costs.names
    wide, keys = _new(index, part, cut)
    keys.sort(key=lambda key: -index.sizes[key])
    where = (
        f"{paths[part.start]!r} to {paths[part.stop - 1]!r} "
        f"({part.stop - part.start} calls, {int(size)} bytes) is one segment"
    )
    if not keys:
        largest = max(
            range(part.start, part.stop),
            key=lambda call: cuts.held_bytes(index)[call],
        )
        return f"{where}: most of its memory is that of {paths[largest]!r}."
    return (
        f"{where}: even its best cut, behind {paths[cut - 1]!r}, would keep "
        f"{wide} bytes of {_some([names[key] for key in keys])}."
    )


def _some(names):
    more = len(names) - _NAMED
    text = ", ".join(repr(name) for name in names[:_NAMED])
    return f"{text} and {more} more" if more > 0 else text
