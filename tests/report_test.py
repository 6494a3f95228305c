"""Plans as tables and as pictures."""

import dataclasses
import importlib.util
import itertools
import re

import pytest
from matplotlib.backends import backend_agg

from tfckpt import drawing, report, tables
from tfckpt import plan as plan_lib
from tfckpt import prediction as prediction_lib

_MIB = 2**20


def _segment(number, **arguments):
    calls = [f"block{number}/conv{i}" for i in range(3)]
    arguments = {
        "boundary": (f"out{number}", f"skip{number}"),
        "boundary_bytes": number * _MIB,
        "forward_flops": number * 1e9,
    } | arguments
    return plan_lib.Segment(calls, **arguments)


def _prediction(**arguments):
    values = {
        "batch_size": 8,
        "peak_bytes": 60 * _MIB,
        "plain_bytes": 240 * _MIB,
        "least_bytes": 40 * _MIB,
        "weight_bytes": 11 * _MIB,
        "gradient_bytes": 10 * _MIB,
        "optimizer_bytes": 20 * _MIB,
        "input_bytes": 3 * _MIB,
        "step_flops": 12e9,
        "extra_flops": 3e9,
        "extra_time": 0.25,
        "forward_time": 1 / 3,
        "frontier": ((40 * _MIB, 0.3), (90 * _MIB, 0.1), (240 * _MIB, 0.0)),
        "timeline": ((0.0, 0), (0.4, 60 * _MIB), (1.25, 0)),
        "plain_timeline": ((0.0, 0), (1 / 3, 240 * _MIB), (1.0, 0)),
    }
    return prediction_lib.Prediction(**(values | arguments))


def _plan(prediction=None, segments=3):
    inside = (
        plan_lib.Segment(["block2/conv0"]),
        plan_lib.Segment(["block2/conv1", "block2/conv2"]),
    )
    made = [
        _segment(1, kept=("block1/conv1",), kept_bytes=5 * _MIB),
        _segment(2, segments=inside),
        *(_segment(number) for number in range(3, segments)),
        _segment(segments, recomputed=False, boundary=(f"out{segments}",)),
    ]
    return plan_lib.Plan(tuple(made), prediction)


def _rows(text, title):
    """The cells of the table of that title."""
    lines = itertools.dropwhile(
        lambda line: not line.startswith(title), text.splitlines()
    )
    # Its title, its heads, a line.
    rows = itertools.takewhile(bool, itertools.islice(lines, 3, None))
    return [[cell for cell in row.split("  ") if cell] for row in rows]


# --- Tables -----------------------------------------------------------------


def test_each_segment_is_a_row():
    rows = _rows(report.as_text(_plan()), "Segments")
    cells = [" | ".join(cell.strip() for cell in row) for row in rows]
    assert cells == [
        "1 | block1/conv0 … block1/conv2 | all but 1"
        " | 3 | 1.0 | 5.00 | 1.00 in 2",
        "2 | block2/conv0 … block2/conv2 | in parts | 3 | 2.0 | 2.00 in 2",
        "2.1 | block2/conv0 | yes | 1",
        "2.2 | block2/conv1 … block2/conv2 | yes | 2",
        "3 | block3/conv0 … block3/conv2 | no | 3 | 3.0 | 3.00 in 1",
    ]


def test_without_a_prediction_only_the_segments_are_shown():
    text = report.as_text(_plan())
    assert text.startswith("Plan: 3 segments, 9 calls, 6 recomputed")
    assert "Memory" not in text
    assert "Extra time" not in text
    assert "None" not in text


def test_memory_with_the_plan_and_without():
    rows = _rows(report.as_text(_plan(_prediction())), "Memory of a step")
    found = {row[0].strip(): [c.strip() for c in row[1:]] for row in rows}
    assert found == {
        "activations, at the peak": ["60 MiB", "240 MiB", "0.250"],
        "weights": ["11 MiB", "11 MiB"],
        "gradients": ["10 MiB", "10 MiB"],
        "optimizer state": ["20 MiB", "20 MiB"],
        "inputs": ["3 MiB", "3 MiB"],
        "total": ["104 MiB", "284 MiB", f"{104 / 284:.3f}"],
    }


def test_time_and_the_least_budget():
    text = report.as_text(_plan(_prediction()))
    assert "Extra time: +25.0% (3.0 GFLOP on top of 12.0)" in text
    assert "Least feasible budget: 40 MiB of activations, 84 MiB in all" in text
    unknown = _prediction(least_bytes=None, step_flops=0.0)
    text = report.as_text(_plan(unknown))
    assert "Least feasible" not in text
    assert "GFLOP on top" not in text


def test_the_frontier_holds_the_plan():
    rows = tables.frontier_rows(_prediction())
    assert rows == [
        (40 * _MIB, 0.3, ""),
        (60 * _MIB, 0.25, "this plan"),
        (90 * _MIB, 0.1, ""),
        (240 * _MIB, 0.0, ""),
    ]
    # On the frontier it stands there once.
    own = _prediction(peak_bytes=90 * _MIB, extra_time=0.1)
    marks = [mark for *_, mark in tables.frontier_rows(own)]
    assert marks == ["", "this plan", ""]


def test_a_long_frontier_keeps_its_ends():
    points = tuple((n * _MIB, 1 / n) for n in range(40, 241))
    rows = tables.frontier_rows(_prediction(frontier=points), most=5)
    shown = [row[:2] for row in rows if not row[2]]
    assert len(shown) == 5
    assert (shown[0], shown[-1]) == (points[0], points[-1])
    assert set(shown) <= set(points)
    assert rows == sorted(rows)


def test_compilations_are_listed():
    trials = (
        prediction_lib.Trial("v5e", None, 17 * 2**30, 0.0, False),
        prediction_lib.Trial("v5e", 3 * 2**30, 15 * 2**30, 0.12, True),
    )
    text = report.as_text(_plan(_prediction(trials=trials)))
    rows = _rows(text, "Compiled")
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["v5e", "no recomputation", "17 GiB", "+0.0%", "no"],
        ["v5e", "3 GiB", "15 GiB", "+12.0%", "yes"],
    ]


def test_sentences_are_listed_and_many_are_cut_short():
    blocked = tuple(f"place {number}" for number in range(30))
    prediction = _prediction(blocked=blocked, notes=("SGD [assumed].",))
    short = report.as_text(_plan(prediction))
    assert "- place 0\n" in short
    assert "place 29" not in short
    assert "20 more" in short
    assert "- SGD [assumed]." in short  # No markup of rich.
    assert "place 29" in report.as_text(_plan(prediction), verbose=True)


def test_of_many_segments_the_ends_are_shown():
    plan = _plan(_prediction(), segments=1000)
    text = report.as_text(plan)
    rows = _rows(text, "Segments")
    numbers = [row[0].strip() for row in rows]
    assert len(rows) < 50
    assert numbers[0] == "1"
    assert numbers[-1] == "1000"
    shown = [int(n) for n in numbers if n.isdecimal()]
    left = sorted(set(range(1, 1001)) - set(shown))
    (elided,) = [row for row in rows if row[0] == "…"]
    assert elided[1].strip() == f"{len(left)} more"
    assert elided[-1].strip() == f"{sum(left):,}.00"
    every = _rows(report.as_text(plan, verbose=True), "Segments")
    assert len(every) == 1002


@pytest.mark.parametrize("width", [80, 100])
def test_text_stays_within_its_width(width):
    long = "a_rather/long_path/of_a_call/" * 3
    plan = plan_lib.Plan(
        (plan_lib.Segment([long + "x", long + "y"]), *_plan().segments),
        _prediction(),
    )
    text = report.as_text(plan, width=width)
    assert max(map(len, text.splitlines())) <= width
    # In several lines, but whole.
    shown = re.sub(r"  +yes .*|\n +", "", text.split("2    block1")[0])
    assert f"{long}x … {long}y" in shown.replace("…", " … ").replace("  ", " ")
    assert f"{long}x … {long}y" in report.as_text(plan, width=260)


def test_summary_prints(capsys):
    plan = _plan(_prediction())
    printed = []
    plan.summary(print_fn=printed.append)
    assert printed == [report.as_text(plan)]
    plan.summary(print_fn=printed.append, verbose=True)
    assert "block3/conv1" in printed[1]
    assert "block3/conv1" not in printed[0]
    plan.summary()
    assert "Least feasible budget" in capsys.readouterr().out


# --- Pictures ---------------------------------------------------------------


def _axes(plan):
    return drawing._figure(plan).axes


def test_the_picture_shows_the_timelines_and_the_frontier():
    over_time, frontier = _axes(_plan(_prediction()))
    lines = {line.get_label(): line for line in over_time.lines}
    (ours,) = [n for n in lines if n.startswith("this plan")]
    assert "60 MiB" in ours
    assert list(lines[ours].get_xdata()) == [0.0, 0.4, 1.25]
    assert list(lines[ours].get_ydata()) == [0, 60, 0]
    (plain,) = [n for n in lines if n.startswith("no recomputation")]
    assert max(lines[plain].get_ydata()) == 240
    words = {text.get_text() for text in over_time.texts}
    assert words == {"forward", "backward"}
    assert "MiB" in over_time.get_ylabel()
    assert "MiB" in frontier.get_xlabel()
    marks = {line.get_label(): line for line in frontier.lines}
    (place,) = marks["this plan"].get_xydata()
    assert tuple(place) == (60, 25)
    assert list(marks["least time"].get_xdata()) == [40, 90, 240]


def test_where_the_forward_pass_ends_may_be_unknown():
    over_time, _ = _axes(_plan(_prediction(forward_time=0.0, frontier=())))
    assert not over_time.texts


@pytest.mark.parametrize("segments", [3, 1000])
def test_nothing_in_the_picture_overlaps(segments):
    figure = drawing._figure(_plan(_prediction(), segments))
    renderer = backend_agg.FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    over_time = figure.axes[0]
    boxes = [
        each.get_window_extent(renderer)
        for axes in figure.axes
        for each in (axes.title, axes._left_title, axes.xaxis.label)
        if each.get_text()
    ]
    boxes += [text.get_window_extent(renderer) for text in over_time.texts]
    boxes += [legend.get_window_extent(renderer) for legend in figure.legends]
    boxes.append(figure._suptitle.get_window_extent(renderer))
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other), (one, other)
    for box in boxes:
        assert figure.bbox.x0 <= box.x0
        assert box.x1 <= figure.bbox.x1


@pytest.mark.parametrize(
    ("suffix", "begin"),
    [
        ("png", b"\x89PNG"),
        ("pdf", b"%PDF"),
        ("svg", b"<?xml"),
        ("PNG", b"\x89"),
    ],
)
def test_the_suffix_says_the_format(suffix, begin, tmp_path):
    path = tmp_path / f"plan.{suffix}"
    _plan(_prediction()).plot(path)
    assert path.read_bytes().startswith(begin)


def test_what_cannot_be_drawn_is_refused_before_drawing(tmp_path):
    plan = _plan(_prediction())
    for name in ("plan.mp3", "plan", ".png"):
        with pytest.raises(ValueError, match="png"):
            plan.plot(tmp_path / name)
    with pytest.raises(ValueError, match="no folder"):
        plan.plot(tmp_path / "none" / "plan.png")
    with pytest.raises(plan_lib.PlanError, match="make_plan"):
        _plan().plot(tmp_path / "plan.png")
    empty = dataclasses.replace(plan.prediction, timeline=())
    with pytest.raises(plan_lib.PlanError, match="make_plan"):
        _plan(empty).plot(tmp_path / "plan.png")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_extra_is_named(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else find(name, *rest),
    )
    with pytest.raises(ImportError, match=r'pip install "tfckpt\[plot\]"'):
        _plan(_prediction()).plot(tmp_path / "plan.png")
