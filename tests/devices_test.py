"""The memory of known devices."""

import pathlib
import re

import pytest
import tensorflow as tf

from tfckpt import devices, memory

_FOLDER = pathlib.Path(memory.__file__).parent / "targets"
_GIB = 2**30


def test_every_target_but_the_cpu_has_a_device():
    names = [device.name for device in devices.known()]
    assert names == [name for name in memory.targets() if name != "cpu"]


@pytest.mark.parametrize("device", devices.known(), ids=lambda d: d.name)
def test_a_program_gets_most_but_not_all(device):
    assert 0.9 * device.memory_bytes < device.usable_bytes
    assert device.usable_bytes < device.memory_bytes
    assert device.source.startswith("https://")
    assert device.name in devices.describe(device)


@pytest.mark.parametrize("path", sorted(_FOLDER.glob("*.txtpb")), ids=str)
def test_a_gpu_has_what_its_description_says(path):
    size = re.search(r"device_memory_size: (\d+)", path.read_text())[1]
    named, by_path = devices.find(path.stem), devices.find(path)
    assert named.memory_bytes == by_path.memory_bytes == int(size)
    assert named.usable_bytes == by_path.usable_bytes
    assert by_path.source == str(path)


def test_newer_gpus_leave_more_to_the_system(tmp_path):
    taken = []
    for major in (8, 9):
        path = tmp_path / f"gpu{major}.txtpb"
        path.write_text(f"major: {major}\ndevice_memory_size: {24 * _GIB}")
        device = devices.find(path)
        taken.append(device.memory_bytes - device.usable_bytes)
    assert taken[1] - taken[0] == (1800 - 1536) * 2**20


def test_what_has_no_memory_is_refused(tmp_path):
    with pytest.raises(ValueError, match="8GiB"):
        devices.find("cpu")
    with pytest.raises(ValueError, match=r"v5e.*txtpb.*mean h100-80gb\?"):
        devices.find("h100")
    path = tmp_path / "mine.txtpb"
    with pytest.raises(ValueError, match="mine.txtpb"):
        devices.find(path)
    path.write_text("gpu_device_info {}")
    with pytest.raises(ValueError, match="device_memory_size"):
        devices.find(path)


@pytest.mark.compile
@pytest.mark.parametrize("name", ["v5e", "v6e"])
def test_the_compiler_says_the_same(name):
    pytest.importorskip("libtpu")
    side = 2**18
    with pytest.raises(memory.CompilationError) as caught:
        memory.compiled_memory(
            lambda x: x @ tf.tanh(x), tf.TensorSpec([side, side]), target=name
        )
    stated = re.search(r"available HBM \(([0-9.]+)G\)", str(caught.value))[1]
    usable = devices.find(name).usable_bytes
    assert usable == pytest.approx(float(stated) * _GIB, rel=1e-3)
