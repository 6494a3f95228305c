"""Peak memory: of a process, of a device, and of a device that is not there.

Nothing here imports JAX or a TPU or GPU compiler; what needs them runs in a
process of its own (`pip install "tfckpt[compile]"`).
"""

from tfckpt.memory.compiled import (
    CompilationError,
    CompiledMemory,
    CompilerNotFoundError,
    compiled_memory,
    targets,
)
from tfckpt.memory.process import (
    MeasurementError,
    Peak,
    device_peak,
    measure_in_process,
    process_peak,
)

__all__ = (
    "CompilationError",
    "CompiledMemory",
    "CompilerNotFoundError",
    "MeasurementError",
    "Peak",
    "compiled_memory",
    "device_peak",
    "measure_in_process",
    "process_peak",
    "targets",
)
