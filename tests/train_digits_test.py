"""The digits' data, network, and training on two batches."""

import re
import sys

import entry_point
import examples_zoo
import keras
import numpy as np
import pytest
import train_digits

import tfckpt

# Data.


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


def test_missing_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(entry_point.UserError, match="pip install scikit-learn"):
        train_digits.load_data("digits")


def test_cifar10_without_a_network(monkeypatch):
    def fail():
        raise Exception("URL fetch failure")

    monkeypatch.setattr(keras.datasets.cifar10, "load_data", fail)
    with pytest.raises(entry_point.UserError, match="CIFAR-10.*URL fetch"):
        train_digits.load_data("cifar10")


def test_cifar10_is_scaled(monkeypatch):
    part = np.full((2, 32, 32, 3), 255, "uint8"), np.array([[3], [4]], "uint8")
    monkeypatch.setattr(
        keras.datasets.cifar10, "load_data", lambda: (part, part)
    )
    (images, labels), _ = train_digits.load_data("cifar10")
    assert (images.dtype, images.max()) == ("float32", 1)
    assert list(labels) == [3, 4]


def test_steps_of_whole_epochs_are_updates():
    options = examples_zoo.options(
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
    with pytest.raises(entry_point.UserError, match="8000 images.*1437"):
        examples_zoo.run(train_digits, "--gradient_accumulation_steps=1000")


# Network.


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


# Training.


@pytest.mark.parametrize(
    "arguments",
    [
        ("--plan=block1_out,block2_out", "--mixed_precision"),
        ("--plan=sqrt", "--jit_compile"),
    ],
    ids=str,
)
def test_digits_train_on_two_batches(arguments):
    model, outcome = examples_zoo.run(train_digits, *arguments)
    assert isinstance(model, tfckpt.SegmentedModel)
    assert model.optimizer.iterations == 2
    assert 0 < outcome["final loss"] < 10
    assert 0 <= outcome["test accuracy"] <= 1


def test_digits_are_trained_to_the_same_weights_with_any_plan():
    plain, _ = examples_zoo.run(train_digits, "--plan=none")
    ours, _ = examples_zoo.run(train_digits, "--plan=2")
    assert not isinstance(plain, tfckpt.SegmentedModel)
    assert isinstance(ours, tfckpt.SegmentedModel)
    for a, b in zip(plain.variables, ours.variables, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5, err_msg=a.path)


def test_the_program_tells_its_accuracy(capsys):
    train_digits.main(examples_zoo.options(train_digits, "--plan=2"))
    *_, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"Test accuracy: \d+\.\d\d%", last)


def test_compare_needs_a_plan():
    options = examples_zoo.options(train_digits, "--plan=none", "--compare")
    with pytest.raises(entry_point.UserError, match="--compare needs a --plan"):
        train_digits.main(options)
