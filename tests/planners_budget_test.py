"""Budgets: never broken, never dearer with more, and the best there is."""

import dataclasses
import itertools
import time

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import optimize, sparse

from tests import costs_zoo
from tfckpt import plan, planners, simulator
from tfckpt.planners import budgets, search, tables
from tfckpt.simulator import index as index_lib
from tfckpt.simulator import walk as walk_lib

_NETWORKS = {
    "conv_chain": costs_zoo.conv_chain(8),
    "resnet": costs_zoo.resnet(8),
    "unet": costs_zoo.unet(3),
    "densenet": costs_zoo.densenet(2, 4),
    "transformer": costs_zoo.transformer(6),
}
_FRACTIONS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@pytest.fixture(params=_NETWORKS)
def network(request):
    return _NETWORKS[request.param]


def _without_products(model):
    return dataclasses.replace(
        model,
        calls=tuple(
            dataclasses.replace(call, product_bytes=0) for call in model.calls
        ),
    )


def _all_plans(model, choices):
    """Yields all flat plans: every cut, every treatment of each segment."""
    index = index_lib.Index(model)
    length = index.length
    made = tables.Tables(index, list(range(length + 1)))
    again = [made.recomputed(choice).again for choice in choices]
    for ends in itertools.product([False, True], repeat=length - 1):
        ends = [*(i + 1 for i, end in enumerate(ends) if end), length]
        options = []
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            ways = [(0, index_lib.Part(start, end, False))]
            inside = model.calls[start:end]
            if end < length and all(c.recomputable for c in inside):
                for number, choice in enumerate(choices):
                    kept = frozenset(
                        i
                        for i in choice
                        if start <= i < end and again[number][i] <= end
                    )
                    part = index_lib.Part(start, end, True, kept)
                    ways.append((number + 1, part))
            options.append(ways)
        yield from itertools.product(*options)


def _added_up(ways, all_tables):
    persisting, peak, time_ = 0, 0, 0.0
    for number, part in ways:
        table, here = all_tables[number], (part.start, part.stop)
        peak = max(peak, persisting + int(table.peak[here]))
        persisting += int(table.persisting[here])
        time_ += float(table.time[here])
    return peak, time_


@hypothesis.given(costs_zoo.graphs(most=5))
@hypothesis.settings(max_examples=40)
def test_brute_force_over_all_flat_plans(model):
    """As good as the tables, which are exact or above; never below the walk."""
    choices = budgets.choices(model)
    finder = budgets.Finder(model, choices)
    index = finder.simulator.index
    made = tables.Tables(index, list(range(index.length + 1)))
    every = [made.alone(), *map(made.recomputed, choices)]
    found, walked = [], []
    for ways in _all_plans(model, choices):
        found.append(_added_up(ways, every))
        walk = walk_lib.Walk(index, [part for _, part in ways])
        walked.append((walk.peak, walk.extra_time))
    least = min(peak for peak, _ in walked)
    assert least <= finder.least <= min(peak for peak, _ in found)
    peaks = sorted({peak for peak, _ in found})
    for size in peaks[:: max(1, len(peaks) // 5)]:
        best = min(time_ for peak, time_ in found if peak <= size)
        real = min(time_ for peak, time_ in walked if peak <= size)
        got = finder.simulator.walk(finder.made(size))
        assert got.peak <= size
        assert got.extra_time <= best + 1e-9
        assert got.extra_time >= real - 1e-9


@pytest.mark.parametrize(
    "model",
    [
        costs_zoo.conv_chain(2),
        costs_zoo.chain(8, size=8, saved=3, gradient=8),
    ],
    ids=["conv_chain", "chain"],
)
def test_brute_force_by_the_simulator(model):
    """On regular networks the planner finds the best of all flat plans."""
    choices = budgets.choices(model)
    index = index_lib.Index(model)
    walked = {}
    for ways in _all_plans(model, choices):
        walk = walk_lib.Walk(index, [part for _, part in ways])
        known = walked.get(walk.peak, np.inf)
        walked[walk.peak] = min(known, walk.extra_time)
    step = model.step_time
    least = min(walked)
    for size in sorted(walked):
        best = min(time_ for peak, time_ in walked.items() if peak <= size)
        made = planners.budget(model, size)
        assert made.prediction.peak_bytes <= size
        assert made.prediction.extra_time == pytest.approx(best / step)
        assert made.prediction.least_bytes == least
    with pytest.raises(plan.PlanError):
        planners.budget(model, least - 1)


def test_brute_force_over_a_residual_block():
    """Nearly the best where a tensor passes a segment by.

    Whether it is held meanwhile depends on where the cut before lay.
    """
    model = costs_zoo.residual_block()
    index = index_lib.Index(model)
    walks = [
        walk_lib.Walk(index, [part for _, part in ways])
        for ways in _all_plans(model, budgets.choices(model))
    ]
    least = min(walk.peak for walk in walks)
    found = planners.min_memory(model).prediction.least_bytes
    assert least <= found <= 1.01 * least
    for size in sorted({walk.peak for walk in walks if walk.peak >= found}):
        best = min(walk.extra_time for walk in walks if walk.peak <= size)
        made = planners.budget(model, size).prediction
        assert made.extra_time >= best / model.step_time - 1e-12
        assert made.extra_time <= best / model.step_time + 0.05


@hypothesis.given(costs_zoo.graphs(most=12), st.floats(0, 1))
@hypothesis.settings(max_examples=60)
def test_every_plan_is_within_its_budget(model, fraction):
    least = planners.min_memory(model).prediction.least_bytes
    top = simulator.Simulator(model).plain.peak
    size = least + int(fraction * (top - least))
    made = planners.budget(model, size)
    walk = simulator.Simulator(model).walk(made)
    assert walk.peak == made.prediction.peak_bytes <= size
    assert not made.segments[-1].recomputed


def test_more_budget_never_costs_more_time(network):
    plain = simulator.Simulator(network).plain.peak
    least = planners.min_memory(network).prediction.least_bytes
    before = np.inf
    for size in np.linspace(least, plain, 25).astype(int):
        predicted = planners.budget(network, int(size)).prediction
        assert predicted.peak_bytes <= size
        assert predicted.extra_time <= before + 1e-12
        before = predicted.extra_time
    assert before == 0


def test_more_budget_never_costs_more_time_on_the_grid(monkeypatch):
    monkeypatch.setattr(search, "EXACT", 8)
    model = _NETWORKS["resnet"]
    finder = budgets.Finder(model, budgets.choices(model))
    times = []
    for size in np.linspace(finder.least, finder.simulator.plain.peak, 25):
        walk = finder.simulator.walk(finder.made(int(size)))
        assert walk.peak <= size
        times.append(walk.extra_time)
    assert times == sorted(times, reverse=True)
    # Rounding costs little.
    for size, time_ in zip(
        np.linspace(finder.least, finder.simulator.plain.peak, 25),
        times,
        strict=True,
    ):
        exact = planners.budget(model, int(size)).prediction.extra_time
        assert time_ / model.step_time <= exact + 0.01


def test_no_recomputation_where_there_is_room(network):
    plain = simulator.Simulator(network).plain.peak
    made = planners.budget(network, plain)
    assert [s.recomputed for s in made.segments] == [False]
    assert made.prediction.extra_time == 0


def test_kept_products_only_help(network):
    with_, without = network, _without_products(network)
    plain = simulator.Simulator(network).plain.peak
    least = planners.min_memory(without).prediction.least_bytes
    assert planners.min_memory(with_).prediction.least_bytes <= least
    gains = []
    for fraction in _FRACTIONS:
        size = int(fraction * plain)
        if size >= least:
            gains.append(
                planners.budget(without, size).prediction.extra_time
                - planners.budget(with_, size).prediction.extra_time
            )
    assert min(gains) >= -1e-12
    # Where every convolution is a call of its own and its output a cut of one
    # tensor, segments alone do as well.
    if network is not _NETWORKS["conv_chain"]:
        assert max(gains) > 0


def test_kept_products_help_where_no_cut_does():
    # Convolution, normalization and activation in one call each.
    builder = costs_zoo.Builder()
    key = builder.inputs[0]
    for _ in range(12):
        key = builder.product(
            "Block", [key], 64, needs="both", saved=128, product_overlap=64
        )
    model = builder.done()
    plain = simulator.Simulator(model).plain.peak
    without = planners.budget(_without_products(model), int(0.75 * plain))
    with_ = planners.budget(model, int(0.75 * plain))
    assert with_.prediction.extra_time < without.prediction.extra_time / 2


def test_all_products_kept_cost_little():
    # Batch normalization and activation take 1.5 of 34.5.
    model = _NETWORKS["conv_chain"]
    made = planners.by_type(model, keep=["Conv2D"])
    assert made.prediction.ratio < 0.75
    assert made.prediction.extra_time < 0.05
    assert planners.min_memory(model).prediction.extra_time > 0.15


def test_min_memory(network):
    predicted = planners.min_memory(network).prediction
    assert predicted.peak_bytes <= 1.01 * predicted.least_bytes
    assert predicted.least_bytes < 0.5 * predicted.plain_bytes
    # Among these the time is the least.
    tight = planners.budget(network, predicted.least_bytes).prediction
    assert predicted.extra_time <= tight.extra_time


def test_frontier(network):
    pairs = planners.frontier(network)
    bytes_, times = zip(*pairs, strict=True)
    assert list(bytes_) == sorted(set(bytes_))
    assert list(times) == sorted(set(times), reverse=True)
    assert times[-1] == 0
    for size, time_ in pairs:
        made = planners.budget(network, size).prediction
        assert made.extra_time <= time_ + 1e-12


def test_a_budget_that_is_too_small():
    builder = costs_zoo.Builder()
    key = builder.call("Dense", builder.inputs, 8, path="small")
    key = builder.call("Dense", [key], 8, path="large", forward_workspace=500)
    key = builder.call("Dense", [key], 8, path="last")
    model = builder.done()
    # Its input, its output and what it needs meanwhile.
    least = 8 + 8 + 500
    with pytest.raises(plan.PlanError) as caught:
        planners.budget(model, least - 1)
    for part in (str(least - 1), f"{least} bytes", "1.000", "'large'"):
        assert part in str(caught.value)
    assert planners.budget(model, least).prediction.peak_bytes == least
    for wrong in (-1, 0.5, "2GiB", None, True):
        with pytest.raises(plan.PlanError, match="whole number of bytes"):
            planners.budget(model, wrong)


def test_what_only_reads_ids_is_never_recomputed():
    made = planners.min_memory(_NETWORKS["transformer"])
    for segment in made.segments:
        assert "embedding" not in segment.calls or not segment.recomputed
    assert any("'embedding'" in line for line in made.prediction.blocked)


def test_what_is_not_worth_it_is_left_alone():
    # Sums and what follows them need nothing: nothing to recompute.
    builder = costs_zoo.Builder()
    key = builder.inputs[0]
    for _ in range(6):
        key = builder.call("Add", [key], 8, needs="none")
    model = builder.done()
    for made in (
        planners.min_memory(model),
        planners.chen(model),
        planners.recursive(model),
        planners.by_type(model, recompute=["add_1", "add_2"]),
    ):
        assert not any(segment.recomputed for segment in made.segments)


def test_blocked_names_what_lives_across():
    builder = costs_zoo.Builder()
    key = builder.call("Dense", builder.inputs, 10, path="stem")
    # Many branches that meet: inside, everything lives across.
    branches = [
        builder.call("Dense", [key], 100, path=f"branch_{i}") for i in range(6)
    ]
    key = builder.call("Add", branches, 100, needs="reads", path="sum")
    key = builder.call("Dense", [key], 10, path="head")
    model = builder.done()
    made = plan.Plan(
        (
            plan.Segment(model.paths[:-1]),
            plan.Segment(model.paths[-1:], recomputed=False),
        )
    )
    (line,) = planners.blocked(model, made)
    assert "'stem' to 'sum'" in line
    assert "'tensor_2'" in line
    assert "more" in line
    # A chain can be cut anywhere.
    chain = costs_zoo.chain(9)
    whole = plan.Plan((plan.Segment(chain.paths, recomputed=False),))
    assert planners.blocked(chain, whole) == ()


def _checkmate(length, sizes, budget):
    """Least time of any schedule for a chain within a budget; None if none.

    The integer programme of Jain et al., "Checkmate"
    (https://arxiv.org/abs/1910.02653), for a chain of calls of time 1 whose
    gradients need what their calls read and take no memory. Stage t ends with
    the gradient of call n - 1 - t. run[t, i]: call i runs in stage t.
    held[t, i]: its output is there when stage t begins. Memory is asked for
    while a call runs: what is there for later, the output, what is read.
    That is no more than the simulator counts.
    """
    n = length
    run = np.arange(n * n).reshape(n, n)
    held = n * n + run
    read = 2 * n * n + run  # What call i reads is there while it runs.
    count = 3 * n * n
    rows, lows, highs = [], [], []

    def at_most(terms, limit):
        rows.append(terms)
        lows.append(-np.inf)
        highs.append(limit)

    upper = np.ones(count)
    for t in range(n):
        for i in range(n):
            if t == 0:
                upper[held[t, i]] = 0
            else:
                at_most(
                    {held[t, i]: 1, run[t - 1, i]: -1, held[t - 1, i]: -1}, 0
                )
            if i:
                at_most(
                    {run[t, i]: 1, run[t, i - 1]: -1, held[t, i - 1]: -1}, 0
                )
                at_most({run[t, i]: 1, read[t, i]: -1}, 0)
            if t + 1 < n and i:
                at_most({held[t + 1, i - 1]: 1, read[t, i]: -1}, 0)
            memory = {run[t, i]: sizes[i]}
            if i:
                memory[read[t, i]] = sizes[i - 1]
            for j in range(n):
                if j < i - 1 and t + 1 < n:
                    memory[held[t + 1, j]] = sizes[j]
                if j > i:
                    memory[held[t, j]] = sizes[j]
            at_most(memory, budget)
        need = n - 2 - t
        if need >= 0:
            at_most({run[t, need]: -1, held[t, need]: -1}, -1)
    at_most({run[0, n - 1]: -1}, -1)
    matrix = sparse.lil_array((len(rows), count))
    for number, terms in enumerate(rows):
        for column, value in terms.items():
            matrix[number, column] = value
    objective = np.zeros(count)
    objective[run.ravel()] = 1
    result = optimize.milp(
        objective,
        integrality=np.ones(count),
        bounds=optimize.Bounds(0, upper),
        constraints=optimize.LinearConstraint(matrix.tocsr(), lows, highs),
    )
    return None if result.x is None else round(result.fun) - n


@pytest.mark.parametrize("sizes", [[1] * 10, [3, 1, 4, 1, 5, 2, 6, 5, 3, 5]])
def test_no_better_than_the_exact_programme(sizes):
    """Checkmate may keep and run again any tensor at any time: a bound."""
    builder = costs_zoo.Builder()
    key = builder.inputs[0]
    for size in sizes:
        key = builder.call("Dense", [key], size)
    builder.gradients = [0] * len(builder.sizes)
    model = builder.done()
    least = planners.recursive(model).prediction.peak_bytes
    met = 0
    for size in range(least, sum(sizes) + 1, max(1, sum(sizes) // 8)):
        bound = _checkmate(len(sizes), sizes, size)
        assert bound is not None
        nested = planners.recursive(model, size).prediction
        assert nested.extra_time * model.step_time >= bound - 1e-9
        met += nested.extra_time * model.step_time <= bound + 1e-9
        if size >= planners.min_memory(model).prediction.least_bytes:
            flat = planners.budget(model, size).prediction
            assert flat.extra_time * model.step_time >= bound - 1e-9
    # On a chain, nested segments reach it where memory is not too scarce.
    assert met >= 2


@pytest.mark.parametrize(("blocks", "limit"), [(60, 10), (200, 60)])
def test_speed(blocks, limit):
    model = costs_zoo.resnet(blocks)
    assert len(model.calls) >= {60: 600, 200: 2000}[blocks]
    plain = simulator.Simulator(model).plain.peak
    budgets._finder.cache_clear()
    begin = time.process_time()
    made = planners.budget(model, plain // 2)
    assert time.process_time() - begin < limit
    planners.min_memory(model)
    planners.frontier(model)
    assert time.process_time() - begin < 1.5 * limit
    assert made.prediction.ratio <= 0.5
