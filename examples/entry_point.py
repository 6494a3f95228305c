"""How the examples begin: one-line errors, devices and seeds.

Whatever of the examples imports TensorFlow imports this module before it.
"""

import contextlib
import os
import pathlib
import sys
import tempfile

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

    from tfckpt import distribute


class UserError(Exception):
    """A mistake of the user's, told in one line and without a traceback."""


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
