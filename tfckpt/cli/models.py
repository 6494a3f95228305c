"""The model that a command line names."""

import difflib
import importlib
import inspect
import os
import pathlib
import sys
from typing import Any

import keras

from tfckpt.cli import options

_APPLICATIONS = "keras.applications."


def load(name: str, input_shape: Any = None) -> Any:
    """Returns a model.

    Args:
        name: A function of `keras.applications` ("ResNet50", with or without
            that in front), which is made without weights; a function that
            returns a model, as "package.module:function"; or the path of a
            `.keras` file.
        input_shape: Shapes of the inputs without the batch dimension, as
            `options.parse_shape` returns them. Given to functions that take
            an `input_shape`.

    Raises:
        UsageError: There is no such model, or it can't be made.
    """
    if name.endswith(".keras"):
        return _from_file(name)
    if ":" in name:
        model = _call(_imported(name), name, input_shape)
    else:
        model = _call(_application(name), name, input_shape, weights=None)
    if not isinstance(model, keras.Model):
        raise options.UsageError(
            f"{name} returned {type(model).__name__}, and not a keras.Model."
        )
    return model


def applications() -> tuple[str, ...]:
    """Returns the names of the models in `keras.applications`."""
    return tuple(
        name
        for name, value in vars(keras.applications).items()
        if inspect.isfunction(value) and name[0].isupper()
    )


def _application(name):
    name = name.removeprefix(_APPLICATIONS)
    known = applications()
    if name in known:
        return getattr(keras.applications, name)
    lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.5)
    raise options.UsageError(
        f"There is no model {name!r} in keras.applications."
        + (f" Near: {', '.join(lower[each] for each in near)}." if near else "")
        + ' Other models are named as "package.module:function" or by the '
        "path of a .keras file."
    )


def _imported(name):
    place, _, function = name.partition(":")
    here = os.getcwd()
    # As `python -m` has it; the installed command has another first place.
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(place)
    except Exception as error:  # Whatever a user's module raises.
        raise options.UsageError(
            f"The module {place!r} of {name!r} can't be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    found = getattr(module, function, None)
    if not callable(found):
        names = [each for each in vars(module) if not each.startswith("_")]
        near = difflib.get_close_matches(function, names, n=3)
        raise options.UsageError(
            f"{place!r} has no function {function!r}."
            + (f" Near: {', '.join(near)}." if near else "")
        )
    return found


def _call(function, name, input_shape, **arguments):
    takes = inspect.signature(function).parameters
    if input_shape is not None and "input_shape" in takes:
        one = len(input_shape) == 1
        arguments["input_shape"] = input_shape[0] if one else input_shape
    try:
        return function(**arguments)
    except Exception as error:  # Whatever a user's function raises.
        raise options.UsageError(
            f"{name} could not be made: {type(error).__name__}: {error}"
        ) from error


def _from_file(name):
    path = pathlib.Path(name)
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else pathlib.Path()
        others = [each.name for each in folder.glob("*.keras")]
        near = difflib.get_close_matches(path.name, others, n=3, cutoff=0.4)
        raise options.UsageError(
            f"There is no file {name!r}."
            + (f" Near: {', '.join(near)}." if near else "")
        )
    try:
        return keras.saving.load_model(path)
    except Exception as error:  # Whatever a file's layers raise.
        raise options.UsageError(
            f"{name} can't be read, without the module of classes that it "
            "holds: name a function that loads it instead, package.module:"
            f"function. {type(error).__name__}: {error}"
        ) from error
