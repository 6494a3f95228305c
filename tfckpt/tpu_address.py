"""Where a TPU is, and whether it answers.

TensorFlow waits for ever for an address at which nothing is, and after a
connection that failed the process can run nothing more. So whoever connects
asks here first: this changes nothing, and waits for seconds at most.
"""

import os
import re
import socket
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Of each address. Workers are in the same data center as the program.
SECONDS = 5.0
# The resolver asks the metadata server and the Cloud TPU API.
RESOLVER_SECONDS = 30.0
_PORT = 8470
# What the environment may say, in the order in which TensorFlow's resolver
# reads it.
_VARIABLES = ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_NAME")
# How a client begins HTTP/2, on which gRPC is built: a line and an empty frame
# of settings, type 4. A server answers with its own.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


def find() -> str | None:
    """Returns the TPU that the environment tells of, None without any.

    That is the address or name in `KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS` or
    `TPU_NAME`, or `"local"` where TensorFlow sees chips of this machine. No
    device is started.

    Example:

    >>> find()  # on a machine without TPU
    """
    for variable in _VARIABLES:
        if value := os.environ.get(variable):
            return value
    return "local" if has_local() else None


def has_local() -> bool:
    """Whether TensorFlow sees a TPU of this machine.

    Example:

    >>> has_local()
    False
    """
    # A visible device is listed as TPU_SYSTEM, and once for each core.
    return any(
        tf.config.list_physical_devices(kind) for kind in ("TPU_SYSTEM", "TPU")
    )


def resolve(tpu: str) -> Any:
    """Returns the resolver of a TPU that is there.

    Args:
        tpu: `"local"`, an address such as `"grpc://10.0.0.2:8470"`, several of
            them with commas between, or the name of a Cloud TPU.

    Returns:
        A `TPUClusterResolver`, not connected.

    Raises:
        ValueError: There is no TPU; the reason in one line.

    Example:

    >>> resolve("local")
    Traceback (most recent call last):
    ...
    ValueError: No TPU: TensorFlow sees none on this machine. ...
    """
    if tpu == "local":
        if not has_local():
            raise ValueError(
                "No TPU: TensorFlow sees none on this machine. Run on a TPU VM "
                "with the package tensorflow-tpu, or give the address or name "
                "of a TPU, such as tpu='grpc://10.0.0.2:8470'."
            )
        return tf.distribute.cluster_resolver.TPUClusterResolver(tpu)
    if tpu.startswith("grpc://"):
        # Without the port the resolver connects to this one.
        for address in tpu.removeprefix("grpc://").split(","):
            _check(tpu, address.removeprefix("grpc://"))
        return tf.distribute.cluster_resolver.TPUClusterResolver(tpu)

    def ask():
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu)
        return resolver, resolver.cluster_spec().job_tasks("worker")

    try:
        resolver, addresses = _within(RESOLVER_SECONDS, ask)
    # No network, no credentials, no client of the API, no such name.
    except Exception as error:
        raise ValueError(
            f"No TPU: the name {tpu!r} could not be looked up "
            f"({_line(error)}). Check the name, its project and zone, and "
            "that `pip install cloud-tpu-client` was done; or give "
            "tpu='local' on a TPU VM, or an address such as "
            "tpu='grpc://10.0.0.2:8470'."
        ) from error
    for address in addresses:
        _check(tpu, address)
    return resolver


def _check(tpu, address):
    """Raises the error that says that nothing is at `address`."""
    host, _, port = address.rpartition(":")
    if not re.fullmatch(r"[0-9]+", port):
        host, port = address, _PORT
    try:
        with socket.create_connection((host, int(port)), SECONDS) as peer:
            peer.sendall(_HELLO)
            head = b""
            while len(head) < 4 and (part := peer.recv(9)):
                head += part
        reason = "what listens there does not speak gRPC"
        answers = head[3:4] == b"\4"
    # OverflowError: the port is too large.
    except (OSError, OverflowError, UnicodeError) as error:
        answers, reason = False, _line(error)
    if not answers:
        raise ValueError(
            f"No TPU: nothing answers at tpu={tpu!r} ({reason}). Check the "
            "address, that the TPU runs, and that its network can be reached "
            "from here; on a TPU VM give tpu='local'."
        )


def _within(seconds: float, ask: Callable[[], Any]) -> Any:
    """Returns what `ask` does, or raises `TimeoutError`.

    The resolver's own requests wait without an end. The thread that is left
    behind then does not keep the program from ending.
    """
    found = []

    def run():
        try:
            found.append((ask(), None))
        except Exception as error:
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise TimeoutError(f"no answer within {seconds:.0f} seconds")
    value, error = found[0]
    if error is not None:
        raise error
    return value


def _line(error):
    return " ".join(str(error).split()) or type(error).__name__
