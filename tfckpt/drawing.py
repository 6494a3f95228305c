"""A plan as a picture: memory in the course of a step, and the frontier.

Needs matplotlib, `pip install "tfckpt[plot]"`, which is imported when
something is drawn.
"""

import importlib.util
import os
import pathlib
from typing import Any

from tfckpt import plan as plan_lib

_OURS, _PLAIN, _GRAY = "#2f6db0", "#b0b0b0", "#707070"
_UNITS = (("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40))


def draw(plan: plan_lib.Plan, path: str | os.PathLike[str]) -> None:
    """Draws memory over a step, with the plan and without, and the frontier.

    Args:
        plan: A plan with a prediction.
        path: The file; its suffix says the format, such as .png, .pdf, .svg.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: The suffix is no format of a picture, or the folder is not
            there.
        PlanError: The plan has no prediction.

    Example:

    >>> import tempfile
    >>> import keras
    >>> from tfckpt import planning
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> plan = planning.make_plan(model, batch_size=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw(plan, f"{folder}/plan.png")
    """
    path = pathlib.Path(path)
    check(path)
    if plan.prediction is None or not plan.prediction.timeline:
        raise plan_lib.PlanError(
            "Only a plan with a prediction can be drawn, and this one has "
            "none. Make it with `tfckpt.make_plan`, which predicts."
        )
    _figure(plan).savefig(path, dpi=150)


def check(path: str | os.PathLike[str]) -> None:
    """Raises an error if no picture can be drawn into this file.

    Args:
        path: The file.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: The suffix is no format of a picture, or the folder is not
            there.
    """
    path = pathlib.Path(path)
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            "Drawing needs matplotlib, which is not installed: "
            'pip install "tfckpt[plot]"'
        )
    from matplotlib.backends import backend_agg

    formats = sorted(backend_agg.FigureCanvasAgg.filetypes)
    if path.suffix[1:].lower() not in formats:
        raise ValueError(
            "The suffix of a picture's file says its format, one of "
            f"{', '.join(formats)}. Received: {str(path)!r}."
        )
    if not path.parent.is_dir():
        raise ValueError(f"There is no folder {str(path.parent)!r}.")


def _figure(plan: plan_lib.Plan) -> Any:
    from matplotlib import figure

    prediction = plan.prediction
    made = figure.Figure(figsize=(11, 4.4), layout="constrained")
    over_time, frontier = made.subplots(1, 2, width_ratios=(3, 2))
    unit, size = _unit(max(prediction.plain_bytes, prediction.peak_bytes))
    _draw_timelines(over_time, prediction, unit, size)
    _draw_frontier(frontier, prediction, unit, size)
    count = len(plan.segments)
    made.suptitle(
        f"A training step of batch size {prediction.batch_size}, "
        f"{count:,} segment{'' if count == 1 else 's'}",
        fontweight="bold",
    )
    made.legend(
        *over_time.get_legend_handles_labels(),
        loc="outside lower left",
        ncols=2,
        frameon=False,
    )
    return made


def _draw_timelines(axes, prediction, unit, size):
    for points, color, name, peak in (
        (prediction.plain_timeline, _PLAIN, "no recomputation", "plain_bytes"),
        (prediction.timeline, _OURS, "this plan", "peak_bytes"),
    ):
        if not points:
            continue
        times, levels = zip(*points, strict=True)
        levels = [level / size for level in levels]
        # What is allocated stays until the next event.
        style = {"step": "post", "color": color}
        axes.fill_between(times, levels, alpha=0.25, linewidth=0, **style)
        ratio = getattr(prediction, peak)
        label = f"{name}: {ratio / size:,.4g} {unit} at the peak"
        axes.step(
            times, levels, where="post", color=color, linewidth=1.2, label=label
        )
    end = max(1.0, *(time for time, _ in prediction.timeline))
    axes.set_xlim(0, end)
    top = max(prediction.plain_bytes, prediction.peak_bytes) / size or 1
    axes.set_ylim(0, 1.12 * top)
    if 0 < prediction.forward_time < end:
        middle = prediction.forward_time
        axes.axvline(middle, color=_GRAY, linestyle=":", linewidth=1)
        for place, text in (
            (middle / 2, "forward"),
            ((middle + end) / 2, "backward"),
        ):
            axes.text(
                place, 1.06 * top, text, ha="center", va="center", color=_GRAY
            )
    axes.set_xlabel("time (a step without recomputation takes 1)")
    axes.set_ylabel(f"activation memory ({unit})")
    axes.set_title("Memory over a step", loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_frontier(axes, prediction, unit, size):
    points = prediction.frontier
    if points:
        sizes, times = zip(*points, strict=True)
        axes.step(
            [each / size for each in sizes],
            [100 * time for time in times],
            where="post",
            color=_GRAY,
            linewidth=1.2,
            marker=".",
            # Hundreds of markers would hide the line.
            markersize=5 if len(points) <= 60 else 0,
            label="least time",
        )
    place = prediction.peak_bytes / size, 100 * prediction.extra_time
    axes.plot(*place, "o", color=_OURS, markersize=8, label="this plan")
    axes.plot(
        prediction.plain_bytes / size,
        0,
        "s",
        color=_PLAIN,
        markersize=7,
        label="no recomputation",
    )
    axes.set_xlim(
        0, 1.05 * max(prediction.plain_bytes, prediction.peak_bytes) / size or 1
    )
    axes.margins(y=0.12)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -0.05 * high), max(high, 1.0))
    axes.set_xlabel(f"activation memory ({unit})")
    axes.set_ylabel("extra time (%)")
    axes.set_title("Least time within a memory", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")


def _unit(size):
    chosen = _UNITS[0]
    for name, step in _UNITS:
        if size >= step:
            chosen = name, step
    return chosen
