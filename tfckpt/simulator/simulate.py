"""What a training step under a plan takes, before it is run."""

import dataclasses

from tfckpt import costs as costs_lib
from tfckpt import plan as plan_lib
from tfckpt import prediction as prediction_lib
from tfckpt.simulator import index as index_lib
from tfckpt.simulator import walk as walk_lib


class Simulator:
    """Predicts memory and time of a training step under any plan.

    `tfckpt.simulator.walk` says what a step does. All planners and reports
    use this one simulator.

    Args:
        costs: What the calls of the model cost.

    Example:

    >>> from tfckpt import costs, plan
    >>> calls = [
    ...     costs.CallCost(
    ...         f"dense_{i}", "Dense", (i,), (i + 1,), needs=(i,),
    ...         forward_time=1.0, backward_time=2.0,
    ...     )
    ...     for i in range(4)
    ... ]
    >>> simulator = Simulator(
    ...     costs.Costs(tuple(calls), (8,) * 5, (0,) * 5, tuple("abcde"),
    ...                 inputs=(0,), outputs=(4,), batch_size=1)
    ... )
    >>> cut = plan.Plan((
    ...     plan.Segment(("dense_0", "dense_1")),
    ...     plan.Segment(("dense_2", "dense_3"), recomputed=False),
    ... ))
    >>> predicted = simulator.predict(cut)
    >>> predicted.peak_bytes, predicted.plain_bytes
    (24, 32)
    >>> round(predicted.extra_time, 3)  # The first call runs again: 1 of 12.
    0.083
    """

    def __init__(self, costs: costs_lib.Costs):
        self.index = index_lib.Index(costs)
        self._positions = {path: i for i, path in enumerate(costs.paths)}
        self._plain = None

    @property
    def costs(self) -> costs_lib.Costs:
        """What the calls cost."""
        return self.index.costs

    @property
    def plain(self) -> walk_lib.Walk:
        """The step with no recomputation."""
        if self._plain is None:
            self._plain = walk_lib.Walk(
                self.index, [index_lib.Part(0, self.index.length, False)]
            )
        return self._plain

    def walk(self, plan: plan_lib.Plan) -> walk_lib.Walk:
        """Returns the step under the plan, with the call at its peak.

        Raises:
            PlanError: The plan holds other calls than the model.
        """
        return walk_lib.Walk(self.index, self.parts(plan))

    def predict(self, plan: plan_lib.Plan) -> prediction_lib.Prediction:
        """Returns memory and time of a step under the plan.

        What depends on more than this plan (frontier, least memory) is left
        empty.

        Raises:
            PlanError: The plan holds other calls than the model.
        """
        costs = self.costs
        walk = self.walk(plan)
        step = costs.step_time
        return prediction_lib.Prediction(
            batch_size=costs.batch_size,
            peak_bytes=walk.peak,
            plain_bytes=self.plain.peak,
            step_bytes=walk.step_peak,
            plain_step_bytes=self.plain.step_peak,
            weight_bytes=costs.weight_bytes,
            gradient_bytes=costs.gradient_bytes,
            optimizer_bytes=costs.optimizer_bytes,
            input_bytes=costs.input_bytes,
            step_flops=sum(
                c.forward_flops + c.backward_flops for c in costs.calls
            ),
            extra_flops=walk.extra_flops,
            extra_time=walk.extra_time / step if step else 0.0,
            forward_time=sum(c.forward_time for c in costs.calls) / step
            if step
            else 0.0,
            timeline=_relative(walk.timeline, step),
            plain_timeline=_relative(self.plain.timeline, step),
            notes=costs.notes,
        )

    def annotated(self, plan: plan_lib.Plan) -> plan_lib.Plan:
        """Returns the plan with a prediction, sizes and boundary names.

        The boundary of a segment are the tensors made in it that a later call
        reads or that the model returns.
        """
        predicted = self.predict(plan)
        return plan_lib.Plan(
            tuple(map(self._annotated, plan.segments)), predicted
        )

    def parts(self, plan: plan_lib.Plan) -> tuple[index_lib.Part, ...]:
        """Returns the segments of a plan by positions of calls."""
        if plan.calls != self.costs.paths:
            raise plan_lib.PlanError(_mismatch(plan.calls, self.costs.paths))
        return tuple(map(self._part, plan.segments))

    def _part(self, segment):
        start = self._positions[segment.calls[0]]
        return index_lib.Part(
            start,
            start + len(segment.calls),
            segment.recomputed,
            frozenset(self._positions[path] for path in segment.kept),
            tuple(map(self._part, segment.segments)),
        )

    def _annotated(self, segment):
        index, part = self.index, self._part(segment)
        inside = index.costs.calls[part.start : part.stop]
        made = [key for call in inside for key in call.makes]
        boundary = [key for key in made if index.last_read[key] >= part.stop]
        return dataclasses.replace(
            segment,
            segments=tuple(map(self._annotated, segment.segments)),
            boundary=tuple(index.costs.names[key] for key in boundary),
            output_bytes=sum(index.sizes[key] for key in made),
            boundary_bytes=sum(index.sizes[key] for key in boundary),
            kept_bytes=sum(
                index.costs.calls[call].product_bytes for call in part.kept
            ),
            forward_flops=sum(call.forward_flops for call in inside),
        )


def _relative(timeline, step):
    return tuple((time / step if step else 0.0, b) for time, b in timeline)


def _mismatch(received, expected):
    for position, (one, other) in enumerate(zip(received, expected)):  # noqa: B905
        if one != other:
            return (
                f"The plan is for another model. Call {position} is {one!r}; "
                f"expected {other!r}. Make the plan from these costs."
            )
    return (
        f"The plan is for another model. It holds {len(received)} calls; "
        f"expected {len(expected)}. Make the plan from these costs."
    )
