"""What `compile` was asked for, checked before anything is changed."""

import dataclasses
import numbers
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfckpt import _compat_training as compat
from tfckpt import distribute, normalization

NORMALIZATIONS = ("micro", "sync", "exact")
_BOTH = (
    "Expected one of gradient_accumulation_steps (each batch of `fit` is a "
    "micro-batch) and micro_batches (each batch of `fit` is split)"
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a model is trained.

    Attributes:
        steps: Micro-batches in a window over calls: a number, or a function
            of the number of updates so far. None for a window in one call.
        parts: Into how many micro-batches a batch is split, or their sizes.
        skip_nonfinite: Whether micro-batches with NaN or inf are left out.
        batch_normalization: Whose statistics it uses, one of `NORMALIZATIONS`;
            None if nobody said so.
    """

    steps: int | Callable[[Any], Any] | None = None
    parts: int | tuple[int, ...] | None = None
    skip_nonfinite: bool = False
    batch_normalization: str | None = None

    @property
    def within_call(self) -> bool:
        """Whether a window is one batch, split."""
        return self.parts is not None

    @property
    def count(self) -> int | None:
        """Micro-batches in each window, None if that changes."""
        if self.within_call:
            return self.parts if is_int(self.parts) else len(self.parts)
        return self.steps if is_int(self.steps) else None

    def config(self) -> dict[str, Any]:
        """Returns the arguments of `compile` that make it."""
        parts = self.parts
        return {
            "gradient_accumulation_steps": self.steps,
            "micro_batches": list(parts) if isinstance(parts, tuple) else parts,
            "skip_nonfinite": self.skip_nonfinite,
            "batch_normalization": self.batch_normalization,
        }


def is_int(value: Any) -> bool:
    """Whether a value is a whole number (True and 4.0 are not)."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def checked(
    steps: Any, parts: Any, skip_nonfinite: Any, batch_normalization: Any
) -> Settings | None:
    """Returns the settings, None if no window was asked for.

    Raises:
        TypeError: A value is of the wrong type.
        ValueError: A value is out of range, or both windows are given.
    """
    if not isinstance(skip_nonfinite, bool):
        raise TypeError(
            "skip_nonfinite must be True or False. Received: "
            f"skip_nonfinite={skip_nonfinite!r}"
        )
    if batch_normalization not in (None, *NORMALIZATIONS):
        raise ValueError(
            f"batch_normalization must be one of {', '.join(NORMALIZATIONS)}. "
            f"Received: batch_normalization={batch_normalization!r}"
        )
    if batch_normalization == "exact" and parts is None:
        raise ValueError(
            "batch_normalization='exact' needs the whole window at once. "
            f"Received: gradient_accumulation_steps={steps!r}, micro_batches="
            "None. Give micro_batches in its place, such as micro_batches=4, "
            "and batches as large as the window."
        )
    if steps is not None and parts is not None:
        raise ValueError(
            f"{_BOTH}, not both. Received: gradient_accumulation_steps="
            f"{steps!r}, micro_batches={parts!r}"
        )
    if steps is None and parts is None:
        if skip_nonfinite:
            raise ValueError(
                f"skip_nonfinite=True skips micro-batches. {_BOTH}; "
                "gradient_accumulation_steps=1 makes each batch one. "
                "Received neither."
            )
        if batch_normalization is not None:
            raise ValueError(
                f"batch_normalization={batch_normalization!r} is about windows "
                f"of micro-batches. {_BOTH}; gradient_accumulation_steps=1 "
                "makes each batch one. Received neither."
            )
        return None
    others = {
        "skip_nonfinite": skip_nonfinite,
        "batch_normalization": batch_normalization,
    }
    if steps is not None:
        return Settings(checked_steps(steps), None, **others)
    return Settings(None, _checked_parts(parts), **others)


def checked_steps(steps: Any) -> int | Callable[[Any], Any]:
    """Returns a number of micro-batches in a window, or a schedule of it."""
    if is_int(steps):
        return int(_positive("gradient_accumulation_steps", steps))
    if callable(steps) and not isinstance(steps, type):
        return steps
    raise TypeError(
        "gradient_accumulation_steps must be a whole number of micro-batches, "
        "at least 1, or a function of the number of updates so far, such as a "
        "keras.optimizers.schedules.PiecewiseConstantDecay. Received: "
        f"gradient_accumulation_steps={steps!r}"
    )


def _checked_parts(parts):
    if is_int(parts):
        return int(_positive("micro_batches", parts))
    sizes = isinstance(parts, Sequence) and not isinstance(parts, str)
    if sizes and parts and all(map(is_int, parts)):
        for size in parts:
            _positive("micro_batches", size, parts)
        return tuple(int(size) for size in parts)
    raise TypeError(
        "micro_batches must be a whole number of micro-batches, at least 1, "
        "or a list of their sizes, such as [5, 3, 4]. Received: "
        f"micro_batches={parts!r}"
    )


def _positive(name, value, whole=None):
    if value < 1:
        raise ValueError(
            f"{name} must be at least 1. Received: {name}="
            f"{value if whole is None else whole!r}"
        )
    return value


def check_model(model: keras.Model, optimizer: Any, base: type) -> None:
    """Raises an error if a model can't be trained in micro-batches.

    Args:
        model: The model.
        optimizer: What `compile` was given, or a `keras.optimizers` name.
        base: The class whose `train_step` has to run.
    """
    kind = type(model)
    if kind.train_step is not base.train_step:
        raise ValueError(
            f"{kind.__name__}.train_step would not accumulate gradients: it "
            f"is not that of {base.__name__}. Remove it, or accumulate in it "
            "with a tfckpt.GradientAccumulator and leave "
            "gradient_accumulation_steps and micro_batches out of `compile`."
        )
    if has_own_loss(model) and not hasattr(model, "loss_denominator"):
        raise ValueError(
            f"{kind.__name__}.compute_loss is its own, so that nobody knows "
            "what its loss is divided by, and micro-batches could not be "
            "weighted. Add a method `loss_denominator(self, x, y, y_pred, "
            "sample_weight)` that returns this number for the batch that it "
            "is given, such as the number of samples or of valid tokens."
        )
    for each in compat.wrapped_optimizers(optimizer):
        steps = each.gradient_accumulation_steps
        if steps:
            raise ValueError(
                f"The optimizer {each.name!r} accumulates gradients too: "
                f"gradient_accumulation_steps={steps}. Use that of `compile` "
                "only, which weights micro-batches of different size rightly, "
                f"and make the optimizer without: keras.optimizers."
                f"{type(each).__name__}(...)."
            )
    _check_distribution(model)


def check_normalization(model: keras.Model, options: Settings) -> None:
    """Raises or warns if batch normalization can't be as asked for.

    Args:
        model: The model.
        options: How it is to be trained.
    """
    layers = [x for x in normalization.layers_of(model) if x.trainable]
    others = [x for x in layers if not normalization.can_listen(x)]
    if others and options.batch_normalization not in (None, "micro"):
        raise ValueError(
            f"batch_normalization={options.batch_normalization!r} can't be "
            f"had for the layer '{others[0].path}' of type "
            f"{type(others[0]).__name__}, which has renorm=True or a `call` "
            "of its own. Use 'micro', which leaves such layers to Keras, set "
            "trainable=False on the layer, or use a plain "
            "keras.layers.BatchNormalization."
        )
    if options.batch_normalization == "exact":
        _check_exact(model, options, layers)
    if layers and options.batch_normalization is None and options.count != 1:
        way_out = (
            "Of a tfckpt.SegmentedModel, "
            if model.graph_of_calls() is None
            else ""
        ) + "batch_normalization='exact' with micro_batches makes them equal. "
        left = (
            f" ({', '.join(x.path for x in others)}: each micro-batch moves "
            "its moving statistics, as in Keras.)"
            if others
            else ""
        )
        warnings.warn(
            "The model has batch normalization, which normalizes each "
            "micro-batch by its own mean and variance: gradients differ from "
            "those of the big batch. (Its moving statistics move once an "
            f"update, with those of the whole window.) {way_out}"
            "batch_normalization='micro' in `compile` says that this is meant."
            + left,
            stacklevel=3,
        )


def _check_exact(model, options, layers):
    asked = "batch_normalization='exact'"
    if options.skip_nonfinite:
        raise ValueError(
            f"{asked} has statistics of all micro-batches, so that none can "
            "be left out. Received: skip_nonfinite=True. Use 'micro', or "
            "leave skip_nonfinite out."
        )
    graph = model.graph_of_calls()
    if graph is None:
        raise ValueError(
            f"{asked} needs a tfckpt.SegmentedModel, whose calls are known. "
            f"Received: '{model.name}' of type {type(model).__name__}. Make "
            "one of a Functional or Sequential model with "
            "SegmentedModel.from_model, or use 'sync' or 'micro'."
        )
    if has_own_loss(model):
        raise ValueError(
            f"{asked} computes the loss twice, and {type(model).__name__} has "
            "a compute_loss of its own, of which nobody knows what it does "
            "besides. Give `compile` a loss, or use 'sync' or 'micro'."
        )
    for call in graph.calls:
        made = {key for entry in call.entries for key in entry.outputs}
        if call.operation in layers and call.feeds[0][1] in made:
            raise ValueError(
                f"{asked} can't be had for the layer '{call.path}', the first "
                "of a nested model that converts what it is given. Give the "
                "nested model inputs of the dtype and shape that it gets, or "
                "use 'sync' or 'micro'."
            )
    called = [call.operation for call in graph.calls]
    for layer in layers:
        if not any(layer is each for each in called):
            raise ValueError(
                f"{asked} can't be had for the layer '{layer.path}', which "
                "is called inside of another layer. Call it in the "
                "Functional model itself, set trainable=False on it, or use "
                "'sync' or 'micro'."
            )


def has_own_loss(model: keras.Model) -> bool:
    """Whether a class of the user's computes the loss."""
    return type(model).compute_loss is not keras.Model.compute_loss


def _check_distribution(model):
    distribute.check_replicas_wait(model.distribute_strategy)
    if keras.distribution.distribution() is not None:
        raise ValueError(
            "Gradients are not accumulated under keras.distribution. "
            f"Received: {keras.distribution.distribution()!r}. Call keras."
            "distribution.set_distribution(None), and make the model under a "
            "tf.distribute strategy."
        )
