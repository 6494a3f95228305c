"""Peaks of processes and devices, and as compilers plan them."""

import importlib.util
import os
import pathlib

import compiled_memory as benchmark
import numpy as np
import pytest
import tensorflow as tf

from tfckpt import memory

_MIB = 2**20


def _needs_compiler(target, *others):
    """Marks a cell that is skipped only where the extra is not installed."""
    names = {"cpu": ()}.get(target, ("jax", "libtpu", "jax_plugins"))
    missing = [name for name in names if not importlib.util.find_spec(name)]
    marks = [
        pytest.mark.skipif(
            bool(missing), reason=f"the [compile] extra is missing: {missing}"
        )
    ]
    if names:
        marks.append(pytest.mark.compile)
    return pytest.param(target, *others, marks=marks)


def each_target(targets):
    return [_needs_compiler(target) for target in targets]


def _product(x):
    return tf.matmul(x, x)


# --- CompiledMemory ---------------------------------------------------------


def test_total_counts_aliased_memory_once():
    needed = memory.CompiledMemory(
        arguments=8 * _MIB,
        outputs=4 * _MIB,
        temporaries=3 * _MIB // 2,
        aliased=4 * _MIB,
        target="v5e",
    )
    assert needed.total == 9.5 * _MIB
    assert str(needed) == (
        "v5e: 9.5 MiB = 8.0 arguments + 4.0 outputs + 1.5 temporaries"
        " - 4.0 aliased"
    )


@pytest.mark.parametrize("target", each_target(memory.targets()))
def test_every_target_compiles_and_finds_the_arguments(target):
    needed = memory.compiled_memory(
        _product, tf.TensorSpec([512, 512]), target=target
    )
    assert needed.target == target
    assert needed.arguments == needed.outputs == _MIB
    assert needed.aliased == 0


@pytest.mark.parametrize("target", each_target(["cpu", "v5e"]))
def test_an_assigned_variable_is_argument_and_aliased_output(target):
    variable = tf.Variable(tf.zeros([512, 512]))

    @tf.function
    def step(x):
        variable.assign_add(x)

    needed = memory.compiled_memory(step, tf.ones([512, 512]), target=target)
    assert needed.arguments == 2 * _MIB
    assert needed.outputs >= needed.aliased >= _MIB
    np.testing.assert_array_equal(variable, 0)  # Nothing ran.


def test_a_trace_without_xla_is_not_used_again():
    compiled = []

    @tf.function
    def step(x):
        compiled.append(len(compiled))
        return x

    step(tf.ones([2]))
    memory.compiled_memory(step, tf.ones([2]), target="cpu")
    assert len(compiled) == 2


@pytest.mark.parametrize("target", each_target(["a100-40gb"]))
def test_a_gpu_is_described_by_a_file(target, tmp_path):
    folder = pathlib.Path(memory.__file__).parent / "targets"
    path = tmp_path / "mine.txtpb"
    path.write_bytes((folder / f"{target}.txtpb").read_bytes())
    spec = tf.TensorSpec([512, 512])
    mine = memory.compiled_memory(_product, spec, target=path)
    known = memory.compiled_memory(_product, spec, target=target)
    assert mine.total == known.total
    assert mine.target == str(path)


@pytest.mark.parametrize("target", ["v1", "mine.txtpb", ""])
def test_an_unknown_target_is_refused_before_the_step_is_traced(target):
    def step(x):
        pytest.fail("traced")

    with pytest.raises(ValueError, match="a100-40gb.*v5e.*txtpb") as caught:
        memory.compiled_memory(step, tf.ones([]), target=target)
    assert repr(target) in str(caught.value)


def _fake_jax(monkeypatch, folder, text):
    (folder / "jax").mkdir()
    (folder / "jax" / "__init__.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.parametrize("target", ["v5e", "h100-80gb"])
def test_a_missing_extra_is_one_clear_line(target, monkeypatch, tmp_path):
    _fake_jax(monkeypatch, tmp_path, "raise ImportError('no jax here')")
    with pytest.raises(ImportError) as caught:
        memory.compiled_memory(_product, tf.ones([2, 2]), target=target)
    assert caught.type is memory.CompilerNotFoundError
    assert 'pip install "tfckpt[compile]"' in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_crash_of_the_compiler_is_an_error_here(monkeypatch, tmp_path):
    _fake_jax(
        monkeypatch,
        tmp_path,
        "import os, sys\nsys.stderr.write('the end')\nsys.stderr.flush()\n"
        "os.abort()",
    )
    with pytest.raises(memory.CompilationError, match="status -6.*the end"):
        memory.compiled_memory(_product, tf.ones([2, 2]))


@pytest.mark.parametrize("target", each_target(["v5e"]))
def test_a_step_too_big_for_the_device_is_an_error(target):
    with pytest.raises(memory.CompilationError, match="RESOURCE_EXHAUSTED"):
        memory.compiled_memory(
            lambda x: x @ tf.tanh(x),
            tf.TensorSpec([65536, 65536]),
            target=target,
        )


@pytest.mark.parametrize("target", each_target(["v5e", "a100-40gb"]))
def test_nothing_of_the_compiler_stays_in_this_process(
    target, monkeypatch, tmp_path
):
    # JAX is another's to import; another test may have done so.
    monkeypatch.setenv("XLA_FLAGS", "--not_a_flag")
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    memory.compiled_memory(_product, tf.ones([8, 8]), target=target)
    assert dict(os.environ) == before
    assert list(tmp_path.iterdir()) == []


def compile_without_jax():
    """Runs in a process of its own, which can't import the extra."""
    needed = memory.compiled_memory(
        _product, tf.TensorSpec([512, 512]), target="cpu"
    )
    return needed.arguments


def test_the_cpu_needs_no_extra(monkeypatch, tmp_path):
    # TensorFlow imports JAX itself where it finds it, so that a look at
    # `sys.modules` would say nothing.
    for name in ("jax", "jaxlib", "libtpu"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('blocked')")
    monkeypatch.syspath_prepend(tmp_path)
    assert memory.measure_in_process(compile_without_jax) == _MIB


@pytest.mark.parametrize(
    ("target", "bar"),
    [
        _needs_compiler("cpu", 0.35),
        _needs_compiler("v5e", 0.13),
        _needs_compiler("a100-40gb", 0.33),
    ],
)
def test_the_chain_takes_as_little_as_the_bar_says(target, bar):
    saved = {}
    for method in ("none", "tfckpt"):
        step, inputs, weights = benchmark.chain_step(method)
        needed = memory.compiled_memory(step, *inputs, target=target)
        saved[method] = benchmark.activations(needed, weights)
    assert saved["tfckpt"] <= bar * saved["none"], saved


# --- Processes and devices --------------------------------------------------


def allocate(size):
    """Runs in a process of its own: the peak of two arrays, one at a time."""
    baseline = np.ones(size, np.uint8)
    with memory.process_peak() as peak:
        for _ in range(2):
            array = np.ones(size, np.uint8)
            del array
    return [peak.bytes, peak.baseline, int(baseline[0])]


def compute(size):
    """Runs in a process of its own: the peak of one tensor."""
    tf.ones([8]) * 2.0
    with memory.process_peak() as peak:
        tensor = tf.ones([size // 4])
        float(tensor[0])
    return peak.bytes


def environment(name):
    return os.environ.get(name)


def fail(text):
    raise KeyError(text)


@pytest.mark.alone
def test_the_peak_of_a_process_rises_by_what_is_allocated():
    size = 128 * _MIB
    rise, baseline, _ = memory.measure_in_process(allocate, size)
    assert rise == pytest.approx(size, rel=0.05)
    assert baseline > size


@pytest.mark.alone
def test_the_peak_of_a_process_sees_tensors():
    size = 128 * _MIB
    rise = memory.measure_in_process(f"{__file__}:compute", size)
    assert rise == pytest.approx(size, rel=0.1)


def test_a_peak_is_set_when_the_block_ends_even_by_an_error():
    with pytest.raises(KeyError):
        with memory.process_peak() as peak:
            assert peak.bytes is None
            raise KeyError
    assert peak.bytes >= 0
    assert "baseline" in repr(peak)


def test_a_system_without_proc_is_told_what_else_there_is(monkeypatch):
    def no_proc(*args, **kwargs):
        raise FileNotFoundError("/proc/self/clear_refs")

    monkeypatch.setattr("builtins.open", no_proc)
    with pytest.raises(NotImplementedError, match="device_peak"):
        with memory.process_peak():
            pass


def test_a_fresh_process_returns_freed_memory_and_takes_variables():
    measured = memory.measure_in_process(environment, "MALLOC_MMAP_THRESHOLD_")
    assert measured == "65536"
    assert "MALLOC_MMAP_THRESHOLD_" not in os.environ
    measured = memory.measure_in_process(
        environment, "TFCKPT_TEST", environment={"TFCKPT_TEST": "yes"}
    )
    assert measured == "yes"


def test_a_failed_measurement_shows_the_end_of_its_log():
    with pytest.raises(memory.MeasurementError, match="KeyError: 'why'"):
        memory.measure_in_process(fail, "why")
    with pytest.raises(memory.MeasurementError, match="exit status -"):
        memory.measure_in_process("os:abort")
    with pytest.raises(memory.MeasurementError, match=r"after 0\.5 seconds"):
        memory.measure_in_process("time:sleep", 60, timeout=0.5)


def test_what_a_new_process_cannot_find_is_refused():
    with pytest.raises(ValueError, match="top of a module"):
        memory.measure_in_process(lambda: 1)
    with pytest.raises(ValueError, match="package.module:function"):
        memory.measure_in_process("math.hypot", 3, 4)


def test_the_peak_of_a_cpu_or_missing_device_is_refused():
    with pytest.raises(ValueError, match="process_peak"):
        with memory.device_peak("CPU:0"):
            pass
    with pytest.raises(ValueError, match="no device 'GPU:77'"):
        with memory.device_peak("GPU:77"):
            pass


@pytest.mark.skipif(
    not tf.config.list_physical_devices("GPU"), reason="there is no GPU"
)
def test_the_peak_of_a_gpu_rises_by_what_is_allocated():
    size = 64 * _MIB
    with tf.device("GPU:0"), memory.device_peak("GPU:0") as peak:
        tensor = tf.ones([size // 4])
        del tensor
    assert peak.bytes == pytest.approx(size, rel=0.05)
