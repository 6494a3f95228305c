"""A plan as tables: segments, memory, time, frontier, compilations.

`table` gives a renderable of `rich`, `as_text` the same as text. What a plan
doesn't know is left out. `tfckpt.drawing` draws it.
"""

import io
from collections.abc import Callable
from typing import Any

import rich.console
import rich.text

from tfckpt import plan as plan_lib
from tfckpt import tables, units

_WIDTH = 100
_SENTENCES = 10


def table(
    plan: plan_lib.Plan, *, verbose: bool = False
) -> rich.console.RenderableType:
    """Returns a plan as something that `rich` prints.

    Args:
        plan: The plan. Without a prediction only its segments are shown.
        verbose: Whether to list every segment, call and note.

    Example:

    >>> from tfckpt import plan as plan_lib
    >>> plan = plan_lib.Plan((plan_lib.Segment(["a", "b"], recomputed=False),))
    >>> print(as_text(plan, width=60).splitlines()[0].rstrip())
    Plan: 1 segment, 2 calls, 0 recomputed
    """
    parts: list[Any] = [
        rich.text.Text(_headline(plan)),
        tables.segment_table(plan, verbose),
    ]
    prediction = plan.prediction
    if prediction is not None:
        parts += [tables.memory_table(prediction), *_time(prediction)]
        if prediction.frontier:
            parts.append(tables.frontier_table(prediction))
        parts += _least(prediction)
        if prediction.trials:
            parts.append(tables.trials_table(prediction.trials))
        parts += _sentences("No cheap cut", prediction.blocked, verbose)
        parts += _sentences("Assumed", prediction.notes, verbose)
    if verbose:
        parts.append(rich.text.Text(str(plan)))
    # A blank line between them.
    spaced = [each for part in parts for each in (part, rich.text.Text())]
    return rich.console.Group(*spaced[:-1])


def show(
    plan: plan_lib.Plan,
    *,
    print_fn: Callable[[str], Any] | None = None,
    verbose: bool = False,
) -> None:
    """Prints `table(plan)`, or calls `print_fn` with it as text."""
    if print_fn is not None:
        print_fn(as_text(plan, verbose=verbose))
        return
    rich.console.Console().print(table(plan, verbose=verbose))


def as_text(
    plan: plan_lib.Plan, *, width: int = _WIDTH, verbose: bool = False
) -> str:
    """Returns `table(plan)` as text of at most `width` columns."""
    return render(table(plan, verbose=verbose), width=width)


def render(
    renderable: rich.console.RenderableType, *, width: int = _WIDTH
) -> str:
    """Returns what `rich` prints as text without colors."""
    file = io.StringIO()
    console = rich.console.Console(file=file, width=width, color_system=None)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _headline(plan):
    recomputed = sum(len(s.calls) for s in plan.segments if s.recomputed)
    counts = [(len(plan.segments), "segment"), (len(plan.calls), "call")]
    said = [f"{n:,} {noun}{'' if n == 1 else 's'}" for n, noun in counts]
    return f"Plan: {', '.join(said)}, {recomputed:,} recomputed"


def _time(prediction):
    line = f"Extra time: {prediction.extra_time:+.1%}"
    if prediction.step_flops:
        line += (
            f" ({tables.gflop(prediction.extra_flops)} GFLOP on top of "
            f"{tables.gflop(prediction.step_flops)})"
        )
    return [rich.text.Text(line)]


def _least(prediction):
    least = prediction.least_bytes
    if least is None:
        return []
    total = least + prediction.fixed_bytes
    return [
        rich.text.Text(
            f"Least feasible budget: {units.format_size(least)} of "
            f"activations, {units.format_size(total)} in all"
        )
    ]


def _sentences(title, sentences, verbose):
    if not sentences:
        return []
    shown = sentences if verbose else sentences[:_SENTENCES]
    lines = [f"{title}:", *(f"- {each}" for each in shown)]
    if len(shown) < len(sentences):
        lines.append(f"- … {len(sentences) - len(shown):,} more")
    return [rich.text.Text("\n".join(lines))]
