"""What a training step takes when it runs, next to what was predicted.

Activation memory is measured as the peak of a graph step (without XLA) above
inputs and weights, less the same of a plain step at batch size 1: what the
weights' gradients, the optimizer and the program take cancels out, or more
than that where those gradients are large next to the activations. Each figure
comes from a process of its own. Times are those of steps with the plan
and without, run by turns in one process.
"""

import dataclasses
import pathlib
import pickle
import random
import statistics
import tempfile
from typing import Any

import keras
import numpy as np
import rich.table
import tensorflow as tf

from tfckpt import measured_step, memory, report, tables, units
from tfckpt import plan as plan_lib
from tfckpt import prediction as prediction_lib


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Measured memory and time of a training step, with a plan and without.

    Attributes:
        batch_size: Examples in the step.
        peak_bytes: Activation memory with the plan; None if not measured.
        plain_bytes: The same with no recomputation.
        seconds: Seconds of each step with the plan.
        plain_seconds: The same with no recomputation, by turns with those.
        prediction: What was predicted for this batch size; None if nothing.
        place: What the memory is of: "process", or a device.
        notes: What could not be measured, and why.

    Example:

    >>> Measurement(8, 30, 120, (1.3, 1.2), (1.0, 1.0)).ratio
    0.25
    """

    batch_size: int
    peak_bytes: int | None
    plain_bytes: int | None
    seconds: tuple[float, ...]
    plain_seconds: tuple[float, ...] = ()
    prediction: prediction_lib.Prediction | None = None
    place: str = "process"
    notes: tuple[str, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Activation memory with the plan, relative to none."""
        if self.peak_bytes is None or not self.plain_bytes:
            return None
        return self.peak_bytes / self.plain_bytes

    @property
    def time_ratios(self) -> tuple[float, ...]:
        """Time with the plan relative to none, for each pair of steps."""
        pairs = zip(self.seconds, self.plain_seconds, strict=False)
        return tuple(ours / plain for ours, plain in pairs)

    def __str__(self) -> str:
        text = report.render(self.table())
        return "\n".join([text, *(f"- {note}" for note in self.notes)])

    def table(self) -> rich.table.Table:
        """Returns the figures as a table that `rich` prints."""
        made = tables.new_table(
            f"A training step, batch size {self.batch_size}",
            "",
            "with the plan",
            "without",
            "ratio",
        )
        measured = self.peak_bytes, self.plain_bytes, self.ratio
        self._add_row(made, f"peak of the {self.place} above batch 1", measured)
        known = self.prediction
        if known is not None:
            predicted = (
                known.peak_above_gradients,
                known.plain_above_gradients,
                known.peak_above_gradients / known.plain_above_gradients
                if known.plain_above_gradients
                else 1.0,
            )
            self._add_row(made, "  as predicted", predicted)
            pairs = zip(predicted, measured, strict=True)
            made.add_row(
                "  error of the prediction", *(_error(*p) for p in pairs)
            )
        made.add_row(
            "seconds of a step",
            *(_seconds(each) for each in (self.seconds, self.plain_seconds)),
            _spread(self.time_ratios),
        )
        if known is not None:
            made.add_row(
                "  as predicted", "", "", f"{1 + known.extra_time:.3f}"
            )
        return made

    def _add_row(self, table, name, figures):
        *sizes, ratio = figures
        table.add_row(
            name,
            *("" if s is None else units.format_size(s) for s in sizes),
            "" if ratio is None else f"{ratio:.3f}",
        )


def measure(
    model: Any, x: Any, y: Any = None, *, repeats: int = 5, compare: bool = True
) -> Measurement:
    """Measures a training step of a model, with its plan and without.

    The model itself is not run: copies of it are, read from a file. A model
    that is compiled runs its own training step if there are targets; else the
    loss is the mean square of the outputs, and the optimizer SGD with
    momentum. It takes a minute or more.

    Args:
        model: A `SegmentedModel`.
        x: A batch of inputs.
        y: Its targets; None for none.
        repeats: Steps that are timed.
        compare: Whether to measure no recomputation too.

    Raises:
        TypeError: `x` or `y` hold something else than arrays.
        ValueError: The batch is empty, or its arrays differ in length.
        MeasurementError: No copy of the model could be run.
    """
    if repeats < 1:
        raise ValueError(
            f"`repeats` is 1 or more steps to be timed. Received: {repeats}."
        )
    data = _checked_batch(x, y)
    batch_size = len(keras.tree.flatten(data)[0])
    notes: list[str] = []
    device = _device()
    # Making layers draws seeds for those that have none.
    state = random.getstate()
    try:
        with tempfile.TemporaryDirectory(prefix="tfckpt-") as folder:
            _write(model, data, pathlib.Path(folder))
            peaks = _peaks(folder, batch_size, device, compare, notes)
            seconds = _times(folder, repeats, compare, device, notes)
    finally:
        random.setstate(state)
    return Measurement(
        batch_size,
        *peaks,
        seconds=tuple(seconds["plan"]),
        plain_seconds=tuple(seconds.get("plain", ())),
        prediction=_prediction(model, batch_size, notes),
        place=device or "process",
        notes=tuple(notes),
    )


def _peaks(folder, batch_size, device, compare, notes):
    """Returns activation memory with the plan and without, None if unknown."""

    def peak(plain, examples):
        arguments = folder, plain, examples, device
        if device:
            return measured_step.peak_bytes(*arguments)
        return memory.measure_in_process(measured_step.peak_bytes, *arguments)

    try:
        floor = peak(True, 1)
    except (memory.MeasurementError, NotImplementedError) as error:
        notes.append(f"Memory was not measured: {_last_line(error)}")
        return None, None
    found = []
    for plain in (False, True) if compare else (False,):
        try:
            found.append(max(0, peak(plain, batch_size) - floor))
        except memory.MeasurementError as error:
            found.append(None)
            what = "without" if plain else "with"
            notes.append(
                f"Memory {what} the plan was not measured: {_last_line(error)}"
            )
    return *found, *([] if compare else [None])


def _times(folder, repeats, compare, device, notes):
    arguments = folder, repeats, compare
    if not device:
        try:
            return memory.measure_in_process(
                measured_step.step_seconds, *arguments
            )
        except memory.MeasurementError as error:
            notes.append(
                "Times are from this process, as another could not run it: "
                f"{_last_line(error)}"
            )
    try:
        return measured_step.step_seconds(*arguments)
    except Exception as error:  # Whatever a copy of a user's model raises.
        raise memory.MeasurementError(
            "A copy of the model, saved and read again, could not be trained: "
            f"{type(error).__name__}: {error} (classes of your own have to be "
            "registered, by keras.saving.register_keras_serializable, in a "
            "module that can be imported)"
        ) from error


def _write(model, data, folder):
    x, y = data
    own = model.compiled and y is not None
    compiled = model.get_compile_config() if own else None
    model.save(folder / measured_step.MODEL)
    with open(folder / measured_step.DATA, "wb") as file:
        pickle.dump((_modules(), x, y, compiled), file)
    plan = getattr(model, "plan", None)
    if isinstance(plan, plan_lib.Plan):
        plan.save(folder / measured_step.PLAN)


def _modules():
    """Modules that register classes and functions, for a new process."""
    found = keras.saving.get_custom_objects().values()
    names = dict.fromkeys(getattr(each, "__module__", None) for each in found)
    return [
        name
        for name in names
        # What is defined in a script, no other process can import.
        if name and name.split(".")[0] not in ("__main__", "builtins", "keras")
    ]


def _prediction(model, batch_size, notes):
    known = getattr(getattr(model, "plan", None), "prediction", None)
    if known is not None and known.batch_size != batch_size:
        notes.append(
            f"The prediction is for batch size {known.batch_size}, and not "
            "compared."
        )
        return None
    return known


def _checked_batch(x, y):
    def as_array(value):
        array = np.asarray(value)
        if array.dtype == object or not array.ndim:
            raise TypeError(
                "`x` and `y` are one batch, as arrays or tensors, or "
                "structures of them, with the batch dimension first. "
                f"Received: {type(value).__name__}."
            )
        # As `fit` does.
        if array.dtype == np.float64:
            array = array.astype(keras.config.floatx())
        return array

    data = keras.tree.map_structure(
        lambda value: None if value is None else as_array(value), (x, y)
    )
    arrays = [a for a in keras.tree.flatten(data) if a is not None]
    lengths = sorted({len(array) for array in arrays})
    if len(lengths) != 1 or not lengths[0]:
        raise ValueError(
            "`x` and `y` hold the same number of examples, 1 or more. "
            f"Received: {lengths or 'no arrays'}."
        )
    return data


def _device():
    for kind in ("GPU", "TPU"):
        if tf.config.list_logical_devices(kind):
            return f"{kind}:0"
    return None


def _last_line(error):
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _error(predicted, measured):
    if predicted is None or not measured:
        return ""
    return f"{predicted / measured - 1:+.1%}"


def _seconds(seconds):
    if not seconds:
        return ""
    return f"{statistics.median(seconds):.4g} s"


def _spread(ratios):
    if not ratios:
        return ""
    middle = statistics.median(ratios)
    return f"{middle:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
