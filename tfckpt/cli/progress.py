"""A bar for a search of which it is not known how long it takes."""

import contextlib
import math
from collections.abc import Callable, Iterator

import rich.progress

from tfckpt import units
from tfckpt.cli import settings


@contextlib.contextmanager
def shown(
    output: settings.Output, name: str, limit: int, *, quiet: bool
) -> Iterator[Callable[[int, float | None], None]]:
    """Shows a bar, and yields a function to be called after each trial.

    The function takes the batch size and the bytes that it needs, None if
    they are too many to be known.

    Args:
        output: Where it is shown. On what is no terminal each trial is a
            line.
        name: What is searched.
        limit: Bytes that fit.
        quiet: Whether only a terminal shows it.
    """
    low, high, done = 0, None, 0
    bar = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TimeElapsedColumn(),
        console=output.progress,
        transient=True,
        disable=not output.progress.is_terminal,
    )
    with bar:
        task = bar.add_task(name, total=None)

        def show(number, taken):
            nonlocal low, high, done
            done += 1
            fits = taken is not None and taken <= limit
            low, high = (number, high) if fits else (low, number)
            size = "too much" if taken is None else units.format_size(taken)
            line = f"{name}: batch size {number:,} takes {size}"
            gap = (2 * low if high is None else high) - low
            # The longest that bisection would take.
            left = math.ceil(math.log2(max(2, gap))) + (high is None)
            bar.update(
                task, description=line, completed=done, total=done + left
            )
            if not quiet:
                output.log(line)

        yield show
