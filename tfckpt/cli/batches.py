"""What a step of some batch size takes: predicted, or as compiled."""

import dataclasses
import functools
from typing import Any

from tfckpt import plan as plan_lib
from tfckpt import prediction as prediction_lib
from tfckpt import segmented_model, target_fit
from tfckpt.cli import settings


class Sizes:
    """Sizes of steps of one model on one device.

    Args:
        model: The model.
        shape: Shape of its input or shapes of its inputs, with any batch
            dimension; None if the model knows them.
        target: The device; None for none.
        output: Where compilations are shown.
        measure: Whether costs are measured.
    """

    def __init__(
        self,
        model: Any,
        shape: Any,
        target: str | None,
        output: settings.Output,
        *,
        measure: bool = False,
    ):
        self.target = target
        self._model, self._shape = model, shape
        self._output, self._measure = output, measure
        # Plans take seconds, compilations more.
        self.predicted = functools.cache(self._predicted)
        self.least_plan = functools.cache(self._least_plan)
        self._compiled = functools.cache(self._compile)

    def taken(
        self, batch_size: int, *, plain: bool, compiled: bool
    ) -> int | None:
        """Returns the bytes of everything that a step needs on the device.

        Args:
            batch_size: Examples in the step.
            plain: Whether nothing is recomputed; else as much as it takes for
                the least memory.
            compiled: Whether the target's compiler is asked.

        Returns:
            Bytes; None if the compiler found them too many.
        """
        if compiled:
            return self._compiled(batch_size, plain)
        known = self.predicted(batch_size)
        least = (
            known.peak_bytes if known.least_bytes is None else known.least_bytes
        )
        return known.fixed_bytes + (known.plain_bytes if plain else least)

    def plan(self, batch_size: int, limit: int) -> plan_lib.Plan:
        """Returns the plan of least time within a limit in bytes.

        Raises:
            PlanError: There is none.
        """
        return self._make(batch_size, memory_budget=limit, target=self.target)

    def least_compiled(self, batch_size: int) -> plan_lib.Plan:
        """Returns the plan of least memory, with what it takes compiled."""
        plan = self.least_plan(batch_size)
        known = plan.prediction
        trial = prediction_lib.Trial(
            target=self.target,
            budget_bytes=known.peak_bytes,
            bytes=self.taken(batch_size, plain=False, compiled=True),
            extra_time=known.extra_time,
            fits=True,
        )
        known = dataclasses.replace(known, trials=(trial,))
        return dataclasses.replace(plan, prediction=known)

    def _predicted(self, batch_size):
        return self._make(batch_size, strategy="sqrt").prediction

    def _least_plan(self, batch_size):
        return self._make(batch_size, strategy="min_memory")

    def _make(self, batch_size, **arguments):
        return settings.make_plan(
            self._model,
            output=self._output,
            batch_size=batch_size,
            input_shape=self._shapes(batch_size),
            measure=self._measure or None,
            **arguments,
        )

    def _compile(self, batch_size, plain):
        plan = None if plain else self.least_plan(batch_size)
        segmented = segmented_model.SegmentedModel.from_model(
            self._model, plan=plan, input_shape=self._shapes(batch_size)
        )
        shapes = [(batch_size, *x.shape[1:]) for x in segmented.inputs]
        if self._shape is not None:
            shapes = self._shapes(batch_size)
            shapes = [shapes] if isinstance(shapes, tuple) else shapes
        found = target_fit.compiled_step(segmented, shapes, self.target)
        if found is None:
            return None
        # The step that is compiled hands its gradients out.
        return found.total + self.predicted(batch_size).optimizer_bytes

    def _shapes(self, batch_size):
        if self._shape is None:
            return None
        if isinstance(self._shape, tuple):
            return (batch_size, *self._shape[1:])
        return [(batch_size, *shape[1:]) for shape in self._shape]
