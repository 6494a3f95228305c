"""What the commands have in common: the model, the plan, where they print."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import rich.console
from absl import flags

from tfckpt import devices, drawing, memory, planning
from tfckpt import plan as plan_lib
from tfckpt.cli import models, options


@dataclasses.dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        run: Runs it, with the parsed flags, the other arguments, and where it
            prints.
        flags: Names of its flags.
        summary: What it does, in a line.
        usage: What stands behind its name, before the flags.
        examples: Command lines.
    """

    run: Callable[[flags.FlagValues, Sequence[str], "Output"], None]
    flags: tuple[str, ...]
    summary: str
    usage: str = "MODEL"
    examples: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Output:
    """Where commands print.

    Attributes:
        results: What was asked for.
        progress: What is under way.
    """

    results: rich.console.Console
    progress: rich.console.Console

    def log(self, line: str) -> None:
        """Prints a line about what is under way."""
        self.progress.print(line, style="dim", highlight=False, markup=False)


def load_model(
    values: flags.FlagValues, arguments: Sequence[str]
) -> tuple[Any, Any]:
    """Returns the model that the arguments name, and its input shape.

    Returns:
        The model, and the shape (or shapes) that `--input_shape` gave, with
        the batch dimension; None if the model knows its own.

    Raises:
        UsageError: Not one model is named, or it can't be had.
    """
    if len(arguments) != 1:
        named = ", ".join(map(repr, arguments)) or "none"
        raise options.UsageError(
            f"Name one MODEL. Received: {named}. Flags are written "
            "--name=value."
        )
    model = models.load(arguments[0], values.input_shape)
    if values.input_shape is None:
        _check_sizes(model)
        return model, None
    size = values.batch_size if "batch_size" in values else 1
    shapes = [(size, *shape) for shape in values.input_shape]
    return model, shapes[0] if len(shapes) == 1 else shapes


def _check_sizes(model):
    for tensor in getattr(model, "inputs", None) or ():
        if None in tensor.shape[1:]:
            raise options.UsageError(
                f"The input '{tensor.name}' of the model leaves sizes open: "
                f"{tuple(tensor.shape)}. Give --input_shape, without the "
                "batch dimension."
            )


def make_plan(
    model: Any,
    *,
    output: Output,
    target: str | None = None,
    memory_budget: int | float | None = None,
    **arguments: Any,
) -> plan_lib.Plan:
    """Returns a plan; the budget is by default what the target has."""
    strategy = arguments.get("strategy")
    if target and memory_budget is None and strategy in (None, "budget"):
        memory_budget = devices.find(target).usable_bytes
    arguments |= {"memory_budget": memory_budget, "target": target}
    try:
        return planning.make_plan(
            model,
            progress=output.log,
            # What was not asked for is for the function to say.
            **{k: v for k, v in arguments.items() if v is not None},
        )
    except plan_lib.PlanError as error:
        if not isinstance(strategy, list):
            raise
        names = ", ".join(planning.STRATEGIES)
        raise plan_lib.PlanError(
            f"{error} (--strategy={','.join(strategy)} was read as call paths; "
            f"strategies with a name are {names}.)"
        ) from error


def check_targets(names: Sequence[str]) -> None:
    """Raises a `ValueError` if a target is not known, before any work."""
    for name in names:
        if name not in memory.targets():
            devices.find(name)


def check_files(values: flags.FlagValues) -> None:
    """Raises an error if the results can't be written, before any work."""
    if values.output:
        path = pathlib.Path(values.output)
        if path.suffix != ".json" or not path.parent.is_dir():
            raise options.UsageError(
                "--output is a file whose name ends in .json, in a folder "
                f"that is there. Received: {values.output!r}."
            )
    if values.plot:
        drawing.check(values.plot)


def write(
    plan: plan_lib.Plan, values: flags.FlagValues, target: str | None
) -> None:
    """Writes a plan where `--output` and `--plot` say.

    Of several targets each has files of its own, with its name in theirs.
    """

    def place(name):
        path = pathlib.Path(name)
        several = target and len(values.target) > 1
        device = pathlib.Path(target or "").stem
        return path.with_stem(f"{path.stem}-{device}") if several else path

    if values.output:
        plan.save(place(values.output))
    if values.plot:
        drawing.draw(plan, place(values.plot))
