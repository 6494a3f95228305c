"""`--memory_limit`: the longest sequence that fits, with and without us.

Each length is tried in a fresh process, which ends itself as soon as it holds
more than the limit. The limit is about the whole process: TensorFlow, the
weights and the optimizer take their part of it. On a GPU it is about all that
is in the GPU's memory, and what comes to more runs to its end.
"""

import re

import entry_point
import measuring
import rich.console
import rich.table

_MIB = 2**20
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text):
    """Returns the bytes that "2GiB", "512 MiB" or "1000000" stand for."""
    match = re.fullmatch(r"([0-9.]+) *([A-Za-z]*)", text.strip())
    try:
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    except (TypeError, ValueError, KeyError):
        size = 0
    if size <= 0:
        raise entry_point.UserError(
            f"{text!r} is no size; give bytes, or a number and KiB, MiB or "
            "GiB, such as 2GiB"
        )
    return size


def longest(fits, *, start, most, precision=1 / 8):
    """Returns the longest length that fits, nearly; 0 if not even `start`.

    Args:
        fits: A function that tells whether a length fits.
        start: The first length to try; it is doubled until one is too long.
        most: The longest length there is.
        precision: How far the answer may lie below the truth, relatively.
    """
    good, bad = 0, most + 1
    while good < most and bad - good > max(1, precision * good):
        middle = (good + bad) // 2
        middle = min(middle, max(start, 2 * good))
        if fits(middle):
            good = middle
        elif middle <= start:
            return 0
        else:
            bad = middle
    return good


def search(program, options, limit, *, most, start=128):
    """Searches with and without us, and prints the longest sequences.

    Args:
        program: The path of the example.
        options: Its flags, as a dictionary.
        limit: Bytes of memory.
        most: The longest sequence that there is data for.
        start: The shortest one to try.
    """
    console = rich.console.Console(highlight=False)

    def fits(length, name, recompute):
        changes = {
            "sequence_length": length,
            "recompute": recompute,
            "steps": 2,
        }
        figures = measuring.measure(program, options | changes, limit=limit)
        peak = f"{figures['total'] / _MIB:.0f} MiB" if figures else "too much"
        console.print(f"{name}, {length} bytes: {peak}")
        return figures is not None

    table = rich.table.Table(
        title=f"Longest sequence within {limit / _MIB:.0f} MiB"
    )
    table.add_column("")
    table.add_column("bytes", justify="right")
    for name, recompute in (("without tfckpt", False), ("with tfckpt", True)):
        found = longest(
            lambda length, name=name, recompute=recompute: fits(
                length, name, recompute
            ),
            start=start,
            most=most,
        )
        table.add_row(name, str(found) if found else "none")
    console.print(table)
