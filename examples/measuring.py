"""Trainings in fresh processes, one after another.

What a process has once used it may keep, so two trainings in one process can't
be told apart.
"""

import os
import pathlib
import resource
import tempfile
import threading
import time
import types

import entry_point
import meter
import numpy as np
import rich.console
import tensorflow as tf

from tfckpt import memory


def as_dict(values):
    """Returns the flags' values as another process can be given them."""
    plain = (bool, float, int, str, type(None))
    flag_values = values.flag_values_dict()
    return {k: v for k, v in flag_values.items() if isinstance(v, plain)}


def measure_each(program, runs):
    """Runs a program's `measured` with each of several flags, named on a rule.

    Args:
        program: The path of the example.
        runs: By name the flags of each run, as a dictionary.

    Returns:
        The figures of each run, see `measure`.
    """
    console = rich.console.Console()
    found = []
    for name, options in runs.items():
        console.rule(name)
        found.append(measure(program, options))
    return found


def measure(program, options, *, limit=None):
    """Runs a program's `measured` in a fresh process.

    Args:
        program: The path of the example.
        options: Its flags, as a dictionary.
        limit: Bytes of memory at which the process gives up.

    Returns:
        The figures and all variables of the model, or None if it went over
        the limit.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            figures = memory.measure_in_process(
                f"{program}:measured", options, folder, limit
            )
        except memory.MeasurementError as error:
            if _over(folder).exists():
                return None
            # The process' traceback ends with what is no fault of the program.
            for kind in ("entry_point.UserError: ", "NotImplementedError: "):
                _, found, line = str(error).rpartition(kind)
                if found:
                    raise entry_point.UserError(line) from error
            raise
        with np.load(_variables(folder)) as arrays:
            figures["variables"] = list(arrays.values())
    return None if limit and figures["total"] > limit else figures


def train(run, options, folder, limit):
    """What a program's `measured` does, in the fresh process.

    Args:
        run: Its `run`.
        options: The flags, as a dictionary.
        folder: Where to leave files for `measure`.
        limit: Bytes of memory at which to give up, or None.

    Returns:
        The figures.
    """
    if limit:
        _end_above(limit, folder)
    options = types.SimpleNamespace(**options)
    strategy = entry_point.set_up(options)
    meters = [meter.Meter(options.gradient_accumulation_steps or 1)]
    model, outcome = run(options, strategy, meters, verbose=0 if limit else 2)
    arrays = [np.asarray(variable, "float64") for variable in model.variables]
    np.savez(_variables(folder), *arrays)
    return meters[0].figures() | {"outcome": outcome}


def _variables(folder):
    return pathlib.Path(folder, "variables.npz")


def _over(folder):
    return pathlib.Path(folder, "over")


def _end_above(limit, folder):
    """Ends this process as soon as it holds more bytes than `limit`."""
    if tf.config.list_physical_devices("GPU"):
        return

    def watch():
        pages = limit // resource.getpagesize()
        statistics = pathlib.Path("/proc/self/statm")
        while int(statistics.read_text().split()[1]) <= pages:
            time.sleep(0.02)
        _over(folder).touch()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def difference(first, second):
    """Returns the largest difference of the variables of two runs' figures."""
    pairs = zip(first["variables"], second["variables"], strict=True)
    return max(float(np.max(np.abs(a - b))) for a, b in pairs)
