"""`--compare` given micro-batches: one big batch against its parts.

Both train on the same examples in the same order. Dropout, which draws anew
for every batch that the model sees, is off in both.
"""

import comparison
import measuring
import numpy as np
import rich.console
import rich.table


def flags_of_both(options, both):
    """Returns the flags of the run with the big batch, and of ours."""
    ours = options | both
    gathered = options["gradient_accumulation_steps"] or 1
    plain = ours | {
        "batch_size": options["batch_size"] * gathered,
        "gradient_accumulation_steps": None,
        "micro_batches": None,
    }
    return plain, ours


def compare(program, options, *, both, note=""):
    """Trains each way in a fresh process and prints the table.

    Args:
        program: The path of the example.
        options: Its flags, as a dictionary.
        both: Flags to change in both runs.
        note: What to say about the example below the table.
    """
    plain, ours = flags_of_both(options, both)
    figures = measuring.measure_each(
        program, {"big batch": plain, "accumulation": ours}
    )
    console = rich.console.Console()
    console.print(table(*figures, examples=plain["batch_size"]))
    if note:
        console.print(note)


def loss_differences(plain, ours):
    """Returns the steps up to which, and the largest difference so far."""
    apart = np.abs(np.subtract(plain["losses"], ours["losses"]))
    steps = sorted({min(len(apart), comparison.EXACT_STEPS), len(apart)})
    return [(step, float(apart[:step].max())) for step in steps]


def table(plain, ours, *, examples):
    """Returns the table of two runs' figures and their differences."""
    found = rich.table.Table(title=f"Steps of {examples} examples")
    found.add_column("")
    for name in "big batch", "accumulation", "ratio":
        found.add_column(name, justify="right")
    for label, key, form, number in (
        ("peak above the baseline", "above baseline", comparison.mib, float),
        ("peak in all", "total", comparison.mib, float),
        (
            "a step (10 to 90 %)",
            "seconds",
            comparison.milliseconds,
            np.median,
        ),
    ):
        values = [run[key] for run in (plain, ours)]
        comparison.add_row(found, label, values, form, number)
    comparison.add_outcomes(found, plain, ours)
    found.add_section()
    for steps, value in loss_differences(plain, ours):
        label = f"loss differs, {steps} steps"
        found.add_row(label, "", f"{value:.1e}", "")
    apart = measuring.difference(plain, ours)
    found.add_row("variables differ", "", f"{apart:.1e}", "")
    found.caption = (
        "Baseline: what is held when training begins, so also the accumulated "
        "gradients. Differences are the largest of any step so far, and of any "
        "weight or moving statistic at the end. A step is an update."
    )
    return found
