"""Strategies of `tf.distribute`: by name, and which can be used.

What a strategy needs is looked for before it is made: TensorFlow finds out
later, in many lines, and sometimes by waiting for ever. The names are those of
the TensorFlow Model Garden, where they are alike.
"""

import json
import os
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfckpt import _compat_training as compat
from tfckpt import tpu_address

NAMES = ("auto", "default", "one_device", "mirrored", "multi_worker", "tpu")
# Names that take `num_gpus`, and those that take `tpu`.
_WITH_GPUS = ("auto", "mirrored", "one_device")
_WITH_TPU = ("auto", "tpu")


def get_strategy(
    name: str = "auto", *, num_gpus: int | None = None, tpu: str | None = None
) -> tf.distribute.Strategy:
    """Returns a strategy, made and connected.

    Models are built and compiled within its `scope()`. Call this once, before
    TensorFlow runs anything: "multi_worker" and "tpu" ask for that.

    Args:
        name: One of these:

            - "default": none, TensorFlow's own; one GPU is used if there.
            - "one_device": all on the first GPU or, without one, on the CPU.
            - "mirrored": a replica on each of `num_gpus` GPUs, all unless
              given; without a GPU on each logical CPU.
            - "multi_worker": a replica on each GPU of each machine, or on each
              machine's CPU, as the environment variable `TF_CONFIG` says.
            - "tpu": a replica on each core of the TPU.
            - "auto": "tpu" if `tpu` is given or the environment tells of one
              (`TPU_NAME`, or chips of this machine), "mirrored" on several
              GPUs, else "default".
        num_gpus: How many GPUs to use, for "mirrored" and "auto"; 1 for
            "one_device" asks for the GPU.
        tpu: Which TPU, for "tpu" and "auto": `"local"` on a TPU VM, an address
            such as `"grpc://10.0.0.2:8470"`, or the name of a Cloud TPU. What
            the environment tells of unless given.

    Returns:
        A `tf.distribute.Strategy`.

    Raises:
        ValueError: An argument is no such thing or does not go with the name,
            or what it asks for is not there. Nothing was changed.

    Example:

    >>> strategy = get_strategy("one_device")
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> strategy.num_replicas_in_sync
    1
    """
    _check_arguments(name, num_gpus, tpu)
    if tf.distribute.has_strategy():
        raise ValueError(
            "get_strategy was called within the scope of "
            f"{type(tf.distribute.get_strategy()).__name__}. Call it outside "
            "of any scope."
        )
    gpus = _count_gpus()
    if num_gpus is not None and num_gpus > gpus:
        raise ValueError(
            f"num_gpus={num_gpus}, but TensorFlow sees {gpus or 'no'} "
            f"GPU{'s' if gpus > 1 else ''} here. Ask for at most as many, or "
            "leave num_gpus out."
        )
    if name == "auto":
        # Who asks for GPUs wants no TPU.
        if tpu is None and num_gpus is None:
            tpu = tpu_address.find()
        several = (gpus if num_gpus is None else num_gpus) > 1
        name = "default" if tpu is None else "tpu"
        name = "mirrored" if name == "default" and several else name
    if name == "one_device":
        return tf.distribute.OneDeviceStrategy("GPU:0" if gpus else "CPU:0")
    if name == "mirrored":
        return tf.distribute.MirroredStrategy(_devices(num_gpus or gpus))
    if name == "multi_worker":
        return _multi_worker()
    if name == "tpu":
        return _tpu(tpu)
    return tf.distribute.get_strategy()


def _check_arguments(name, num_gpus, tpu):
    if name not in NAMES:
        raise ValueError(
            f"There is no strategy {name!r}. Expected one of "
            f"{', '.join(map(repr, NAMES))}."
        )
    if num_gpus is not None:
        if type(num_gpus) is not int or num_gpus < 1:
            raise ValueError(
                f"num_gpus={num_gpus!r}: expected a positive integer, or None "
                "for all GPUs."
            )
        if name not in _WITH_GPUS or tpu is not None:
            raise ValueError(
                f"num_gpus={num_gpus} does not go with "
                + (f"tpu={tpu!r}" if tpu is not None else f"strategy {name!r}")
                + ". Leave it out, or take strategy 'mirrored' without a TPU."
            )
        if name == "one_device" and num_gpus > 1:
            raise ValueError(
                f"num_gpus={num_gpus} does not go with strategy 'one_device', "
                "which uses one. Take strategy 'mirrored'."
            )
    if tpu is None:
        return
    if not isinstance(tpu, str):
        raise ValueError(
            f"tpu={tpu!r}: expected a string, such as 'local' or "
            "'grpc://10.0.0.2:8470'."
        )
    if name not in _WITH_TPU:
        raise ValueError(
            f"tpu={tpu!r} does not go with strategy {name!r}. Leave it out, or "
            "take strategy 'tpu'."
        )


def _count_gpus():
    """Counts logical GPUs without starting them."""
    return sum(
        len(tf.config.get_logical_device_configuration(gpu) or (gpu,))
        for gpu in tf.config.get_visible_devices("GPU")
    )


def _devices(gpus):
    if gpus:
        return [f"GPU:{index}" for index in range(gpus)]
    cpus = tf.config.list_logical_devices("CPU")
    return [f"CPU:{index}" for index in range(len(cpus))]


def _multi_worker():
    text = os.environ.get("TF_CONFIG", "")
    example = (
        '{"cluster": {"worker": ["host1:port", "host2:port"]}, '
        '"task": {"type": "worker", "index": 0}}'
    )
    try:
        cluster = json.loads(text)
        task = cluster["task"]
        cluster["cluster"][task["type"]][int(task["index"])]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            "Strategy 'multi_worker' finds the other machines in the "
            "environment variable TF_CONFIG, which is "
            + (f"{text!r}." if text else "not set.")
            + f" Set it on each machine, such as to {example}."
        ) from error
    try:
        return tf.distribute.MultiWorkerMirroredStrategy()
    except RuntimeError as error:
        # Collective operations are set up with the devices.
        if "program startup" not in str(error):
            raise
        raise ValueError(
            "Strategy 'multi_worker' must be made before TensorFlow runs "
            "anything; call get_strategy at the start of the program."
        ) from error


def _tpu(tpu):
    # "" is as good as None, as for TensorFlow's resolver.
    tpu = tpu or tpu_address.find() or "local"
    resolver = tpu_address.resolve(tpu)
    try:
        # Does nothing for a TPU of this machine.
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except tf.errors.OpError as error:
        raise ValueError(
            f"tpu={tpu!r} answers, but TensorFlow could not start it as a TPU: "
            f"{' '.join(error.message.split())}. Check that it is a TPU with "
            f"TensorFlow {tf.__version__}, and start this program again."
        ) from error
    return tf.distribute.TPUStrategy(resolver)


def check_replicas_wait(strategy: tf.distribute.Strategy) -> None:
    """Raises a ValueError if replicas don't make each update together."""
    kind = tf.distribute.experimental.ParameterServerStrategy
    if isinstance(strategy, kind):
        raise ValueError(
            "Gradients can't be accumulated under ParameterServerStrategy, "
            "whose workers don't wait for each other. Received: a model made "
            f"under {type(strategy).__name__}. Use MirroredStrategy, "
            "MultiWorkerMirroredStrategy or TPUStrategy."
        )


def apply_reduced(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[Any],
) -> None:
    """Applies gradients that are added up over the replicas already.

    Keras' optimizers clip the gradients of each replica and add them up after
    that. It is called in a replica, where
    `tfckpt.GradientAccumulator.result` gives such gradients.

    Args:
        optimizer: The optimizer.
        gradients: One for each variable, or None; the same in all replicas.
        variables: The variables.

    Example:

    >>> variable = tf.Variable(1.0)
    >>> accumulator = tfckpt.GradientAccumulator([variable])
    >>> accumulator.add([tf.constant(0.5)], weight=2)
    >>> optimizer = keras.optimizers.SGD(1.0)
    >>> apply_reduced(optimizer, accumulator.result(), [variable])
    >>> float(variable)
    0.5
    """
    context = tf.distribute.get_replica_context()

    def together(strategy, gradients):
        with compat.reduced_already(optimizer):
            strategy.extended.call_for_each_replica(
                optimizer.apply, args=(gradients, variables)
            )

    context.merge_call(together, args=(list(gradients),))
