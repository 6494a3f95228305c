"""What a `SegmentedModel` was asked to plan, and when that can be settled.

Planning needs sizes. Where the model knows them the plan is made with it;
else it stays open until the first batch, or until `input_shape` tells.
"""

import contextlib
import difflib
import operator
from collections.abc import Sequence
from typing import Any

import keras

from tfckpt import graph as graph_lib
from tfckpt import plan as plan_lib
from tfckpt import planners, segments, sizes

DEFAULT = "sqrt"

# What an unknown size counts as when a plan has to be settled: only the
# proportions of the segments depend on it, never a number in the training.
_UNKNOWN_SIZE = 128


class Segmentation:
    """What a model was asked to plan, and what came of it.

    An object of its own, so that Keras does not look into it for layers.

    Args:
        model: The model.
        asked: Its `plan` argument.
        input_shape: Its `input_shape` argument.

    Attributes:
        plan: The plan; `Unsettled` until sizes are known, None if none.

    Raises:
        PlanError: The plan can't be made for this model.
    """

    def __init__(self, model: Any, asked: Any, input_shape: Any) -> None:
        self.asked = _checked_plan(asked)
        self.input_shape = input_shape
        self._shapes = flat_shapes(model, input_shape)
        self._graph = graph_lib.read(model)
        self._parts: tuple[segments.Part, ...] | None = None
        self.plan: plan_lib.Plan | plan_lib.Unsettled | None = None
        if self.asked is not None:
            self._settle(self._shapes, unknown=None)

    def get_config(self) -> dict[str, Any]:
        """Returns both arguments as plain data for JSON."""
        asked = self.asked
        if isinstance(asked, plan_lib.Plan):
            asked = asked.get_config()
        elif isinstance(asked, tuple):
            asked = list(asked)
        return {"plan": asked, "input_shape": self.input_shape}

    def graph(self, model: Any) -> graph_lib.Graph:
        """Returns the calls of the model as it is now."""
        if not self._graph.is_current():
            self._graph = graph_lib.read(model)
            self._parts = None
        return self._graph

    def settled(
        self, model: Any, flat: Sequence[Any]
    ) -> tuple[graph_lib.Graph, tuple[segments.Part, ...]]:
        """Returns the graph and its parts, settling the plan if need be."""
        self.graph(model)
        if self._parts is None:
            shapes = self._shapes or [
                None if x is None else tuple(x.shape) for x in flat
            ]
            self._settle(shapes, unknown=_UNKNOWN_SIZE)
        return self._graph, self._parts

    def _settle(self, shapes, unknown):
        graph = self._graph
        batch_size = next((s[0] for s in shapes or () if s), None)
        specs = sizes.infer(graph, shapes)

        def measure(batch_size):
            return [
                sizes.tensor_bytes(spec, batch_size, unknown) for spec in specs
            ]

        plan = self._make(measure(batch_size or 1), unknown)
        self.plan = plan
        if isinstance(plan, plan_lib.Unsettled):
            return
        segments.check_fits(graph, plan)
        known = measure(batch_size)
        self.plan = plan_lib.annotate(
            plan,
            [_total(known, call) for call in graph.calls],
            [
                [(graph.names[key], known[key]) for key in keys]
                for keys in graph.live()
            ],
        )
        self._parts = segments.split(graph, self.plan)

    def _make(self, known, unknown):
        graph, asked = self._graph, self.asked
        if isinstance(asked, plan_lib.Plan):
            return asked
        if isinstance(asked, tuple):
            return planners.at_boundaries(graph.paths, asked)
        calls = [_total(known, call) for call in graph.calls]
        live = [[known[key] for key in keys] for keys in graph.live()]
        if isinstance(asked, int):
            # Says what is wrong with the number even before sizes are known.
            planners.uniform(graph.paths, asked)
        if None in calls or any(None in keys for keys in live):
            if unknown is None:
                position = calls.index(None) if None in calls else 0
                return plan_lib.Unsettled(
                    asked,
                    f"the size of the output of '{graph.paths[position]}' is "
                    "not known before the first batch. Give `input_shape` to "
                    "know it earlier.",
                )
            # Tensors of unknown item size (strings, sparse) count nothing.
            calls = [size or 0 for size in calls]
            live = [[size or 0 for size in keys] for keys in live]
        cuts = [sum(keys) for keys in live]
        if isinstance(asked, int):
            return planners.uniform(graph.paths, asked, calls, cuts)
        return planners.sqrt(graph.paths, calls, cuts)


def _total(known, call):
    made = [known[key] for _, outputs in call.steps for key in outputs]
    return None if None in made else sum(made)


def _checked_plan(asked):
    if asked is None or isinstance(asked, plan_lib.Plan):
        return asked
    if isinstance(asked, str) and asked == DEFAULT:
        return asked
    if isinstance(asked, (list, tuple)) and all(
        isinstance(path, str) for path in asked
    ):
        return tuple(asked)
    if not isinstance(asked, (bool, str)):
        with contextlib.suppress(TypeError):
            return operator.index(asked)
    raise plan_lib.PlanError(
        '`plan` is None, "sqrt", a number of segments, a list of call paths '
        f"or a Plan. Received: {asked!r} of type {type(asked).__name__}."
        + (_meant(asked) if isinstance(asked, str) else "")
    )


def _meant(text):
    if text.endswith(".json"):
        return f" A saved plan is read by tfckpt.Plan.load({text!r})."
    if text in ("min_memory", "budget", "recursive", "chen"):
        return (
            f" tfckpt.make_plan(model, strategy={text!r}, batch_size=...) "
            "makes such a plan."
        )
    near = difflib.get_close_matches(text, ["sqrt"], n=1)
    return f" Did you mean {(near or [[text]])[0]!r}?"


def flat_shapes(model: Any, input_shape: Any) -> list[tuple[Any, ...]] | None:
    """Returns the shapes of a model's inputs, flat; None if none are given.

    Args:
        model: A Functional model.
        input_shape: A structure of shapes like its inputs, the batch
            dimension first.

    Raises:
        PlanError: They don't fit the model's inputs.
    """
    if input_shape is None:
        return None
    expected = [tuple(x.shape) for x in model.inputs]
    shapes = []
    try:
        keras.tree.map_shape_structure(
            lambda shape: shapes.append(tuple(shape)), input_shape
        )
    except TypeError:
        shapes = []
    if len(shapes) != len(expected) or not all(map(_fits, shapes, expected)):
        raise plan_lib.PlanError(
            "`input_shape` is the shape of each input, the batch dimension "
            f"first. Received: {input_shape!r}. Expected something like "
            f"{expected[0] if len(expected) == 1 else expected}, with sizes "
            "of 1 or more in place of None."
        )
    return shapes


def _fits(shape, expected):
    """Whether a shape is one that the input may have."""
    return len(shape) == len(expected) and all(
        size is None
        or (
            isinstance(size, int)
            and size > 0
            and (known is None or size == known)
        )
        for size, known in zip(shape, expected, strict=True)
    )
