"""Plans as data: checks, files, the table."""

import dataclasses
import json

import pytest

from tfckpt import plan
from tfckpt import prediction as prediction_lib


def _plan(*segments):
    """Returns a plan that recomputes all but the last segment."""
    *recomputed, last = segments
    return plan.Plan(
        (*map(plan.Segment, recomputed), plan.Segment(last, recomputed=False))
    )


def test_plan_is_checked():
    with pytest.raises(plan.PlanError, match="at least one Segment"):
        plan.Plan(())
    with pytest.raises(plan.PlanError, match="at least one call"):
        plan.Segment(())
    with pytest.raises(plan.PlanError, match="sequence of strings"):
        plan.Segment("abc")
    with pytest.raises(plan.PlanError, match="True or False"):
        plan.Segment(("a",), recomputed="yes")
    with pytest.raises(plan.PlanError, match="several: a"):
        plan.Plan((plan.Segment(["a", "b"]), plan.Segment(["a"])))


def test_json():
    made = plan.annotate(
        _plan(["a", "b"], ["c", "d"]),
        [8, None, 8, 8],
        [[("a", 8)], [("b", None)], [], [("d", 8)]],
    )
    back = plan.Plan.from_json(made.to_json())
    assert back == made
    assert back.segments[0].boundary == ("b",)
    assert back.segments[1].output_bytes == 16
    assert str(back) == str(made)
    assert hash(back) == hash(made)
    assert back != _plan(["a", "b"], ["c"], ["d"])
    with pytest.raises(plan.PlanError, match="can't be read"):
        plan.Plan.from_json("{")
    with pytest.raises(plan.PlanError, match='"format"'):
        plan.Plan.from_json("[]")
    with pytest.raises(plan.PlanError, match="color"):
        plan.Plan.from_config(
            {"format": 1, "segments": [{"calls": ["a"], "color": 1}]}
        )


def test_summary():
    made = plan.annotate(
        _plan(["a", "b"], ["c"]),
        [1024, 1024, 6],
        [[("a", 1024)], [("a", 1024), ("b", 1024)], [("c", 6)]],
    )
    assert str(made).splitlines() == [
        "Plan: 2 segments, 3 calls, 2 recomputed",
        "segment 1, recomputed: 2 calls, outputs 2 KiB",
        "    a",
        "    b",
        "  boundary: a, b = 2 KiB",
        "segment 2, not recomputed: 1 call, outputs 6 B",
        "    c",
        "  boundary: c = 6 B",
    ]


@pytest.mark.parametrize(
    "config",
    [
        {"format": 2, "segments": [3]},
        {"format": 2, "segments": [{"recomputed": True}]},
        {"format": 2, "segments": [{"calls": ["a"]}], "prediction": {"x": 1}},
    ],
)
def test_a_config_that_is_wrong_is_a_plan_error(config):
    with pytest.raises(plan.PlanError, match="entry that is wrong"):
        plan.Plan.from_config(config)


def _wrong_configs():
    prediction = prediction_lib.Prediction(
        8, 60, 240, 40, frontier=((40, 0.3),), timeline=((0.0, 1),)
    )
    trial = prediction_lib.Trial("v5e", None, 3, 0.1, True)
    right = plan.Plan(
        (plan.Segment(["a"], kept=["a"], output_bytes=3),),
        dataclasses.replace(prediction, trials=(trial,)),
    ).to_json()
    assert plan.Plan.from_json(right).to_json() == right
    where = {
        "segment": lambda config: config["segments"][0],
        "prediction": lambda config: config["prediction"],
        "trial": lambda config: config["prediction"]["trials"][0],
    }
    for place, find in where.items():
        for name in find(json.loads(right)):
            for wrong in ({"a": 1}, -1, float("nan"), [[1]], "x"):
                config = json.loads(right)
                field = find(config)
                if isinstance(field[name], str) and wrong == "x":
                    continue
                field[name] = wrong
                yield pytest.param(config, id=f"{place}-{name}-{wrong}")


@pytest.mark.parametrize("config", [*_wrong_configs()])
def test_values_of_another_type_are_plan_errors(config):
    with pytest.raises(plan.PlanError, match="wrong|Segment"):
        plan.Plan.from_config(config)


@pytest.mark.parametrize(
    "text", ["[" * 100000, '{"format": 2, "segments": [], "more": 1}']
)
def test_text_that_is_no_plan_is_a_plan_error(text, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(plan.PlanError, match="plan.json' holds no plan"):
        plan.Plan.load(path)


def test_a_file_that_is_no_text_is_a_plan_error(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(b"\x80\x81\x82")
    with pytest.raises(plan.PlanError, match="holds no plan"):
        plan.Plan.load(path)
