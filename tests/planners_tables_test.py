"""Closed forms of segments against the simulator's walk."""

import hypothesis
import pytest
from hypothesis import strategies as st

from tests import costs_zoo
from tfckpt.planners import cuts, tables
from tfckpt.simulator import index as index_lib
from tfckpt.simulator import walk as walk_lib


def _products(model, data):
    having = [i for i, c in enumerate(model.calls) if c.product_bytes]
    if not having:
        return frozenset()
    return frozenset(data.draw(st.sets(st.sampled_from(having))))


def _peak_and_time(index, parts, products):
    """Adds up the tables along segments."""
    made = tables.Tables(index, list(range(index.length + 1)))
    alone, again = made.alone(), made.recomputed(products)
    persisting, peak, time = 0, 0, 0.0
    for part in parts:
        table = again if part.recomputed else alone
        here = part.start, part.stop
        peak = max(peak, persisting + int(table.peak[here]))
        persisting += int(table.persisting[here])
        time += float(table.time[here])
    return peak, time


@hypothesis.given(costs_zoo.graphs(), st.data())
@hypothesis.settings(max_examples=300)
def test_never_below_the_walk(model, data):
    products = _products(model, data)
    parts = data.draw(costs_zoo.parts(model, products))
    index = index_lib.Index(model)
    walk = walk_lib.Walk(index, parts)
    peak, time = _peak_and_time(index, parts, products)
    assert peak >= walk.peak
    assert time == pytest.approx(walk.extra_time)


@hypothesis.given(costs_zoo.graphs(chain=True), st.data())
@hypothesis.settings(max_examples=300)
def test_equal_to_the_walk(model, data):
    """On chains, where only the last segment is left alone.

    On other graphs the tables may say more, because they look at one segment
    at a time: whether a tensor that this one doesn't read is held while it is
    run again depends on where those before were cut.
    """
    products = _products(model, data)
    parts = data.draw(costs_zoo.parts(model, products, alone=False))
    index = index_lib.Index(model)
    walk = walk_lib.Walk(index, parts)
    peak, _ = _peak_and_time(index, parts, products)
    assert peak == walk.peak


@pytest.mark.parametrize(
    ("model", "loose"),
    [
        (costs_zoo.conv_chain(4), 1),
        (costs_zoo.resnet(4), 1),
        (costs_zoo.unet(2), 1),
        (costs_zoo.densenet(1, 4), 1.15),
        (costs_zoo.transformer(2), 1),
    ],
    ids=["conv_chain", "resnet", "unet", "densenet", "transformer"],
)
def test_close_on_networks(model, loose):
    index = index_lib.Index(model)
    having = frozenset(i for i, c in enumerate(model.calls) if c.product_bytes)
    for length in (2, 3, 5, 8):
        parts = _every(index, length, frozenset())
        walk = walk_lib.Walk(index, parts)
        peak, time = _peak_and_time(index, parts, frozenset())
        assert walk.peak <= peak <= loose * walk.peak
        assert time == pytest.approx(walk.extra_time)
        parts = _every(index, length, having)
        walk = walk_lib.Walk(index, parts)
        peak, time = _peak_and_time(index, parts, having)
        assert walk.peak <= peak <= 1.15 * walk.peak
        assert time == pytest.approx(walk.extra_time)


def _every(index, length, products):
    made = tables.Tables(index, list(range(index.length + 1)))
    again = made.recomputed(products).again
    result = []
    for start in range(0, index.length, length):
        stop = min(start + length, index.length)
        recomputed = stop < index.length and all(
            c.recomputable for c in index.costs.calls[start:stop]
        )
        kept = frozenset(
            i
            for i in products
            if recomputed and start <= i < stop and again[i] <= stop
        )
        result.append(index_lib.Part(start, stop, recomputed, kept))
    return result


def test_the_plain_step_is_exact():
    for model in (costs_zoo.unet(3), costs_zoo.transformer(3)):
        index = index_lib.Index(model)
        walk = walk_lib.Walk(index, [index_lib.Part(0, index.length, False)])
        alone = tables.Tables(index, [0, index.length]).alone()
        assert int(alone.peak[0, 1]) == walk.peak


def test_recomputed_segments_hold_nothing_that_reads_ids():
    index = index_lib.Index(costs_zoo.transformer(1))
    made = tables.Tables(index, list(range(index.length + 1)))
    assert not made.allowed[0].any()
    assert made.allowed[1, 2:-1].all()
    # The last segment is never recomputed.
    assert not made.allowed[:, -1].any()
    again = made.recomputed()
    assert (again.peak[~made.allowed] >= tables.IMPOSSIBLE // 2).all()


def test_widths_of_cuts():
    builder = costs_zoo.Builder(100)
    one = builder.call("Dense", builder.inputs, 1)
    two = builder.call("Dense", [one], 2)
    three = builder.call("Dense", [two], 4)
    builder.call("Add", [one, three], 8)
    index = index_lib.Index(builder.done())
    assert list(cuts.widths(index)) == [0, 1, 1 + 2, 1 + 4, 8]
    assert cuts.live(index, 2) == [one, two]
    assert cuts.live(index, 3) == [one, three]


def test_thinned_cuts_are_narrow():
    model = costs_zoo.resnet(16)
    index = index_lib.Index(model)
    every = cuts.candidates(index, 1000)
    assert every == list(range(len(model.calls) + 1))
    few = cuts.candidates(index, 10)
    assert {0, len(model.calls)} <= set(few)
    assert len(few) <= 12
    # Behind a block: one tensor lives.
    assert all(len(cuts.live(index, cut)) == 1 for cut in few[1:-1])


def test_cuts_around_what_reads_ids_are_always_there():
    index = index_lib.Index(costs_zoo.transformer(20))
    assert {0, 1} <= set(cuts.candidates(index, 5))
