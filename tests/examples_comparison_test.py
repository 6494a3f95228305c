"""`--compare`: what is measured, in a fresh process, and what is printed."""

import math
import types

import big_batch
import comparison
import entry_point
import example_flags
import examples_zoo
import measuring
import meter
import numpy as np
import pytest
import train_digits
import train_text

# Measuring.


def test_the_meter_takes_running_means_apart():
    found = meter.Meter(2)
    batches = [5.0, 3.0, 1.0, 2.0]
    for _ in range(2):
        for number, _ in enumerate(batches):
            found.on_train_batch_begin(number)
            mean = np.mean(batches[: number + 1])
            found.on_train_batch_end(number, {"loss": mean})
    np.testing.assert_allclose(found.losses, [4, 1.5] * 2)


def test_the_largest_difference_of_any_variable():
    first = {"variables": [np.zeros((2, 2)), np.ones(3)]}
    second = {"variables": [np.full((2, 2), 0.5), np.array([1, 0.25, 1.5])]}
    assert measuring.difference(first, first) == 0
    assert measuring.difference(first, second) == 0.75


def test_a_fresh_process_measures():
    options = measuring.as_dict(
        examples_zoo.options(train_text, "--gradient_accumulation_steps=2")
    )
    figures = measuring.measure(train_text.__file__, options)
    assert 0 < figures["above baseline"] < figures["total"] < 2**34
    assert len(figures["losses"]) == len(figures["seconds"]) == 2
    assert math.isfinite(figures["outcome"]["final bits per byte"])
    # The positions' vectors are the only ones of this shape.
    assert (16, 8) in [each.shape for each in figures["variables"]]


def test_a_process_that_fails_is_told_in_one_line():
    options = measuring.as_dict(examples_zoo.options(train_text))
    with pytest.raises(entry_point.UserError, match="^--width=9.*--heads=2$"):
        measuring.measure(train_text.__file__, options | {"width": 9})


# Tables.


@pytest.mark.parametrize("module", [train_digits, train_text])
def test_compare_prints_what_it_measures(module, monkeypatch, capsys):
    runs = []

    def measure(program, options):
        assert program == module.__file__
        runs.append(options)
        ours = options.get("recompute", options.get("plan") != "none")
        peak = 1 if options["batch_size"] == 1 else 3 if ours else 5
        changed = ours and not options["exact"]
        return {
            "above baseline": peak * 2**20,
            "seconds": [0.3 if ours else 0.2],
            "outcome": {"loss": 1.25},
            "variables": [np.ones(1), np.full(2, float(changed))],
        }

    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setenv("COLUMNS", "120")
    module.main(examples_zoo.options(module, "--compare", "--seed=7"))
    exactly = f"difference after {comparison.EXACT_STEPS} steps, --exact"
    assert examples_zoo.table(capsys.readouterr().out) == {
        "peak memory above the baseline": ["5 MiB", "3 MiB", "0.60"],
        "of that, activations": ["4 MiB", "2 MiB", "0.50"],
        "a step: median (10 to 90 %)": [
            "200 ms (200 to 200)",
            "300 ms (300 to 300)",
            "1.50",
        ],
        "loss": ["1.2500", "1.2500", "1.00"],
        "difference at the end": ["", "1.0e+00", ""],
        exactly: ["", "0", ""],
    }
    assert {run["seed"] for run in runs} == {7}
    assert [run["exact"] for run in runs] == [False] * 3 + [True] * 2


@pytest.mark.parametrize(
    ("module", "window"),
    [
        (train_text, "--micro_batches=2"),
        (train_digits, "--gradient_accumulation_steps=2"),
    ],
)
def test_compare_shows_the_big_batch(module, window, monkeypatch, capsys):
    runs = []

    def measure(program, options):
        runs.append(options)
        ours = bool(example_flags.window(types.SimpleNamespace(**options)))
        return {
            "above baseline": (2 if ours else 8) * 2**20,
            "total": (12 if ours else 16) * 2**20,
            "seconds": [0.3 if ours else 0.2],
            "losses": [2.0] * 20 + [1.5 + ours / 8],
            "outcome": {"loss": 1.25},
            "variables": [np.ones(1), np.full(2, 0.5 * ours)],
        }

    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setenv("COLUMNS", "120")
    module.main(
        examples_zoo.options(module, "--compare", "--batch_size=4", window)
    )
    printed = capsys.readouterr().out
    assert examples_zoo.table(printed) == {
        "peak above the baseline": ["8 MiB", "2 MiB", "0.25"],
        "peak in all": ["16 MiB", "12 MiB", "0.75"],
        "a step (10 to 90 %)": [
            "200 ms (200 to 200)",
            "300 ms (300 to 300)",
            "1.50",
        ],
        "loss": ["1.2500", "1.2500", "1.00"],
        "loss differs, 20 steps": ["", "0.0e+00", ""],
        "loss differs, 21 steps": ["", "1.2e-01", ""],
        "variables differ": ["", "5.0e-01", ""],
    }
    assert ("Batch normalization" in printed) == (module is train_digits)
    sizes = [4, 4] if module is train_text else [8, 4]
    assert [run["batch_size"] for run in runs] == sizes
    assert not any(run["dropout"] for run in runs)
    assert not example_flags.window(types.SimpleNamespace(**runs[0]))


def test_compare_of_windows_needs_no_plan(monkeypatch):
    called = []
    monkeypatch.setattr(big_batch, "compare", lambda *a, **k: called.append(a))
    train_digits.main(
        examples_zoo.options(
            train_digits, "--compare", "--plan=none", "--micro_batches=2"
        )
    )
    assert called
