"""What the examples share: flags, one-line errors, and `--compare`.

`--compare` trains without `tfckpt` and with it from one seed, each in a fresh
process: what a process has once used it may keep, so two trainings in one
process can't be told apart.
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

    from tfckpt import memory

# Steps of the runs that show equality, see `compare`.
EXACT_STEPS = 20
_MIB = 2**20


class UserError(Exception):
    """A mistake of the user's, told in one line and without a traceback."""


def define_flags(values, *, batch_size, learning_rate, steps, steps_help):
    """Defines the flags that both examples have, with their defaults."""
    options = {"flag_values": values}
    flags.DEFINE_integer(
        "batch_size", batch_size, "Examples a step.", lower_bound=1, **options
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
    flags.DEFINE_bool(
        "compare",
        False,
        "Train with and without tfckpt and print a table of both.",
        **options,
    )


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


def set_up(options):
    """Applies the flags that concern the whole process."""
    if options.exact:
        # The order in which operations run side by side changes last bits.
        tf.config.threading.set_inter_op_parallelism_threads(1)
        # It rewrites the programs with and without recomputation differently.
        tf.config.optimizer.set_experimental_options(
            {"disable_meta_optimizer": True}
        )
    with _held_back_log():
        tf.config.list_logical_devices()
    keras.utils.set_random_seed(options.seed)
    if options.mixed_precision:
        keras.config.set_dtype_policy("mixed_bfloat16")


class Meter(keras.callbacks.Callback):
    """Measures a `fit`: its peak memory and every step's seconds.

    The memory is that of the first GPU or, without one, of the process. The
    baseline is what is held when the training begins: inputs and weights.
    """

    def __init__(self):
        super().__init__()
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

    def figures(self):
        """Returns bytes and seconds."""
        return {
            "above baseline": self._peak.bytes,
            "total": self._peak.baseline + self._peak.bytes,
            # The first steps trace and warm up.
            "seconds": self._seconds[2:] or self._seconds,
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


def comparison_table(plain, ours, floor, *, trained, exact):
    """Returns the table of two runs' figures and their differences."""
    table = rich.table.Table(title="One training without and with tfckpt")
    table.add_column("")
    for name in "without", "with", "with / without":
        table.add_column(name, justify="right")

    def add(label, values, form):
        ratio = f"{values[1] / values[0]:.2f}" if values[0] > 0 else ""
        table.add_row(label, *map(form, values), ratio)

    def mib(size):
        return f"{size / _MIB:.0f} MiB"

    def milliseconds(seconds):
        low, middle, high = np.percentile(seconds, [10, 50, 90]) * 1e3
        return f"{middle:.0f} ms ({low:.0f} to {high:.0f})"

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
