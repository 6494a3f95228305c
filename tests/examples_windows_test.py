"""Windows of micro-batches and strategies, in each example."""

import math
import types

import big_batch
import entry_point
import examples_zoo
import measuring
import meter
import numpy as np
import pytest
import tensorflow as tf
import train_digits
import train_text
import train_tpu

from tfckpt import distribute


@pytest.mark.parametrize(
    "window", [{"gradient_accumulation_steps": 3}, {"micro_batches": 2}]
)
def test_steps_of_digits_are_updates(window):
    ((name, value),) = window.items()
    model, _ = examples_zoo.run(train_digits, f"--{name}={value}")
    examples_zoo.check_steps(model, 2, **window)


def test_text_follows_the_big_batch():
    gathered, split = [
        big_batch.flags_of_both(
            measuring.as_dict(
                examples_zoo.options(train_text, "--steps=4", *flags)
            ),
            {"dropout": False},
        )
        for flags in (
            ("--batch_size=8", "--gradient_accumulation_steps=3"),
            ("--batch_size=24", "--micro_batches=3"),
        )
    ]
    # One run with the big batch is the other side of both.
    assert gathered[0] == split[0]
    assert gathered[0]["batch_size"] == 24

    def losses(flags, **window):
        options = types.SimpleNamespace(**flags)
        found = meter.Meter(options.gradient_accumulation_steps or 1)
        strategy = entry_point.set_up(options)
        model, _ = train_text.run(options, strategy, [found], verbose=0)
        if window:
            examples_zoo.check_steps(model, 4, **window)
        return found.losses

    plain = losses(gathered[0])
    assert len(plain) == 4
    for (_, flags), window in (
        (gathered, {"gradient_accumulation_steps": 3}),
        (split, {"micro_batches": 3}),
    ):
        np.testing.assert_allclose(
            losses(flags, **window), plain, rtol=0, atol=1e-4
        )


@pytest.mark.parametrize(
    ("module", "window"),
    [
        (train_digits, "--micro_batches=2"),
        (train_text, "--gradient_accumulation_steps=2"),
        (train_tpu, "--gradient_accumulation_steps=2"),
    ],
)
def test_models_are_made_in_the_scope(module, window, strategy, monkeypatch):
    asked = []

    def get_strategy(name, **arguments):
        asked.append((name, arguments))
        return strategy

    monkeypatch.setattr(distribute, "get_strategy", get_strategy)
    model, outcome = examples_zoo.run(
        module, "--strategy=mirrored", "--num_gpus=2", "--batch_size=4", window
    )
    assert asked == [("mirrored", {"num_gpus": 2, "tpu": None})]
    assert model.distribute_strategy is strategy
    assert model.optimizer.iterations == 2
    for variable in (*model.weights, *model.optimizer.variables):
        assert isinstance(variable.value, tf.distribute.DistributedValues)
    assert all(math.isfinite(value) for value in outcome.values())
