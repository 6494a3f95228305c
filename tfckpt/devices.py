"""The memory of the targets that a step can be compiled for.

The vendors' pages say how much a device has; a program gets less. For TPUs
`usable_bytes` is what their compiler says is there ("exceeds available HBM
(15.75G)", libtpu 0.0.52). It compiles for one core: on v3 and v4 that is half
of a chip. For GPUs it is the memory less what TensorFlow leaves to the system
(`MinSystemMemory` in tensorflow/core/common_runtime/gpu/gpu_device.cc) and
half a GiB for the CUDA context, which is an estimate. Other programs on the
device and fragmentation take more.
"""

import dataclasses
import difflib
import os
import pathlib
import re

from tfckpt import memory, units

_GIB = 2**30
_MIB = 2**20
_CUDA_CONTEXT = 512 * _MIB
_PAGES = "https://docs.cloud.google.com/tpu/docs/"
# Memory of one core, in GiB: what it has, and what the compiler may use.
_TPUS = {
    "v3": (16, 15.48, "one core of two"),
    "v4": (16, 15.25, "one core of two"),
    "v5e": (16, 15.75, "one chip"),
    # The page says 95 GB, the compiler counts 96 GiB.
    "v5p": (96, 95.73, "one chip"),
    "v6e": (32, 31.24, "one chip"),
}
_GPU_PAGES = {
    "a100-40gb": "https://www.nvidia.com/en-us/data-center/a100/",
    "h100-80gb": "https://docs.nvidia.com/launchpad/ai/h100-mig/latest/",
}


@dataclasses.dataclass(frozen=True)
class Device:
    """A device that training steps can be compiled for.

    Attributes:
        name: Its name as a target, or the path of its description.
        memory_bytes: Memory that it has, in bytes.
        usable_bytes: Memory that a program gets of it, in bytes.
        part: Which part of the machine one program runs on, and whose memory
            this is.
        source: Where `memory_bytes` is from.
    """

    name: str
    memory_bytes: int
    usable_bytes: int
    part: str
    source: str


def known() -> tuple[Device, ...]:
    """Returns the devices that have a name.

    Example:

    >>> [device.name for device in known()][-2:]
    ['v5p', 'v6e']
    """
    return tuple(find(name) for name in memory.targets() if name != "cpu")


def find(name: str | os.PathLike[str]) -> Device:
    """Returns the device of a target.

    Args:
        name: A name of `known()`, or the path of a GPU's description (an XLA
            `GpuTargetConfigProto` as `.txtpb`).

    Raises:
        ValueError: It is neither, or the description holds no
            `device_memory_size`.

    Example:

    >>> find("v5e").memory_bytes == 16 * 2**30
    True
    """
    name = os.fspath(name)
    if name in _TPUS:
        has, usable, part = _TPUS[name]
        page = _PAGES + name
        return Device(name, has * _GIB, int(usable * _GIB), part, page)
    if name == "cpu":
        raise ValueError(
            'The target "cpu" has no memory of its own that is known. Say '
            "how much there is, as a size such as 8GiB."
        )
    return _gpu(name)


def _gpu(name):
    path = pathlib.Path(name)
    if path.suffix != ".txtpb":
        path = pathlib.Path(memory.__file__).parent / "targets"
        path /= f"{name}.txtpb"
    if not path.is_file():
        names = memory.targets()
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.3)
        raise ValueError(
            f"Unknown target {name!r}. Known are {', '.join(names)}, and the "
            "path of a GPU's description that ends in .txtpb."
            + (f" Did you mean {near[0]}?" if near else "")
        )
    text = path.read_text(encoding="utf-8")
    size = _number(text, "device_memory_size")
    if not size:
        raise ValueError(
            f"{path} holds no `device_memory_size`, the memory of the GPU in "
            "bytes. Add it to `gpu_device_info`."
        )
    # TensorFlow leaves more to the system on newer GPUs.
    generation = _number(text, "major") or 0
    system = 1800 * _MIB if generation > 8 else 1536 * _MIB
    return Device(
        name,
        size,
        max(0, size - system - _CUDA_CONTEXT),
        "one GPU",
        _GPU_PAGES.get(name, str(path)),
    )


def _number(text, field):
    found = re.search(rf"\b{field}:\s*([0-9]+)", text)
    return int(found[1]) if found else None


def describe(device: Device) -> str:
    """Returns a line about a device.

    Example:

    >>> describe(find("v6e"))
    'v6e: 31.24 GiB of 32 GiB usable, one chip'
    """
    return (
        f"{device.name}: {units.format_size(device.usable_bytes)} of "
        f"{units.format_size(device.memory_bytes)} usable, {device.part}"
    )
