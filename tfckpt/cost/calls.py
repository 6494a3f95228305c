"""The cost of one call: traced, estimated by a rule, or guessed.

Rules are for layers that hold loops, into which a trace doesn't look, and for
what users register.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfckpt import plan as plan_lib
from tfckpt.cost import tracing

# A rule takes a layer, the shapes and dtypes of its inputs, and for each of
# these whether a gradient flows to it.
Rule = Callable[
    [keras.Layer, Sequence[tf.TensorSpec], Sequence[bool]], tracing.Traced
]
_rules: list[tuple[type, Rule]] = []


def register(layer_class: type[keras.Layer], rule: Rule) -> None:
    """Says what the calls of a class of layers cost.

    For layers whose cost a trace of their call can't tell: those with loops,
    or that can't be traced with the sizes at hand. The rule that was
    registered last for a class or its nearest base class counts.

    Args:
        layer_class: a subclass of `keras.Layer`.
        rule: a function of the layer, a list of `tf.TensorSpec`s of its input
            tensors with all sizes known, and a list that says for each
            whether a gradient flows to it. Returns a `Traced`, with bytes
            and operations of one call. A plan is refused (`PlanError`) if it
            fails or returns anything else.

    Raises:
        TypeError: `layer_class` is not a class of layers, or `rule` no
            function of three arguments.

    Example:

    >>> from tfckpt import cost
    >>> class Solver(keras.layers.Layer):
    ...     pass
    >>> def rule(layer, inputs, active):
    ...     size = inputs[0].shape.num_elements()
    ...     return cost.Traced(
    ...         outputs=(4 * size,),
    ...         aliases=(None,),
    ...         saved=20 * 4 * size,  # one tensor for each of 20 steps
    ...         forward_flops=20.0 * size,
    ...         forward_time=20.0 * size,
    ...         backward_flops=40.0 * size,
    ...         backward_time=40.0 * size,
    ...     )
    >>> cost.register(Solver, rule)
    """
    if not (
        isinstance(layer_class, type)
        and issubclass(layer_class, keras.Layer)
        and callable(rule)
    ):
        raise TypeError(
            "cost.register takes a class of layers (a subclass of "
            "keras.Layer) and a function, which is called with a layer of it. "
            f"Received: {layer_class!r} and {rule!r}."
        )
    try:
        inspect.signature(rule).bind(None, [], [])
    except ValueError:  # Built in, without a signature.
        pass
    except TypeError as error:
        raise TypeError(
            "A rule is called with a layer, the shapes of its inputs and "
            f"which of them are differentiated. Received: {rule!r}, for which "
            f"that means: {error}."
        ) from error
    _rules.append((layer_class, rule))


def by_rule(
    layer: Any,
    inputs: Sequence[tf.TensorSpec],
    active: Sequence[bool],
    output_count: int,
) -> tracing.Traced | None:
    """What a rule says of a call, None if it has to be traced.

    Raises:
        PlanError: A rule of a user fails, or returns no such costs.
    """
    rule = _rule_of(layer)
    if rule is None or rule in _OWN:
        return rule and rule(layer, inputs, active)
    subject = f"The rule for the cost of {type(layer).__name__} '{layer.name}'"
    try:
        found = rule(layer, list(inputs), list(active))
    except Exception as error:
        raise plan_lib.PlanError(
            f"{subject} failed: {type(error).__name__}: {error}. Correct what "
            "was given to tfckpt.cost.register."
        ) from error
    if (
        not isinstance(found, tracing.Traced)
        or len(found.outputs) != output_count
        or len(found.aliases) != output_count
        or any(not isinstance(x, int) or x < 0 for x in found.outputs)
        or any(not _is_in(x, inputs) for x in found.needs_inputs)
        or any(not _is_in(x, found.outputs) for x in found.needs_outputs)
        or any(x is not None and not _is_in(x, inputs) for x in found.aliases)
        or any(not _is_amount(getattr(found, name)) for name in _AMOUNTS)
    ):
        raise plan_lib.PlanError(
            f"{subject} returned {found!r}. Expected: a tfckpt.cost.Traced "
            f"with bytes and alias of {output_count} outputs, positions among "
            f"{len(inputs)} inputs, and Python's numbers, finite and not "
            "negative."
        )
    return found


def _is_in(position, sequence):
    return isinstance(position, int) and 0 <= position < len(sequence)


def _is_amount(value):
    return isinstance(value, (int, float)) and 0 <= value < math.inf


def _rule_of(layer):
    for base in type(layer).__mro__:
        for layer_class, rule in reversed(_rules):
            if layer_class is base:
                return rule
    return None


def guess(
    inputs: Sequence[tf.TensorSpec], outputs: Sequence[tf.TensorSpec]
) -> tracing.Traced:
    """For a call that can't be traced: it keeps its inputs and outputs."""
    sizes = [_bytes(x) for x in (*inputs, *outputs)]
    elements = float(sum(sizes))
    return tracing.Traced(
        outputs=tuple(map(_bytes, outputs)),
        aliases=(None,) * len(outputs),
        needs_inputs=tuple(range(len(inputs))),
        needs_outputs=tuple(range(len(outputs))),
        forward_flops=elements,
        backward_flops=2 * elements,
        forward_time=10 * elements,
        backward_time=20 * elements,
        backward_workspace=max(sizes, default=0),
    )


def _bytes(spec):
    elements = spec.shape.num_elements()
    return 0 if elements is None else elements * spec.dtype.size


def _recurrent(layer, inputs, active):
    """A cell, once for each time step; its states are saved."""
    # A mask is no state.
    sequence = inputs[0]
    batch_size, steps, *rest = sequence.shape
    cell = layer.cell
    states = _shapes_of(lambda: cell.get_initial_state(batch_size))
    flat = [tf.TensorSpec(x.shape, x.dtype) for x in keras.tree.flatten(states)]

    def traced(count):
        """So many steps one after another: dropout masks are drawn once."""

        def call(x, *now):
            for _ in range(count):
                output, now = cell(
                    x,
                    keras.tree.pack_sequence_as(states, list(now)),
                    training=True,
                )
                now = keras.tree.flatten(now)
            return output, *now

        _forget_masks(cell)
        try:
            return tracing.trace(
                call,
                [tf.TensorSpec([batch_size, *rest], sequence.dtype), *flat],
                [active[0], *(True for _ in flat)],
                [v.value for v in cell.trainable_variables],
            )
        finally:
            _forget_masks(cell)

    once, twice = traced(1), traced(2)

    def total(name):
        one, two = getattr(once, name), getattr(twice, name)
        return one + (steps - 1) * (two - one)

    output = once.outputs[0]
    outputs = (
        output * (steps if layer.return_sequences else 1),
        *(once.outputs[1:] if layer.return_state else ()),
    )
    return tracing.Traced(
        outputs=outputs,
        aliases=(None,) * len(outputs),
        needs_inputs=(0,),
        # The states at the end, and the output of each step.
        saved=total("saved") + sum(once.outputs[1:]) + output * steps,
        forward_flops=total("forward_flops"),
        backward_flops=total("backward_flops"),
        forward_time=total("forward_time"),
        backward_time=total("backward_time"),
        # The loop's copies of the sequence, time first.
        forward_workspace=_bytes(sequence),
        backward_workspace=_bytes(sequence),
    )


def _forget_masks(cell):
    """Cells keep a dropout mask, here of a graph that is thrown away."""
    for each in (cell, *getattr(cell, "cells", ())):
        for name in ("reset_dropout_mask", "reset_recurrent_dropout_mask"):
            getattr(each, name, lambda: None)()


def _bidirectional(layer, inputs, active):
    ways = [
        _recurrent(each, inputs[:1], active[:1])
        for each in (layer.forward_layer, layer.backward_layer)
    ]
    both = {
        field.name: sum(getattr(each, field.name) for each in ways)
        for field in dataclasses.fields(tracing.Traced)
        if field.type in (int, float, "int", "float")
    }
    outputs = tuple(map(sum, zip(*(way.outputs for way in ways), strict=True)))
    if layer.merge_mode is None:
        outputs = tuple(size for way in ways for size in way.outputs)
    elif layer.merge_mode != "concat":
        outputs = ways[0].outputs
    return tracing.Traced(
        outputs=outputs,
        aliases=(None,) * len(outputs),
        needs_inputs=(0,),
        **both,
    )


def corrected(layer: Any, traced: tracing.Traced, specs: Any) -> tracing.Traced:
    """Adds the operations of a convolution in groups.

    Keras compiles it for itself, and a trace does not look into that.

    Args:
        layer: A layer.
        traced: What its trace found.
        specs: Its output's shape and dtype.
    """
    groups = getattr(layer, "groups", 1)
    kernel = getattr(layer, "kernel", None)
    if not isinstance(groups, int) or groups < 2 or kernel is None:
        return traced
    elements = specs[0].shape.num_elements() or 0
    flops = 2.0 * elements * math.prod(kernel.shape[:-1])
    return dataclasses.replace(
        traced,
        forward_flops=traced.forward_flops + flops,
        backward_flops=traced.backward_flops + 2 * flops,
        forward_time=traced.forward_time + flops,
        backward_time=traced.backward_time + 2 * flops,
    )


def _shapes_of(function):
    return tf.function(function).get_concrete_function().structured_outputs


_AMOUNTS = (
    *("saved", "forward_flops", "backward_flops"),
    *("forward_time", "backward_time", "forward_workspace"),
    *("product_bytes", "product_overlap", "product_flops", "product_time"),
)
_OWN = (_recurrent, _bidirectional)

register(keras.layers.RNN, _recurrent)
register(keras.layers.Bidirectional, _bidirectional)
