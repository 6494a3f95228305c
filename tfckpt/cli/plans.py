"""The command `plan`: a plan and what it will take, before running."""

from collections.abc import Sequence

from absl import flags

from tfckpt import devices, memory, report, tables, units
from tfckpt import plan as plan_lib
from tfckpt.cli import settings

FLAGS = (
    "batch_size",
    "input_shape",
    "memory_budget",
    "strategy",
    "target",
    "measure_costs",
    "output",
    "plot",
    "verbose",
)


def run(
    values: flags.FlagValues, arguments: Sequence[str], output: settings.Output
) -> None:
    """Prints the plan of a model, for each target if there are several."""
    settings.check_targets(values.target)
    settings.check_files(values)
    model, shape = settings.load_model(values, arguments)
    found = {}
    for target in values.target or [None]:
        try:
            plan = settings.make_plan(
                model,
                output=output,
                target=target,
                batch_size=values.batch_size,
                input_shape=shape,
                memory_budget=values.memory_budget,
                strategy=values.strategy,
                measure=values.measure_costs or None,
            )
        except (plan_lib.PlanError, memory.CompilationError) as error:
            if len(values.target) < 2:
                raise
            found[target] = error
            continue
        found[target] = plan
        settings.write(plan, values, target)
        if len(values.target) > 1:
            output.results.rule(target)
        output.results.print(report.table(plan, verbose=values.verbose))
        if len(values.target) > 1:
            output.results.print()
    if len(found) > 1:
        output.results.print(_overview(found, values.batch_size))
        for target, error in found.items():
            if isinstance(error, Exception):
                output.results.print(f"{target}: {error}", markup=False)


def _overview(found, batch_size):
    made = tables.new_table(
        f"Does it train at batch size {batch_size}?",
        "target",
        "memory",
        "without us",
        "with the plan",
        "segments",
        "extra time",
        "trains",
    )
    for target, plan in found.items():
        usable = "" if target == "cpu" else devices.find(target).usable_bytes
        cells = [target, usable and units.format_size(usable)]
        if isinstance(plan, Exception):
            made.add_row(*cells, "", "", "", "", "no")
            continue
        plain, ours = _taken(plan)
        fits = not usable or ours is None or ours <= usable
        made.add_row(
            *cells,
            units.format_size(plain),
            units.format_size(ours),
            f"{len(plan.segments):,}",
            f"{plan.prediction.extra_time:+.1%}",
            "yes" if fits else "no",
        )
    return made


def _taken(plan):
    """Returns what a step takes without the plan and with it, compiled."""
    known = plan.prediction
    plain = [t.bytes for t in known.trials if t.budget_bytes is None]
    ours = [t.bytes for t in known.trials if t.budget_bytes == known.peak_bytes]
    # Where all fits without recomputation, nothing else was compiled.
    ours = ours or plain
    if not ours:
        return None, known.total_bytes
    return plain[0] if plain else None, ours[0]
