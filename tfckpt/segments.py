"""The calls of a graph as functions from tensors to tensors, and their run.

A segment reads what earlier segments made through its arguments only, and
returns only what later segments or the caller need. A tensor that a segment
doesn't use passes it by.

How gradients are summed
------------------------
What the readers of a tensor contribute to its gradient is summed in the
order in which they are differentiated, later ones first, and three summands
or more round differently when they are grouped. One layer may contribute
several: batch normalization reads its input four times. So a tensor that is
read both in a segment and after it goes through the segment: the segment
returns it too, and later readers read that. Their sum then comes in as the
upstream gradient of the returned tensor, and the readers in the segment add
theirs to it one by one, as they do without segments.

What is left, for tensors with three contributions or more: readers on parallel
branches that a plan puts into different segments are summed in the order of
the segments; and what losses inside a segment (`add_loss`, activity
regularizers) contribute comes after what later segments do, not before.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tfckpt import _compat_graph as compat
from tfckpt import graph as graph_lib
from tfckpt import plan as plan_lib
from tfckpt import recomputation


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A segment as a function.

    Attributes:
        start: Position of its first call.
        end: Position after its last call.
        recomputed: Whether the backward pass runs it again.
        arguments: Keys of the tensors that it reads and doesn't make.
        outputs: Keys of the tensors that it returns: those that it makes
            and others read, and arguments that are read again later.
        drops: For each call the keys that nobody reads after it.
        kept: Positions of the calls whose products are kept.
        parts: Parts inside, which are recomputed one by one when this one
            is.
    """

    start: int
    end: int
    recomputed: bool
    arguments: tuple[int, ...]
    outputs: tuple[int, ...]
    drops: tuple[tuple[int, ...], ...]
    kept: frozenset[int] = frozenset()
    parts: tuple["Part", ...] = ()


def split(graph: graph_lib.Graph, plan: plan_lib.Plan) -> tuple[Part, ...]:
    """Returns the segments of a plan as parts of the graph.

    Raises:
        PlanError: The plan is for other calls.
    """
    check_fits(graph, plan)
    readers: dict[int, list[int]] = {}
    made: dict[int, int] = dict.fromkeys(graph.inputs, -1)
    for position, call in enumerate(graph.calls):
        for read, outputs in call.steps:
            for key in read:
                readers.setdefault(key, []).append(position)
            made.update((key, position) for key in outputs)
    # These may carry another mask after they were read.
    masked = frozenset(
        key
        for call in graph.calls
        for entry in call.entries
        if entry.masked
        for _, key in entry.feeds
    )
    # A tensor that nobody reads is dropped where it is made.
    last = {
        key: readers[key][-1] if key in readers else position
        for key, position in made.items()
    } | dict.fromkeys(graph.outputs, len(graph.calls))
    uses = _Uses(graph, readers, made, last, masked)
    return uses.parts(plan.segments, 0)


@dataclasses.dataclass(frozen=True, eq=False)
class _Uses:
    """Who makes and reads each tensor.

    Attributes:
        graph: The graph.
        readers: For each key the positions of the calls that read it.
        made: For each key the position of the call that makes it.
        last: For each key the position of the last call that reads it.
        masked: Keys that may carry another mask after they were read.
    """

    graph: graph_lib.Graph
    readers: Mapping[int, Sequence[int]]
    made: Mapping[int, int]
    last: Mapping[int, int]
    masked: frozenset[int]

    def parts(
        self, planned: Sequence[plan_lib.Segment], end: int
    ) -> tuple[Part, ...]:
        """Returns the parts of segments, the first of which begins at `end`."""
        parts = []
        for segment in planned:
            start, end = end, end + len(segment.calls)
            parts.append(self._part(segment, start, end))
        return tuple(parts)

    def _part(self, segment, start, end):
        first = {
            key: next(p for p in positions if p >= start)
            for key, positions in self.readers.items()
            if self.made[key] < start
            and any(start <= p < end for p in positions)
        }
        # The gradient of what is read last is complete first.
        arguments = sorted(first, key=lambda key: -first[key])
        outputs = [
            key
            for key, position in self.made.items()
            if start <= position < end and self.last[key] >= end
        ]
        outputs += [
            key
            for key in arguments
            if self.last[key] >= end
            and (key in self.masked or _is_float(self.graph.specs[key]))
        ]
        return Part(
            start,
            end,
            segment.recomputed,
            tuple(arguments),
            tuple(outputs),
            tuple(
                tuple(k for k, at in self.last.items() if at == position)
                for position in range(start, end)
            ),
            frozenset(
                start + offset
                for offset, path in enumerate(segment.calls)
                if path in segment.kept
            ),
            self.parts(segment.segments, start),
        )


class Run:
    """One call of a model, segment by segment.

    Args:
        graph: The model's graph.
        context: Arguments that the model hands to its layers: `training`,
            and what was registered besides.
    """

    def __init__(
        self, graph: graph_lib.Graph, context: Mapping[str, Any]
    ) -> None:
        self._graph = graph
        self._context = dict(context)
        # By path of a nested model; a Python value, written on entry and
        # again, equally, when the entry is recomputed.
        self._training: dict[str, Any] = {}

    def __call__(
        self,
        parts: Sequence[Part],
        inputs: Sequence[Any],
        keep_last: bool,
    ) -> list[Any]:
        """Runs the model.

        Args:
            parts: The segments.
            inputs: The model's inputs, flat and standardized.
            keep_last: Whether the last segment runs as its plan says; it
                is recomputed as well otherwise.

        Returns:
            The model's outputs, flat.
        """
        values = dict(zip(self._graph.inputs, inputs, strict=True))
        for part in parts:
            last = part is parts[-1]
            self._run(part, values, part.recomputed or (last and not keep_last))
        return [values[key] for key in self._graph.outputs]

    def _run(self, part, values, recomputed):
        # What has no output has no gradient either.
        if not recomputed or not part.outputs:
            self.execute(part, values)
            return
        outputs = recomputation.recompute(self.function(part))(
            *(values[key] for key in part.arguments)
        )
        values.update(zip(part.outputs, outputs, strict=True))
        for key in itertools.chain(*part.drops):
            values.pop(key, None)

    def function(self, part: Part) -> Callable[..., tuple[Any, ...]]:
        """Returns `part` as a function of its arguments."""

        def run_segment(*tensors: Any) -> tuple[Any, ...]:
            values = dict(zip(part.arguments, tensors, strict=True))
            self.execute(part, values)
            return tuple(values[key] for key in part.outputs)

        calls = self._graph.calls
        run_segment.__name__ = run_segment.__qualname__ = (
            f"segment from '{calls[part.start].path}' "
            f"to '{calls[part.end - 1].path}'"
        )
        return run_segment

    def execute(self, part: Part, values: dict[int, Any]) -> None:
        """Makes the calls of a part.

        Args:
            part: The part.
            values: Tensors by key. Those that the part makes are added,
                those that nobody reads any more are removed.
        """
        for inner in part.parts:
            self._run(inner, values, inner.recomputed)
        if part.parts:
            return
        opened = list(self._graph.calls[part.start].owners)
        try:
            for position, drops in zip(
                range(part.start, part.end), part.drops, strict=True
            ):
                call = self._graph.calls[position]
                for entry in call.entries:
                    opened.append(entry.nested)
                    self._enter(entry, values)
                with (
                    recomputation.products()
                    if position in part.kept
                    else contextlib.nullcontext()
                ):
                    self._call(call, values)
                for nested in call.leaves:
                    compat.leave_context(nested.model)
                for key in drops:
                    values.pop(key, None)
        except BaseException:
            # Keras ends the calls of nested models in a `finally`.
            for nested in reversed(opened):
                compat.leave_context(nested.model)
            raise

    def make_calls(
        self,
        model: Any,
        positions: Sequence[int],
        values: dict[int, Any],
        around: Callable[[int], contextlib.AbstractContextManager],
    ) -> None:
        """Makes some calls, outside of a call of the model.

        Args:
            model: The model.
            positions: Positions of the calls, in order.
            values: Tensors by key; what is made is added.
            around: Returns the context in which the call at a position is
                made.
        """
        training = self._context["training"]
        for position in positions:
            call = self._graph.calls[position]
            models = [model, *(nested.model for nested in call.owners)]
            with contextlib.ExitStack() as stack:
                for each in models:
                    stack.callback(compat.leave_context, each)
                    compat.enter_context(each, True, training)
                for nested in call.owners:
                    self._training[nested.path] = training
                stack.enter_context(compat.layer_scopes([model]))
                stack.enter_context(around(position))
                for entry in call.entries:
                    self._convert(entry, values)
                self._call(call, values)

    def _training_of(self, nested: graph_lib.Nested | None) -> Any:
        if nested is None:
            return self._context.get("training")
        return self._training[nested.path]

    def _enter(self, entry, values):
        nested = entry.nested
        training = self._training_of(nested.parent)
        given = training is not None
        if not given:
            given, training = nested.training_given, nested.training
        self._training[nested.path] = compat.enter_context(
            nested.model, given, training
        )
        self._convert(entry, values)

    def _convert(self, entry, values):
        nested = entry.nested
        if not entry.feeds:
            return
        args, kwargs = _filled_in(entry.node, entry.feeds, values)
        flat = compat.enter_inputs(
            nested.model,
            nested.functional,
            args[0] if args else kwargs["inputs"],
            kwargs["mask"] if entry.masked else None,
        )
        for key, tensor in zip(entry.outputs, flat, strict=True):
            if key is not None:
                values[key] = tensor

    def _call(self, call, values):
        for key, spec, path in call.expected:
            _check_as_recorded(call, values[key], spec, path)
        args, kwargs = _filled_in(call.node, call.feeds, values)
        context = self._context
        if call.owners:
            context = {"training": self._training_of(call.owners[-1])}
        with compat.layer_scopes([nested.model for nested in call.owners]):
            outputs = compat.call_operation(
                call.operation, context, args, kwargs
            )
        values.update(
            zip(call.outputs, keras.tree.flatten(outputs), strict=False)
        )


def _is_float(spec):
    """Whether a tensor may have a gradient."""
    dtype = keras.backend.standardize_dtype(spec.dtype)
    return "float" in dtype or "complex" in dtype


def _filled_in(node, feeds, values):
    return compat.fill_in(node, {i: values[key] for i, key in feeds})


def _check_as_recorded(call, tensor, spec, path):
    """Refuses what the nested model would have converted or refused."""
    if tensor is None:
        return
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    shape = tuple(tensor.shape)
    if (
        dtype == spec.dtype
        and len(shape) == len(spec.shape)
        and all(
            a is None or b is None or a == b
            for a, b in zip(shape[1:], spec.shape[1:], strict=True)
        )
    ):
        return
    raise ValueError(
        f"The nested model '{path}' was recorded with an input of shape "
        f"{spec.shape} and dtype {spec.dtype}, but '{call.path}' in it "
        f"received shape {shape} and dtype {dtype}. Correct the "
        "`compute_output_spec` (or `compute_output_shape`) of the layer "
        f"before '{path}', set dtype policies before the model is made, or "
        "use plan=None."
    )


def check_fits(graph: graph_lib.Graph, plan: plan_lib.Plan) -> None:
    """Raises a PlanError if a plan is for other calls than the graph's."""
    if plan.calls != graph.paths:
        missing = [path for path in graph.paths if path not in plan.calls]
        unknown = [path for path in plan.calls if path not in graph.paths]
        raise plan_lib.PlanError(
            "The plan is for another model: "
            + (
                f"it lacks the calls {missing[:5]}, and names "
                f"{unknown[:5]}, which the model doesn't make. "
                if missing or unknown
                else "the same calls run in another order. "
            )
            + f"The plan has {len(plan.calls)} calls, the model "
            f"{len(graph.paths)}. Make the plan from this model. (Names that "
            "Keras numbers are the same after keras.utils.clear_session(), or "
            "give the layers names.)"
        )
