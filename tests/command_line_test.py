"""The command line: what it prints, writes, refuses."""

import functools
import json
import os
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

import tfckpt
from tfckpt import __main__ as command_line
from tfckpt import devices, memory, planning
from tfckpt import plan as plan_lib
from tfckpt.cli import bisection, max_batch, measuring, models, options

_ROOT = pathlib.Path(__file__).parent.parent


def chain(input_shape=(32,)):
    """What the command line is asked for as "command_line_test:chain"."""
    inputs = x = keras.Input(input_shape)
    for number in range(8):
        x = keras.layers.Dense(32, activation="tanh", name=f"dense{number}")(x)
    return keras.Model(inputs, x)


def open_sizes(input_shape=(None, 8)):
    return chain(input_shape)


def two_inputs(input_shape=((4,), (None, 3))):
    ids = keras.Input(input_shape[0], dtype="int32")
    x = keras.Input(input_shape[1], dtype="float32")
    embedded = keras.layers.Embedding(2, 3)(ids)
    joined = keras.layers.Concatenate(axis=1)([embedded, x])
    return keras.Model([ids, x], keras.layers.Dense(2)(joined))


def raising():
    raise RuntimeError("not today")


def number():
    return 3


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def run(capsys):
    """Runs a command line: its status, what it printed, what it said."""

    def run(*arguments):
        status = command_line.main(arguments)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


_CHAIN = f"{__name__}:chain"


# --- plan -------------------------------------------------------------------


def test_plan_prints_the_report(run):
    status, out, err = run("plan", _CHAIN, "--batch_size=64")
    assert (status, err) == (0, "")
    made = planning.make_plan(chain(), batch_size=64)
    assert out.startswith(f"Plan: {len(made.segments)} segments, 8 calls")
    assert "Memory of a step, batch size 64" in out
    assert f"{made.prediction.ratio:.3f}" in out
    assert "dense4" not in out.replace("dense3  ", "")  # Rows, not calls.


def test_plan_passes_its_flags_on(run, tmp_path):
    path = tmp_path / "plan.json"
    status, _, err = run(
        "plan",
        _CHAIN,
        "--batch_size=48",
        "--memory_budget=80%",
        f"--output={path}",
    )
    assert status == 0, err
    made = planning.make_plan(chain(), batch_size=48, memory_budget=0.8)
    written = plan_lib.Plan.load(path)
    assert written == made
    assert written.prediction == made.prediction
    # It can be given to a model.
    model = tfckpt.SegmentedModel.from_model(chain(), plan=written)
    assert model.plan == made


@pytest.mark.parametrize(
    ("text", "strategy"),
    [("3", 3), ("dense1,dense4", ["dense1", "dense4"])]
    + [(name, name) for name in ("sqrt", "min_memory", "chen")],
)
def test_strategies(text, strategy, run, tmp_path):
    path = tmp_path / "plan.json"
    status, _, err = run(
        "plan", _CHAIN, f"--strategy={text}", f"--output={path}"
    )
    assert status == 0, err
    made = planning.make_plan(chain(), batch_size=32, strategy=strategy)
    assert plan_lib.Plan.load(path) == made


def test_verbose_lists_calls(run):
    _, out, _ = run("plan", _CHAIN, "--strategy=1", "--verbose")
    assert re.search(r"^ +dense4$", out, re.MULTILINE)


def test_plan_draws(run, tmp_path):
    path = tmp_path / "plan.png"
    status, _, err = run("plan", _CHAIN, f"--plot={path}")
    assert status == 0, err
    assert path.read_bytes().startswith(b"\x89PNG")


def test_input_shapes(run):
    name = f"{__name__}:open_sizes"
    status, _, err = run("plan", name)
    assert status == 2
    assert "--input_shape" in err
    status, out, err = run("plan", name, "--input_shape=5,8", "--batch_size=2")
    assert status == 0, err
    made = planning.make_plan(chain((5, 8)), batch_size=2)
    assert f"{made.prediction.plain_bytes / 1024:.4g} KiB" in out
    status, out, err = run(
        "plan", f"{__name__}:two_inputs", "--input_shape=4;7x3"
    )
    assert status == 0, err


@pytest.mark.parametrize("costs", ["--measure_costs", "--nomeasure_costs"])
def test_costs_can_be_measured(costs, run):
    status, out, err = run("plan", _CHAIN, costs)
    assert status == 0, err
    assert "Extra time" in out


# --- Models -----------------------------------------------------------------


def test_models_of_keras(run):
    for name in ("MobileNetV2", "keras.applications.MobileNetV2"):
        model = models.load(name, ((32, 32, 3),))
        assert model.input.shape == (None, 32, 32, 3)
    assert {"ResNet50", "VGG19", "DenseNet121"} <= set(models.applications())
    assert not any(name.islower() for name in models.applications())


def test_models_of_files(run, tmp_path):
    path = tmp_path / "model.keras"
    model = chain()
    model.compile("sgd", "mse")
    model.save(path)
    status, out, err = run("plan", str(path))
    assert status == 0, err
    assert "8 calls" in out
    # It is compiled: its own optimizer counts.
    assert models.load(str(path)).compiled


def test_modules_are_found_in_the_working_directory(run, tmp_path, monkeypatch):
    (tmp_path / "made_here.py").write_text(
        "import keras\n"
        "def make():\n"
        "    return keras.Sequential([keras.Input((4,)),"
        " keras.layers.Dense(2)])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    status, out, err = run("plan", "made_here:make")
    assert status == 0, err
    assert "1 call" in out


# --- measure ----------------------------------------------------------------


@pytest.mark.alone
def test_measure_compares_prediction_and_measurement(run):
    status, out, err = run(
        "measure", _CHAIN, "--strategy=3", "--repeats=2", "--batch_size=4096"
    )
    assert status == 0, err
    assert "peak of the process above batch 1" in out
    assert "error of the prediction" in out
    assert "seconds of a step" in out


def test_random_inputs_fit_the_model():
    model = two_inputs()
    ids, x = measuring.random_inputs(model, 5, [(1, 4), (1, 6, 3)])
    assert (ids.shape, ids.dtype) == ((5, 4), np.int32)
    assert (x.shape, x.dtype) == ((5, 6, 3), np.float32)
    assert set(np.unique(ids)) == {0, 1}
    assert model([ids, x]).shape == (5, 10, 2)
    text = keras.Model(inputs := keras.Input((1,), dtype="string"), inputs)
    with pytest.raises(options.UsageError, match="string"):
        measuring.random_inputs(text, 1)


# --- max_batch --------------------------------------------------------------


def _largest(out):
    """The two batch sizes in the last line."""
    cells = [c for c in out.splitlines()[-1].split("  ") if c.strip()]
    return [int(cell.replace(",", "")) for cell in cells[2:4]]


def test_max_batch_finds_the_largest_batches(run):
    limit = 2 * 2**20
    status, out, err = run("max_batch", _CHAIN, f"--memory_limit={limit}")
    assert status == 0, err
    plain, ours = _largest(out)
    assert plain < ours

    def plain_total(batch_size):
        known = planning.make_plan(chain(), batch_size=batch_size).prediction
        return known.fixed_bytes + known.plain_bytes

    assert plain_total(plain) <= limit < plain_total(plain + 1)
    fits = functools.partial(planning.make_plan, chain(), memory_budget=limit)
    assert fits(batch_size=ours).prediction.total_bytes <= limit
    with pytest.raises(plan_lib.PlanError):
        fits(batch_size=ours + 1)
    assert f"batch size {ours}" in out


def test_max_batch_writes_its_plan(run, tmp_path):
    path = tmp_path / "plan.json"
    status, out, err = run(
        "max_batch", _CHAIN, "--memory_limit=2MiB", f"--output={path}"
    )
    assert status == 0, err
    _, ours = _largest(out)
    assert plan_lib.Plan.load(path).prediction.batch_size == ours


def test_max_batch_says_when_nothing_fits(run):
    status, out, err = run("max_batch", _CHAIN, "--memory_limit=1KiB")
    assert (status, out) == (1, "")
    assert "weights" in err


@pytest.mark.parametrize(
    "target", ["cpu", pytest.param("v5e", marks=pytest.mark.compile)]
)
def test_max_batch_asks_the_compiler_of_a_target(target, run):
    if target != "cpu":
        pytest.importorskip("libtpu")
    status, out, err = run(
        "max_batch", _CHAIN, f"--target={target}", "--memory_limit=4MiB"
    )
    assert status == 0, err
    # Every compilation is a line.
    lines = err.splitlines()
    cells = [c.strip() for c in out.splitlines()[-1].split("  ") if c.strip()]
    assert cells[0] == target
    for cell, name in zip(cells[2:4], ("without", "with"), strict=True):
        tried = [line for line in lines if line.startswith(f"{name} a plan:")]
        assert len(tried) <= max_batch._TRIALS
        low, _, high = cell.partition(" to ")
        low, high = (int(n.replace(",", "")) for n in (low, high or low))
        assert any(f" {low:,} takes" in line for line in tried)
        near = high - low < max_batch._TOLERANCE * (high + 1)
        assert near or len(tried) == max_batch._TRIALS
    assert "Compiled for the target" in out


@pytest.mark.parametrize("target", ["cpu"])
def test_plan_asks_the_compiler_of_a_target(target, run):
    status, out, err = run(
        "plan", _CHAIN, f"--target={target}", "--memory_budget=1GiB"
    )
    assert status == 0, err
    assert "Compiled for the target" in out
    assert "compilation 1" in err


@pytest.mark.compile
def test_plan_for_several_targets_ends_in_an_overview(run, tmp_path):
    pytest.importorskip("libtpu")
    path = tmp_path / "plan.json"
    status, out, err = run(
        "plan", _CHAIN, "--target=v5e,a100-40gb", f"--output={path}"
    )
    assert status == 0, err
    overview = out[out.index("Does it train") :]
    for name in ("v5e", "a100-40gb"):
        assert re.search(rf"^{name} .* yes$", overview, re.MULTILINE)
        written = plan_lib.Plan.load(tmp_path / f"plan-{name}.json")
        assert written.prediction.trials[0].target == name


# --- targets ----------------------------------------------------------------


def test_targets_are_listed(run):
    status, out, _ = run("targets")
    assert status == 0
    for name in memory.targets():
        assert re.search(rf"^{name} ", out, re.MULTILINE)
    for device in devices.known():
        assert device.source in out


# --- Help and mistakes ------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), ("--help",), ("help",)])
def test_help_shows_commands_and_examples(arguments, run):
    status, out, _ = run(*arguments)
    assert status == 0
    for name in ("plan", "measure", "max_batch", "targets"):
        assert re.search(rf"^  {name} ", out, re.MULTILINE)
    assert "Examples:" in out


@pytest.mark.parametrize("name", ["plan", "measure", "max_batch", "targets"])
def test_every_command_has_help(name, run):
    status, out, _ = run(name, "--help")
    assert status == 0
    for flag in command_line.COMMANDS[name].flags:
        assert f"--{flag}" in out
    for line in out.splitlines():
        assert len(line) <= 100


def test_examples_name_flags_that_are_there():
    for command in command_line.COMMANDS.values():
        for example in command.examples:
            values = options.define(*command.flags)
            assert len(options.parse(values, example.split())) == 1


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ("plna", 2, "'plna'.*mean plan"),
        ("plan", 2, "MODEL.*none"),
        ("plan a b", 2, "'a', 'b'"),
        ("plan ResNet5", 2, "'ResNet5'.*ResNet50"),
        ("plan no_module:make", 2, "no_module"),
        ("plan {m}:chian", 2, "chian.*chain"),
        ("plan {m}:raising", 2, "RuntimeError: not today"),
        ("plan {m}:number", 2, "int.*keras.Model"),
        ("plan none.keras", 2, "none.keras"),
        ("plan {m}:chain --batch=4", 2, "--batch_size"),
        ("plan {m}:chain --batch_size=0", 2, "batch_size"),
        ("plan {m}:chain --batch_size=few", 2, "few"),
        ("plan {m}:chain --memory_budget=much", 2, "much.*2GiB|2GiB.*much"),
        ("plan {m}:chain --memory_budget=8g", 2, "8GiB"),
        ("plan {m}:chain --input_shape=3,a", 2, "3,a"),
        ("plan {m}:chain --input_shape=3,0", 2, "3,0"),
        ("plan {m}:chain --strategy=sqr", 2, "mean sqrt"),
        ("plan {m}:chain --strategy=dense99", 1, "dense99.*sqrt, min_memory"),
        ("plan {m}:chain --memory_budget=1", 1, "fraction.* 1.0"),
        ("plan {m}:chain --strategy=budget", 1, "memory_budget"),
        ("plan {m}:chain --memory_budget=0.0001", 1, "east"),
        ("plan {m}:chain --target=v9", 1, "v5e"),
        ("plan {m}:chain --target=cpu", 1, "8GiB"),
        ("plan {m}:chain --output=plan.txt", 2, "json"),
        ("plan {m}:chain --output=/none/plan.json", 2, "json"),
        ("plan {m}:chain --plot=plan.mp3", 1, "png"),
        ("max_batch {m}:chain", 2, "--memory_limit"),
        ("max_batch {m}:chain --memory_limit=0.5", 2, "8GiB"),
        ("targets v5e", 2, "v5e"),
    ],
)
def test_mistakes_are_answered_in_one_line(arguments, status, words, run):
    found, out, err = run(*arguments.format(m=__name__).split())
    assert found == status, err
    assert not out
    (line,) = err.splitlines()
    assert line.startswith("tfckpt: ")
    assert re.search(words, line), line


def test_a_damaged_file_is_answered_in_one_line(run, tmp_path):
    path = tmp_path / "model.keras"
    path.write_text("nothing")
    status, _, err = run("plan", str(path))
    assert status == 2
    assert len(err.splitlines()) == 1
    status, _, err = run("plan", str(tmp_path / "modle.keras"))
    assert "model.keras" in err


def test_a_missing_extra_is_answered_in_one_line(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = run("plan", _CHAIN, "--plot=plan.png")
    assert status == 1
    assert 'pip install "tfckpt[plot]"' in err


def test_the_version_is_said(run):
    assert run("--version")[:2] == (0, f"tfckpt {tfckpt.__version__}\n")


def test_an_interrupt_ends_quietly(run, monkeypatch):
    def interrupt(*arguments, **others):
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "make_plan", interrupt)
    assert run("plan", _CHAIN)[0] == 130


def test_as_a_program(tmp_path):
    chain().save(tmp_path / "model.keras")
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    start = functools.partial(
        subprocess.run,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    program = [sys.executable, "-m", "tfckpt"]
    done = start([*program, "plan", "model.keras", "--output=plan.json"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Plan: ")
    assert json.loads((tmp_path / "plan.json").read_text())["segments"]
    done = start([*program, "plan", "modle.keras"])
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("tfckpt: ")


# --- The search -------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 7, 1000])
@pytest.mark.parametrize("guess", [1, 3, 999, 5000])
@pytest.mark.parametrize(
    "size",
    [
        lambda n: 3 * n + 100,
        lambda n: n**3,
        lambda n: n**0.5,
        lambda n: 5 if n < 40 else 10**6 + n,
        lambda n: None if n > 60 else 1.0,
        lambda n: 7.0,
    ],
)
def test_the_largest_is_found(size, guess, most):
    limit = 1000
    fitting = [n for n in range(1, most + 1) if (size(n) or 1e9) <= limit]
    low, high = bisection.largest(size, limit, guess=guess, most=most)
    assert low == (fitting[-1] if fitting else 0)
    assert high == (None if low == most else low + 1)


def test_lines_need_few_trials():
    tried = []

    def size(number):
        tried.append(number)
        return 12_345 * number + 10**6

    assert bisection.largest(size, 10**9, guess=50) == (80923, 80924)
    assert len(tried) <= 16  # It begins far away.


def test_a_tolerance_ends_the_search_early():
    tried = []

    def size(number):
        tried.append(number)
        return 10 * number + 77

    low, high = bisection.largest(size, 10**6, guess=90_000, tolerance=0.05)
    assert low <= 99_992 < high
    assert high - low <= 0.05 * high
    assert len(tried) == 3
    tried.clear()
    bisection.largest(size, 10**6, guess=1, tolerance=0.0, trials=5)
    assert len(tried) == 5


def test_nothing_fits():
    assert bisection.largest(lambda n: 10, 9, guess=100) == (0, 1)
