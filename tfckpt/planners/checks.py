"""Checks of what planners are given."""

import math
import operator

import numpy as np

from tfckpt import plan, units


def paths(paths):
    """Returns the paths of calls as a tuple, or raises a PlanError."""
    if isinstance(paths, str) or not all(isinstance(p, str) for p in paths):
        raise plan.PlanError(f"Call paths are strings. Received: {paths!r}.")
    if not paths:
        raise plan.PlanError(
            "A model without calls has nothing to plan. Use plan=None."
        )
    return tuple(paths)


def number(segments, length):
    """Returns a number of segments, or raises a PlanError."""
    try:
        number = operator.index(segments)
    except TypeError:
        number = None
    if number is None or isinstance(segments, (bool, np.bool_)):
        raise plan.PlanError(
            f"The number of segments is an int from 1 to {length}, the "
            f"number of calls. Received: {segments!r} of type "
            f"{type(segments).__name__}."
        )
    if not 1 <= number <= length:
        raise plan.PlanError(
            f"{length} calls can't be cut into {number} segments. Expected a "
            f"number from 1 to {length}. Ask for fewer segments, or for "
            '"sqrt".'
            if number > length
            else f"The number of segments is from 1 to {length}, the number "
            f"of calls. Received: {number}. To recompute nothing, ask for "
            "None."
        )
    return number


def sizes(name, values, length):
    """Returns bytes for each call as an array, or raises a PlanError."""
    if values is None:
        return None
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (length,) or not np.all(array >= 0):
        raise plan.PlanError(
            f"`{name}` holds a number of bytes, 0 or more, for each of the "
            f"{length} calls. Received: {values!r}."
        )
    return array


def whole(name, value):
    """Returns a whole number from 1 on, or raises a PlanError."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, (bool, np.bool_)):
        raise plan.PlanError(
            f"`{name}` is a whole number, 1 or more. Received: {value!r} of "
            f"type {type(value).__name__}."
        )
    return number


def budget(value):
    """Returns a budget in bytes, or raises a PlanError."""
    try:
        size = operator.index(value)
    except TypeError:
        size = -1
    if size < 0 or isinstance(value, (bool, np.bool_)):
        raise plan.PlanError(
            "A budget is a whole number of bytes, 0 or more. Received: "
            f"{value!r} of type {type(value).__name__}."
        )
    return size


def too_small(size, least, simulator, advice):
    """Returns the PlanError for a budget that can't be met.

    Args:
        size: The budget in bytes.
        least: The plan that needs least.
        simulator: The simulator of the model.
        advice: What else may be done, a clause.
    """
    walk = simulator.walk(least)
    # Not less than it takes, so that it can be asked for.
    path = simulator.costs.paths[walk.peak_call]
    fraction = math.ceil(1000 * walk.peak / simulator.plain.peak) / 1000
    return plan.PlanError(
        f"No plan takes {_described(size)} of activation memory. The least "
        f"budget is {fraction:.3f} of the plain step's activation memory, "
        f"{_described(walk.peak)}; {path!r} sets it "
        f"({walk.peak_phase} pass). Ask for that, {advice}."
    )


def _described(size):
    # Exactly, so that it can be asked for.
    rounded = units.format_size(size)
    return f"{size} bytes" + ("" if size < 1024 else f" ({rounded})")
