"""What the examples share: flags, one-line errors, and `--compare`.

`--compare` trains without `tfckpt` and with it from one seed, each in a fresh
process: what a process has once used it may keep, so two trainings in one
process can't be told apart. Given micro-batches, `big_batch` compares.
"""

import contextlib
import os
import pathlib
import sys
import tempfile
import time

import numpy as np
import rich.console
import rich.table
from absl import app, flags


@contextlib.contextmanager
def _held_back_log():
    """Shows what TensorFlow's libraries log when they start only on errors.

    They log before they read how much they may. An answer to a mistake in a
    flag would be one line among twenty.
    """
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            yield
        except BaseException:
            log.seek(0)
            os.write(stderr, log.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


# Before any other module imports TensorFlow.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
with _held_back_log():
    import keras
    import tensorflow as tf

    from tfckpt import distribute, memory

# Steps of the runs that show equality, see `compare`.
EXACT_STEPS = 20
_MIB = 2**20


class UserError(Exception):
    """A mistake of the user's, told in one line and without a traceback."""


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
        raise UserError(
            f"--plan={text}: {error} (It is none, sqrt, a number of "
            "segments, or call paths with commas between.)"
        ) from error


def run(define, main):
    """Runs `main(flags.FLAGS)`; mistakes of the user's become one line.

    Not `absl.app.run`, which answers a bad flag with several.
    """

    def fail(error, status):
        line = " ".join(str(error).split())
        print(f"{pathlib.Path(sys.argv[0]).name}: {line}", file=sys.stderr)
        sys.exit(status)

    app.define_help_flags()
    define(flags.FLAGS)
    try:
        rest = flags.FLAGS(sys.argv)
    except flags.Error as error:
        fail(error, 2)
    if rest[1:]:
        fail(f"unexpected argument {rest[1]!r}: flags begin with --", 2)
    try:
        main(flags.FLAGS)
    except UserError as error:
        fail(error, 1)


def window(options):
    """Returns the arguments of `compile` that the flags ask for."""
    names = "gradient_accumulation_steps", "micro_batches"
    return {
        name: getattr(options, name)
        for name in names
        if getattr(options, name) is not None
    }


def set_up(options):
    """Applies the flags that concern the whole process.

    Returns:
        The strategy, within whose scope the model is to be made.
    """
    if options.exact:
        # The order in which operations run side by side changes last bits.
        tf.config.threading.set_inter_op_parallelism_threads(1)
        # It rewrites the programs with and without recomputation differently.
        tf.config.optimizer.set_experimental_options(
            {"disable_meta_optimizer": True}
        )
    strategy = _strategy(options)
    keras.utils.set_random_seed(options.seed)
    if options.mixed_precision:
        keras.config.set_dtype_policy("mixed_bfloat16")
    return strategy


def _strategy(options):
    with _held_back_log():
        try:
            strategy = distribute.get_strategy(
                options.strategy, num_gpus=options.num_gpus, tpu=options.tpu
            )
            tf.config.list_logical_devices()
            return strategy
        except ValueError as error:
            # The log is no answer to a mistake, so out of its reach.
            mistake = UserError(error)
    raise mistake


class Meter(keras.callbacks.Callback):
    """Measures a `fit`: its peak memory, every step's seconds and loss.

    The memory is that of the first GPU or, without one, of the process. The
    baseline is what is held when the training begins: inputs and weights.

    Args:
        batches: How many make a step.

    Attributes:
        losses: The loss of each step so far.
    """

    def __init__(self, batches=1):
        super().__init__()
        self._batches = batches
        self.losses = []
        self._before = 0.0
        self._stack = contextlib.ExitStack()
        self._peak = None
        self._start = 0.0
        self._seconds = []

    def on_train_begin(self, logs=None):
        # On a GPU, activations are in its memory.
        gpus = tf.config.list_logical_devices("GPU")
        peak = memory.device_peak("GPU:0") if gpus else memory.process_peak()
        self._peak = self._stack.enter_context(peak)

    def on_train_end(self, logs=None):
        self._stack.close()

    def on_train_batch_begin(self, batch, logs=None):
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self._seconds.append(time.perf_counter() - self._start)
        done, rest = divmod(batch + 1, self._batches)
        if rest == 0:
            # What is logged is the mean of the epoch so far.
            total = done * logs["loss"]
            self.losses.append(total - (self._before if done > 1 else 0.0))
            self._before = total

    def figures(self):
        """Returns bytes, and seconds and losses of the steps."""
        whole = len(self._seconds) // self._batches * self._batches
        seconds = np.reshape(self._seconds[:whole], [-1, self._batches])
        seconds = seconds.sum(axis=1).tolist()
        return {
            "above baseline": self._peak.bytes,
            "total": self._peak.baseline + self._peak.bytes,
            # The first steps trace and warm up.
            "seconds": seconds[2:] or seconds,
            "losses": self.losses,
        }


def as_dict(values):
    """Returns the flags' values as another process can be given them."""
    plain = (bool, float, int, str, type(None))
    flag_values = values.flag_values_dict()
    return {k: v for k, v in flag_values.items() if isinstance(v, plain)}


def measure(program, options, *, folder, limit=None):
    """Runs a program's `measured` in a fresh process.

    Args:
        program: The path of the example.
        options: Its flags, as a dictionary.
        folder: Where the process may leave files.
        limit: Bytes of memory at which the process gives up.

    Returns:
        The figures, or None if it went over the limit.
    """
    try:
        figures = memory.measure_in_process(
            f"{program}:measured", options, os.fspath(folder), limit
        )
    except memory.MeasurementError as error:
        if pathlib.Path(folder, "over").exists():
            return None
        # The process' traceback ends with what is no fault of the program.
        for kind in ("comparison.UserError: ", "NotImplementedError: "):
            _, found, line = str(error).rpartition(kind)
            if found:
                raise UserError(line) from error
        raise
    return None if limit and figures["total"] > limit else figures


def save_variables(model, folder):
    """Writes all of the model's variables for `difference`."""
    arrays = [np.asarray(variable, "float64") for variable in model.variables]
    np.savez(pathlib.Path(folder, "variables.npz"), *arrays)


def difference(first, second):
    """Returns the largest difference of the variables in two folders."""
    with (
        np.load(pathlib.Path(first, "variables.npz")) as a,
        np.load(pathlib.Path(second, "variables.npz")) as b,
    ):
        return max(float(np.max(np.abs(a[name] - b[name]))) for name in a)


def compare(program, options, *, plain, ours, smallest):
    """Trains with and without us in fresh processes and prints the table.

    Two runs of the whole training show memory, time and accuracy as
    TensorFlow runs them. Then the last bits of gradients differ, even from
    run to run of one program, and a training makes more of that. Two short
    runs with `--exact` show whether recomputation itself changes anything.

    Args:
        program: The path of the example.
        options: The flags of all runs, as a dictionary.
        plain: Flags to change for no recomputation.
        ours: Flags to change for recomputation.
        smallest: Flags to change for the smallest step, whose peak is what
            the program needs beside its activations.
    """
    console = rich.console.Console()
    exact = {"steps": EXACT_STEPS, "exact": True}
    runs = {
        "without tfckpt": plain,
        "with tfckpt": ours,
        "the smallest step": plain | smallest,
        "without tfckpt, exact": plain | exact,
        "with tfckpt, exact": ours | exact,
    }
    with contextlib.ExitStack() as stack:
        figures, folders = [], []
        for name, changes in runs.items():
            console.rule(name)
            folders.append(stack.enter_context(tempfile.TemporaryDirectory()))
            figures.append(
                measure(program, options | changes, folder=folders[-1])
            )
        table = comparison_table(
            *figures[:3],
            trained=difference(*folders[:2]),
            exact=difference(*folders[3:]),
        )
    console.print(table)


def mib(size):
    return f"{size / _MIB:.0f} MiB"


def milliseconds(seconds):
    low, middle, high = np.percentile(seconds, [10, 50, 90]) * 1e3
    return f"{middle:.0f} ms ({low:.0f} to {high:.0f})"


def comparison_table(plain, ours, floor, *, trained, exact):
    """Returns the table of two runs' figures and their differences."""
    table = rich.table.Table(title="One training without and with tfckpt")
    table.add_column("")
    for name in "without", "with", "with / without":
        table.add_column(name, justify="right")

    def add(label, values, form):
        ratio = f"{values[1] / values[0]:.2f}" if values[0] > 0 else ""
        table.add_row(label, *map(form, values), ratio)

    peaks = [run["above baseline"] for run in (plain, ours)]
    add("peak memory above the baseline", peaks, mib)
    add(
        "of that, activations",
        [peak - floor["above baseline"] for peak in peaks],
        mib,
    )
    seconds = [run["seconds"] for run in (plain, ours)]
    medians = [np.median(each) for each in seconds]
    table.add_row(
        "a step: median (10 to 90 %)",
        *map(milliseconds, seconds),
        f"{medians[1] / medians[0]:.2f}",
    )
    for name in plain["outcome"]:
        add(
            name,
            [run["outcome"][name] for run in (plain, ours)],
            "{:.4f}".format,
        )
    table.add_section()
    exactly = f"difference after {EXACT_STEPS} steps, --exact"
    for label, value in (("difference at the end", trained), (exactly, exact)):
        table.add_row(label, "", f"{value:.1e}" if value else "0", "")
    table.caption = (
        "Activations: the peak less that of the smallest step. Difference: "
        "the largest of any weight, moving statistic or random seed."
    )
    return table
