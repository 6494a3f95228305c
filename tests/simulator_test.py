"""The simulator: steps worked out by hand, and what holds for every plan."""

import time

import hypothesis
import pytest
from hypothesis import strategies as st

from tests import costs_zoo
from tfckpt import plan, simulator
from tfckpt.simulator import index as index_lib
from tfckpt.simulator import walk as walk_lib


def _plan(costs, *segments):
    """Makes a plan of (number of calls, recomputed, numbers of kept calls)."""
    made, start = [], 0
    for count, recomputed, *kept in segments:
        paths = costs.paths[start : start + count]
        made.append(
            plan.Segment(paths, recomputed, tuple(costs.paths[i] for i in kept))
        )
        start += count
    return plan.Plan(tuple(made))


def _bytes(walk):
    return [size for _, size in walk.timeline]


def test_plain_chain():
    # Tensors of 8 bytes, 1..4; each gradient needs what its call read.
    model = costs_zoo.chain(4, size=8, gradient=1)
    walk = simulator.Simulator(model).walk(_plan(model, (4, False)))
    assert _bytes(walk) == [
        8,  # makes 1
        16,  # 1, makes 2
        24,
        32,
        # Output 4 is gone, its gradient of 1 is there, that of 3 is made.
        24 + 2,
        16 + 2,
        8 + 2,
        # The model's input takes no bytes, but its gradient is asked for.
        0 + 2,
        1,
    ]
    assert (walk.peak, walk.peak_call, walk.peak_phase) == (32, 3, "forward")
    assert walk.extra_time == 0
    assert walk.runs == [1, 1, 1, 1]


def test_recomputed_chain():
    model = costs_zoo.chain(4, size=8, gradient=1)
    walk = simulator.Simulator(model).walk(_plan(model, (2, True), (2, False)))
    assert _bytes(walk) == [
        8,  # makes 1
        16,  # makes 2, which outlives the segment; 1 goes
        16,  # 2, makes 3
        24,  # 2, 3, makes 4
        16 + 2,  # backward of the last call
        8 + 2,
        # Only call 0 runs again: nobody needs 2 any more.
        8 + 1,
        8 + 2,
        0 + 2,
        1,
    ]
    assert walk.peak == 24
    assert walk.extra_time == 1.0
    assert walk.extra_flops == 10.0
    assert walk.runs == [2, 1, 1, 1]


def test_saved_bytes_and_workspace():
    model = costs_zoo.chain(
        2,
        size=8,
        needs="none",
        saved=100,
        forward_workspace=3,
        backward_workspace=1000,
    )
    walk = simulator.Simulator(model).walk(_plan(model, (1, True), (1, False)))
    assert _bytes(walk) == [
        8 + 100 + 3,
        # What the first call saved is dropped.
        8 + 8 + 100 + 3,
        100 + 1000,
        8 + 100 + 3,
        100 + 1000,
        0,
    ]
    assert walk.peak_phase == "backward"
    assert walk.peak_call == 1


def test_kept_product():
    builder = costs_zoo.Builder()
    key = builder.call("ReLU", builder.inputs, 8)
    # A convolution, an activation inside: its product is not its output.
    key = builder.call(
        "Conv2D",
        [key],
        8,
        needs="both",
        time=10.0,
        product_bytes=6,
        product_time=9.0,
        product_flops=90.0,
    )
    key = builder.call("Dense", [key], 8)
    builder.gradients = [0] * 4
    model = builder.done()
    both = simulator.Simulator(model)
    walk = both.walk(_plan(model, (2, True, 1), (1, False)))
    assert _bytes(walk) == [
        8,  # makes 1
        8 + 8 + 6,  # 1, makes 2, and the product
        8 + 6 + 8,
        8 + 6,  # backward of Dense needs 2
        # ReLU runs again: 1 is needed by the convolution's gradient.
        6 + 8,
        # The activation runs again from the product.
        6 + 8 + 8,
        6 + 8 + 8,
        0,
        0,
    ]
    assert walk.extra_time == 1.0 + (10.0 - 9.0)
    # FLOPs: 10 of ReLU and 100 of the convolution, but for 90.
    assert walk.extra_flops == 10.0 + 100.0 - 90.0
    # Without it the convolution runs again.
    assert both.walk(
        _plan(model, (2, True), (1, False))
    ).extra_time == pytest.approx(11.0)


def test_kept_product_that_is_the_output_counts_once():
    builder = costs_zoo.Builder()
    key = builder.product("Conv2D", builder.inputs, 8)
    key = builder.call("BatchNormalization", [key], 8)
    key = builder.call("Dense", [key], 8)
    builder.gradients = [0] * 4
    model = builder.done()
    walk = simulator.Simulator(model).walk(
        _plan(model, (2, True, 0), (1, False))
    )
    # The convolution's output and the normalization's; then the first one is
    # there as the kept product when normalization's gradient needs it.
    assert walk.peak == 8 + 8 + 8
    assert _bytes(walk)[4:] == [8, 8, 8, 0]
    # What remains is free: the convolution's other work is none here.
    assert walk.extra_time == pytest.approx(0.5)


def test_product_that_needs_its_other_summand():
    builder = costs_zoo.Builder()
    first = builder.call("ReLU", builder.inputs, 8, needs="none")
    second = builder.call("ReLU", builder.inputs, 8, needs="none")
    for product_needs in [(), (second,)]:
        more = costs_zoo.Builder()
        more.calls = list(builder.calls)
        more.sizes, more.gradients = list(builder.sizes), [0] * 5
        key = more.call(
            "Dense",
            [first, second],
            8,
            needs="makes",
            product_bytes=8,
            product_time=1.0,
            product_needs=product_needs,
        )
        more.call("Dense", [key], 8)
        model = more.done()
        walk = simulator.Simulator(model).walk(
            _plan(model, (3, True, 2), (1, False))
        )
        assert walk.runs == [1, 1 + len(product_needs), 2, 1]


def test_dead_code_is_not_run():
    builder = costs_zoo.Builder()
    first = builder.call("Dense", builder.inputs, 8)
    # Nobody needs what a sum or what follows it makes.
    added = builder.call("Add", [first, *builder.inputs], 8, needs="none")
    builder.call("Add", [added, first], 8, needs="none")
    builder.call("Dense", [3], 8)
    model = builder.done()
    walk = simulator.Simulator(model).walk(_plan(model, (3, True), (1, False)))
    assert walk.runs == [1, 1, 1, 1]
    assert walk.extra_time == 0


def test_arguments_persist_until_the_backward_pass_is_done():
    # 1 is read by calls 1 and 3, 2 by call 2: a connection across.
    builder = costs_zoo.Builder()
    one = builder.call("Dense", builder.inputs, 8)
    two = builder.call("Dense", [one], 16)
    three = builder.call("Dense", [two], 32)
    builder.call("Add", [three, one], 32, needs="none")
    builder.gradients = [0] * 5
    model = builder.done()
    walk = simulator.Simulator(model).walk(
        _plan(model, (1, True), (2, True), (1, False))
    )
    assert _bytes(walk) == [
        8,
        8 + 16,
        8 + 16 + 32,
        8 + 32 + 32,
        8,  # the sum needs nothing; 1 is an argument of the second segment
        8 + 16,  # call 1 runs again; call 2 is dead code
        8 + 16,
        8,  # backward of call 1 needs 1
        0,
        0,
    ]


def test_two_readers_make_two_gradients():
    builder = costs_zoo.Builder()
    one = builder.call("Dense", builder.inputs, 8, needs="none")
    two = builder.call("Dense", [one], 8, needs="none")
    builder.call("Add", [one, two], 8, needs="none")
    model = builder.done()
    walk = simulator.Simulator(model).walk(_plan(model, (3, False)))
    # Of the sum: its own, of 1, of 2; then of 1 a second time.
    assert _bytes(walk)[3:] == [8 + 8 + 8, 8 + 8 + 8, 8 + 8, 0]


def test_nested_runs():
    model = costs_zoo.chain(4, size=1, needs="reads", saved=1)
    paths = model.paths
    inner = plan.Segment(
        paths[:3],
        segments=(
            plan.Segment(paths[:2]),
            plan.Segment(paths[2:3], recomputed=False),
        ),
    )
    nested = plan.Plan((inner, plan.Segment(paths[3:], recomputed=False)))
    walk = simulator.Simulator(model).walk(nested)
    # Forward; again for the outer one; 0 and 1 again for the inner one.
    assert walk.runs == [3, 3, 2, 1]
    assert walk.extra_time == 2 + 2 + 1


def test_arguments_of_inner_segments_are_made_again():
    builder = costs_zoo.Builder()
    key = builder.call("Dense", builder.inputs, 8)
    key = builder.call("Dense", [key], 8)
    key = builder.call("Add", [key], 8, needs="none")
    builder.call("Dense", [key], 8)
    model = builder.done()
    paths = model.paths
    inner = (
        plan.Segment(paths[:1], recomputed=False),
        plan.Segment(paths[1:2]),
        plan.Segment(paths[2:3], recomputed=False),
    )
    nested = plan.Plan(
        (
            plan.Segment(paths[:3], segments=inner),
            plan.Segment(paths[3:], recomputed=False),
        )
    )
    walk = simulator.Simulator(model).walk(nested)
    # The second call reads what the first made; what it makes nobody needs.
    assert walk.runs == [2, 1, 1, 1]


def test_prediction():
    model = costs_zoo.conv_chain(3)
    both = simulator.Simulator(model)
    made = _plan(model, (3, True), (6, False))
    predicted = both.predict(made)
    assert predicted.plain_bytes == both.plain.peak
    assert predicted.peak_bytes == both.walk(made).peak
    assert predicted.extra_time == pytest.approx(
        both.walk(made).extra_time / model.step_time
    )
    assert predicted.weight_bytes == model.weight_bytes
    assert predicted.gradient_bytes == model.gradient_bytes
    assert predicted.optimizer_bytes == model.optimizer_bytes
    assert predicted.input_bytes == 1024
    assert predicted.batch_size == 4
    assert predicted.plain_timeline[-1][0] == pytest.approx(1.0)
    assert predicted.timeline[-1][0] == pytest.approx(
        1.0 + predicted.extra_time
    )
    assert max(size for _, size in predicted.timeline) == predicted.peak_bytes


def test_annotated():
    model = costs_zoo.unet(1)
    made = simulator.Simulator(model).annotated(
        _plan(model, (6, True, 0, 3), (len(model.calls) - 6, False))
    )
    first = made.segments[0]
    # What the pooling reads, and the connection across reads it too.
    assert first.boundary == ("tensor_6",)
    assert first.boundary_bytes == 8192
    assert first.output_bytes == 6 * 8192
    assert first.kept_bytes == 2 * 8192
    assert first.forward_flops == 2 * (100 + 10 + 5)
    assert made.prediction.peak_bytes < made.prediction.plain_bytes


def test_refuses_another_model():
    both = simulator.Simulator(costs_zoo.chain(3))
    with pytest.raises(plan.PlanError, match="another model.*3 calls|4 calls"):
        both.predict(_plan(costs_zoo.chain(4), (4, False)))
    with pytest.raises(plan.PlanError, match="'relu'; expected 'dense_0'"):
        both.predict(
            plan.Plan((plan.Segment(["relu", "a", "b"], recomputed=False),))
        )


def test_a_model_without_times():
    model = costs_zoo.chain(4, time=0.0)
    predicted = simulator.Simulator(model).predict(
        _plan(model, (2, True), (2, False))
    )
    assert predicted.extra_time == 0


@hypothesis.given(costs_zoo.graphs(), st.data())
def test_everything_is_freed(model, data):
    parts = data.draw(costs_zoo.parts(model))
    walk = walk_lib.Walk(index_lib.Index(model), parts)
    # Only gradients of what no call makes are left, one for each reader.
    made = {key for call in model.calls for key in call.makes}
    left = sum(
        model.gradients[key]
        for call in model.calls
        for key in set(call.reads) - made
    )
    left += sum(model.gradients[k] for k in set(model.outputs) - made)
    assert walk.timeline[-1][1] == left


@hypothesis.given(costs_zoo.graphs(), st.integers(1, 7))
def test_cutting_what_is_left_alone_changes_nothing(model, cut):
    index = index_lib.Index(model)
    cut = min(cut, index.length - 1)
    whole = walk_lib.Walk(index, [index_lib.Part(0, index.length, False)])
    halves = walk_lib.Walk(
        index,
        [
            index_lib.Part(0, cut, False),
            index_lib.Part(cut, index.length, False),
        ],
    )
    assert halves.timeline == whole.timeline


@hypothesis.given(costs_zoo.graphs(), st.data())
def test_runs_and_time_belong_together(model, data):
    index = index_lib.Index(model)
    parts = data.draw(costs_zoo.parts(model))
    walk = walk_lib.Walk(index, parts)
    kept = {call for part in parts for call in part.kept}
    for part in parts:
        for call in range(part.start, part.stop):
            assert walk.runs[call] in ((1, 2) if part.recomputed else (1,))
    assert walk.extra_time == pytest.approx(
        sum(
            (runs - 1) * (call.forward_time - (i in kept and call.product_time))
            for i, (runs, call) in enumerate(
                zip(walk.runs, model.calls, strict=True)
            )
        )
    )


def test_two_thousand_calls_in_a_second():
    model = costs_zoo.resnet(200)
    assert len(model.calls) > 2000
    both = simulator.Simulator(model)
    made = plan.Plan(
        tuple(
            plan.Segment(model.paths[i : i + 40], i + 40 < len(model.calls))
            for i in range(0, len(model.calls), 40)
        )
    )
    begin = time.process_time()
    both.predict(made)
    assert time.process_time() - begin < 1
