"""The cost of one call: traced, estimated by a rule, or guessed.

Rules are for layers that hold loops, into which a trace doesn't look, and for
what users register.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

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
            and operations of one call.

    Raises:
        TypeError: `layer_class` is not a class of layers, or `rule` not
            callable.

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
    _rules.append((layer_class, rule))


def rule_of(layer: Any) -> Rule | None:
    """The rule for a layer, None if it has to be traced."""
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

    def once_called(x, *now):
        return cell(
            x, keras.tree.pack_sequence_as(states, list(now)), training=True
        )

    _forget_masks(cell)
    try:
        once = tracing.trace(
            once_called,
            [tf.TensorSpec([batch_size, *rest], sequence.dtype), *flat],
            [active[0], *(True for _ in flat)],
            [v.value for v in cell.trainable_variables],
        )
    finally:
        _forget_masks(cell)
    output = once.outputs[0]
    kept = once.saved + sum(once.outputs)
    outputs = (
        output * (steps if layer.return_sequences else 1),
        *(once.outputs[1:] if layer.return_state else ()),
    )
    return tracing.Traced(
        outputs=outputs,
        aliases=(None,) * len(outputs),
        needs_inputs=(0,),
        saved=kept * steps,
        forward_flops=once.forward_flops * steps,
        backward_flops=once.backward_flops * steps,
        forward_time=once.forward_time * steps,
        backward_time=once.backward_time * steps,
        # The loop's copies of the sequence, time first.
        forward_workspace=_bytes(sequence),
        backward_workspace=_bytes(sequence),
        loops=True,
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
        loops=True,
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


register(keras.layers.RNN, _recurrent)
register(keras.layers.Bidirectional, _bidirectional)
