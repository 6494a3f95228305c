"""The flags that the examples share, and what they stand for."""

import contextlib

import entry_point
from absl import flags

from tfckpt import distribute


def define_flags(
    values, *, batch_size, learning_rate, steps, steps_help, compares=True
):
    """Defines the flags that the examples have, with their defaults."""
    options = {"flag_values": values}
    flags.DEFINE_integer(
        "batch_size", batch_size, "Examples a batch.", lower_bound=1, **options
    )
    flags.DEFINE_float(
        "learning_rate",
        learning_rate,
        "The highest.",
        lower_bound=0,
        **options,
    )
    flags.DEFINE_integer("steps", steps, steps_help, lower_bound=1, **options)
    flags.DEFINE_integer(
        "seed", 0, "Of weights, order and dropout.", lower_bound=0, **options
    )
    flags.DEFINE_bool(
        "mixed_precision", False, "Compute in bfloat16.", **options
    )
    flags.DEFINE_bool("jit_compile", False, "Compile with XLA.", **options)
    flags.DEFINE_bool(
        "exact",
        False,
        "Give the same bits in every run, with and without recomputation: one "
        "operation at a time, and without Grappler, TensorFlow's optimizer of "
        "graphs.",
        **options,
    )
    if compares:
        flags.DEFINE_bool(
            "compare",
            False,
            "Train with and without recomputation and print a table of both; "
            "given micro-batches, with them and with the big batch that they "
            "are part of.",
            **options,
        )
    _define_window(values)
    _define_strategy(values)


def _define_window(values):
    options = {"flag_values": values}
    flags.DEFINE_integer(
        "gradient_accumulation_steps",
        None,
        "Batches whose gradients make one step: an update of the weights.",
        lower_bound=1,
        **options,
    )
    flags.DEFINE_integer(
        "micro_batches",
        None,
        "Parts of each batch that run one after another, to save memory.",
        lower_bound=1,
        **options,
    )
    flags.register_multi_flags_validator(
        ["gradient_accumulation_steps", "micro_batches"],
        lambda given: None in given.values(),
        "either batches are gathered or each is split, not both",
        **options,
    )
    flags.register_multi_flags_validator(
        ["batch_size", "micro_batches"],
        lambda given: (given["micro_batches"] or 1) <= given["batch_size"],
        "a batch has no more parts than examples",
        **options,
    )


def _define_strategy(values):
    options = {"flag_values": values}
    flags.DEFINE_enum(
        "strategy",
        "auto",
        distribute.NAMES,
        "Where to train. auto: on the TPU if there is one, on all of several "
        "GPUs, else on the one device.",
        **options,
    )
    flags.DEFINE_integer(
        "num_gpus", None, "How many GPUs, if not all.", lower_bound=1, **options
    )
    flags.DEFINE_string(
        "tpu",
        None,
        "The TPU: local on a TPU VM, grpc://address:port, or a Cloud TPU's "
        "name.",
        **options,
    )


def window(options):
    """Returns the arguments of `compile` that the flags ask for."""
    names = "gradient_accumulation_steps", "micro_batches"
    return {
        name: getattr(options, name)
        for name in names
        if getattr(options, name) is not None
    }


def define_plan(values, paths):
    """Defines `--plan`, for a model that has these call paths."""
    flags.DEFINE_string(
        "plan",
        "sqrt",
        "What is recomputed: none, sqrt, a number of segments, or the call "
        f"paths at which segments end, such as {paths}.",
        flag_values=values,
    )


def parse_plan(text):
    """Returns the `plan` of `SegmentedModel` that the flag stands for."""
    if text in ("none", "sqrt"):
        return {"none": None, "sqrt": "sqrt"}[text]
    try:
        return int(text)
    except ValueError:
        return [path.strip() for path in text.split(",")]


@contextlib.contextmanager
def mistakes_of_plan(text):
    """Makes a plan that the model has not the user's error."""
    try:
        yield
    except ValueError as error:
        raise entry_point.UserError(
            f"--plan={text}: {error} (It is none, sqrt, a number of "
            "segments, or call paths with commas between.)"
        ) from error
