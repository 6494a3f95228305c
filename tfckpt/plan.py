"""Which calls of a model are recomputed together: plans and their planners.

A plan cuts the calls of a model, in the order in which they run, into
segments. The forward pass keeps only the tensors at the boundaries; the
backward pass runs each segment again. The last segment is not recomputed:
its activations would be needed at once.

The planners here cut once, into segments of equal size: gradient
checkpointing, or "sublinear memory", after Chen et al., "Training Deep Nets
with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174. About the
square root of the number of calls is the best number of segments for a chain
of equal calls (section 4.1 there). Not done here: time, nested segments,
budgets.

Nothing here needs TensorFlow or Keras.
"""

import dataclasses
import difflib
import json
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# A cut is searched within this part of a segment's size around the place of
# equal sizes: far enough to leave the inside of a residual block, near enough
# to keep the segments alike.
_SEARCH = 0.5

_FORMAT = 1


class PlanError(ValueError):
    """A plan that can't be made, read or applied to a model."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """Calls that are recomputed together.

    Two segments are equal when they hold the same calls and treat them the
    same way; the sizes and boundary names only inform.

    Attributes:
        calls: Paths of the calls, in the order in which they run.
        recomputed: Whether the backward pass runs them again.
        kept: Reserved: paths of calls inside whose output is kept.
        boundary: Names of the tensors that live on after the segment.
        output_bytes: Bytes of the outputs of the calls; None if unknown.
        boundary_bytes: Bytes of the boundary tensors; None if unknown.
    """

    calls: tuple[str, ...]
    recomputed: bool = True
    kept: tuple[str, ...] = ()
    boundary: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    output_bytes: int | None = dataclasses.field(default=None, compare=False)
    boundary_bytes: int | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("calls", "kept", "boundary"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(
                isinstance(path, str) for path in value
            ):
                raise PlanError(
                    f"Segment.{name} is a sequence of strings. "
                    f"Received: {value!r}."
                )
            object.__setattr__(self, name, tuple(value))
        if not self.calls:
            raise PlanError("A segment holds at least one call. Received none.")
        if not isinstance(self.recomputed, bool):
            raise PlanError(
                "Segment.recomputed is True or False. "
                f"Received: {self.recomputed!r}."
            )


@dataclasses.dataclass(frozen=True)
class Plan:
    """Segments that together hold every call of a model once.

    Args:
        segments: The segments, in the order in which they run.

    Raises:
        PlanError: No segment, or a call in two segments.

    Example:

    >>> plan = uniform(["a", "b", "c", "d", "e"], 2)
    >>> [segment.calls for segment in plan.segments]
    [('a', 'b', 'c'), ('d', 'e')]
    >>> [segment.recomputed for segment in plan.segments]
    [True, False]
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        segments = tuple(self.segments)
        if not segments or not all(isinstance(s, Segment) for s in segments):
            raise PlanError(
                "A plan is a sequence of at least one Segment. "
                f"Received: {self.segments!r}."
            )
        object.__setattr__(self, "segments", segments)
        calls = self.calls
        twice = sorted({path for path in calls if calls.count(path) > 1})
        if twice:
            raise PlanError(
                "Each call stands in one segment. These stand in several: "
                f"{', '.join(twice)}."
            )

    @property
    def calls(self) -> tuple[str, ...]:
        """Paths of all calls, in the order in which they run."""
        return tuple(path for s in self.segments for path in s.calls)

    def summary(self) -> str:
        """Returns a table: a row for each segment, then its calls."""
        recomputed = sum(len(s.calls) for s in self.segments if s.recomputed)
        lines = [
            f"Plan: {_count(len(self.segments), 'segment')}, "
            f"{_count(len(self.calls), 'call')}, {recomputed} recomputed"
        ]
        for number, segment in enumerate(self.segments, 1):
            what = "recomputed" if segment.recomputed else "not recomputed"
            lines.append(
                f"segment {number}, {what}: "
                f"{_count(len(segment.calls), 'call')}"
                f"{_bytes(', outputs ', segment.output_bytes)}"
            )
            lines.extend(
                f"    {path}" + (" (kept)" if path in segment.kept else "")
                for path in segment.calls
            )
            if segment.boundary:
                lines.append(
                    f"  boundary: {', '.join(segment.boundary)}"
                    f"{_bytes(' = ', segment.boundary_bytes)}"
                )
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.summary()

    def get_config(self) -> dict[str, Any]:
        """Returns the plan as plain data for JSON."""
        return {
            "format": _FORMAT,
            "segments": [dataclasses.asdict(s) for s in self.segments],
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Plan":
        """Returns the plan that `get_config` describes."""
        if not isinstance(config, Mapping) or config.get("format") != _FORMAT:
            raise PlanError(
                f'A plan\'s config is a mapping with "format": {_FORMAT} and '
                f'"segments". Received: {config!r}.'
            )
        names = {field.name for field in dataclasses.fields(Segment)}
        segments = []
        for segment in config.get("segments", ()):
            unknown = sorted(set(segment) - names)
            if unknown:
                raise PlanError(
                    f"Unknown entries of a segment: {', '.join(unknown)}. "
                    f"Expected: {', '.join(sorted(names))}."
                )
            segments.append(Segment(**segment))
        return cls(tuple(segments))

    def to_json(self) -> str:
        """Returns the plan as JSON."""
        return json.dumps(self.get_config())

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Returns the plan that `to_json` wrote."""
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"A plan's JSON can't be read: {error}.") from error
        return cls.from_config(config)


@dataclasses.dataclass(frozen=True)
class Unsettled:
    """What a model was asked to plan while it doesn't know its sizes.

    Attributes:
        asked: The `plan` argument.
        reason: What is missing.
    """

    asked: Any
    reason: str

    def __str__(self) -> str:
        return f"Plan: {self.asked!r}, not settled yet: {self.reason}"


def uniform(
    paths: Sequence[str],
    segments: int,
    sizes: Sequence[float] | None = None,
    cuts: Sequence[float] | None = None,
) -> Plan:
    """Returns a plan of `segments` segments that are alike.

    Args:
        paths: Paths of the calls, in the order in which they run.
        segments: Number of segments, from 1 to the number of calls.
        sizes: Bytes of each call's output. Without them, or when they are
            all equal, the segments hold equal numbers of calls, the first
            ones one more where that can't be.
        cuts: For each call the bytes that live on after it. Among places
            that make the segments nearly alike, the cut with the fewest
            bytes is taken. The last entry is not used.

    Raises:
        PlanError: `segments` is not a whole number in that range.

    Example:

    >>> plan = uniform([f"layer_{i}" for i in range(9)], 5)
    >>> [len(segment.calls) for segment in plan.segments]
    [2, 2, 2, 2, 1]
    """
    paths = _checked_paths(paths)
    number = _checked_number(segments, len(paths))
    ends = _ends(
        _checked_sizes("sizes", sizes, len(paths)),
        _checked_sizes("cuts", cuts, len(paths)),
        number,
        len(paths),
    )
    return _from_ends(paths, ends)


def sqrt(
    paths: Sequence[str],
    sizes: Sequence[float] | None = None,
    cuts: Sequence[float] | None = None,
) -> Plan:
    """Returns a plan of about the square root of n segments of equal bytes.

    n counts the calls whose output holds bytes. For a chain of n equal calls
    this keeps about 2 sqrt(n) outputs in place of n.

    Args:
        paths: Paths of the calls, in the order in which they run.
        sizes: Bytes of each call's output.
        cuts: For each call the bytes that live on after it; see `uniform`.

    Example:

    >>> plan = sqrt(["a", "b", "c", "d"], sizes=[6, 2, 2, 2])
    >>> [segment.calls for segment in plan.segments]
    [('a',), ('b', 'c', 'd')]
    """
    paths = _checked_paths(paths)
    checked = _checked_sizes("sizes", sizes, len(paths))
    holding = len(paths) if checked is None else np.count_nonzero(checked)
    number = max(1, round(math.sqrt(holding)))
    return uniform(paths, number, sizes, cuts)


def at_boundaries(paths: Sequence[str], boundaries: Sequence[str]) -> Plan:
    """Returns the plan in which a segment ends with each named call.

    Args:
        paths: Paths of the calls, in the order in which they run.
        boundaries: Paths of calls: the boundary "conv1" means that a segment
            ends with the call "conv1". The name of a nested model stands for
            its last call. The order doesn't matter; the last call of the
            model ends the last segment in any case.

    Raises:
        PlanError: A boundary is unknown or stands there twice.

    Example:

    >>> plan = at_boundaries(["a", "b/c", "b/d", "e"], ["b"])
    >>> [segment.calls for segment in plan.segments]
    [('a', 'b/c', 'b/d'), ('e',)]
    """
    paths = _checked_paths(paths)
    if isinstance(boundaries, str) or not all(
        isinstance(name, str) for name in boundaries
    ):
        raise PlanError(
            "Boundaries are a list of call paths, such as "
            f"{[paths[0]]!r}. Received: {boundaries!r}."
        )
    last = {}
    for position, path in enumerate(paths):
        last[path] = position
        parts = path.split("/")
        for depth in range(1, len(parts)):
            last["/".join(parts[:depth])] = position
    ends = []
    for name in boundaries:
        if name not in last:
            near = difflib.get_close_matches(name, last, n=5, cutoff=0.5)
            raise PlanError(
                f"No call of the model is named {name!r}. "
                + (f"Near matches: {', '.join(near)}. " if near else "")
                + f"The {len(paths)} calls run from {paths[0]!r} to "
                f"{paths[-1]!r}; `model.plan` prints them all."
            )
        ends.append(last[name] + 1)
    if len(set(ends)) < len(ends):
        raise PlanError(
            f"Two boundaries end at the same call. Received: {boundaries!r}. "
            "Name each call once."
        )
    return _from_ends(paths, sorted(set(ends) | {len(paths)}))


def annotate(
    plan: Plan,
    sizes: Sequence[int | None],
    live: Sequence[Sequence[tuple[str, int | None]]],
) -> Plan:
    """Returns the plan with sizes and boundary names filled in.

    Args:
        plan: Any plan.
        sizes: Bytes of each call's output, None where unknown.
        live: For each call the tensors that live on after it: name, bytes.
    """
    segments, end = [], 0
    for segment in plan.segments:
        start, end = end, end + len(segment.calls)
        boundary = live[end - 1]
        segments.append(
            dataclasses.replace(
                segment,
                boundary=tuple(name for name, _ in boundary),
                output_bytes=_total(sizes[start:end]),
                boundary_bytes=_total([size for _, size in boundary]),
            )
        )
    return Plan(tuple(segments))


def _ends(sizes, cuts, number, length):
    """Returns the position after each segment's last call."""
    if sizes is None or np.all(sizes == sizes[0]):
        sizes = np.ones(length)
    # Equal counts, the larger segments first, as `numpy.array_split` has it.
    counts = np.full(number, length // number)
    counts[: length % number] += 1
    targets = np.cumsum(sizes)[np.cumsum(counts) - 1]
    if not np.all(sizes == sizes[0]):
        targets = np.sum(sizes) * np.arange(1, number + 1) / number
    before = np.concatenate([[0.0], np.cumsum(sizes)])
    reach = _SEARCH * before[-1] / number
    ends = []
    for index in range(number - 1):
        # Every segment before and after needs one call at least.
        first = (ends[-1] if ends else 0) + 1
        places = np.arange(first, length - (number - index - 1) + 1)
        far = np.abs(before[places] - targets[index])
        nearest = places[np.argmin(far)]
        if cuts is None:
            ends.append(int(nearest))
            continue
        near = places[far <= reach] if np.any(far <= reach) else [nearest]
        ends.append(
            int(
                min(
                    near,
                    key=lambda p: (
                        cuts[p - 1],
                        abs(before[p] - targets[index]),
                        p,
                    ),
                )
            )
        )
    return [*ends, length]


def _from_ends(paths, ends):
    starts = [0, *ends[:-1]]
    return Plan(
        tuple(
            Segment(paths[start:end], recomputed=end < len(paths))
            for start, end in zip(starts, ends, strict=True)
        )
    )


def _checked_paths(paths):
    if isinstance(paths, str) or not all(isinstance(p, str) for p in paths):
        raise PlanError(f"Call paths are strings. Received: {paths!r}.")
    if not paths:
        raise PlanError("A model without calls has nothing to plan.")
    return tuple(paths)


def _checked_number(segments, length):
    try:
        number = operator.index(segments)
    except TypeError:
        number = None
    if number is None or isinstance(segments, (bool, np.bool_)):
        raise PlanError(
            f"The number of segments is an int from 1 to {length}, the "
            f"number of calls. Received: {segments!r} of type "
            f"{type(segments).__name__}."
        )
    if not 1 <= number <= length:
        raise PlanError(
            f"{length} calls can't be cut into {number} segments. Expected a "
            f"number from 1 to {length}. Ask for fewer segments, or for "
            '"sqrt".'
            if number > length
            else f"The number of segments is from 1 to {length}, the number "
            f"of calls. Received: {number}. To recompute nothing, ask for "
            "None."
        )
    return number


def _checked_sizes(name, values, length):
    if values is None:
        return None
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (length,) or not np.all(array >= 0):
        raise PlanError(
            f"`{name}` holds a number of bytes, 0 or more, for each of the "
            f"{length} calls. Received: {values!r}."
        )
    return array


def _total(sizes):
    return None if None in sizes else sum(sizes)


def _count(number, noun):
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _bytes(prefix, size):
    if size is None:
        return ""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{prefix}{size:.4g} {unit}"
        size /= 1024
    return f"{prefix}{size:.4g} GiB"
