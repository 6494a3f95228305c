"""Which nested models run as their single calls, and what goes in unchanged.

A nested model is flattened, so that its calls can be recomputed one by one,
only where nothing is lost by it: one that does more than run its graph (an
overridden `call`, an activity regularizer, masks computed by itself,
quantization, `RematScope`) stays one call.
"""

from collections.abc import Mapping
from typing import Any

import keras

from tfckpt import _compat_graph as compat


def flattened(node: Any) -> Any:
    """Returns the Functional to run in place of a node's call, or None."""
    model = node.operation
    functional = compat.functional_of(model)
    if functional is None or not runs_its_graph_only(model):
        return None
    args, kwargs = compat.arguments_of(node)
    if len(args) > 1 or set(kwargs) - {"inputs", "training", "mask"}:
        return None
    # Keras records the masks that it found on the inputs, too.
    if not all(
        mask is None or isinstance(mask, keras.KerasTensor)
        for mask in masks_in(kwargs)
    ):
        return None
    if not isinstance(kwargs.get("training"), (bool, type(None))):
        return None
    given = args[0] if args else kwargs.get("inputs")
    leaves = keras.tree.flatten(given)
    if not all(isinstance(x, keras.KerasTensor) for x in leaves):
        return None
    if not compat.nodes_in_order(functional):
        return None
    made = {id(y) for n in compat.nodes_in_order(functional) for y in n.outputs}
    made.update(map(id, functional.inputs))
    if not all(id(y) in made for y in functional.outputs):
        return None
    return functional


def runs_its_graph_only(model: Any) -> bool:
    """Whether a call of the model does nothing but make its calls."""
    return (
        compat.runs_as_keras(model)
        and model.activity_regularizer is None
        and not model.supports_masking
        and model.quantization_mode is None
    )


def masks_in(kwargs: Mapping[str, Any]) -> list[Any]:
    """The masks that a call passes, flat; None where it passes none."""
    return keras.tree.flatten(kwargs.get("mask"))


def direct_inputs(given: Any, functional: Any) -> list[Any]:
    """Which inputs of a nested model go in as they are.

    Args:
        given: What its call was recorded with.
        functional: What runs it.

    Returns:
        For each of its inputs the tensor, None where it is converted.
    """
    if not _same_structure(given, functional.input):
        return [None] * len(functional.inputs)
    return [
        x if _goes_in_as_it_is(x, spec) else None
        for x, spec in zip(
            keras.tree.flatten(given), functional.inputs, strict=True
        )
    ]


def _same_structure(given, expected):
    if isinstance(given, keras.KerasTensor):
        return len(keras.tree.flatten(expected)) == 1 and not isinstance(
            expected, dict
        )
    try:
        keras.tree.assert_same_structure(
            keras.tree.lists_to_tuples(given),
            keras.tree.lists_to_tuples(expected),
        )
    except (TypeError, ValueError):
        return False
    return True


def _goes_in_as_it_is(x, spec):
    return (
        x.dtype == spec.dtype
        and len(x.shape) == len(spec.shape)
        and not any(
            getattr(t, attribute, False)
            for t in (x, spec)
            for attribute in ("sparse", "ragged")
        )
    )
