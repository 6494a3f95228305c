"""Flags of the examples, and one line for each mistake."""

import os
import subprocess
import sys

import entry_point
import example_flags
import examples_zoo
import pytest
import train_digits
import train_tpu
from absl import flags

# Mistakes, as the user sees them.


@pytest.mark.parametrize(
    ("program", "argument", "status", "words"),
    [
        ("train_digits", "--plan=bloc1_out", 1, "bloc1_out"),
        ("train_text", "--lenght=5", 2, "'lenght'"),
        ("train_tpu", "--tpu=grpc://127.0.0.1:1", 1, "nothing answers"),
    ],
)
def test_mistakes_are_answered_in_one_line(program, argument, status, words):
    done = subprocess.run(
        [sys.executable, f"examples/{program}.py", argument],
        cwd=examples_zoo.ROOT,
        env={**os.environ, "PYTHONPATH": str(examples_zoo.ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{program}.py: ")
    assert words in line


@pytest.mark.parametrize(
    ("argument", "status", "line"),
    [
        ("steps=3", 2, "unexpected argument 'steps=3': flags begin with --"),
        ("--strategy=tpus", 2, "--strategy=tpus"),
        ("--micro_batches=2 --gradient_accumulation_steps=2", 2, "not both"),
        ("--steps=3", 1, "steps 3 are too few"),
    ],
)
def test_run_ends_with_a_line(monkeypatch, capsys, argument, status, line):
    def main(options):
        raise entry_point.UserError(f"steps {options.steps}\nare too few")

    monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())
    monkeypatch.setattr(sys, "argv", ["a/some.py", *argument.split()])
    with pytest.raises(SystemExit) as ended:
        entry_point.run(train_tpu.define_flags, main)
    assert ended.value.code == status
    printed = capsys.readouterr().err
    assert printed.startswith("some.py: ")
    assert printed.count("\n") == 1
    assert line in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategy=auto", "--tpu=local"], "none on this machine"),
        (["--strategy=mirrored", "--num_gpus=99"], "num_gpus=99"),
    ],
    ids=str,
)
def test_devices_that_are_not_there(arguments, words):
    options = examples_zoo.options(train_tpu, *arguments)
    with pytest.raises(entry_point.UserError, match=words):
        entry_point.set_up(options)


# Flags.


@pytest.mark.parametrize("module", examples_zoo.MODULES)
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
        examples_zoo.options(module, argument)


@pytest.mark.parametrize(
    "argument", ["--depth=2", "--epochs=0", "--dataset=mnist"]
)
def test_bad_flags_of_digits_are_refused(argument):
    with pytest.raises(flags.Error, match=argument[2:]):
        examples_zoo.options(train_digits, argument)


@pytest.mark.parametrize("module", examples_zoo.MODULES)
def test_both_windows_are_refused(module):
    with pytest.raises(flags.Error, match="not both") as caught:
        examples_zoo.options(
            module, "--micro_batches=2", "--gradient_accumulation_steps=2"
        )
    for name in "micro_batches", "gradient_accumulation_steps":
        assert name in str(caught.value)


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
    assert example_flags.parse_plan(text) == plan


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
    options = examples_zoo.options(train_digits, f"--plan={plan}")
    with pytest.raises(
        entry_point.UserError, match=f"--plan={plan}: .*{words}"
    ):
        train_digits.main(options)
