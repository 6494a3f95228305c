"""Whether there is a TPU, found out soon and said in one line."""

import socket
import threading
import time

import pytest
import tensorflow as tf

from tests import distribute_test
from tfckpt import distribute, tpu_address

_ADDRESS = "grpc://127.0.0.1:"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("kind", ["TPU_SYSTEM", "TPU"])
def test_chips_of_this_machine_are_found(monkeypatch, kind):
    assert tpu_address.find() is None
    monkeypatch.setattr(
        tf.config,
        "list_physical_devices",
        lambda asked: [tf.config.PhysicalDevice(kind, kind)] * (asked == kind),
    )
    assert tpu_address.find() == "local"
    monkeypatch.setenv("TPU_NAME", "grpc://10.0.0.2")
    assert tpu_address.find() == "grpc://10.0.0.2"


@pytest.mark.parametrize(
    ("tpu", "words"),
    [
        ("local", "none on this machine.*TPU VM"),
        ("", "none on this machine.*TPU VM"),
        (f"{_ADDRESS}1", "nothing answers at tpu='grpc://127.0.0.1:1'"),
        (f"{_ADDRESS}123456", "nothing answers"),
        ("grpc://", "nothing answers at tpu='grpc://'"),
        ("my-tpu", "'my-tpu' could not be looked up"),
    ],
)
def test_no_tpu_is_one_line_soon(monkeypatch, tpu, words):
    # Nothing answers there, whatever network the tests have.
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    start = time.perf_counter()
    with pytest.raises(ValueError, match=words) as caught:
        distribute.get_strategy("tpu", tpu=tpu)
    assert time.perf_counter() - start < 10
    assert "\n" not in str(caught.value)
    # The process is as good as before.
    assert int(tf.constant(1) + 1) == 2
    assert distribute.get_strategy("default").num_replicas_in_sync == 1


@pytest.mark.parametrize("says", [b"", b"SSH-2.0-OpenSSH_9.6\r\n", None])
def test_what_is_no_tpu_is_not_connected_to(monkeypatch, says):
    monkeypatch.setattr(tpu_address, "SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            peer, _ = server.accept()
            with peer:
                if says is None:
                    # Accepts and is silent, for longer than is waited for.
                    peer.recv(1000)
                    peer.recv(1)
                else:
                    peer.sendall(says)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        tpu = f"{_ADDRESS}{server.getsockname()[1]}"
        with pytest.raises(ValueError, match="nothing answers|gRPC"):
            distribute.get_strategy("tpu", tpu=tpu)
        thread.join()


def test_a_server_of_tensorflow_answers():
    server = tf.distribute.Server.create_local_server()
    tpu_address.resolve(server.target)


def test_a_lookup_without_an_answer_ends(monkeypatch):
    monkeypatch.setattr(tpu_address, "RESOLVER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("GCE_METADATA_HOST", host)
        with pytest.raises(ValueError, match="'my-tpu'.*within 0 seconds"):
            distribute.get_strategy("tpu", tpu="my-tpu")


def test_a_server_that_is_no_tpu_is_one_line():
    # In a process of its own: after that TensorFlow can run nothing more.
    done = distribute_test.run_python(
        "import tensorflow as tf\n"
        "from tfckpt import distribute\n"
        "server = tf.distribute.Server.create_local_server()\n"
        "try:\n"
        "    distribute.get_strategy('tpu', tpu=server.target)\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    (line,) = done.stdout.splitlines()
    assert "could not start it as a TPU" in line
