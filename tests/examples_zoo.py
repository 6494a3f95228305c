"""The examples as their tests run them: small, and by their flags."""

import pathlib

import entry_point
import train_digits
import train_text
import train_tpu
from absl import flags

_SMALL = {
    train_digits: ("--depth=3", "--batch_size=8", "--steps=2"),
    train_text: (
        "--sequence_length=16",
        "--layers=1",
        "--width=8",
        "--heads=2",
        "--batch_size=2",
        "--steps=2",
    ),
    train_tpu: (
        "--strategy=one_device",
        "--image_size=8",
        "--patch_size=4",
        "--layers=1",
        "--width=8",
        "--heads=2",
        "--batch_size=4",
        "--steps=2",
        "--epochs=1",
    ),
}
MODULES = list(_SMALL)
ROOT = pathlib.Path(__file__).parent.parent


def options(module, *arguments):
    """Returns the flags of an example, small but for what is given."""
    values = flags.FlagValues()
    module.define_flags(values)
    values(["program", *_SMALL[module], *arguments])
    return values


def run(module, *arguments, seed=0):
    """Trains an example; returns the model and the outcome."""
    values = options(module, f"--seed={seed}", *arguments)
    return module.run(values, entry_point.set_up(values))


def check_steps(model, steps, **window):
    """Steps are updates, for the optimizer and for its schedule."""
    assert model.optimizer.iterations == steps
    schedule = model.optimizer.get_config()["learning_rate"]["config"]
    assert schedule["decay_steps"] == steps
    compiled = model.get_compile_config()
    for name in "gradient_accumulation_steps", "micro_batches":
        assert compiled.get(name) == window.get(name), name


def table(printed):
    """Returns the cells of a printed table by the label of their row."""
    return {
        cells[1].strip(): [cell.strip() for cell in cells[2:5]]
        for line in printed.splitlines()
        if len(cells := line.split("│")) == 6
    }
