"""The command `max_batch`: the largest batch that fits, with and without us."""

from collections.abc import Sequence

from absl import flags

from tfckpt import devices, memory, report, tables, units
from tfckpt import plan as plan_lib
from tfckpt.cli import batches, bisection, options, progress, settings

FLAGS = (
    "memory_limit",
    "target",
    "input_shape",
    "measure_costs",
    "output",
    "plot",
    "verbose",
)

# A compilation takes seconds to minutes.
_TOLERANCE = 0.05
_TRIALS = 8


def run(
    values: flags.FlagValues, arguments: Sequence[str], output: settings.Output
) -> None:
    """Prints the largest batch sizes, and the plan of the largest one."""
    settings.check_targets(values.target)
    settings.check_files(values)
    limits = {t: _limit(values, t) for t in values.target or [None]}
    model, shape = settings.load_model(values, arguments)
    table = tables.new_table(
        "Largest batch size",
        "target",
        "memory",
        "without a plan",
        "with a plan",
        "gain",
        "extra time",
    )
    plans = {}
    for target, limit in limits.items():
        sizes = batches.Sizes(
            model, shape, target, output, measure=values.measure_costs
        )
        plain = _search(sizes, limit, True, output)
        ours = _search(sizes, limit, False, output)
        plans[target] = plan = _plan(sizes, limit, ours[0])
        table.add_row(
            target or "any",
            units.format_size(limit),
            _bracket(plain),
            _bracket(ours),
            f"{ours[0] / plain[0]:.2f}x" if plain[0] else "",
            f"{plan.prediction.extra_time:+.1%}" if plan else "",
        )
    for target, plan in plans.items():
        if target and len(plans) > 1:
            output.results.rule(target)
        if plan:
            settings.write(plan, values, target)
            output.results.print(report.table(plan, verbose=values.verbose))
            output.results.print()
    output.results.print(table)


def _search(sizes, limit, plain, output):
    """Returns the largest batch size that fits, and the least that doesn't."""
    name = "without a plan" if plain else "with a plan"
    # What the simulator says comes first: it is quick.
    guess = 1
    found = None
    for compiled in (False, True) if sizes.target else (False,):
        bounds = {"guess": guess}
        if compiled:
            bounds |= {"tolerance": _TOLERANCE, "trials": _TRIALS}
        with progress.shown(output, name, limit, quiet=not compiled) as show:

            def size(number, compiled=compiled, show=show):
                taken = sizes.taken(number, plain=plain, compiled=compiled)
                show(number, taken)
                return taken

            found = bisection.largest(size, limit, **bounds)
        guess = max(1, found[0])
    return found


def _plan(sizes, limit, batch_size):
    """Returns the best plan at that batch size; None if nothing fits."""
    if not batch_size and sizes.target:
        return None
    try:
        # At 1 it says what the least budget is.
        return sizes.plan(max(1, batch_size), limit)
    except (plan_lib.PlanError, memory.CompilationError):
        if not batch_size:
            raise
        # The step fits, but the search for a cheaper plan found none.
        return sizes.least_compiled(batch_size)


def _bracket(found):
    low, high = found
    if not low:
        return "none"
    if high is None:
        return f"{low:,} or more"
    return f"{low:,}" if high <= low + 1 else f"{low:,} to {high - 1:,}"


def _limit(values, target):
    limit = values.memory_limit
    if isinstance(limit, float):
        raise options.UsageError(
            "--memory_limit is a size such as 8GiB. Received the fraction "
            f"{limit}."
        )
    if limit is not None:
        return limit
    if target is None:
        raise options.UsageError(
            "Say how much memory there is, --memory_limit=8GiB, or on which "
            "device, --target=v5e."
        )
    return devices.find(target).usable_bytes
