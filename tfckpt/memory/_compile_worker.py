"""Compiles a StableHLO program for a device that is not there.

`compiled.compiled_memory` runs this file in a process of its own, because the
compilers want environment variables that are none of the caller's business,
because they may end the process, and because JAX and TensorFlow had better
not share one. Hence it imports neither `tfckpt` nor TensorFlow.

Usage: python _compile_worker.py REQUEST.json

The request names the program's file, the target and the file for the answer:
the memory in bytes, or `{"error": kind, "message": text}`.
"""

import json
import os
import pathlib
import sys
import traceback


def _topology(request):
    """Returns the devices to compile for, and loads their compiler.

    JAX finds the compilers by itself. They are imported here only to say by
    name which one is not installed.
    """
    from jax.experimental import topologies

    if request["platform"] == "tpu":
        import libtpu  # noqa: F401

        return topologies.get_topology_desc(
            platform="tpu", topology_name=request["topology"]
        )
    import jax_plugins.xla_cuda12  # noqa: F401

    return topologies.get_topology_desc(
        platform="cuda",
        topology_name=request["topology"],
        topology="1x1x1",
        target_config=request["description"],
    )


def _compile(request):
    """Compiles the program and returns the executable's memory in bytes."""
    topology = _topology(request)
    device = topology.devices[0]
    import numpy as np
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jaxlib.mlir import ir

    with mlir.make_ir_context():
        with open(request["program"], encoding="utf-8") as program:
            module = ir.Module.parse(program.read())
        options = xla_client.CompileOptions()
        options.num_replicas = 1
        options.num_partitions = 1
        options.device_assignment = xla_client.DeviceAssignment.create(
            np.array([[device.id]], np.int32)
        )
        executable = device.client.compile(
            module, xla_client.DeviceList((device,)), options
        )
    stats = executable.get_compiled_memory_stats()
    return {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
    }


def main(path):
    """Answers the request that stands in the file `path`."""
    with open(path, encoding="utf-8") as file:
        request = json.load(file)
    try:
        answer = _compile(request)
    except ImportError as error:
        answer = {"error": "missing", "message": str(error)}
    except Exception as error:  # The caller raises it again, by its kind.
        answer = {
            "error": "failed",
            "message": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
    with open(request["answer"], "w", encoding="utf-8") as file:
        json.dump(answer, file)
    # Skips the compilers' own clearing up, which is slow and may crash.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    # The package's own modules must not stand in for others of that name.
    here = str(pathlib.Path(__file__).resolve().parent)
    sys.path = [entry for entry in sys.path if entry != here]
    main(sys.argv[1])
