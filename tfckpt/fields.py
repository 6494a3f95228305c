"""Values of dataclasses that were read from a file, held to their types."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any


def check(kind: type, values: Mapping[str, Any]) -> None:
    """Raises a TypeError if a value is of another type than its field.

    Numbers are finite and not negative; a list stands for a tuple.
    Names that are no field are not looked at, nor are dataclasses inside.

    Args:
        kind: A dataclass.
        values: Values by name of the field.

    Example:

    >>> from tfckpt import plan
    >>> check(plan.Segment, {"output_bytes": None, "calls": ["a", "b"]})
    >>> check(plan.Segment, {"output_bytes": "8"})
    Traceback (most recent call last):
     ...
    TypeError: Segment.output_bytes is int | None. Received: '8'.
    """
    for field in dataclasses.fields(kind):
        if field.name in values and not _is_of(values[field.name], field.type):
            named = getattr(field.type, "__name__", None) or str(field.type)
            if typing.get_origin(field.type) is not None:
                named = str(field.type)
            raise TypeError(
                f"{kind.__name__}.{field.name} is {named}. Received: "
                f"{values[field.name]!r}."
            )


def _is_of(value, kind):
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(_is_of(value, each) for each in inside)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            return False
        if inside[-1] is Ellipsis:
            inside = inside[:1] * len(value)
        return len(inside) == len(value) and all(map(_is_of, value, inside))
    if kind is float or kind is int:
        numbers = (int, float) if kind is float else int
        if isinstance(value, bool) or not isinstance(value, numbers):
            return False
        return 0 <= value < math.inf
    if isinstance(kind, type) and not dataclasses.is_dataclass(kind):
        return isinstance(value, kind)
    return True
