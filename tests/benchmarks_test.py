"""`benchmarks/memory.py`: it measures what it says, here at tiny sizes."""

import json

import memory as benchmark
import numpy as np
import pytest
import tensorflow as tf
from absl import flags

import tfckpt

_TINY = {
    "chain": {"batch_size": 512, "depth": 6, "width": 64, "segments": 3},
    "resnet": {
        "batch_size": 4,
        "depth": 3,
        "width": 4,
        "size": 8,
        "segments": 3,
    },
    "transformer": {
        "batch_size": 2,
        "depth": 3,
        "width": 16,
        "size": 8,
        "segments": 3,
    },
}


def _options(*arguments):
    values = flags.FlagValues()
    benchmark.define_flags(values)
    values(["program", *arguments])
    return values


@pytest.mark.parametrize(
    ("depth", "segments", "blocks"),
    [
        (36, 6, [5, 11, 17, 23, 29]),
        (5, 2, [1]),
        (5, 1, []),
        (2, 9, [0]),
    ],
)
def test_boundaries(depth, segments, blocks):
    found = benchmark.boundaries({"depth": depth, "segments": segments})
    assert found == [f"block{block}" for block in blocks]


@pytest.mark.parametrize("network", _TINY)
def test_all_methods_have_the_same_gradients(network):
    sizes = _TINY[network]
    model = benchmark.make_model(network, sizes)
    x = tf.random.stateless_normal(
        (sizes["batch_size"], *model.input.shape[1:]), (1, 2)
    )
    plain, *others = (
        benchmark.gradient_step(
            benchmark.with_method(model, method, sizes), model
        )(x)
        for method in ("none", "recompute_grad", "tfckpt")
    )
    largest = max(np.abs(gradient).max() for gradient in plain)
    assert largest > 0
    for gradients in others:
        for a, b in zip(plain, gradients, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * largest)


def test_tfckpt_recomputes_the_same_segments():
    sizes = _TINY["chain"]
    model = benchmark.make_model("chain", sizes)
    assert not isinstance(model, tfckpt.SegmentedModel)
    calls = []
    model.get_layer("block0").activation = lambda x: (
        calls.append(0) or tf.tanh(x)
    )
    model.get_layer("block5").activation = lambda x: (
        calls.append(5) or tf.tanh(x)
    )
    counts = {}
    for method in ("none", "recompute_grad", "tfckpt"):
        calls.clear()
        step = benchmark.gradient_step(
            benchmark.with_method(model, method, sizes), model
        )
        step(tf.ones((2, 64)))
        counts[method] = calls.count(0), calls.count(5)
    # The first segment twice, the last one once.
    assert counts == {
        "none": (1, 1),
        "recompute_grad": (2, 1),
        "tfckpt": (2, 1),
    }


@pytest.mark.parametrize("network", _TINY)
def test_plan(network):
    figures = {
        method: benchmark.planned_bytes(network, method, _TINY[network])
        for method in ("none", "tfckpt")
    }
    assert figures["none"] > 0
    if network == "chain":
        assert figures["tfckpt"] < 0.9 * figures["none"]


def test_seconds_of_all_methods():
    seconds = benchmark.step_seconds("chain", _TINY["chain"], repeats=2)
    assert list(seconds) == ["none", "recompute_grad", "tfckpt"]
    assert all(len(own) == 2 and min(own) > 0 for own in seconds.values())


@pytest.mark.alone
def test_process_memory_of_a_graph_step_falls():
    # 8 MiB for each layer's output.
    sizes = {"batch_size": 8192, "depth": 16, "width": 256, "segments": 4}
    plain, _, ours = benchmark.measure_process("chain", sizes)
    assert plain["figure"] > 16 * 8 * 2**20
    assert ours["ratio"] < 0.7


def test_figures_are_relative_and_above_the_smallest_step(monkeypatch):
    asked = []

    def fresh(function, network, *rest):
        asked.append((function, rest))
        if function == "step_seconds":
            return {
                "none": [1, 2, 3],
                "recompute_grad": [2, 2, 3],
                "tfckpt": [1.5, 2, 6],
            }
        method, sizes = rest
        if sizes["batch_size"] == 1:
            return 10
        return {"none": 110, "recompute_grad": 60, "tfckpt": 35}[method]

    monkeypatch.setattr(benchmark, "_fresh", fresh)
    records = benchmark.records_of(
        "chain", _options_sizes(), ["process", "plan", "time"], repeats=3
    )
    ours = {r["measure"]: r for r in records if r["method"] == "tfckpt"}
    assert ours["process"]["figure"] == 25
    assert ours["process"]["ratio"] == 0.25
    assert ours["plan"]["ratio"] == 35 / 110
    # Within each round: 1.5, 1, 2.
    assert ours["time"]["ratio"] == 1.5
    assert ours["time"]["spread"] == [1, 2]
    assert [ours[m]["bar"] for m in ours] == [0.30, 0.35, 1.35]
    assert all(r["bar"] is None for r in records if r["method"] == "none")
    small = benchmark.records_of("chain", _TINY["chain"], ["plan"], repeats=1)
    assert {record["bar"] for record in small} == {None}


def _options_sizes():
    return {"batch_size": 4096, "depth": 36, "width": 1024, "segments": 6}


def _fake_records(network, sizes, measures, **_):
    return [
        {
            "network": network,
            "measure": measure,
            "method": method,
            "sizes": sizes,
            "figure": ratio * 2**30,
            "ratio": ratio,
            "bar": 0.3 if method == "tfckpt" else None,
        }
        | ({"spread": [0.5, 1.5]} if measure == "time" else {})
        for measure in measures
        for method, ratio in (
            ("none", 1),
            ("recompute_grad", 0.5),
            ("tfckpt", 0.25 if measure == "process" else 0.4),
        )
    ]


def test_table_json_and_picture(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(benchmark, "records_of", _fake_records)
    monkeypatch.setenv("COLUMNS", "100")
    paths = tmp_path / "figures.json", tmp_path / "figures.png"
    benchmark.main(
        _options("--network=chain", f"--json={paths[0]}", f"--plot={paths[1]}")
    )
    printed = capsys.readouterr().out
    assert "0.30 met" in printed
    assert "0.30 MISSED" in printed
    assert "0.500 to 1.500" in printed
    records = json.loads(paths[0].read_text())
    assert len(records) == 9
    assert records[0]["sizes"] == _options_sizes()
    assert paths[1].read_bytes().startswith(b"\x89PNG")


def test_a_picture_needs_matplotlib(monkeypatch):
    monkeypatch.setattr(
        benchmark.importlib.util, "find_spec", lambda name: None
    )
    with pytest.raises(SystemExit, match=r"pip install .*tfckpt\[plot\]"):
        benchmark.main(_options("--plot=x.png"))


def test_a_failure_says_of_what(monkeypatch):
    def fail(*args, **options):
        raise tfckpt.memory.MeasurementError("killed")

    monkeypatch.setattr(benchmark, "records_of", fail)
    with pytest.raises(SystemExit, match="resnet could not be .*killed"):
        benchmark.main(_options("--network=resnet"))


@pytest.mark.parametrize(
    "argument", ["--measure=speed", "--measure=", "--depth=0", "--network=vgg"]
)
def test_bad_flags(argument):
    with pytest.raises(flags.Error, match=argument[2:7]):
        _options(argument)


def test_sizes_by_flag():
    options = _options("--depth=4", "--network=chain", "--network=resnet")
    assert options.network == ["chain", "resnet"]
    assert (options.depth, options.width) == (4, None)
