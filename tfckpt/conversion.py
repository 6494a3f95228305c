"""Which models `SegmentedModel.from_model` takes: those that lose nothing."""

from typing import Any

import keras

from tfckpt import _compat_graph as compat


def checked_functional(cls: type, model: Any, input_shape: Any) -> Any:
    """Returns the Functional that runs a model which is to be converted.

    Args:
        cls: The class that the model is converted to.
        model: The model.
        input_shape: What an unbuilt Sequential is built with.

    Raises:
        TypeError: `model` has no graph, or holds what `cls` would lose.
        ValueError: `model` is a Sequential that is not built.
    """
    kind = type(model).__name__
    if not isinstance(model, keras.Model):
        raise TypeError(
            "SegmentedModel.from_model takes a keras.Model. Received: "
            f"{model!r} of type {kind}. For a layer there is "
            "tfckpt.Recompute, for a function tfckpt.recompute."
        )
    if isinstance(model, keras.Sequential):
        if not compat.functional_of(model) and input_shape is not None:
            model.build(input_shape)
        if not compat.functional_of(model):
            raise ValueError(
                f"The Sequential '{model.name}' is not built, so its calls "
                f"are not known. Received: input_shape={input_shape!r}. Add "
                "a keras.Input first, call `build`, or give `input_shape` "
                "with the batch dimension, such as (None, 32). A Sequential "
                "that takes several inputs has no graph; use "
                "tfckpt.Recompute for its layers."
            )
    functional = compat.functional_of(model)
    if functional is None:
        raise TypeError(
            f"'{model.name}' is a subclassed model ({kind}): what its `call` "
            "does can't be read as a graph. Expected a Functional or "
            "Sequential model. Wrap the layers that it calls in "
            "tfckpt.Recompute instead."
        )
    lost = _lost_methods(cls, model)
    if lost:
        raise TypeError(
            f"'{model.name}' of type {kind} has methods that "
            f"{cls.__name__} would lose: {', '.join(lost)}. Put them into a "
            f"class of your own, `class Segmented{kind}(tfckpt.Segmented"
            f"Model)`, and call `Segmented{kind}.from_model(model)`; or, if "
            "you don't need them, segment `keras.Model(model.input, "
            "model.output)`; or wrap its layers in tfckpt.Recompute."
        )
    beside = compat.layers_beside(model, functional)
    if beside:
        names = ", ".join(layer.name for layer in beside)
        raise TypeError(
            f"'{model.name}' holds layers that are not in its graph, which "
            f"{cls.__name__} would lose: {names}. Segment `keras.Model("
            "model.input, model.output)`, and attach them to the result."
        )
    return functional


def _lost_methods(cls, model):
    """Returns names of methods of the model's class that `cls` lacks."""
    # How it is made and saved is replaced on purpose.
    replaced = {"get_config", "from_config"}
    lost = set()
    for base in type(model).__mro__:
        if base in cls.__mro__ or base.__module__.split(".")[0] == "keras":
            continue
        for name, value in vars(base).items():
            method = callable(value) or isinstance(
                value, (property, classmethod, staticmethod)
            )
            if not method or name in replaced:
                continue
            if name.startswith("__") and name != "__call__":
                continue
            if not _has_own(cls, name):
                lost.add(name)
    # Keras itself sets these on layers, and `compile` sets the last.
    lost.update(
        name
        for name, value in vars(model).items()
        if callable(value)
        and callable(getattr(type(model), name, None))
        and name not in ("build", "quantize", "loss")
    )
    return sorted(lost)


def _has_own(cls, name):
    return any(
        name in vars(base)
        for base in cls.__mro__
        if base.__module__.split(".")[0] not in ("keras", "tfckpt")
        and base is not object
    )
