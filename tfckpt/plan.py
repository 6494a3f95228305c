"""Which calls of a model are recomputed together: a plan, as plain data.

A plan cuts the calls of a model, in the order in which they run, into
segments. The forward pass keeps only the tensors at the boundaries; the
backward pass runs each segment again. The last segment is not recomputed:
its activations would be needed at once.

`tfckpt.planners` makes plans. Nothing here needs TensorFlow or Keras.
"""

import collections
import dataclasses
import importlib
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfckpt import fields
from tfckpt import prediction as prediction_lib

_FORMAT = 2
_READABLE = (1, 2)


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
        kept: Paths of calls inside whose products (matrix products,
            convolutions, and the sums of normalizations) are kept from the
            forward pass. A call without any keeps nothing.
        segments: Segments inside, which are recomputed one by one when this
            one is; empty if it is run again in one go. Together they hold
            the same calls.
        boundary: Names of the tensors that are made in the segment and live
            on after it.
        output_bytes: Bytes of the outputs of the calls; None if unknown.
        boundary_bytes: Bytes of the boundary tensors; None if unknown.
        kept_bytes: Bytes of the kept products; None if unknown.
        forward_flops: Operations of the forward pass; None if unknown.
    """

    calls: tuple[str, ...]
    recomputed: bool = True
    kept: tuple[str, ...] = ()
    segments: tuple["Segment", ...] = ()
    boundary: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    output_bytes: int | None = dataclasses.field(default=None, compare=False)
    boundary_bytes: int | None = dataclasses.field(default=None, compare=False)
    kept_bytes: int | None = dataclasses.field(default=None, compare=False)
    forward_flops: float | None = dataclasses.field(default=None, compare=False)

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
        self._check_inside()

    def _check_inside(self):
        unknown = sorted(set(self.kept) - set(self.calls))
        if unknown or (self.kept and not self.recomputed):
            raise PlanError(
                "Segment.kept names calls of the segment, which must be "
                f"recomputed. Received: kept={self.kept!r}, "
                f"recomputed={self.recomputed}, calls={self.calls!r}."
            )
        object.__setattr__(self, "segments", tuple(self.segments))
        if not self.segments:
            return
        inside = tuple(path for s in self.segments for path in s.calls)
        if not self.recomputed or inside != self.calls or self.kept:
            raise PlanError(
                "Segments inside a segment hold the same calls in the same "
                "order, and the segment around them is recomputed and keeps "
                f"nothing itself. Received: {inside!r} inside of "
                f"{self.calls!r}, recomputed={self.recomputed}, "
                f"kept={self.kept!r}."
            )


@dataclasses.dataclass(frozen=True)
class Plan:
    """Segments that together hold every call of a model once.

    The functions in `tfckpt.planners` make one from the paths of the calls.

    Two plans are equal when their segments are; the prediction only informs.

    Args:
        segments: The segments, in the order in which they run.
        prediction: Memory and time that a step is expected to take.

    Raises:
        PlanError: No segment, or a call in two segments.

    Example:

    >>> plan = Plan(
    ...     (
    ...         Segment(["conv1", "conv2", "pool"]),
    ...         Segment(["flatten", "dense"], recomputed=False),
    ...     )
    ... )
    >>> plan.calls
    ('conv1', 'conv2', 'pool', 'flatten', 'dense')
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    segments: tuple[Segment, ...]
    prediction: prediction_lib.Prediction | None = dataclasses.field(
        default=None, compare=False
    )

    def __post_init__(self) -> None:
        segments = tuple(self.segments)
        if not segments or not all(isinstance(s, Segment) for s in segments):
            raise PlanError(
                "A plan is a sequence of at least one Segment. "
                f"Received: {self.segments!r}."
            )
        object.__setattr__(self, "segments", segments)
        calls = self.calls
        counts = collections.Counter(calls)
        twice = sorted(path for path, count in counts.items() if count > 1)
        if twice:
            raise PlanError(
                "Each call stands in one segment. These stand in several: "
                f"{', '.join(twice)}."
            )

    @property
    def calls(self) -> tuple[str, ...]:
        """Paths of all calls, in the order in which they run."""
        return tuple(path for s in self.segments for path in s.calls)

    def __str__(self) -> str:
        recomputed = sum(len(s.calls) for s in self.segments if s.recomputed)
        lines = [
            f"Plan: {_count(len(self.segments), 'segment')}, "
            f"{_count(len(self.calls), 'call')}, {recomputed} recomputed"
        ]
        for number, segment in enumerate(self.segments, 1):
            lines.extend(_described(segment, str(number), ""))
        return "\n".join(lines)

    def summary(
        self,
        print_fn: Callable[[str], Any] | None = None,
        verbose: bool = False,
    ) -> None:
        """Prints the segments, and the memory and time that are expected.

        Args:
            print_fn: Called with the text; by default it is printed as wide
                as the terminal is.
            verbose: Whether to list every call.
        """
        # What reports and draws plans imports them, and more than numpy.
        report = importlib.import_module("tfckpt.report")
        report.show(self, print_fn=print_fn, verbose=verbose)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws memory over a step, with the plan and without, into a file.

        Needs `pip install "tfckpt[plot]"` and a plan with a prediction.

        Args:
            path: The file; its suffix says the format: .png, .pdf, .svg.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: The suffix is no format of a picture.
            PlanError: The plan has no prediction.
        """
        importlib.import_module("tfckpt.drawing").draw(self, path)

    def get_config(self) -> dict[str, Any]:
        """Returns the plan as plain data for JSON."""
        return {
            "format": _FORMAT,
            "segments": [dataclasses.asdict(s) for s in self.segments],
            "prediction": self.prediction
            and dataclasses.asdict(self.prediction),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Plan":
        """Returns the plan that `get_config` describes."""
        if (
            not isinstance(config, Mapping)
            or config.get("format") not in _READABLE
            or set(config) - {"format", "segments", "prediction"}
        ):
            raise PlanError(
                f'A plan\'s config is a mapping with "format": {_FORMAT}, '
                f'"segments" and "prediction". Received: {config!r}.'
            )
        prediction = config.get("prediction")
        try:
            return cls(
                tuple(map(_segment_from_config, config.get("segments", ()))),
                None
                if prediction is None
                else prediction_lib.Prediction.from_config(prediction),
            )
        except (AttributeError, TypeError) as error:
            raise PlanError(
                f"A plan's config has an entry that is wrong: {error}. Make it "
                "with `Plan.get_config`."
            ) from error

    def to_json(self) -> str:
        """Returns the plan as JSON."""
        return json.dumps(self.get_config())

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Returns the plan that `to_json` wrote."""
        try:
            config = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise PlanError(f"A plan's JSON can't be read: {error}.") from error
        return cls.from_config(config)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file, as JSON."""
        pathlib.Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Returns the plan that `save` wrote.

        Raises:
            PlanError: The file holds no plan.
        """
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise PlanError(f"'{path}' holds no plan: {error}.") from error
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"'{path}' holds no plan: {error}") from error


def _segment_from_config(config):
    names = {field.name for field in dataclasses.fields(Segment)}
    unknown = sorted(set(config) - names)
    if unknown:
        raise PlanError(
            f"Unknown entries of a segment: {', '.join(unknown)}. "
            f"Expected: {', '.join(sorted(names))}."
        )
    fields.check(Segment, config)
    inside = tuple(map(_segment_from_config, config.get("segments", ())))
    return Segment(**{**config, "segments": inside})


def _described(segment, number, indent):
    what = "recomputed" if segment.recomputed else "not recomputed"
    yield (
        f"{indent}segment {number}, {what}: "
        f"{_count(len(segment.calls), 'call')}"
        f"{_bytes(', outputs ', segment.output_bytes)}"
    )
    for inner, each in enumerate(segment.segments, 1):
        yield from _described(each, f"{number}.{inner}", indent + "  ")
    if not segment.segments:
        for path in segment.calls:
            kept = " (products kept)" if path in segment.kept else ""
            yield f"{indent}    {path}{kept}"
    if segment.boundary:
        yield (
            f"{indent}  boundary: {', '.join(segment.boundary)}"
            f"{_bytes(' = ', segment.boundary_bytes)}"
        )


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
    segments, end, before = [], 0, []
    for segment in plan.segments:
        start, end = end, end + len(segment.calls)
        boundary = [each for each in live[end - 1] if each not in before]
        before = live[end - 1]
        segments.append(
            dataclasses.replace(
                segment,
                boundary=tuple(name for name, _ in boundary),
                output_bytes=_total(sizes[start:end]),
                boundary_bytes=_total([size for _, size in boundary]),
            )
        )
    return Plan(tuple(segments), plan.prediction)


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
