"""The vision transformer: its records, training, and going on."""

import dataclasses
import pathlib

import entry_point
import examples_zoo
import numpy as np
import pytest
import tensorflow as tf
import train_tpu

import tfckpt

# Training.


@pytest.mark.parametrize(
    ("window", "more"),
    [
        ({}, ("--plan=none", "--nomixed_precision")),
        ({"gradient_accumulation_steps": 3}, ("--steps_per_execution=4",)),
        ({"micro_batches": 2}, ("--steps_per_execution=1",)),
    ],
    ids=str,
)
def test_vision_trains_on_two_batches(window, more):
    arguments = [f"--{name}={value}" for name, value in window.items()]
    model, outcome = examples_zoo.run(train_tpu, *arguments, *more)
    assert isinstance(model, tfckpt.SegmentedModel)
    examples_zoo.check_steps(model, 2, **window)
    assert 0 < outcome["loss"] < 10
    assert model.get_layer("patches").compute_dtype == (
        "float32" if "--nomixed_precision" in more else "bfloat16"
    )
    assert model.get_layer("logits").compute_dtype == "float32"


@pytest.mark.parametrize(
    ("steps", "most", "expected"), [(6, 4, 3), (7, 4, 1), (3, 20, 3)]
)
def test_calls_end_with_the_epoch(steps, most, expected):
    options = examples_zoo.options(
        train_tpu, f"--steps={steps}", f"--steps_per_execution={most}"
    )
    one = tf.distribute.get_strategy()
    assert train_tpu.batches_a_call(options, one) == expected


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
    with pytest.raises(entry_point.UserError, match=words):
        examples_zoo.run(train_tpu, *arguments)


def test_batches_divide_over_the_replicas(strategy):
    options = examples_zoo.options(train_tpu, "--batch_size=3")
    with pytest.raises(entry_point.UserError, match="batch_size=3.*2 replic"):
        train_tpu.check(options, strategy)


# Going on.


@dataclasses.dataclass
class Finished:
    """A training of two epochs.

    Attributes:
        flags: All but `--model_dir`.
        folder: Its `--model_dir`.
        values: Of all variables of model and optimizer, at the end.
    """

    flags: tuple[str, ...]
    folder: pathlib.Path
    values: list[np.ndarray]


def _values(model):
    variables = (*model.variables, *model.optimizer.variables)
    return [np.asarray(variable) for variable in variables]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    _write_records(folder / "data")
    flags = (
        "--epochs=2",
        "--gradient_accumulation_steps=2",
        f"--data_dir={folder / 'data'}",
        "--first_label=1",
    )
    model, _ = examples_zoo.run(train_tpu, *flags, f"--model_dir={folder}")
    examples_zoo.check_steps(model, 4, gradient_accumulation_steps=2)
    return Finished(flags, folder, _values(model))


def test_vision_goes_on_as_if_never_ended(tmp_path, finished):
    # As a run that was ended after the first epoch leaves it.
    for path in finished.folder.glob("ckpt-1.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "checkpoint").write_text(
        'model_checkpoint_path: "ckpt-1"\n'
        'all_model_checkpoint_paths: "ckpt-1"\n'
    )
    model, _ = examples_zoo.run(
        train_tpu, *finished.flags, f"--model_dir={tmp_path}"
    )
    for a, b in zip(finished.values, _values(model), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_a_program_that_is_done_trains_no_further(
    finished, monkeypatch, capsys
):
    models, run = [], train_tpu.run

    def remember(options, strategy):
        model, figures = run(options, strategy)
        models.append(model)
        return model, figures

    monkeypatch.setattr(train_tpu, "run", remember)
    train_tpu.main(
        examples_zoo.options(
            train_tpu,
            *finished.flags,
            f"--model_dir={finished.folder}",
            "--seed=1",
        )
    )
    # Further steps would change little: the schedule has ended.
    for a, b in zip(finished.values, _values(models[0]), strict=True):
        np.testing.assert_array_equal(a, b)
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == "OneDeviceStrategy, 1 x the model"
    assert second == "Goes on after epoch 2."
    assert last.startswith("Test accuracy: ")


# Weights of other shapes, and weights that are not in the checkpoint.
@pytest.mark.parametrize("other", ["--width=16", "--layers=2"])
def test_checkpoints_of_another_model_are_refused(finished, other):
    with pytest.raises(entry_point.UserError, match="ckpt-2.*another model"):
        examples_zoo.run(
            train_tpu, *finished.flags, f"--model_dir={finished.folder}", other
        )


# Data.


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


@pytest.fixture(params=["made up", "recorded"])
def data_flags(request, tmp_path):
    if request.param == "made up":
        return ()
    _write_records(tmp_path / "data")
    return (f"--data_dir={tmp_path / 'data'}",)


def test_records_are_read_whole_and_scaled(tmp_path):
    _write_records(tmp_path / "data")
    options = examples_zoo.options(
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


def test_shapes_are_static(data_flags):
    options = examples_zoo.options(train_tpu, *data_flags)
    for part in train_tpu.data(options, first_epoch=0):
        images, labels = part.element_spec
        assert images.shape == (4, 8, 8, 3)
        assert labels.shape == (4,)


def test_epochs_are_known_by_their_number(data_flags):
    options = examples_zoo.options(
        train_tpu, *data_flags, "--epochs=2", "--steps=4"
    )
    train, _ = train_tpu.data(options, first_epoch=0)
    second, _ = train_tpu.data(options, first_epoch=1)
    whole = [images for images, _ in train.take(8).as_numpy_iterator()]
    rest = [images for images, _ in second.take(4).as_numpy_iterator()]
    np.testing.assert_array_equal(whole[4:], rest)
    assert np.any(np.not_equal(whole[:4], rest))
