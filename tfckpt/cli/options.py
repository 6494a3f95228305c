"""Flags of the commands: their definition, their errors, their help."""

import difflib
import functools
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from tfckpt import planning, units

_NAMES = ", ".join(planning.STRATEGIES)


class UsageError(Exception):
    """A command line that can't be understood."""


class _Parser(flags.ArgumentParser):
    """A flag whose text is turned into a value by a function."""

    def __init__(self, function: Callable[[str], Any], syntax: str):
        self.parse = function
        self.syntactic_help = syntax

    def flag_type(self):
        return "text"


def parse_shape(text: str) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of the inputs, without the batch dimension.

    Args:
        text: Sizes separated by "," or "x"; shapes separated by ";".

    Raises:
        ValueError: A size is no whole number of 1 or more.

    Example:

    >>> parse_shape("224x224x3"), parse_shape("128;16,8")
    (((224, 224, 3),), ((128,), (16, 8)))
    """
    shapes = []
    for part in text.strip("()[] ").split(";"):
        sizes = [each.strip() for each in part.replace("x", ",").split(",")]
        if not all(each.isdecimal() and int(each) for each in sizes):
            raise ValueError(
                "a shape is sizes of 1 or more without the batch dimension, "
                "such as 224,224,3, and 128;64,64 for two inputs; received "
                f"{text!r}"
            )
        shapes.append(tuple(map(int, sizes)))
    return tuple(shapes)


def parse_strategy(text: str) -> str | int | list[str]:
    """Returns a strategy: a name, a number of segments, or call paths.

    Raises:
        ValueError: It looks like a misspelt name.

    Example:

    >>> parse_strategy("sqrt"), parse_strategy("8"), parse_strategy("a,b/c")
    ('sqrt', 8, ['a', 'b/c'])
    """
    if text in planning.STRATEGIES:
        return text
    if text.isdecimal():
        return int(text)
    near = difflib.get_close_matches(text, planning.STRATEGIES, n=1, cutoff=0.7)
    if near or not text:
        raise ValueError(
            f"a strategy is one of {_NAMES}, a number of segments, or call "
            "paths separated by commas; received "
            f"{text!r}" + (f". Did you mean {near[0]}?" if near else "")
        )
    return text.split(",")


_SIZE = functools.partial(
    flags.DEFINE, _Parser(units.parse_size, "a size such as 2GiB")
)
_SHAPE = functools.partial(
    flags.DEFINE, _Parser(parse_shape, "a shape such as 224,224,3")
)
_STRATEGY = functools.partial(
    flags.DEFINE, _Parser(parse_strategy, "a strategy")
)
_COUNT = functools.partial(flags.DEFINE_integer, lower_bound=1)
# How each flag is defined, its default, its help.
_FLAGS = {
    "batch_size": (_COUNT, 32, "Examples in a step."),
    "input_shape": (
        _SHAPE,
        None,
        "Shape of the input without the batch dimension, such as 224,224,3; "
        "those of several inputs are separated by ';'. For models that leave "
        "sizes open.",
    ),
    "memory_budget": (
        _SIZE,
        None,
        "What a step may take: everything on the device (2GiB), or activation "
        "memory relative to no recomputation (0.4). By default none; with "
        "--target all that it has.",
    ),
    "memory_limit": (
        _SIZE,
        None,
        "Memory of the device, such as 8GiB. By default that of the target.",
    ),
    "strategy": (
        _STRATEGY,
        None,
        f"One of {_NAMES}; a number of segments; or paths of the "
        "calls that end one, separated by commas. By default sqrt, and "
        "budget where there is one.",
    ),
    "target": (
        flags.DEFINE_list,
        [],
        "Devices whose compilers are asked, such as v5e,a100-40gb. "
        "`targets` lists them.",
    ),
    "measure_costs": (
        flags.DEFINE_boolean,
        False,
        "Time each call instead of counting its operations.",
    ),
    "repeats": (_COUNT, 5, "Steps of each kind that are timed."),
    "output": (flags.DEFINE_string, None, "Write the plan here, as .json."),
    "plot": (
        flags.DEFINE_string,
        None,
        "Draw it here; the suffix says how: .png, .pdf, .svg.",
    ),
    "verbose": (flags.DEFINE_boolean, False, "List every call."),
    "help": (flags.DEFINE_boolean, False, "Show this."),
}


def define(*names: str) -> flags.FlagValues:
    """Returns the flags of the given names, and `help`, not parsed yet."""
    values = flags.FlagValues()
    for name in (*names, "help"):
        how, default, text = _FLAGS[name]
        how(name=name, default=default, help=text, flag_values=values)
    return values


def parse(values: flags.FlagValues, arguments: Sequence[str]) -> list[str]:
    """Parses a command's arguments and returns those that are no flags.

    Raises:
        UsageError: A flag is unknown, or its value is not understood.
    """
    try:
        return values(["tfckpt", *arguments])[1:]
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, list(values), n=1)
        raise UsageError(
            f"There is no flag --{error.flagname}."
            + (f" Did you mean --{near[0]}?" if near else "")
        ) from error
    except flags.Error as error:
        raise UsageError(str(error)) from error


def describe(values: flags.FlagValues) -> str:
    """Returns the help of all flags."""
    lines = []
    for name in values:
        flag = values[name]
        default = "" if flag.default in (None, [], False) else flag.default
        head = f"  --{name}" + (f"={default}" if default else "")
        lines += textwrap.wrap(
            flag.help,
            78,
            initial_indent=head.ljust(22) + ("  " if len(head) >= 22 else ""),
            subsequent_indent=" " * 22,
        )
    return "\n".join(lines)
