"""The tables of a report: segments, memory, frontier, compilations."""

from collections.abc import Iterator
from typing import Any

import rich.box
import rich.table
import rich.text

from tfckpt import plan as plan_lib
from tfckpt import prediction as prediction_lib
from tfckpt import units

# Longer lists show their two ends.
_SEGMENTS = 40
_FRONTIER = 8
_MIB = 2**20


def new_table(title: str, *columns: str, left: int = 1) -> rich.table.Table:
    """Returns an empty table in the style of this package.

    Args:
        title: What it shows.
        *columns: Heads of the columns.
        left: How many of them are aligned to the left; the others hold
            numbers.
    """
    made = rich.table.Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=rich.box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
    )
    for number, column in enumerate(columns):
        made.add_column(
            column,
            justify="left" if number < left else "right",
            overflow="fold",
        )
    return made


def segment_table(plan: plan_lib.Plan, verbose: bool) -> rich.table.Table:
    """Returns a row for each segment; of very many only the two ends."""
    made = new_table(
        "Segments",
        "",
        "first … last call",
        "recomputed",
        "calls",
        "GFLOP",
        "kept MiB",
        "boundary MiB",
        left=3,
    )
    for number, column in enumerate(made.columns):
        # Where the table is too wide, only the calls are broken into lines.
        column.no_wrap = number != 1
    rows = list(enumerate(plan.segments, 1))
    hidden = []
    if len(rows) > _SEGMENTS and not verbose:
        half = _SEGMENTS // 2
        rows, hidden = rows[:half] + rows[-half:], rows[half:-half]
    for position, (number, segment) in enumerate(rows):
        if hidden and position == len(rows) // 2:
            made.add_row(*_elided([s for _, s in hidden]), style="dim")
        for cells in _segment_rows(segment, str(number)):
            made.add_row(*cells)
    return made


def _segment_rows(segment, number) -> Iterator[tuple[Any, ...]]:
    first, *others = segment.calls
    yield (
        number,
        rich.text.Text(" … ".join([first, *others[-1:]]), overflow="fold"),
        _how(segment),
        f"{len(segment.calls):,}",
        gflop(segment.forward_flops),
        _mib(segment.kept_bytes) if segment.kept else "",
        _boundary(segment),
    )
    for inner, each in enumerate(segment.segments, 1):
        yield from _segment_rows(each, f"{number}.{inner}")


def _how(segment):
    if not segment.recomputed:
        return "no"
    if segment.segments:
        return "in parts"
    return f"all but {len(segment.kept):,}" if segment.kept else "yes"


def _boundary(segment):
    if not segment.boundary:
        return ""
    size = _mib(segment.boundary_bytes)
    return f"{size} in {len(segment.boundary)}".lstrip()


def _elided(segments):
    def total(name):
        values = [getattr(segment, name) for segment in segments]
        return None if None in values else sum(values)

    return (
        "…",
        f"{len(segments):,} more",
        "",
        f"{sum(len(s.calls) for s in segments):,}",
        gflop(total("forward_flops")),
        _mib(total("kept_bytes")) if any(s.kept for s in segments) else "",
        _mib(total("boundary_bytes")),
    )


def memory_table(prediction: prediction_lib.Prediction) -> rich.table.Table:
    """Returns what a step takes on the device, with the plan and without."""
    made = new_table(
        f"Memory of a step, batch size {prediction.batch_size}",
        "",
        "with the plan",
        "without",
        "ratio",
    )
    plain_total = prediction.fixed_bytes + prediction.plain_bytes
    made.add_row(
        "activations, at the peak",
        units.format_size(prediction.peak_bytes),
        units.format_size(prediction.plain_bytes),
        f"{prediction.ratio:.3f}",
    )
    for name in ("weight", "gradient", "optimizer", "input"):
        size = units.format_size(getattr(prediction, f"{name}_bytes"))
        label = {"optimizer": "optimizer state"}.get(name, f"{name}s")
        made.add_row(label, size, size)
    made.add_row(
        "total",
        units.format_size(prediction.total_bytes),
        units.format_size(plain_total),
        f"{prediction.total_bytes / plain_total:.3f}" if plain_total else "",
        style="bold",
    )
    return made


def trials_table(trials: Any) -> rich.table.Table:
    """Returns the compilations by targets' compilers as a table."""
    made = new_table(
        "Compiled for the target",
        "target",
        "planned for",
        "takes",
        "extra time",
        "fits",
    )
    for trial in trials:
        made.add_row(
            trial.target,
            "no recomputation"
            if trial.budget_bytes is None
            else units.format_size(trial.budget_bytes),
            "too big"
            if trial.bytes is None
            else units.format_size(trial.bytes),
            f"{trial.extra_time:+.1%}",
            "yes" if trial.fits else "no",
        )
    return made


def frontier_table(prediction: prediction_lib.Prediction) -> rich.table.Table:
    """Returns the least time for each memory, with the plan among them."""
    made = new_table(
        "Least time within a memory",
        "activations",
        "ratio",
        "extra time",
        "",
        left=0,
    )
    made.columns[-1].justify = "left"
    for size, extra, mark in frontier_rows(prediction):
        ratio = size / prediction.plain_bytes if prediction.plain_bytes else 1
        made.add_row(
            units.format_size(size),
            f"{ratio:.3f}",
            f"{extra:+.1%}",
            mark,
            style="bold" if mark else None,
        )
    return made


def frontier_rows(
    prediction: prediction_lib.Prediction, most: int = _FRONTIER
) -> list[tuple[int, float, str]]:
    """Returns rows of bytes, extra time and a mark, by rising memory.

    Args:
        prediction: The prediction; its own plan is one of the rows.
        most: Number of rows besides that of the plan; evenly chosen, with
            both ends.
    """
    points = list(prediction.frontier)
    if len(points) > most:
        step = (len(points) - 1) / (most - 1)
        points = [points[round(n * step)] for n in range(most)]
    own = prediction.peak_bytes, prediction.extra_time
    rows = [(*point, "") for point in points if point != own]
    return sorted([*rows, (*own, "this plan")])


def _mib(size):
    return "" if size is None else f"{size / _MIB:,.2f}"


def gflop(flops: float | None) -> str:
    """Returns operations as billions, "" if unknown."""
    return "" if flops is None else f"{float(f'{flops / 1e9:.4g}'):,}"
