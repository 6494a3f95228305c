"""The command line: `python -m tfckpt COMMAND MODEL --flags`."""

import difflib
import sys
from collections.abc import Sequence
from importlib import metadata

import rich.console
from absl import app, flags

from tfckpt import memory
from tfckpt.cli import (
    max_batch,
    measuring,
    options,
    plans,
    settings,
    targets,
)

_WIDTH = 100
_PROGRAM = "python -m tfckpt"
COMMANDS = {
    "plan": settings.Command(
        plans.run,
        plans.FLAGS,
        "What to recompute, and what memory and time a step will take.",
        examples=(
            "ResNet50 --batch_size=64 --memory_budget=2GiB",
            "my_package.models:transformer --strategy=min_memory "
            "--output=plan.json",
            "model.keras --batch_size=256 --target=v5e,a100-40gb",
        ),
    ),
    "measure": settings.Command(
        measuring.run,
        measuring.FLAGS,
        "Makes a plan, runs it, and compares prediction and measurement.",
        examples=("ResNet50 --batch_size=8 --input_shape=160,160,3",),
    ),
    "max_batch": settings.Command(
        max_batch.run,
        max_batch.FLAGS,
        "The largest batch size that fits, with and without recomputation.",
        examples=(
            "ResNet50 --memory_limit=8GiB",
            "ResNet50 --target=v5e,h100-80gb",
        ),
    ),
    "targets": settings.Command(
        targets.run,
        (),
        "The devices whose compilers can be asked, and their memory.",
        usage="",
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Runs a command line, without the program's name.

    Returns:
        The exit status: 0 if it was done, 1 if it could not be done, 2 if it
        was not understood.
    """
    results = rich.console.Console()
    progress = rich.console.Console(stderr=True)
    for console in (results, progress):
        if not console.is_terminal:
            console.width = max(console.width, _WIDTH)
    try:
        return _main(list(arguments), settings.Output(results, progress))
    except options.UsageError as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    # What the package raises for what can't be done; PlanError is one.
    except (
        ImportError,
        NotImplementedError,
        OSError,
        TypeError,
        ValueError,
        memory.CompilationError,
        memory.MeasurementError,
    ) as error:
        return _fail(error, 1)


def run() -> None:
    """Runs the command line of this process, and ends it."""

    def parse(arguments):
        # Each command has flags of its own; absl's are not used.
        flags.FLAGS(arguments[:1])
        return arguments

    app.run(lambda arguments: main(arguments[1:]), flags_parser=parse)


def _main(arguments, output):
    name, *rest = arguments or ["--help"]
    if name in ("--help", "-h", "help"):
        output.results.print(_overview(), markup=False, highlight=False)
        return 0
    if name == "--version":
        output.results.print(
            f"tfckpt {metadata.version('tfckpt')}", highlight=False
        )
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        raise options.UsageError(
            f"There is no command {name!r}. Commands are "
            f"{', '.join(COMMANDS)}."
            + (f" Did you mean {near[0]}?" if near else "")
        )
    command = COMMANDS[name]
    values = options.define(*command.flags)
    positional = options.parse(values, rest)
    if values.help:
        output.results.print(
            _help(name, command, values), markup=False, highlight=False
        )
        return 0
    command.run(values, positional, output)
    return 0


def _overview():
    lines = [
        f"Usage: {_PROGRAM} COMMAND MODEL [--flag=value ...]",
        "",
        "Plans gradient checkpointing: what to recompute, and what it costs.",
        "",
        *(f"  {name:<12}{c.summary}" for name, c in COMMANDS.items()),
        "",
        "MODEL is the name of a model in keras.applications (ResNet50), a",
        "function that returns one (package.module:function), or the path of",
        "a .keras file.",
        "",
        "Examples:",
        *_examples(*COMMANDS),
        "",
        f"{_PROGRAM} COMMAND --help shows the flags of a command.",
    ]
    return "\n".join(lines)


def _help(name, command, values):
    lines = [
        f"Usage: {_PROGRAM} {name} {command.usage} [--flag=value ...]",
        "",
        command.summary,
        "",
        options.describe(values),
    ]
    if command.examples:
        lines += ["", "Examples:", *_examples(name)]
    return "\n".join(lines)


def _examples(*names):
    return [
        f"  {_PROGRAM} {name} {example}"
        for name in names
        for example in COMMANDS[name].examples
    ]


def _fail(error, status):
    # One line, whatever a compiler's log holds.
    text = " ".join(str(error).split())
    if not isinstance(error, options.UsageError | str | ValueError):
        text = text if text else type(error).__name__
    text = text if len(text) <= 1000 else f"{text[:1000]} ..."
    print(f"tfckpt: {text}", file=sys.stderr)  # noqa: T201
    return status


if __name__ == "__main__":
    run()
