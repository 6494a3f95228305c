"""The examples: their parts on two batches, their flags, their one-liners."""

import math
import os
import pathlib
import subprocess
import sys

import comparison
import keras
import memory_limit
import numpy as np
import pytest
import train_digits
import train_text
from absl import flags

import tfckpt

_SMALL = {
    train_digits: ("--depth=3", "--batch_size=8", "--steps=2"),
    train_text: (
        "--sequence_length=16",
        "--layers=2",
        "--width=8",
        "--heads=2",
        "--batch_size=2",
        "--steps=2",
    ),
}


def _options(module, *arguments):
    values = flags.FlagValues()
    module.define_flags(values)
    values(["program", *_SMALL[module], *arguments])
    return values


def _run(module, *arguments, seed=0):
    options = _options(module, f"--seed={seed}", *arguments)
    comparison.set_up(options)
    return module.run(options)


# The main programs.


@pytest.mark.parametrize(
    ("program", "argument", "status", "words"),
    [
        ("train_digits", "--batch_size=-3", 2, "--batch_size=-3"),
        ("train_digits", "--plan=bloc1_out", 1, "bloc1_out"),
        ("train_text", "--lenght=5", 2, "'lenght'"),
        ("train_text", "--memory_limit=much", 1, "'much'"),
    ],
)
def test_mistakes_are_answered_in_one_line(program, argument, status, words):
    root = pathlib.Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, f"examples/{program}.py", argument],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{program}.py: ")
    assert words in line


@pytest.mark.parametrize("module", [train_digits, train_text])
@pytest.mark.parametrize(
    "argument",
    [
        "--batch_size=0",
        "--batch_size=few",
        "--learning_rate=-1",
        "--seed=-1",
        "--steps=0",
        "--unknown",
    ],
)
def test_bad_flags_are_refused(module, argument):
    with pytest.raises(flags.Error, match=argument.split("=")[0].strip("-")):
        _options(module, argument)


@pytest.mark.parametrize(
    "argument", ["--depth=2", "--epochs=0", "--dataset=mnist"]
)
def test_bad_flags_of_digits_are_refused(argument):
    with pytest.raises(flags.Error, match=argument[2:]):
        _options(train_digits, argument)


# Digits.


def test_digits_are_split_in_the_same_way_every_time():
    (images, labels), (test_images, test_labels) = train_digits.load_data(
        "digits"
    )
    assert images.shape == (1437, 16, 16, 1)
    assert test_images.shape == (360, 16, 16, 1)
    assert (images.min(), images.max()) == (-1, 1)
    assert labels.dtype == "int32"
    assert set(labels) == set(test_labels) == set(range(10))
    np.testing.assert_array_equal(
        images, train_digits.load_data("digits")[0][0]
    )


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("none", None),
        ("sqrt", "sqrt"),
        ("5", 5),
        ("a,b#2", ["a", "b#2"]),
        ("a/b, c", ["a/b", "c"]),
    ],
)
def test_plan_flag(text, plan):
    assert train_digits.parse_plan(text) == plan


def test_digits_network_is_deep_and_has_three_resolutions():
    model = train_digits.build_model((16, 16, 1), depth=6, plan=None)
    sizes = [model.get_layer(f"block{k}_out").output.shape for k in range(1, 7)]
    assert [size[1:] for size in sizes] == [
        (16, 16, 16),
        (16, 16, 16),
        (8, 8, 32),
        (8, 8, 32),
        (4, 4, 64),
        (4, 4, 64),
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--plan=2",),
        ("--plan=block1_out,block2_out", "--mixed_precision"),
        ("--plan=sqrt", "--jit_compile"),
    ],
)
def test_digits_train_on_two_batches(arguments):
    model, outcome = _run(train_digits, *arguments)
    assert isinstance(model, tfckpt.SegmentedModel)
    assert model.optimizer.iterations == 2
    assert 0 < outcome["final loss"] < 10
    assert 0 <= outcome["test accuracy"] <= 1


def test_digits_are_trained_to_the_same_weights_with_any_plan():
    plain, _ = _run(train_digits, "--plan=none")
    ours, _ = _run(train_digits, "--plan=2")
    assert not isinstance(plain, tfckpt.SegmentedModel)
    for a, b in zip(plain.variables, ours.variables, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5, err_msg=a.path)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("0", "0"),
        ("10000", "10000"),
        ("sqr", "'sqr'.*none, sqrt, a number"),
        ("block1_out,nowhere", "'nowhere'"),
    ],
)
def test_a_plan_that_the_model_has_not(plan, words):
    with pytest.raises(comparison.UserError, match=f"--plan={plan}: .*{words}"):
        train_digits.main(_options(train_digits, f"--plan={plan}"))


def test_compare_needs_a_plan():
    with pytest.raises(comparison.UserError, match="--compare needs a --plan"):
        train_digits.main(_options(train_digits, "--plan=none", "--compare"))


def test_missing_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(comparison.UserError, match="pip install scikit-learn"):
        train_digits.load_data("digits")


def test_cifar10_without_a_network(monkeypatch):
    def fail():
        raise Exception("URL fetch failure")

    monkeypatch.setattr(keras.datasets.cifar10, "load_data", fail)
    with pytest.raises(comparison.UserError, match="CIFAR-10.*URL fetch"):
        train_digits.load_data("cifar10")


def test_cifar10_is_scaled(monkeypatch):
    part = np.full((2, 32, 32, 3), 255, "uint8"), np.array([[3], [4]], "uint8")
    monkeypatch.setattr(
        keras.datasets.cifar10, "load_data", lambda: (part, part)
    )
    (images, labels), _ = train_digits.load_data("cifar10")
    assert (images.dtype, images.max()) == ("float32", 1)
    assert list(labels) == [3, 4]


# Text.


def test_text_is_source_in_the_order_of_paths(tmp_path):
    (tmp_path / "test").mkdir()
    for name in ("b.py", "a.py", "test/c.py", "d.txt"):
        (tmp_path / name).write_text(name)
    assert bytes(train_text.load_text(tmp_path)) == b"a.pyb.py"
    assert bytes(train_text.load_text(tmp_path, size=5)) == b"a.pyb"
    with pytest.raises(comparison.UserError, match="no Python source under"):
        train_text.load_text(tmp_path / "nowhere")


def test_this_python_has_enough_text():
    assert len(train_text.load_text(size=10**6)) == 10**6


def test_windows_predict_the_next_byte():
    text = np.arange(100, dtype="uint8")
    data = train_text.windows(text, 10, batch_size=3, seed=1)
    (first, targets), (second, _) = data.take(2).as_numpy_iterator()
    assert first.shape == (3, 10)
    np.testing.assert_array_equal(first + 1, targets)
    assert (first != second).any()
    with pytest.raises(comparison.UserError, match="--sequence_length=100"):
        train_text.windows(text, 100, batch_size=3, seed=1)


def test_text_model_does_not_look_ahead():
    model = train_text.build_model(
        8, layers=2, width=8, heads=2, recompute=True
    )
    x = np.arange(8)[np.newaxis]
    changed = np.where(np.arange(8) < 5, x, 200)
    before, after = np.asarray(model(x)), np.asarray(model(changed))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any()


def test_width_and_heads_must_fit():
    with pytest.raises(comparison.UserError, match="--width=9.*--heads=2"):
        train_text.main(_options(train_text, "--width=9"))


@pytest.mark.parametrize("more", ["--nojit_compile", "--mixed_precision"])
def test_text_trains_on_two_batches_to_the_same_weights(more):
    plain, outcome = _run(train_text, "--norecompute", more)
    ours, same = _run(train_text, "--recompute", more)
    assert not isinstance(plain.get_layer("block1"), tfckpt.Recompute)
    assert isinstance(ours.get_layer("block1"), tfckpt.Recompute)
    assert 0 < outcome["on other text"] < 12
    assert same == pytest.approx(outcome, rel=1e-2)


def test_a_sample_continues_the_prompt():
    model = train_text.build_model(
        8, layers=1, width=8, heads=2, recompute=False
    )
    found = train_text.sample(model, b"def", length=9, context=8, seed=0)
    assert found.startswith("def")
    assert len(found) > 3


@pytest.mark.parametrize("limit", [64, 100, 1000, 12345, 10**6])
def test_longest_is_near_and_never_too_long(limit):
    tried = []

    def fits(length):
        tried.append(length)
        return length <= limit

    found = memory_limit.longest(fits, start=64, most=50_000)
    truth = min(limit, 50_000)
    assert truth / (1 + 1 / 8) - 1 <= found <= truth
    assert len(tried) < 20
    # Memory grows with the square of the length: no wild guesses.
    assert max(tried) <= max(64, 2 * truth)


def test_nothing_fits():
    assert memory_limit.longest(lambda length: False, start=64, most=999) == 0


# What they share.


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2**31), ("1.5 MiB", 3 * 2**19), ("1000", 1000), ("1kib", 1024)],
)
def test_sizes(text, size):
    assert memory_limit.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "2 parsec", "1.2.3"])
def test_bad_sizes(text):
    with pytest.raises(comparison.UserError, match="such as 2GiB"):
        memory_limit.parse_size(text)


def _program(name):
    return str(pathlib.Path(__file__).parent.parent / "examples" / name)


def test_a_fresh_process_measures(tmp_path):
    options = comparison.as_dict(_options(train_text))
    figures = comparison.measure(
        _program("train_text.py"), options, folder=tmp_path
    )
    assert 0 < figures["above baseline"] < figures["total"] < 2**34
    assert figures["seconds"]
    assert math.isfinite(figures["outcome"]["final bits per byte"])
    assert comparison.difference(tmp_path, tmp_path) == 0


def test_a_process_over_the_limit_is_ended(tmp_path):
    options = comparison.as_dict(_options(train_text))
    figures = comparison.measure(
        _program("train_text.py"), options, folder=tmp_path, limit=2**20
    )
    assert figures is None


def test_a_process_that_fails_is_told_in_one_line(tmp_path):
    options = comparison.as_dict(_options(train_text)) | {"width": 9}
    with pytest.raises(comparison.UserError, match="multiple of --heads"):
        comparison.measure(_program("train_text.py"), options, folder=tmp_path)


@pytest.mark.parametrize("module", [train_digits, train_text])
def test_compare_prints_what_it_measures(module, monkeypatch, capsys):
    runs = []

    def measure(program, options, *, folder):
        runs.append(options)
        ours = options.get("recompute", options.get("plan") != "none")
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.layers[0].bias.assign([ours and not options["exact"]])
        model.layers[0].kernel.assign([[1]])
        comparison.save_variables(model, folder)
        return {
            "above baseline": (3 if ours else 5) * 2**20,
            "seconds": [0.3 if ours else 0.2],
            "outcome": {"loss": 1.25},
        } | ({"above baseline": 2**20} if options["batch_size"] == 1 else {})

    monkeypatch.setattr(comparison, "measure", measure)
    monkeypatch.setenv("COLUMNS", "120")
    module.main(_options(module, "--compare", "--seed=7"))
    printed = capsys.readouterr().out
    lines = {
        cells[1].strip(): [cell.strip() for cell in cells[2:5]]
        for line in printed.splitlines()
        if len(cells := line.split("│")) == 6
    }
    assert lines["peak memory above the baseline"] == [
        "5 MiB",
        "3 MiB",
        "0.60",
    ]
    assert lines["of that, activations"] == ["4 MiB", "2 MiB", "0.50"]
    assert lines["a step: median (10 to 90 %)"][2] == "1.50"
    assert lines["loss"] == ["1.2500", "1.2500", "1.00"]
    assert lines["difference at the end"][1] == "1.0e+00"
    exactly = f"difference after {comparison.EXACT_STEPS} steps, --exact"
    assert lines[exactly][1] == "0"
    assert {run["seed"] for run in runs} == {7}
    assert [run["exact"] for run in runs] == [False] * 3 + [True] * 2
