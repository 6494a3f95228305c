"""Names that people give to calls, layers and classes of layers."""

import difflib
from collections.abc import Iterable, Sequence

from tfckpt import costs as costs_lib
from tfckpt import plan


def unknown(
    name: str, known: Iterable[str], paths: Sequence[str]
) -> plan.PlanError:
    """Returns the error for a name that nothing has, with near matches."""
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
    return plan.PlanError(
        f"No call of the model is named {name!r}. "
        + (f"Near matches: {', '.join(near)}. " if near else "")
        + f"The {len(paths)} calls run from {paths[0]!r} to {paths[-1]!r}; "
        "`model.plan` prints them all."
    )


def positions(
    costs: costs_lib.Costs, names: Sequence[str]
) -> dict[str, list[int]]:
    """Returns for each name the calls that it stands for.

    A name is the class of a layer, the path of a call, the name of a layer
    (all its calls), or the name or path of a nested model (all calls inside).

    Raises:
        PlanError: A name stands for nothing, or the names are no sequence of
            strings.
    """
    if isinstance(names, str) or not all(isinstance(n, str) for n in names):
        raise plan.PlanError(
            "Names are a list of layer classes, layer names or call paths, "
            f"such as ['Conv2D']. Received: {names!r}."
        )
    known = {}
    for position, call in enumerate(costs.calls):
        for name in _names(call):
            known.setdefault(name, []).append(position)
    for name in names:
        if name not in known:
            kinds = ", ".join(dict.fromkeys(c.kind for c in costs.calls))
            raise plan.PlanError(
                f"No layer class, layer or call is named {name!r}. Classes in "
                f"this model: {kinds}. {unknown(name, known, costs.paths)}"
            )
    return {name: known[name] for name in names}


def _names(call):
    plain = "/".join(part.split("#")[0] for part in call.path.split("/"))
    found = {call.kind, call.path, plain}
    for path in (call.path, plain):
        parts = path.split("/")
        found.update(parts)
        for depth in range(1, len(parts)):
            found.add("/".join(parts[:depth]))
    return found
