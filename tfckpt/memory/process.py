"""Peak memory of running code: of this process and of a device.

A process keeps what it once freed, so figures of two configurations measured
in one process are not comparable: run each with `measure_in_process`.
"""

import contextlib
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

_WORKER = pathlib.Path(__file__).parent / "_measure_worker.py"


class MeasurementError(RuntimeError):
    """A configuration that was measured in its own process failed."""


class Peak:
    """A peak above a baseline, in bytes. Set when the `with` block ends."""

    def __init__(self):
        self.baseline: int = 0
        self.bytes: int | None = None

    def __repr__(self) -> str:
        return f"Peak(bytes={self.bytes}, baseline={self.baseline})"


@contextlib.contextmanager
def process_peak() -> Iterator[Peak]:
    """Measures how far the resident memory of this process rises.

    Enter it when inputs and weights exist, so that they count as baseline.
    The peak of the whole process is reset by it (Linux only). Freed memory
    that the process holds can be used again without a rise: compare fresh
    processes, see `measure_in_process`.

    Yields:
        A `Peak`: its `bytes` are the peak less the baseline, once the block
        has ended.

    Raises:
        NotImplementedError: the system has no `/proc/self/clear_refs`.

    Example:

    >>> import numpy as np
    >>> from tfckpt import memory
    >>> with memory.process_peak() as peak:
    ...     total = np.ones(2**24, np.uint8).sum()
    >>> peak.bytes > 2**23
    True
    """
    peak = Peak()
    try:
        # 5 sets the peak back to what is resident now (man 5 proc).
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
        peak.baseline = _status("VmRSS")
    except OSError as error:
        raise NotImplementedError(
            "The peak of a process is measured through Linux's /proc, which "
            f"this system does not offer ({error}). On a GPU or TPU use "
            "tfckpt.memory.device_peak, or tfckpt.memory.compiled_memory "
            "anywhere."
        ) from error
    try:
        yield peak
    finally:
        peak.bytes = max(0, _status("VmHWM") - peak.baseline)


@contextlib.contextmanager
def device_peak(device: str = "GPU:0") -> Iterator[Peak]:
    """Measures how far TensorFlow's memory on a GPU or TPU rises.

    Args:
        device: the device's name, such as "GPU:0".

    Yields:
        A `Peak`: its `bytes` are the peak less the baseline, once the block
        has ended.

    Raises:
        ValueError: the device is not there, or it is a CPU, of which
            TensorFlow keeps no count: use `process_peak`.
    """
    if "CPU" in device.upper():
        raise ValueError(
            f"TensorFlow does not count the memory of {device!r}. Use "
            "tfckpt.memory.process_peak for the CPU."
        )
    present = [found.name for found in tf.config.list_logical_devices()]
    if not any(name.endswith(f":{device}") for name in present):
        raise ValueError(
            f"There is no device {device!r}. Present are: {present}."
        )
    peak = Peak()
    # What was started before belongs to the baseline.
    tf.test.experimental.sync_devices()
    tf.config.experimental.reset_memory_stats(device)
    info = tf.config.experimental.get_memory_info(device)
    peak.baseline = info["current"]
    try:
        yield peak
    finally:
        tf.test.experimental.sync_devices()
        info = tf.config.experimental.get_memory_info(device)
        peak.bytes = max(0, info["peak"] - peak.baseline)


def measure_in_process(
    target: str | Callable[..., Any],
    *args: Any,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> Any:
    """Runs one configuration in a fresh process and returns its result.

    Freed tensors go back to the system there at once
    (`MALLOC_MMAP_THRESHOLD_=65536`), so that the process' peak is the
    tensors' peak.

    Args:
        target: a function of a module or script, or its name as
            "package.module:function" or "path/to/file.py:function". Modules
            are found as in this process.
        *args: its arguments, of types that JSON has. What it prints is
            printed here.
        environment: variables for the process, over those of this one.
        timeout: seconds to wait; None waits for ever.

    Returns:
        What the function returned, through JSON.

    Raises:
        ValueError: `target` is neither a name nor a function that a new
            process can find.
        MeasurementError: the function raised, the process died (for want of
            memory, often), or the time was over.

    Example:

    >>> from tfckpt import memory
    >>> memory.measure_in_process("math:hypot", 3, 4)
    5.0
    """
    name = target if isinstance(target, str) else _name(target)
    if not re.fullmatch(r".+:[\w.]+", name):
        raise ValueError(
            f"Received target={target!r}; expected a function or its name as "
            '"package.module:function" or "path/to/file.py:function".'
        )
    with tempfile.TemporaryDirectory(prefix="tfckpt-") as folder:
        answer = pathlib.Path(folder) / "answer.json"
        request = {
            "target": name,
            "arguments": args,
            "answer": str(answer),
            "path": sys.path,
        }
        try:
            done = subprocess.run(
                [sys.executable, str(_WORKER), json.dumps(request)],
                env={
                    **os.environ,
                    "MALLOC_MMAP_THRESHOLD_": "65536",
                    **(environment or {}),
                },
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise MeasurementError(
                f"{name}{args} was not done after {timeout} seconds."
            ) from error
        if not answer.exists():
            raise MeasurementError(
                f"{name}{args} ended with exit status {done.returncode}. The "
                f"end of its log: {done.stderr[-2000:]}"
            )
        return json.loads(answer.read_text(encoding="utf-8"))


def _status(field):
    """A size of this process in bytes."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _name(function):
    """The name by which a new process finds a function, or ValueError."""
    name = getattr(function, "__qualname__", "<unnamed>")
    if "<" in name:
        raise ValueError(
            f"Received {function!r}, which is not defined at the top of a "
            "module, so that a new process can't find it."
        )
    module = function.__module__
    if module == "__main__":
        # Run as `python -m package.module` it has a name, else only a file.
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        file = inspect.getfile(function)
        module = spec.name if spec else os.path.abspath(file)
    return f"{module}:{name}"
