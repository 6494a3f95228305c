"""`benchmarks/networks.py`: it measures what it says, here at tiny sizes."""

import io
import json
import pathlib

import network_results as results_lib
import network_steps as steps
import network_tables as tables
import network_zoo as zoo
import networks
import numpy as np
import pytest
import rich.console
from absl import flags

from tfckpt import memory

_QUICK = ("chain", "transformer", "u_net", "psp_net", "deep_residual")
_EPS = float(np.finfo(np.float32).eps)


def _options(*arguments):
    values = flags.FlagValues()
    networks.define_flags(values)
    values(["program", *arguments])
    return values


def _job(plan, measure, batch_size=None, network="chain", size="full"):
    return results_lib.Job(network, plan, measure, size, batch_size)


def _made(tmp_path, network, plan="sqrt", **sizes):
    """Plans a tiny network; returns it, its sizes and where the plan is."""
    sizes = dict(zoo.NETWORKS[network].tiny) | sizes
    path = tmp_path / f"{network}.json"
    steps.make_plan(network, sizes, plan, str(path))
    return network, sizes, f"{plan}={path}"


# --------------------------------------------------------------------------
# The networks
# --------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.NETWORKS)
def test_every_network_can_be_made_twice_alike(name):
    network = zoo.NETWORKS[name]
    first, second = (zoo.make_model(name, network.tiny) for _ in range(2))
    assert [layer.name for layer in first.layers] == [
        layer.name for layer in second.layers
    ]
    assert {*network.tiny} == {*network.full} == {*network.compile}
    assert all(size for size in first.output.shape[1:])


@pytest.mark.parametrize("blocks", [1, 3])
def test_layers_of_the_deep_residual_network(blocks):
    sizes = {"size": 8, "width": 2, "blocks": blocks}
    model = zoo.make_model("deep_residual", sizes)
    layers = [
        layer
        for layer in model.layers
        if type(layer).__name__ in ("Conv2D", "Dense")
    ]
    # Each stage has one convolution more, in its first shortcut.
    assert len(layers) == 9 * blocks + 2 + 3
    assert 9 * zoo.NETWORKS["deep_residual"].full["blocks"] + 2 == 1001


def test_the_u_net_doubles_its_channels_at_each_level():
    model = zoo.make_model("u_net", zoo.NETWORKS["u_net"].full)
    channels = {
        layer.filters
        for layer in model.layers
        if type(layer).__name__ == "Conv2D" and layer.kernel_size == (3, 3)
    }
    assert channels == {32, 64, 128, 256, 512}


# --------------------------------------------------------------------------
# What runs in fresh processes
# --------------------------------------------------------------------------


@pytest.mark.parametrize("network", _QUICK)
def test_gradients_are_those_of_the_plain_model(tmp_path, network):
    found = steps.gradient_difference(*_made(tmp_path, network))
    assert found["largest"] > 0
    assert found["difference"] <= 32 * _EPS * found["largest"]


def test_gradients_of_other_functions_differ(tmp_path, monkeypatch):
    subject = _made(tmp_path, "chain")
    follow = steps._follow

    def scaled(model, path):
        call = follow(model, path)
        return call if path is None else lambda x: 1.01 * call(x)

    monkeypatch.setattr(steps, "_follow", scaled)
    found = steps.gradient_difference(*subject)
    # Of the square of 1.01 times the output.
    expected = 1.01**2 - 1
    assert found["difference"] == pytest.approx(
        expected * found["largest"], rel=1e-3
    )


def test_recompute_grad_follows_a_plan_of_ours(tmp_path):
    network, sizes, path = _made(tmp_path, "chain")
    path = path.replace("sqrt=", "recompute_grad=")
    found = steps.gradient_difference(network, sizes, path)
    assert found["largest"] > 0
    assert found["difference"] <= 32 * _EPS * found["largest"]


def test_what_is_noted_of_a_plan(tmp_path):
    sizes = zoo.NETWORKS["chain"].tiny
    noted = {
        plan: steps.make_plan("chain", sizes, plan, str(tmp_path / plan))
        for plan in ("sqrt", "budget.70", "min_memory")
    }
    assert (tmp_path / "budget.70").exists()
    digests = {each["digest"] for each in noted.values()}
    assert len(digests) > 1
    half = noted["budget.70"]
    assert half["peak_bytes"] <= 0.7 * half["plain_bytes"]
    assert half["calls"] == sizes["depth"]
    again = steps.make_plan("chain", sizes, "sqrt", str(tmp_path / "again"))
    assert again["digest"] == noted["sqrt"]["digest"]


@pytest.mark.alone
def test_process_memory_is_that_of_the_tensors(tmp_path):
    # 8 MiB for each layer's output, 0.25 MiB for its weights.
    network, sizes, path = _made(
        tmp_path, "chain", batch_size=8192, depth=16, width=256
    )

    def warm(path):
        return memory.measure_in_process(
            steps.process_peak,
            network,
            sizes,
            path,
            environment=networks._NO_POOL,
        )["warm"]

    plain = warm(None)
    outputs = 16 * 8 * 2**20
    # Besides: the gradients of three of them, of weights, and momentum.
    assert outputs < plain < outputs + (3 * 8 + 10) * 2**20
    assert warm(path) < 0.7 * plain


def test_the_compiler_takes_less_for_a_plan(tmp_path):
    network, sizes, path = _made(tmp_path, "chain", batch_size=1024)
    plain, ours = (
        steps.compiled(network, sizes, each, "cpu") for each in (None, path)
    )
    assert 0 < ours["bytes"] < plain["bytes"]


def test_seconds_of_both(tmp_path):
    found = steps.step_seconds(*_made(tmp_path, "chain"), rounds=3)
    assert len(found["plain"]) == len(found["ours"]) == 3
    assert min(found["plain"] + found["ours"]) > 0


# --------------------------------------------------------------------------
# Jobs and results
# --------------------------------------------------------------------------


def test_jobs_come_after_their_plans_and_time_comes_last():
    jobs = results_lib.jobs_of(
        ["chain", "resnet50"],
        ["none", "sqrt", "recompute_grad"],
        ["process", "time", "v5e"],
    )
    assert len(jobs) == len(set(jobs))
    for number, job in enumerate(jobs):
        assert job.source is None or job.source in jobs[:number]
    measures = [job.measure for job in jobs]
    assert set(measures[measures.index("time") :]) == {"time"}
    # The plain step at batch size 1 is what is taken off.
    assert _job("none", "process", 1) in jobs
    assert _job("none", "process", 1).sizes["batch_size"] == 1
    # tf.recompute_grad can't follow a plan through a residual network.
    assert _job("recompute_grad", "process") in jobs
    assert _job("recompute_grad", "process", network="resnet50") not in jobs
    # Compilers get smaller images, and a plan for those.
    small = _job("sqrt", "v5e", network="resnet50", size="compile")
    assert small in jobs
    assert small.source.size == "compile"
    assert small.sizes["size"] < zoo.NETWORKS["resnet50"].full["size"]
    # Against itself a plain step has nothing to show.
    assert _job("none", "time") not in jobs


def _record(results, job, **entries):
    return {
        "job": {
            "network": job.network,
            "plan": job.plan,
            "measure": job.measure,
            "size": job.size,
            "batch_size": job.batch_size,
        },
        "sizes": job.sizes,
        "digest": results.digest(job),
        **entries,
    }


def _filled(path, values):
    """Results in a file, from values by job."""
    results = results_lib.Results(path)
    for job, value in values.items():
        results.add(_record(results, job, value=value))
    return results


def test_results_outlive_the_process(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    plan, job = _job("sqrt", "prediction"), _job("sqrt", "process")
    _filled(path, {plan: {"digest": "a"}, job: {"warm": [1]}})
    results = results_lib.Results(path)
    assert results.value(job) == {"warm": [1]}
    assert results.value(_job("none", "process")) is None
    # Another plan, and what was measured under the last one is stale.
    results.add(_record(results, plan, value={"digest": "b"}))
    assert results_lib.Results(path).value(job) is None


def test_a_failure_hides_nothing(tmp_path):
    job, other = _job("none", "process"), _job("none", "pool")
    results = _filled(tmp_path / "r.jsonl", {job: {"warm": [1]}})
    for each in (job, other):
        results.add(_record(results, each, error="killed"))
    results = results_lib.Results(tmp_path / "r.jsonl")
    assert results.value(job) == {"warm": [1]}
    assert results.value(other) is None
    assert results.failures() == [(other, "killed")]


def test_results_of_other_sizes_do_not_count(tmp_path):
    job = _job("none", "process")
    results = results_lib.Results(tmp_path / "r.jsonl")
    record = _record(results, job, value={"warm": [1]})
    results.add(record | {"sizes": job.sizes | {"depth": 1}})
    assert results.value(job) is None


def _run(path, *arguments):
    networks.main(_options(f"--results={path}", "--network=chain", *arguments))


@pytest.fixture
def measured(monkeypatch):
    """The jobs that `networks.measure` was asked for; figures are made up."""
    asked = []

    def measure(job, path, **options):
        asked.append((job, path, options))
        if job.batch_size == 1:
            raise memory.MeasurementError("killed for want of memory")
        if job.measure == "prediction":
            pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
            pathlib.Path(path).write_text("a plan")
            return {"digest": "a"} | dict.fromkeys(steps.EXPECTED, 1)
        return {"warm": [8], "cold": [9]}

    monkeypatch.setattr(networks, "measure", measure)
    return asked


def test_what_is_done_is_not_done_again(tmp_path, measured, capsys):
    path = tmp_path / "results.jsonl"
    arguments = "--plan=none,sqrt", "--measure=process", "--repeats=3"
    _run(path, *arguments)
    jobs = [job for job, *_ in measured]
    assert jobs == [
        _job("none", "process", 1),
        _job("none", "process"),
        _job("sqrt", "prediction"),
        _job("sqrt", "process"),
    ]
    plan, ours = measured[2:]
    assert ours[1] == f"sqrt={plan[1]}"
    assert ours[2] == {"repeats": 3, "rounds": 5, "timeout": 7200}
    # The failure was recorded, and the run went on.
    assert "failed: killed for want" in capsys.readouterr().out
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert ["error" in line for line in lines] == [True, False, False, False]
    assert all(line["versions"]["keras"] for line in lines)
    measured.clear()
    _run(path, *arguments)
    assert [job for job, *_ in measured] == jobs[:1]
    assert "Failed: chain, none, process, batch" in capsys.readouterr().out
    measured.clear()
    _run(path, *arguments, "--again")
    # Plans are made again only when they are asked for.
    assert [job for job, *_ in measured] == [jobs[0], jobs[1], jobs[3]]
    measured.clear()
    _run(path, *arguments, "--table")
    assert not measured


def test_what_has_no_plan_is_skipped(tmp_path, monkeypatch, capsys):
    def fail(job, *args, **options):
        raise memory.MeasurementError("no plan is so small")

    monkeypatch.setattr(networks, "measure", fail)
    path = tmp_path / "results.jsonl"
    _run(path, "--plan=budget.01", "--measure=gradients")
    assert "gradients: skipped" in capsys.readouterr().out
    assert len(path.read_text().splitlines()) == 1


def test_an_interrupted_run_keeps_what_is_done(tmp_path, measured, monkeypatch):
    measure = networks.measure

    def stopped(job, *args, **options):
        if job.plan == "sqrt":
            raise KeyboardInterrupt
        return measure(job, *args, **options)

    monkeypatch.setattr(networks, "measure", stopped)
    path = tmp_path / "results.jsonl"
    with pytest.raises(SystemExit) as caught:
        _run(path, "--plan=none,sqrt", "--measure=process")
    assert caught.value.code == 130
    assert results_lib.Results(path).value(_job("none", "process"))


def test_a_measurement_in_fresh_processes(tmp_path):
    path = str(tmp_path / "plan.json")
    options = {"repeats": 2, "rounds": 1, "timeout": 300}
    job = _job("sqrt", "prediction", size="tiny")
    assert networks.measure(job, path, **options)["segments"] > 1
    job = _job("sqrt", "process", size="tiny")
    found = networks.measure(job, f"sqrt={path}", **options)
    assert len(found["warm"]) == len(found["cold"]) == 2
    with pytest.raises(memory.MeasurementError, match="not done after"):
        networks.measure(job, f"sqrt={path}", **options | {"timeout": 0.1})


@pytest.mark.parametrize(
    ("measure", "figures", "environment"),
    [("process", 3, networks._NO_POOL), ("pool", 3, None), ("time", 1, None)],
)
def test_only_process_memory_is_taken_without_the_pool(
    monkeypatch, measure, figures, environment
):
    given = []

    def fresh(*args, environment=None, timeout=None):
        given.append((environment, timeout))
        return {"warm": 1, "cold": 2}

    monkeypatch.setattr(networks, "_fresh", fresh)
    options = {"repeats": 3, "rounds": 1, "timeout": 9}
    networks.measure(_job("sqrt", measure), "sqrt=x", **options)
    assert given == [(environment, 9)] * figures


@pytest.mark.parametrize(
    "argument",
    [
        "--measure=speed",
        "--measure=",
        "--plan=fast",
        "--network=vgg",
        "--plan=",
    ],
)
def test_bad_flags(argument):
    with pytest.raises(flags.Error, match=argument[2:6]):
        _options(argument)


# --------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------

_MIB = 2**20


def _process(mib, cold=0):
    return {"warm": [mib * _MIB], "cold": [(mib + cold) * _MIB]}


def _chain_results(path, seconds=(1, 2, 3)):
    """Figures of the chain, whose batch size is 4096."""
    return _filled(
        path,
        {
            _job("none", "process", 1): _process(10),
            _job("none", "process"): _process(10 + 4095),
            _job("sqrt", "prediction"): {
                "digest": "a",
                "peak_bytes": 1001 * _MIB,
                "plain_bytes": 4000 * _MIB,
                "peak_above_gradients": 1001 * _MIB,
                "plain_above_gradients": 4000 * _MIB,
                "extra_time": 0.25,
                "extra_flops": 30,
                "step_flops": 100,
            },
            _job("sqrt", "process"): {
                "warm": [n * _MIB for n in (2000, 829, 100)],
                "cold": [n * _MIB for n in (5000, 4105, 100)],
            },
            _job("sqrt", "time"): {"plain": [1, 1, 1], "ours": [*seconds]},
            _job("sqrt", "gradients"): {
                "difference": 64 * _EPS,
                "largest": 2.0,
            },
            _job("none", "cpu", size="compile"): {"bytes": 100 * _MIB},
            _job("sqrt", "prediction", size="compile"): {"digest": "b"},
            _job("sqrt", "cpu", size="compile"): {"bytes": 36 * _MIB},
        },
    )


def test_a_row_is_worked_out_from_the_results(tmp_path):
    results = _chain_results(tmp_path / "r.jsonl")
    row = tables.row_of(results, "chain", "sqrt")
    # The medians, less 10.
    assert row.memory == 819 * _MIB
    assert row.ratio == 819 / 4095
    assert row.cold_ratio == 1
    assert row.pool_ratio is None
    # An example takes 1 MiB.
    assert row.peak == 820 * _MIB
    assert row.error == pytest.approx(1001 / 820 - 1)
    assert row.predicted_ratio == 1001 / 4000
    assert row.time == (2, 1, 3)
    assert (row.predicted_time, row.flops) == (1.25, 1.3)
    assert row.gradients == pytest.approx(32)
    assert row.compiled == {"cpu": (36 * _MIB, 0.36)}
    plain = tables.row_of(results, "chain", "none")
    assert (plain.ratio, plain.peak) == (1, 4096 * _MIB)
    assert plain.error == pytest.approx(4000 / 4096 - 1)


def test_bars_are_held_against_the_figures(tmp_path):
    results = _chain_results(tmp_path / "r.jsonl", seconds=[1.3, 1.3, 1.3])
    row = tables.row_of(results, "chain", "sqrt")
    process, cpu = tables.verdicts_of([row])
    assert (process.figure, process.text) == ("process", "met")
    assert (process.bar, process.time_bar) == (0.30, 1.35)
    assert (cpu.figure, cpu.bar, cpu.text) == ("cpu", 0.35, "MISSED")


def _row(plan, ratio, time=None, network="resnet50"):
    return tables.Row(
        network, plan, ratio=ratio, time=time and (time, time, time)
    )


@pytest.mark.parametrize(
    ("rows", "plan", "text"),
    [
        # The quickest of those that are small enough stands for them.
        ([("sqrt", 0.2, 1.4), ("min_memory", 0.3, 1.3)], "min_memory", "met"),
        ([("sqrt", 0.2, 1.4)], "sqrt", "MISSED by time"),
        ([("sqrt", 0.35, None)], "sqrt", "met; time not measured"),
        # The smallest, where none is.
        (
            [("sqrt", 0.5, 1.1), ("min_memory", 0.4, 1.3)],
            "min_memory",
            "MISSED",
        ),
        # Others' plans and plain steps don't count.
        (
            [("sqrt", 0.5, 1), ("chen", 0.2, 1), ("none", 0, 1)],
            "sqrt",
            "MISSED",
        ),
    ],
)
def test_one_plan_has_to_meet_a_bar(rows, plan, text):
    verdict, *_ = tables.verdicts_of([_row(*row) for row in rows])
    assert (verdict.row.plan, verdict.text) == (plan, text)


def test_a_budget_has_its_own_bar():
    rows = [_row("sqrt", 0.3, 1.0), _row("budget.40", 0.45, 1.05)]
    found = {each.figure: each.text for each in tables.verdicts_of(rows)}
    assert found == {"process": "met", "budget.40": "MISSED"}


def test_predictions_are_summed_up():
    rows = [
        tables.Row("chain", plan, peak=100.0, predicted=predicted)
        for plan, predicted in (("none", 105), ("sqrt", 91), ("chen", 126))
    ]
    text = tables.prediction_summary(rows)
    assert "of 3 steps: median error 9.0% (bar 10%: met)" in text
    assert "worst 26.0% (bar 25%: MISSED), of chain, chen." in text
    assert tables.prediction_summary([tables.Row("chain", "sqrt")]) is None


def test_tables_are_printed_whole(tmp_path, capsys):
    results = _chain_results(tmp_path / "r.jsonl")
    console = rich.console.Console(file=io.StringIO(), width=60)
    tables.show(results, ["chain", "u_net"], ["sqrt"], console)
    printed = console.file.getvalue()
    assert "0.200" in printed
    assert "1.00 to 3.00" in printed
    assert "MISSED by time" in printed
    assert "…" not in printed
    assert "median error" in printed
    tables.show(results, ["chain"], ["sqrt"], console, markdown=True)
    lines = capsys.readouterr().out.splitlines()
    assert "| chain | 4096 x 1024 | none | 4,095 | 1.000 |" in lines[5]
    table = [line for line in lines if line.startswith("|")][:4]
    assert len({line.count("|") for line in table}) == 1
