"""`--compare`: one training without `tfckpt` and with it, from one seed.

Given micro-batches, `big_batch` compares.
"""

import measuring
import numpy as np
import rich.console
import rich.table

# Steps of the runs that show equality, see `compare`.
EXACT_STEPS = 20
_MIB = 2**20


def compare(program, options, *, plain, ours, smallest):
    """Trains with and without us in fresh processes and prints the table.

    Two runs of the whole training show memory, time and accuracy as
    TensorFlow runs them. Then the last bits of gradients differ, even from
    run to run of one program, and a training makes more of that. Two short
    runs with `--exact` show whether recomputation itself changes anything.

    Args:
        program: The path of the example.
        options: The flags of all runs, as a dictionary.
        plain: Flags to change for no recomputation.
        ours: Flags to change for recomputation.
        smallest: Flags to change for the smallest step, whose peak is what
            the program needs beside its activations.
    """
    exact = {"steps": EXACT_STEPS, "exact": True}
    runs = {
        "without tfckpt": plain,
        "with tfckpt": ours,
        "the smallest step": plain | smallest,
        "without tfckpt, exact": plain | exact,
        "with tfckpt, exact": ours | exact,
    }
    figures = measuring.measure_each(
        program, {name: options | changes for name, changes in runs.items()}
    )
    found = table(
        *figures[:3],
        trained=measuring.difference(*figures[:2]),
        exact=measuring.difference(*figures[3:]),
    )
    rich.console.Console().print(found)


def mib(size):
    return f"{size / _MIB:.0f} MiB"


def milliseconds(seconds):
    low, middle, high = np.percentile(seconds, [10, 50, 90]) * 1e3
    return f"{middle:.0f} ms ({low:.0f} to {high:.0f})"


def add_row(table, label, values, form, number=float):
    """Adds a row of two runs.

    Args:
        table: Where to.
        label: What the row is about.
        values: The value of each run.
        form: The function that writes a value.
        number: The function that takes the number for the ratio from it.
    """
    first, second = map(number, values)
    ratio = f"{second / first:.2f}" if first > 0 else ""
    table.add_row(label, *map(form, values), ratio)


def add_outcomes(table, plain, ours):
    """Adds a row for each figure that the two programs return."""
    for name in plain["outcome"]:
        values = [run["outcome"][name] for run in (plain, ours)]
        add_row(table, name, values, "{:.4f}".format)


def table(plain, ours, floor, *, trained, exact):
    """Returns the table of two runs' figures and their differences."""
    found = rich.table.Table(title="One training without and with tfckpt")
    found.add_column("")
    for name in "without", "with", "with / without":
        found.add_column(name, justify="right")
    peaks = [run["above baseline"] for run in (plain, ours)]
    add_row(found, "peak memory above the baseline", peaks, mib)
    activations = [peak - floor["above baseline"] for peak in peaks]
    add_row(found, "of that, activations", activations, mib)
    add_row(
        found,
        "a step: median (10 to 90 %)",
        [run["seconds"] for run in (plain, ours)],
        milliseconds,
        np.median,
    )
    add_outcomes(found, plain, ours)
    found.add_section()
    exactly = f"difference after {EXACT_STEPS} steps, --exact"
    for label, value in (("difference at the end", trained), (exactly, exact)):
        found.add_row(label, "", f"{value:.1e}" if value else "0", "")
    found.caption = (
        "Activations: the peak less that of the smallest step. Difference: "
        "the largest of any weight, moving statistic or random seed."
    )
    return found
