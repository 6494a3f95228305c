"""Private names of Keras that the graph and `SegmentedModel` need.

Each function says what it reaches for and why no public name does the same.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
from keras.src import backend
from keras.src.models.functional import Functional, operation_fn

# The methods that decide how a Functional or Sequential model runs. A class
# that overrides one of them doesn't run as Keras' own, so its calls must not
# be made one by one in its place.
_RUNNING = (
    "__call__",
    "call",
    "compute_mask",
    "_assert_input_compatibility",
    "_get_call_context",
    "_maybe_reset_call_context",
    "_resolve_and_populate_arg",
    "_run_through_graph",
    "_set_mask_metadata",
    "_standardize_inputs",
)


def functional_of(model: Any) -> Any:
    """The Functional that runs `model`, or None.

    `keras.Model(inputs, outputs)` makes one, but the class has no public
    name; a built Sequential runs one that it holds in a private attribute.
    """
    if isinstance(model, keras.Sequential):
        return model._functional or None
    return model if isinstance(model, Functional) else None


def functional_class() -> type:
    """The class of `keras.Model(inputs, outputs)` (no public name)."""
    return Functional


def runs_as_keras(model: Any) -> bool:
    """Whether calling `model` is Keras' own code, and only runs its graph.

    Besides overridden methods these change what a call does: argument names
    that are handed down to sublayers, rematerialization, quantization. None
    of the first two has a public name.
    """
    base = (
        keras.Sequential if isinstance(model, keras.Sequential) else Functional
    )
    return (
        all(
            getattr(type(model), name, None) is getattr(base, name, None)
            and name not in vars(model)
            for name in _RUNNING
        )
        and getattr(model, "_call_context_args", {"training"}) == {"training"}
        and getattr(model, "_remat_mode", None) is None
    )


def nodes_in_order(functional: Any) -> list[Any]:
    """The nodes of a Functional in the order in which it runs them.

    `Function._run_through_graph` runs by decreasing depth; the depths are in
    a private attribute, and the order decides what a shared seed generator
    hands to whom.
    """
    by_depth = functional._nodes_by_depth
    return [
        node
        for depth in sorted(by_depth, reverse=True)
        for node in by_depth[depth]
        if node.operation and not node.is_input
    ]


def fill_in(node: Any, tensors: Mapping[int, Any]) -> tuple[Any, Any]:
    """The arguments of a node's call, its Keras tensors replaced by id.

    The arguments of a recorded call have no public name.
    """
    return node.arguments.fill_in(tensors)


def arguments_of(node: Any) -> tuple[tuple, dict]:
    """The recorded arguments of a node's call (no public name)."""
    return node.arguments.args, node.arguments.kwargs


def call_operation(
    operation: Any,
    context: Mapping[str, Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Calls an operation of a Functional as `Functional.call` does.

    The rule which operations get `training`, and that a value given to the
    model goes over one recorded in the graph, differs between versions.
    """
    return operation_fn(operation, **context)(*args, **kwargs)


def standardize_inputs(functional: Any, inputs: Any, mask: Any) -> list[Any]:
    """The first lines of `Functional.call`: flat inputs, masks attached."""
    flat = functional._standardize_inputs(inputs)
    if mask is not None:
        for tensor, one in zip(flat, keras.tree.flatten(mask), strict=False):
            if one is not None:
                backend.set_keras_mask(tensor, one)
    return flat


def enter_inputs(
    model: Any, functional: Any, inputs: Any, mask: Any = None
) -> list[Any]:
    """What `Layer.__call__` and `Functional.call` do to a model's inputs.

    The conversion to the input's dtype and rank and the checks are private
    methods; the masks that the inputs carry outlive them.
    """

    def convert(x: Any) -> Any:
        mask = backend.get_keras_mask(x)
        y = model.dtype_policy.convert_input(
            x, model.autocast, model.input_dtype
        )
        if mask is not None:
            backend.set_keras_mask(y, mask)
        return y

    if model._convert_input_args:
        inputs = keras.tree.map_structure(convert, inputs)
    model._assert_input_compatibility(inputs)
    if mask is None:
        mask = keras.tree.map_structure(backend.get_keras_mask, inputs)
    return standardize_inputs(functional, inputs, mask)


def enter_context(model: Any, given: bool, training: Any) -> Any:
    """Enters `model` in Keras' call context; returns its `training`.

    A nested model's call leaves its `training` in the context, where layers
    that come after it find it. The context is private.

    Args:
        model: The model that is entered.
        given: Whether the caller passes `training`, even as None.
        training: What it passes.
    """
    context = model._get_call_context()
    if not given:
        training = getattr(context, "training", None)
    context.training = training
    return training


def leave_context(model: Any) -> None:
    """Ends what `enter_context` began."""
    model._maybe_reset_call_context()


@contextlib.contextmanager
def layer_scopes(models: Sequence[Any]) -> Iterator[None]:
    """The name and autocast scopes in which the layers of `models` run.

    `Layer.__call__` opens them around `call`; neither has a public name. The
    models are nested in each other, the outermost first.
    """
    with contextlib.ExitStack() as stack:
        for model in models:
            stack.enter_context(model._open_name_scope())
            current = backend.get_autocast_scope()
            if current is not None:
                if not model.autocast or not backend.is_float_dtype(
                    model.compute_dtype
                ):
                    stack.enter_context(backend.AutocastScope(None))
                elif current.dtype != model.compute_dtype:
                    stack.enter_context(
                        backend.AutocastScope(model.compute_dtype)
                    )
            elif model.compute_dtype != model.variable_dtype:
                stack.enter_context(backend.AutocastScope(model.compute_dtype))
        yield


def has_history(tensor: Any) -> bool:
    """Whether a call is recorded that made a Keras tensor (no public name)."""
    return hasattr(tensor, "_keras_history")


def is_outermost(layer: Any) -> bool:
    """Whether no other layer's call is going on around this one's.

    The call context, which knows, is private.
    """
    context = backend.common.global_state.get_global_attribute(
        "current_call_ctx"
    )
    return context is None or context.entry_layer is layer


def layers_beside(model: Any, functional: Any) -> list[Any]:
    """Layers that hang on a model without being in its graph.

    `Model.layers` of a Functional lists those in the graph only.
    """
    return [
        layer
        for layer in model._layers
        if layer is not functional and layer not in functional.operations
    ]


def compile_arguments(model: Any) -> dict[str, Any]:
    """The arguments of `compile`, as they were given.

    `get_compile_config` is public, but makes copies, and the optimizer's
    state would not be among them.
    """
    return dict(model._compile_config.config)
