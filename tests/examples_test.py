"""The examples: their parts on two batches, their flags, their one-liners."""

import math
import os
import pathlib
import subprocess
import sys
import types

import big_batch
import comparison
import keras
import memory_limit
import numpy as np
import pytest
import tensorflow as tf
import train_digits
import train_text
import train_tpu
from absl import flags

import tfckpt
from tfckpt import distribute

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
    train_tpu: (
        "--strategy=one_device",
        "--image_size=8",
        "--patch_size=4",
        "--layers=2",
        "--width=8",
        "--heads=2",
        "--batch_size=4",
        "--steps=2",
        "--epochs=1",
    ),
}
_ALL = list(_SMALL)


def _options(module, *arguments):
    values = flags.FlagValues()
    module.define_flags(values)
    values(["program", *_SMALL[module], *arguments])
    return values


def _run(module, *arguments, seed=0):
    options = _options(module, f"--seed={seed}", *arguments)
    return module.run(options, comparison.set_up(options))


# The main programs.


@pytest.mark.parametrize(
    ("program", "argument", "status", "words"),
    [
        ("train_digits", "--batch_size=-3", 2, "--batch_size=-3"),
        ("train_digits", "--plan=bloc1_out", 1, "bloc1_out"),
        ("train_text", "--lenght=5", 2, "'lenght'"),
        ("train_text", "--memory_limit=much", 1, "'much'"),
        ("train_tpu", "--strategy=tpus", 2, "--strategy=tpus"),
        ("train_tpu", "--tpu=local", 1, "none on this machine"),
        ("train_tpu", "--tpu=grpc://127.0.0.1:1", 1, "nothing answers"),
        ("train_tpu", "--strategy=mirrored --num_gpus=99", 1, "num_gpus=99"),
        ("train_tpu", "--data_dir=/nowhere", 1, "--data_dir=/nowhere"),
        (
            "train_digits",
            "--micro_batches=2 --gradient_accumulation_steps=2",
            2,
            "not both",
        ),
    ],
)
def test_mistakes_are_answered_in_one_line(program, argument, status, words):
    root = pathlib.Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, f"examples/{program}.py", *argument.split()],
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


@pytest.mark.parametrize("module", _ALL)
@pytest.mark.parametrize(
    "argument",
    [
        "--batch_size=0",
        "--gradient_accumulation_steps=0",
        "--gradient_accumulation_steps=-2",
        "--gradient_accumulation_steps=1.5",
        "--micro_batches=0",
        "--micro_batches=100000",
        "--num_gpus=0",
        "--strategy=mirored",
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
    assert comparison.parse_plan(text) == plan


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


def _table(printed):
    return {
        cells[1].strip(): [cell.strip() for cell in cells[2:5]]
        for line in printed.splitlines()
        if len(cells := line.split("│")) == 6
    }


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
    lines = _table(capsys.readouterr().out)
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


# Strategies and windows.


@pytest.mark.parametrize("module", _ALL)
def test_both_windows_are_refused(module):
    with pytest.raises(flags.Error, match="not both") as caught:
        _options(module, "--micro_batches=2", "--gradient_accumulation_steps=2")
    for name in "micro_batches", "gradient_accumulation_steps":
        assert name in str(caught.value)


@pytest.mark.parametrize("module", _ALL)
@pytest.mark.parametrize(
    "window", ["--gradient_accumulation_steps=3", "--micro_batches=2"]
)
def test_steps_are_updates(module, window):
    model, _ = _run(module, window)
    assert model.optimizer.iterations == 2
    name, value = window.strip("-").split("=")
    assert model.get_compile_config()[name] == int(value)
    schedule = model.optimizer.get_config()["learning_rate"]["config"]
    assert schedule["decay_steps"] == 2


def test_steps_of_whole_epochs_are_updates():
    options = _options(
        train_digits,
        "--batch_size=64",
        "--epochs=3",
        "--gradient_accumulation_steps=4",
    )
    options.steps = None
    images = np.zeros((1437, 1), "float32")
    batches, epochs, steps = train_digits.batches_of(
        images, np.zeros(1437), options
    )
    # 22 batches are 5 steps; what is left is less than a step.
    assert (len(batches), epochs, steps) == (20, 3, 15)


def test_a_step_of_more_than_there_is():
    with pytest.raises(comparison.UserError, match="8000 images.*1437"):
        _run(train_digits, "--gradient_accumulation_steps=1000")


@pytest.fixture
def mirrored(strategy):
    return strategy


@pytest.mark.parametrize(
    ("module", "more"),
    [
        (train_digits, ()),
        (train_digits, ("--gradient_accumulation_steps=2",)),
        (train_text, ("--layers=1",)),
        (train_text, ("--layers=1", "--micro_batches=2")),
        (train_tpu, ("--layers=1", "--gradient_accumulation_steps=2")),
        (train_tpu, ("--layers=1", "--micro_batches=2")),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_models_are_made_in_the_scope(module, more, mirrored, monkeypatch):
    asked = []

    def get_strategy(name, **arguments):
        asked.append((name, arguments))
        return mirrored

    monkeypatch.setattr(distribute, "get_strategy", get_strategy)
    model, outcome = _run(
        module, "--strategy=mirrored", "--num_gpus=2", "--batch_size=4", *more
    )
    assert asked == [("mirrored", {"num_gpus": 2, "tpu": None})]
    assert model.distribute_strategy is mirrored
    assert model.optimizer.iterations == 2
    for variable in (*model.weights, *model.optimizer.variables):
        assert isinstance(variable.value, tf.distribute.DistributedValues)
    assert all(math.isfinite(value) for value in outcome.values())


@pytest.mark.parametrize(
    ("module", "window", "equal"),
    [
        (train_text, "--gradient_accumulation_steps=3", True),
        (train_text, "--micro_batches=4", True),
        (train_digits, "--gradient_accumulation_steps=3", False),
        (train_digits, "--micro_batches=4", False),
    ],
)
def test_accumulation_follows_the_big_batch(module, window, equal):
    small = ("--layers=1",) if module is train_text else ()
    options = _options(module, "--batch_size=8", "--steps=4", window, *small)
    losses, sizes = [], []
    runs = big_batch.flags_of_both(
        comparison.as_dict(options), {"dropout": False}
    )
    for values in runs:
        options = types.SimpleNamespace(**values)
        meter = comparison.Meter(options.gradient_accumulation_steps or 1)
        module.run(options, comparison.set_up(options), [meter])
        losses.append(meter.losses)
        sizes.append(options.batch_size)
    assert sizes == ([24, 8] if "steps" in window else [8, 8])
    apart = np.abs(np.subtract(*losses))
    assert len(apart) == 4
    if equal:
        assert apart.max() < 1e-4
    else:
        # The same images, but batch normalization takes other moments.
        assert 1e-4 < apart[0] < 1


def test_the_meter_takes_running_means_apart():
    meter = comparison.Meter(2)
    batches = [5.0, 3.0, 1.0, 2.0]
    for _ in range(2):
        for number, _ in enumerate(batches):
            meter.on_train_batch_begin(number)
            mean = np.mean(batches[: number + 1])
            meter.on_train_batch_end(number, {"loss": mean})
    np.testing.assert_allclose(meter.losses, [4, 1.5] * 2)


@pytest.mark.parametrize(
    ("module", "window"),
    [
        (train_text, "--micro_batches=2"),
        (train_digits, "--gradient_accumulation_steps=2"),
    ],
)
def test_compare_shows_the_big_batch(module, window, monkeypatch, capsys):
    runs = []

    def measure(program, options, *, folder):
        runs.append(options)
        ours = bool(comparison.window(types.SimpleNamespace(**options)))
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.layers[0].bias.assign([0.5 * ours])
        model.layers[0].kernel.assign([[1]])
        comparison.save_variables(model, folder)
        return {
            "above baseline": (2 if ours else 8) * 2**20,
            "total": (12 if ours else 16) * 2**20,
            "seconds": [0.3 if ours else 0.2],
            "losses": [2.0] * 20 + [1.5 + ours / 8],
            "outcome": {"loss": 1.25},
        }

    monkeypatch.setattr(comparison, "measure", measure)
    monkeypatch.setenv("COLUMNS", "120")
    module.main(_options(module, "--compare", "--batch_size=4", window))
    printed = capsys.readouterr().out
    assert _table(printed) == {
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
    assert not comparison.window(types.SimpleNamespace(**runs[0]))


def test_compare_of_windows_needs_no_plan(monkeypatch):
    called = []
    monkeypatch.setattr(big_batch, "compare", lambda *a, **k: called.append(a))
    train_digits.main(
        _options(train_digits, "--compare", "--plan=none", "--micro_batches=2")
    )
    assert called


def test_a_fresh_process_measures_a_window(tmp_path):
    options = comparison.as_dict(
        _options(train_text, "--gradient_accumulation_steps=2")
    )
    figures = comparison.measure(
        _program("train_text.py"), options, folder=tmp_path
    )
    assert len(figures["losses"]) == len(figures["seconds"]) == 2


# TPU.


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--plan=none", "--nomixed_precision"),
        ("--gradient_accumulation_steps=3", "--steps_per_execution=4"),
        ("--micro_batches=2", "--steps_per_execution=1"),
    ],
    ids=str,
)
def test_vision_trains_on_two_batches(more):
    model, outcome = _run(train_tpu, *more)
    assert isinstance(model, tfckpt.SegmentedModel)
    assert model.optimizer.iterations == 2
    assert 0 < outcome["loss"] < 10
    assert model.get_layer("patches").compute_dtype == (
        "float32" if "--nomixed_precision" in more else "bfloat16"
    )
    assert model.get_layer("logits").compute_dtype == "float32"


@pytest.mark.parametrize(
    ("steps", "most", "expected"), [(6, 4, 3), (7, 4, 1), (3, 20, 3)]
)
def test_calls_end_with_the_epoch(steps, most, expected):
    options = _options(
        train_tpu, f"--steps={steps}", f"--steps_per_execution={most}"
    )
    one = tf.distribute.get_strategy()
    assert train_tpu.batches_a_call(options, one) == expected


def _tpu_flags(folder, *more):
    return ("--epochs=2", f"--model_dir={folder}", "--steps=3", *more)


@pytest.mark.parametrize(
    ("window", "recorded"),
    [
        ("--gradient_accumulation_steps=2", False),
        ("--micro_batches=2", True),
    ],
)
def test_vision_goes_on_as_if_never_ended(tmp_path, window, recorded):
    more = (window,)
    if recorded:
        _write_records(tmp_path / "data")
        more = (window, f"--data_dir={tmp_path / 'data'}", "--first_label=1")
    whole, _ = _run(train_tpu, *_tpu_flags(tmp_path / "a", *more))
    # As a run that was ended after the first epoch leaves it.
    (tmp_path / "b").mkdir()
    for path in (tmp_path / "a").glob("ckpt-1.*"):
        (tmp_path / "b" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "b" / "checkpoint").write_text(
        'model_checkpoint_path: "ckpt-1"\n'
        'all_model_checkpoint_paths: "ckpt-1"\n'
    )
    resumed, _ = _run(train_tpu, *_tpu_flags(tmp_path / "b", *more))
    assert resumed.optimizer.iterations == whole.optimizer.iterations == 6
    for a, b in zip(
        (*whole.variables, *whole.optimizer.variables),
        (*resumed.variables, *resumed.optimizer.variables),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6, err_msg=a.path)


def test_vision_that_is_done_trains_no_further(tmp_path):
    first, _ = _run(train_tpu, *_tpu_flags(tmp_path))
    again, _ = _run(train_tpu, *_tpu_flags(tmp_path), seed=1)
    # Further steps would change little: the schedule has ended.
    assert again.optimizer.iterations == 6
    for a, b in zip(first.weights, again.weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_checkpoints_of_another_model_are_refused(tmp_path):
    _run(train_tpu, *_tpu_flags(tmp_path))
    for more in "--width=16", "--layers=3":
        with pytest.raises(comparison.UserError, match="ckpt-2.*another model"):
            _run(train_tpu, *_tpu_flags(tmp_path, more))


def _write_records(folder):
    folder.mkdir()
    for split, number in ("train-0", 9), ("train-1", 7), ("validation-0", 5):
        with tf.io.TFRecordWriter(str(folder / split)) as writer:
            for index in range(number):
                image = np.full((10, 12, 3), 20 * index, "uint8")
                png = tf.io.encode_png(image).numpy()
                features = {
                    "image/encoded": tf.train.Feature(
                        bytes_list=tf.train.BytesList(value=[png])
                    ),
                    "image/class/label": tf.train.Feature(
                        int64_list=tf.train.Int64List(value=[index % 3 + 1])
                    ),
                }
                example = tf.train.Example(
                    features=tf.train.Features(feature=features)
                )
                writer.write(example.SerializeToString())


def test_records_are_read_whole_and_scaled(tmp_path):
    _write_records(tmp_path / "data")
    options = _options(
        train_tpu, f"--data_dir={tmp_path / 'data'}", "--first_label=1"
    )
    files = train_tpu.files_of(options.data_dir, "train")
    images, labels = zip(
        *train_tpu.recorded(files, options).as_numpy_iterator(), strict=True
    )
    assert len(images) == 16
    assert images[0].shape == (8, 8, 3)
    assert sorted(set(labels)) == [0, 1, 2]
    low = min(image.min() for image in images)
    high = max(image.max() for image in images)
    assert (low, high) == pytest.approx((-1, 160 / 127.5 - 1), abs=1e-6)


@pytest.mark.parametrize("recorded", [False, True])
def test_shapes_are_static(tmp_path, recorded):
    more = ()
    if recorded:
        _write_records(tmp_path / "data")
        more = (f"--data_dir={tmp_path / 'data'}",)
    for part in train_tpu.data(_options(train_tpu, *more), first_epoch=0):
        images, labels = part.element_spec
        assert images.shape == (4, 8, 8, 3)
        assert labels.shape == (4,)


def test_epochs_are_known_by_their_number(tmp_path):
    _write_records(tmp_path / "data")
    options = _options(
        train_tpu, f"--data_dir={tmp_path / 'data'}", "--epochs=2", "--steps=4"
    )
    train, _ = train_tpu.data(options, first_epoch=0)
    second, _ = train_tpu.data(options, first_epoch=1)
    whole = [images for images, _ in train.as_numpy_iterator()]
    rest = [images for images, _ in second.as_numpy_iterator()]
    np.testing.assert_array_equal(whole[4:], rest)
    assert np.any(np.not_equal(whole[:4], rest))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--patch_size=3",), "--image_size=8.*--patch_size=3"),
        (("--heads=3",), "--width=8.*--heads=3"),
        (("--micro_batches=3",), "--batch_size=4.*--micro_batches"),
        (("--plan=block9_out",), "--plan=block9_out"),
        (("--data_dir=/nowhere",), "/nowhere has no files train"),
        (("--model_dir=/dev/null/x",), "--model_dir=/dev/null/x can't be made"),
    ],
    ids=str,
)
def test_flags_that_do_not_go_together(arguments, words):
    with pytest.raises(comparison.UserError, match=words):
        _run(train_tpu, *arguments)


def test_batches_divide_over_the_replicas(mirrored):
    options = _options(train_tpu, "--batch_size=3")
    with pytest.raises(comparison.UserError, match="--batch_size=3.*2 replic"):
        train_tpu.check(options, mirrored)
