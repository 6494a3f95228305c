"""What a training step under a plan is expected to take: plain data."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfckpt import fields


@dataclasses.dataclass(frozen=True)
class Trial:
    """One compilation of a training step by a target's own compiler.

    Attributes:
        target: Name of the target.
        budget_bytes: Activation memory that the plan was made for, as the
            simulator counts it; None for no recomputation.
        bytes: What the compiled step takes on the device, in the terms of the
            budget that was asked for; None if the compiler found it too big
            for the device.
        extra_time: Added time of that plan, relative to a plain step.
        fits: Whether that is within the budget.
    """

    target: str
    budget_bytes: int | None
    bytes: int | None
    extra_time: float
    fits: bool


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Memory and time of a training step, with a plan and without.

    Activation memory is what a step takes besides weights, gradients of
    weights, optimizer state and inputs.

    Attributes:
        batch_size: Examples in a step.
        peak_bytes: Activation memory with the plan.
        plain_bytes: Activation memory with no recomputation.
        step_bytes: Most bytes of activations and gradients of weights
            together; these are made one after the other, so it may be less
            than the sum. 0 if not known.
        plain_step_bytes: The same with no recomputation.
        least_bytes: Least activation memory of any plan; None if not known.
        weight_bytes: Bytes of the model's variables.
        gradient_bytes: Bytes of the gradients of trainable variables.
        optimizer_bytes: Bytes of the optimizer's variables.
        input_bytes: Bytes of the inputs.
        step_flops: Operations of a plain step, forward and backward.
        extra_flops: Operations that the plan adds.
        extra_time: Time that the plan adds, relative to a plain step.
        forward_time: Where the forward pass ends, if a plain step takes 1; 0
            if not known.
        frontier: Pairs of activation memory and extra time, each the least
            time within that memory, by rising memory.
        timeline: Memory over a step with the plan: pairs of time, where a
            plain step takes 1, and bytes.
        plain_timeline: The same with no recomputation.
        blocked: For each place where no cheap cut was possible, a sentence.
        trials: Compilations by the target's compiler.
        notes: What was assumed, a sentence each.
    """

    batch_size: int
    peak_bytes: int
    plain_bytes: int
    least_bytes: int | None = None
    weight_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    input_bytes: int = 0
    step_flops: float = 0.0
    extra_flops: float = 0.0
    extra_time: float = 0.0
    forward_time: float = 0.0
    step_bytes: int = 0
    plain_step_bytes: int = 0
    frontier: tuple[tuple[int, float], ...] = ()
    timeline: tuple[tuple[float, int], ...] = ()
    plain_timeline: tuple[tuple[float, int], ...] = ()
    blocked: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """Activation memory with the plan, relative to none."""
        return self.peak_bytes / self.plain_bytes if self.plain_bytes else 1.0

    @property
    def peak_above_gradients(self) -> int:
        """The peak above the gradients of all weights.

        That is what a measurement finds which takes the peak of a step of one
        example off.
        """
        if not self.step_bytes:
            return self.peak_bytes
        return self.step_bytes - self.gradient_bytes

    @property
    def plain_above_gradients(self) -> int:
        """The same with no recomputation."""
        if not self.plain_step_bytes:
            return self.plain_bytes
        return self.plain_step_bytes - self.gradient_bytes

    @property
    def fixed_bytes(self) -> int:
        """Weights, gradients, optimizer state and inputs together."""
        return (
            self.weight_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.input_bytes
        )

    @property
    def total_bytes(self) -> int:
        """Everything on the device."""
        return self.fixed_bytes + self.peak_bytes

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Prediction":
        """Returns the prediction that `dataclasses.asdict` described."""
        if not isinstance(config, Mapping):
            raise TypeError(f"A prediction is a mapping. Received: {config!r}.")
        fields.check(cls, config)
        values = dict(config)
        for name in ("frontier", "timeline", "plain_timeline"):
            values[name] = tuple(map(tuple, values.get(name, ())))
        for name in ("blocked", "notes"):
            values[name] = tuple(values.get(name, ()))
        values["trials"] = tuple(
            _trial(trial) for trial in values.get("trials", ())
        )
        return cls(**values)


def _trial(config):
    fields.check(Trial, config)
    return Trial(**config)
