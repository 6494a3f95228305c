"""The text, its model, and training on two batches."""

import re

import entry_point
import examples_zoo
import keras
import numpy as np
import pytest
import train_text

import tfckpt

# Data.


def test_text_is_source_in_the_order_of_paths(tmp_path):
    (tmp_path / "test").mkdir()
    for name in ("b.py", "a.py", "test/c.py", "d.txt"):
        (tmp_path / name).write_text(name)
    assert bytes(train_text.load_text(tmp_path)) == b"a.pyb.py"
    assert bytes(train_text.load_text(tmp_path, size=5)) == b"a.pyb"
    with pytest.raises(entry_point.UserError, match="no Python source under"):
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
    with pytest.raises(entry_point.UserError, match="--sequence_length=100"):
        train_text.windows(text, 100, batch_size=3, seed=1)


# Model.


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
    with pytest.raises(entry_point.UserError, match="--width=9.*--heads=2"):
        train_text.main(examples_zoo.options(train_text, "--width=9"))


def test_a_sample_continues_the_prompt():
    model = train_text.build_model(
        8, layers=1, width=8, heads=2, recompute=False
    )
    found = train_text.sample(model, b"def", length=9, context=8, seed=0)
    assert found.startswith("def")
    assert len(found) > 3


# Training.


def test_text_is_trained_to_the_same_weights():
    plain, outcome = examples_zoo.run(train_text, "--norecompute")
    ours, same = examples_zoo.run(train_text, "--recompute")
    assert not isinstance(plain.get_layer("block1"), tfckpt.Recompute)
    assert isinstance(ours.get_layer("block1"), tfckpt.Recompute)
    assert 0 < outcome["on other text"] < 12
    assert same == pytest.approx(outcome, rel=1e-5)
    for a, b in zip(plain.weights, ours.weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5, err_msg=a.path)


def test_the_program_tells_its_bits_and_writes(capsys):
    options = examples_zoo.options(train_text, "--mixed_precision")
    train_text.main(options)
    printed = capsys.readouterr().out
    bits = re.search(r"^Bits per byte of other text: (\d+\.\d\d)\n", printed, 8)
    assert 0 < float(bits[1]) < 12
    assert printed[bits.end() :].startswith("def ")
    assert keras.config.dtype_policy().name == "mixed_bfloat16"
