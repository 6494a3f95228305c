"""Strategies by name: which one is made, and what is refused before."""

import ast
import json
import os
import socket
import subprocess
import sys

import pytest
import tensorflow as tf

from tfckpt import distribute, tpu_address
from tools import imports


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_NAME", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def made(monkeypatch):
    """What would be made on a machine with four GPUs and a TPU."""
    found = []

    def record(kind):
        return lambda *args: found.append((kind, *args)) or kind

    gpus = [tf.config.PhysicalDevice(f"GPU:{k}", "GPU") for k in range(4)]
    monkeypatch.setattr(
        tf.config,
        "get_visible_devices",
        lambda kind: {"GPU": gpus}.get(kind, []),
    )
    monkeypatch.setattr(
        tf.config, "get_logical_device_configuration", lambda gpu: None
    )
    for name in "OneDeviceStrategy", "MirroredStrategy", "TPUStrategy":
        monkeypatch.setattr(tf.distribute, name, record(name))
    monkeypatch.setattr(tpu_address, "resolve", lambda tpu: f"resolver {tpu}")
    monkeypatch.setattr(
        tf.config, "experimental_connect_to_cluster", record("connect")
    )
    monkeypatch.setattr(
        tf.tpu.experimental, "initialize_tpu_system", record("initialize")
    )
    return found


# Names.


@pytest.mark.parametrize("name", ["default", "auto"])
def test_default_is_no_strategy(name):
    strategy = distribute.get_strategy(name)
    assert strategy is tf.distribute.get_strategy()
    assert not tf.distribute.has_strategy()


def test_one_device_is_the_cpu_without_a_gpu():
    strategy = distribute.get_strategy("one_device")
    assert isinstance(strategy, tf.distribute.OneDeviceStrategy)
    with strategy.scope():
        assert "CPU:0" in tf.Variable(1.0).device


def test_mirrored_takes_the_logical_cpus_without_a_gpu():
    strategy = distribute.get_strategy("mirrored")
    assert isinstance(strategy, tf.distribute.MirroredStrategy)
    assert strategy.num_replicas_in_sync == 2
    results = strategy.run(
        lambda: tf.distribute.get_replica_context().replica_id_in_sync_group
    )
    found = strategy.experimental_local_results(results)
    assert [int(each) for each in found] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"name": "one_device"}, ("OneDeviceStrategy", "GPU:0")),
        ({"name": "one_device", "num_gpus": 1}, ("OneDeviceStrategy", "GPU:0")),
        (
            {"name": "mirrored"},
            ("MirroredStrategy", [f"GPU:{k}" for k in range(4)]),
        ),
        (
            {"name": "mirrored", "num_gpus": 2},
            ("MirroredStrategy", ["GPU:0", "GPU:1"]),
        ),
        ({}, ("MirroredStrategy", [f"GPU:{k}" for k in range(4)])),
        ({"num_gpus": 3}, ("MirroredStrategy", ["GPU:0", "GPU:1", "GPU:2"])),
        ({"num_gpus": 1}, None),
        ({"name": "default"}, None),
    ],
    ids=str,
)
def test_gpus(made, arguments, expected):
    distribute.get_strategy(**arguments)
    assert made == ([expected] if expected else [])


def test_split_gpus_are_counted_apart(made, monkeypatch):
    monkeypatch.setattr(
        tf.config,
        "get_logical_device_configuration",
        lambda gpu: [tf.config.LogicalDeviceConfiguration(64)] * 2,
    )
    distribute.get_strategy("mirrored")
    assert made == [("MirroredStrategy", [f"GPU:{k}" for k in range(8)])]


@pytest.mark.parametrize("name", ["tpu", "auto"])
def test_a_tpu_is_connected_and_initialized_in_order(made, name):
    distribute.get_strategy(name, tpu="local")
    assert made == [
        (kind, "resolver local")
        for kind in ("connect", "initialize", "TPUStrategy")
    ]


@pytest.mark.parametrize("name", ["tpu", "auto"])
@pytest.mark.parametrize("tpu", [None, ""])
def test_the_tpu_of_the_environment_is_found(made, monkeypatch, name, tpu):
    # Given to TensorFlow's resolver by the environment, "local" is looked up
    # as a name.
    monkeypatch.setenv("TPU_NAME", "local")
    distribute.get_strategy(name, tpu=tpu)
    assert made[-1] == ("TPUStrategy", "resolver local")


def test_who_asks_for_gpus_gets_no_tpu(made, monkeypatch):
    monkeypatch.setenv("TPU_NAME", "local")
    distribute.get_strategy("auto", num_gpus=2)
    assert made == [("MirroredStrategy", ["GPU:0", "GPU:1"])]


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=imports.ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_multi_worker_reads_the_cluster_from_the_environment():
    config = {
        "cluster": {"worker": [f"127.0.0.1:{_free_port()}"]},
        "task": {"type": "worker", "index": 0},
    }
    done = run_python(
        "from tfckpt import distribute\n"
        "strategy = distribute.get_strategy('multi_worker')\n"
        "print(type(strategy).__name__, strategy.num_replicas_in_sync)",
        TF_CONFIG=json.dumps(config),
    )
    assert done.stdout.split() == ["CollectiveAllReduceStrategy", "1"], (
        done.stderr
    )


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "mirored"}, "'mirored'.*'auto', .*'mirrored'"),
        ({"name": None}, "None.*'auto'"),
        ({"num_gpus": 0}, "num_gpus=0.*positive"),
        ({"name": "mirrored", "num_gpus": -2}, "num_gpus=-2.*positive"),
        ({"num_gpus": 1.5}, "num_gpus=1.5.*integer"),
        ({"num_gpus": True}, "num_gpus=True.*integer"),
        ({"num_gpus": 5}, "num_gpus=5.*sees 4 GPUs"),
        ({"name": "mirrored", "num_gpus": 5}, "num_gpus=5.*sees 4 GPUs"),
        ({"name": "one_device", "num_gpus": 2}, "num_gpus=2.*'one_device'"),
        ({"name": "default", "num_gpus": 1}, "num_gpus=1.*'default'"),
        ({"name": "multi_worker", "num_gpus": 1}, "num_gpus=1.*'multi_worker'"),
        ({"name": "tpu", "num_gpus": 1}, "num_gpus=1.*'tpu'"),
        ({"num_gpus": 1, "tpu": "local"}, "num_gpus=1.*tpu='local'"),
        ({"name": "mirrored", "tpu": "local"}, "tpu='local'.*'mirrored'"),
        ({"name": "default", "tpu": ""}, "tpu=''.*'default'"),
        ({"name": "tpu", "tpu": 8}, "tpu=8.*string"),
        ({"name": "multi_worker"}, "TF_CONFIG, which is not set.*cluster"),
    ],
    ids=str,
)
def test_bad_input_is_one_clear_error(made, arguments, words):
    with pytest.raises(ValueError, match=words) as caught:
        distribute.get_strategy(**arguments)
    assert "\n" not in str(caught.value)
    assert not made


def test_auto_takes_a_tpu_or_says_that_there_is_none():
    with pytest.raises(ValueError, match="none on this machine.*TPU VM"):
        distribute.get_strategy("auto", tpu="local")


@pytest.mark.parametrize("name", ["mirrored", "auto", "one_device"])
def test_gpus_that_are_not_there(name):
    with pytest.raises(ValueError, match="num_gpus=1.*sees no GPU here"):
        distribute.get_strategy(name, num_gpus=1)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"cluster": {"worker": ["a:1"]}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "chief", '
        '"index": 0}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", '
        '"index": 1}}',
    ],
)
def test_a_bad_cluster_is_refused(monkeypatch, text):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match="TF_CONFIG.*such as to") as caught:
        distribute.get_strategy("multi_worker")
    assert repr(text) in str(caught.value)


def test_multi_worker_after_the_start_is_refused(monkeypatch):
    config = {
        "cluster": {"worker": [f"127.0.0.1:{port}" for port in (1, 2)]},
        "task": {"type": "worker", "index": 0},
    }
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ValueError, match="before TensorFlow runs anything"):
        distribute.get_strategy("multi_worker")


def test_inside_of_a_scope_is_refused():
    with distribute.get_strategy("one_device").scope():
        with pytest.raises(ValueError, match="scope of OneDeviceStrategy"):
            distribute.get_strategy()


def test_no_other_module_makes_a_strategy():
    for path in imports.python_files():
        if path.parts[0] == "tfckpt" and path.name != "distribute.py":
            tree = ast.parse((imports.ROOT / path).read_text("utf-8"))
            for node in ast.walk(tree):
                called = isinstance(node, ast.Call) and ast.unparse(node.func)
                assert not str(called).endswith("Strategy"), path
