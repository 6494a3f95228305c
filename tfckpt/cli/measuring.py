"""The command `measure`: a plan is made and run, and both are compared."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from absl import flags

from tfckpt import measurement, report, segmented_model
from tfckpt.cli import options, settings

FLAGS = (
    "batch_size",
    "input_shape",
    "memory_budget",
    "strategy",
    "measure_costs",
    "repeats",
    "verbose",
)


def run(
    values: flags.FlagValues, arguments: Sequence[str], output: settings.Output
) -> None:
    """Plans, runs random inputs, prints prediction and measurement."""
    model, shape = settings.load_model(values, arguments)
    plan = settings.make_plan(
        model,
        output=output,
        batch_size=values.batch_size,
        input_shape=shape,
        memory_budget=values.memory_budget,
        strategy=values.strategy,
        measure=values.measure_costs or None,
    )
    output.results.print(report.table(plan, verbose=values.verbose))
    output.results.print()
    x = random_inputs(model, values.batch_size, shape)
    segmented = segmented_model.SegmentedModel.from_model(
        model, plan=plan, input_shape=shape
    )
    output.log("Measuring, in fresh processes one after the other ...")
    measured = measurement.measure(segmented, x, repeats=values.repeats)
    output.results.print(measured.table())
    for note in measured.notes:
        output.results.print(f"- {note}", markup=False)


def random_inputs(model: Any, batch_size: int, shape: Any = None) -> Any:
    """Returns a batch for a model: numbers from 0 to 1, 0 and 1 for ints.

    So small, they are valid where a layer takes them as ids.

    Args:
        model: A Functional or Sequential model.
        batch_size: Examples.
        shape: Shape, or shapes in the order of `model.inputs`, with the batch
            dimension; None if the model knows them.

    Raises:
        UsageError: An input is of another type.
    """
    shapes = [tuple(each.shape) for each in model.inputs]
    if shape is not None:
        shapes = [shape] if isinstance(shape, tuple) else list(shape)
    generator = np.random.default_rng(0)
    arrays = []
    for tensor, (_, *sizes) in zip(model.inputs, shapes, strict=True):
        size = (batch_size, *sizes)
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if "float" in dtype:
            array = generator.random(size, np.float32)
        elif "int" in dtype or dtype == "bool":
            array = generator.integers(0, 2, size)
        else:
            raise options.UsageError(
                f"The input '{tensor.name}' is of type {dtype}, for which "
                "there are no random values."
            )
        arrays.append(array if dtype == "bfloat16" else array.astype(dtype))
    return keras.tree.pack_sequence_as(model.input, arrays)
