"""The memory of a training step as a device's own compiler plans it.

XLA decides when it compiles how much memory a program takes. The compilers
for TPU and GPU run on any machine, so the figure of a device can be had
without the device. TensorFlow lowers the step to StableHLO here, and JAX, as
the one that hands out those compilers, compiles it.

Not covered: what the runtime adds (fragmentation, the program's code, on a
GPU the workspace of cuDNN and cuBLAS, which is chosen on the device); steps
that XLA can't compile; more than one device. What a TPU keeps in its on-chip
memory is not counted, so very small steps seem to need nothing.
"""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfckpt import _compat

_DESCRIPTIONS = pathlib.Path(__file__).parent / "targets"
_WORKER = pathlib.Path(__file__).parent / "_compile_worker.py"

# The smallest slice of each, as the compiler names it, and its machine.
_TPUS = {
    "v3": ("v3:2x2", "v3-8"),
    "v4": ("v4:2x2x1", "v4-8"),
    "v5e": ("v5e:2x2", "v5litepod-4"),
    "v5p": ("v5p:2x2x1", "v5p-8"),
    "v6e": ("v6e:2x2", "v6e-4"),
}


class CompilerNotFoundError(ImportError):
    """The compiler for a target is not installed."""


class CompilationError(RuntimeError):
    """The compiler for a target refused the program, or crashed."""


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
    """What a compiled step takes on its device, in bytes.

    Attributes:
        arguments: the step's inputs and the variables it reads.
        outputs: its results and the variables it assigns.
        temporaries: everything in between: saved activations, workspace.
        aliased: the part of `outputs` that lies in memory of `arguments`.
        target: the device that it was compiled for.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    target: str

    @property
    def total(self) -> int:
        """All of it in bytes, with what is shared counted once."""
        return self.arguments + self.outputs + self.temporaries - self.aliased

    def __str__(self) -> str:
        return (
            f"{self.target}: {_mib(self.total)} MiB = "
            f"{_mib(self.arguments)} arguments"
            f" + {_mib(self.outputs)} outputs"
            f" + {_mib(self.temporaries)} temporaries"
            f" - {_mib(self.aliased)} aliased"
        )


def targets() -> tuple[str, ...]:
    """The targets that `compiled_memory` knows by name."""
    gpus = sorted(path.stem for path in _DESCRIPTIONS.glob("*.txtpb"))
    return ("cpu", *gpus, *_TPUS)


def compiled_memory(
    step: Callable[..., Any],
    *args: Any,
    target: str | os.PathLike[str] = "v5e",
) -> CompiledMemory:
    """Compiles a step for a device and returns the memory it will take.

    The device is not needed, and nothing is run. The figure is the compiler's
    own plan and the same every time. It takes seconds for a small step and
    minutes for a deep convolutional network.

    Args:
        step: a function or `tf.function` of tensors. It may read and assign
            variables, which have to exist. Its gradients should be among its
            results, or be applied: what nothing needs is not computed.
        *args: its arguments, as tensors of fixed shape or `tf.TensorSpec`s.
        target: "cpu"; a TPU ("v3", "v4", "v5e", "v5p", "v6e"), one chip of
            it; a GPU ("a100-40gb", "h100-80gb"); or the path of a GPU's
            description, an XLA `GpuTargetConfigProto` as `.txtpb`. All but
            "cpu" need `pip install "tfckpt[compile]"`.

    Returns:
        The memory in bytes. For a training step of a model the saved
        activations are in `temporaries`, the weights in `arguments`.

    Raises:
        ValueError: the target is not known.
        CompilerNotFoundError: the target's compiler is not installed.
        CompilationError: it can't compile the step; that a step is too big
            for the device's memory is one reason.

    Example:

    >>> import tensorflow as tf
    >>> from tfckpt import memory
    >>> def step(x):
    ...     return tf.reduce_sum(tf.tanh(x) ** 2)
    >>> x = tf.ones([256, 1024])
    >>> needed = memory.compiled_memory(step, x, target="cpu")
    >>> needed.arguments
    1048576
    """
    request = _request(target)
    # A `tf.function` may hold a trace made without XLA, and the recomputed
    # parts of such a trace are ordered in a way that XLA does not see.
    step = getattr(step, "python_function", step)
    lowered = tf.function(step, jit_compile=True).experimental_get_compiler_ir(
        *args
    )
    if request["platform"] == "cpu":
        stats = _cpu_buffers(lowered(stage="optimized_hlo_proto_serialized"))
    else:
        program = lowered(stage="stablehlo")
        if isinstance(program, bytes):
            program = program.decode()
        stats = _compile_elsewhere(_portable(program), request)
    return CompiledMemory(**stats, target=os.fspath(target))


def _mib(size):
    return f"{size / 2**20:,.1f}"


def _request(target):
    """What the worker has to know of a target."""
    name = os.fspath(target)
    if name == "cpu":
        return {"platform": "cpu"}
    if name in _TPUS:
        topology, machine = _TPUS[name]
        return {"platform": "tpu", "topology": topology, "machine": machine}
    path = pathlib.Path(name)
    if path.suffix != ".txtpb":
        path = _DESCRIPTIONS / f"{name}.txtpb"
    if name not in targets() and not path.is_file():
        raise ValueError(
            f"Unknown target {name!r}. Known are {', '.join(targets())}, and "
            "the path of a GPU's description that ends in .txtpb."
        )
    description = path.read_text(encoding="utf-8")
    model = re.search(r'device_description_str:\s*"([^"]*)"', description)
    return {
        "platform": "cuda",
        "topology": model.group(1) if model else path.stem,
        "description": description,
    }


def _portable(program):
    """StableHLO of TensorFlow as the compilers' parsers know it."""
    # TensorFlow leaves one operation of another dialect. A barrier is a copy
    # too, as far as memory and the merging of equal operations go.
    return re.sub(r"\bmhlo\.copy\b", "stablehlo.optimization_barrier", program)


def _cpu_buffers(serialized):
    """Sums up XLA:CPU's buffer assignment."""
    module = _compat.hlo_module(serialized)
    sizes = {"arguments": 0, "outputs": 0, "temporaries": 0, "aliased": 0}
    for buffer in module.buffer_assignment.buffer_allocations:
        if buffer.is_entry_computation_parameter:
            sizes["arguments"] += buffer.size
            if buffer.maybe_live_out:
                sizes["outputs"] += buffer.size
                sizes["aliased"] += buffer.size
        elif buffer.maybe_live_out:
            sizes["outputs"] += buffer.size
        else:
            sizes["temporaries"] += buffer.size
    return sizes


def _compile_elsewhere(program, request):
    """Compiles StableHLO in a process of its own, and reads its memory."""
    with tempfile.TemporaryDirectory(prefix="tfckpt-") as folder:
        folder = pathlib.Path(folder)
        answer_path = folder / "answer.json"
        request = {
            **request,
            "program": str(folder / "program.mlir"),
            "answer": str(answer_path),
        }
        pathlib.Path(request["program"]).write_text(program, encoding="utf-8")
        request_path = folder / "request.json"
        request_path.write_text(json.dumps(request), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(_WORKER), str(request_path)],
            env=_environment(request),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        if not answer_path.exists():
            raise CompilationError(
                f"The compiler for {request['topology']} ended with exit "
                f"status {done.returncode} and no answer. The end of its "
                f"log: {done.stderr[-2000:]}"
            )
        answer = json.loads(answer_path.read_text(encoding="utf-8"))
    if answer.get("error") == "missing":
        raise CompilerNotFoundError(
            f"Compiling for {request['topology']} needs a compiler that is "
            'not installed: pip install "tfckpt[compile]" '
            f"({answer['message']})"
        )
    if "error" in answer:
        raise CompilationError(
            f"The compiler for {request['topology']} refused the step: "
            f"{answer['message'][:4000]}"
        )
    return answer


def _environment(request):
    """The worker's environment: the caller's, and what the compilers want."""
    environment = dict(os.environ)
    # Meant for TensorFlow's compiler; another one stops at unknown flags.
    environment.pop("XLA_FLAGS", None)
    # JAX must not look for devices.
    environment["JAX_PLATFORMS"] = "cpu"
    if request["platform"] == "tpu":
        environment |= {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": request["machine"],
            "TPU_WORKER_HOSTNAMES": "localhost",
            # No device is opened, so several may compile at once.
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_LOG_DIR": "disabled",
        }
    return environment
