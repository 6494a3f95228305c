"""One call and its gradient as a graph of ops, read without running it.

What the gradient of a layer keeps is not written down by hand: the ops of
the gradient are there to be looked at. A tensor of the forward pass that one
of them reads is saved. Ops of the gradient that don't wait for the upstream
gradient run in the forward pass already.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfckpt import recomputation
from tfckpt.cost import ops


@dataclasses.dataclass(frozen=True)
class Traced:
    """What a traced call costs; see `tfckpt.costs.CallCost` for the terms.

    Attributes:
        outputs: Bytes of each output.
        aliases: For each output the position of the input whose memory it
            shares, or None.
        needs_inputs: Positions of the inputs that the gradient reads.
        needs_outputs: Positions of the outputs that it reads.
        product_inputs: Positions of the inputs that running it again needs
            when its products are kept.
        specs: Shape and dtype of each output; none where not known.
    """

    outputs: tuple[int, ...]
    aliases: tuple[int | None, ...]
    needs_inputs: tuple[int, ...] = ()
    needs_outputs: tuple[int, ...] = ()
    saved: int = 0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    forward_time: float = 0.0
    backward_time: float = 0.0
    forward_workspace: int = 0
    backward_workspace: int = 0
    product_bytes: int = 0
    product_overlap: int = 0
    product_flops: float = 0.0
    product_time: float = 0.0
    product_inputs: tuple[int, ...] = ()
    specs: tuple[tf.TensorSpec, ...] = ()


def trace(
    call: Callable[..., Any],
    inputs: Sequence[tf.TensorSpec],
    active: Sequence[bool],
    variables: Sequence[Any],
) -> Traced:
    """Returns what a call and its gradient cost.

    Nothing runs, and no variable changes.

    Args:
        call: A function of tensors.
        inputs: Shape and dtype of its arguments.
        active: For each argument, whether a gradient flows to it.
        variables: The variables that are trained.
    """
    found: dict[str, Any] = {}
    step = with_gradient(call, active, variables, found)
    tf.function(step, autograph=False).get_concrete_function(*inputs)
    return _Reading(**found).traced()


def forward_only(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the call as one that changes no variable."""

    def step(*tensors):
        with keras.StatelessScope(collect_losses=True):
            outputs = keras.tree.flatten(call(*tensors))
        return [x for x in outputs if x is not None]

    return step


def with_gradient(
    call: Callable[..., Any],
    active: Sequence[bool],
    variables: Sequence[Any],
    found: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Returns a function that makes a call and its gradient.

    Args:
        call: See `trace`, and so the next two.
        active: For each argument, whether a gradient flows to it.
        variables: The variables that are trained.
        found: Gets the tensors and ops of the graph, for `trace`; upstream
            gradients are then inputs without values. Else they are ones.
    """
    forward = forward_only(call)

    def step(*tensors):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            watched = [
                x for x, flows in zip(tensors, active, strict=True) if flows
            ]
            tape.watch([*watched, *variables])
            outputs = forward(*tensors)
        ends = [x for x in outputs if x.dtype.is_floating]
        if found is None:
            return outputs, tape.gradient(ends, [watched, list(variables)])
        upstream = [tf.compat.v1.placeholder(x.dtype, x.shape) for x in ends]
        gradients = tape.gradient(
            ends, [watched, list(variables)], output_gradients=upstream
        )
        flat = [
            list(tf.nest.flatten(each, expand_composites=True))
            for each in gradients
        ]
        found.update(
            inputs=tensors,
            outputs=outputs,
            upstream=upstream,
            gradients=flat[0],
            weights=flat[1],
            every_op=tf.compat.v1.get_default_graph().get_operations(),
        )
        return outputs, gradients

    return step


class _Reading:
    """Reads a graph that `trace` made."""

    def __init__(self, inputs, outputs, upstream, gradients, weights, every_op):
        self._inputs, self._outputs = inputs, outputs
        self._upstream = upstream
        self._gradients = [x for x in gradients if x is not None]
        self._weights = [x for x in weights if x is not None]
        self._ops = every_op
        self._roots: dict[str, Any] = {}
        late = self._after_upstream()
        wanted = self._wanted()
        self._forward = [
            op for op in every_op if op in wanted and op not in late
        ]
        self._backward = [op for op in every_op if op in wanted and op in late]
        given = {x.op for x in (*inputs, *upstream)}
        self._made = [op for op in self._forward if op not in given]
        self._backward = [op for op in self._backward if op not in given]

    def traced(self) -> Traced:
        """Returns what the call costs."""
        forward = set(self._forward)
        input_roots = {x.name: i for i, x in enumerate(self._inputs)}
        output_roots = {}
        for i, x in enumerate(self._outputs):
            output_roots.setdefault(self._root(x).name, i)
        read = {
            root.name: root
            for op in self._backward
            if op.type not in ops.METADATA
            for root in map(self._root, op.inputs)
            if root.op in forward and _is_activation(root)
        }
        saved = {
            name: root
            for name, root in read.items()
            if name not in input_roots and name not in output_roots
        }
        ends = [*map(self._root, self._outputs), *read.values()]
        again = self._closure(ends, stop=False)
        kept = self._closure(ends, stop=True)
        products = {
            root.name: root
            for op in again - kept
            if _is_kept(op)
            for root in map(self._root, op.outputs)
            if self._is_met(root, kept, ends)
        }
        made = {
            name: self._root(self._outputs[i])
            for name, i in output_roots.items()
            if name not in input_roots
        }
        run = [op for op in self._made if op in again]
        rerun = [op for op in run if op in kept]
        held = {**saved, **made}
        upstream = {x.name: x for x in self._upstream}
        gradients = {
            root.name: root for root in map(self._root, self._gradients)
        }
        weights = {self._root(x).name for x in self._weights}
        # These nobody else needs: they may go before the gradient is done.
        own = {n: x for n, x in read.items() if n not in input_roots}
        return Traced(
            outputs=tuple(map(ops.tensor_bytes, self._outputs)),
            aliases=tuple(
                input_roots.get(self._root(x).name) for x in self._outputs
            ),
            needs_inputs=tuple(
                i for name, i in input_roots.items() if name in read
            ),
            needs_outputs=tuple(
                i
                for name, i in output_roots.items()
                if name in read and name not in input_roots
            ),
            saved=_bytes(saved),
            forward_flops=sum(map(ops.flops, run)),
            backward_flops=sum(map(ops.flops, self._backward)),
            forward_time=sum(map(ops.time, run)),
            backward_time=sum(map(ops.time, self._backward)),
            forward_workspace=max(
                0, self._peak(run, {}, held, ()) - _bytes(held)
            ),
            backward_workspace=self._peak(
                self._backward, {**upstream, **own}, gradients, weights
            )
            - _bytes(upstream)
            - _bytes(own)
            - _bytes(gradients),
            product_bytes=_bytes(products),
            product_overlap=_bytes(
                {n: root for n, root in products.items() if n in held}
            ),
            product_flops=sum(ops.flops(op) for op in again - kept),
            product_time=sum(ops.time(op) for op in again - kept),
            product_inputs=tuple(
                i
                for name, i in input_roots.items()
                if any(
                    self._root(x).name == name
                    for op in rerun
                    for x in op.inputs
                )
            ),
            specs=tuple(tf.TensorSpec(x.shape, x.dtype) for x in self._outputs),
        )

    def _root(self, tensor):
        """The tensor in whose memory `tensor` lies."""
        name = tensor.name
        if name not in self._roots:
            root = tensor
            while root.op.type in ops.ALIASES:
                root = root.op.inputs[root.value_index]
            self._roots[name] = root
        return self._roots[name]

    def _wanted(self):
        """The ops that outputs and gradients depend on."""
        ends = [*self._outputs, *self._gradients, *self._weights]
        wanted, queue = set(), [x.op for x in ends]
        while queue:
            op = queue.pop()
            if op not in wanted:
                wanted.add(op)
                queue.extend(x.op for x in op.inputs)
        return wanted

    def _after_upstream(self):
        """The ops that wait for the upstream gradient."""
        late = {x.op for x in self._upstream}
        for op in self._ops:
            if any(x.op in late for x in op.inputs) or any(
                each in late for each in op.control_inputs
            ):
                late.add(op)
        return late

    def _closure(self, ends, stop):
        """The ops that make `ends`; products end the search if asked to."""
        forward = set(self._forward)
        found, queue = set(), [x.op for x in ends]
        while queue:
            op = queue.pop()
            if op in found or op not in forward or (stop and _is_kept(op)):
                continue
            found.add(op)
            queue.extend(x.op for x in op.inputs)
        return found

    def _is_met(self, root, kept, ends):
        """Whether what is run again, or the gradient, reads a product."""
        return any(root is end for end in ends) or any(
            self._root(x) is root for op in kept for x in op.inputs
        )

    def _peak(self, run, before, after, uncounted):
        """The most bytes while ops run in their order.

        Args:
            run: The ops.
            before: Tensors by name that exist at first.
            after: Tensors by name that are still there at the end.
            uncounted: Names of tensors that are counted elsewhere.
        """
        last = {}
        for op in run:
            for x in op.inputs:
                last[self._root(x).name] = op
        live = dict.fromkeys(after, False) | {
            name: ops.tensor_bytes(x) for name, x in before.items()
        }
        live = {name: size for name, size in live.items() if size}
        total = peak = sum(live.values())
        for op in run:
            if op.type in ops.ALIASES:
                continue
            new = {
                x.name: ops.tensor_bytes(x)
                for x in op.outputs
                if x.name not in uncounted and _is_activation(x)
            }
            dead = [
                name
                for name in {self._root(x).name for x in op.inputs}
                if name in live and last[name] is op and name not in after
            ]
            # Most ops that are no product write over an input of their size.
            over = next(
                (
                    name
                    for name in dead
                    if not _is_product(op)
                    and len(new) == 1
                    and live[name] == sum(new.values())
                ),
                None,
            )
            if over is not None:
                total -= live.pop(over)
                dead.remove(over)
            live.update(new)
            total += sum(new.values())
            peak = max(peak, total + ops.workspace(op))
            dead += [n for n in new if n not in last and n not in after]
            total -= sum(live.pop(name) for name in dead)
        return peak


def _bytes(tensors):
    return sum(map(ops.tensor_bytes, tensors.values()))


def _is_product(op):
    return op.type in recomputation.PRODUCTS or "Conv" in op.type


def _is_kept(op):
    return (
        op.type in recomputation.PRODUCTS or op.type in recomputation.REDUCTIONS
    ) and all(x.dtype.is_floating or x.dtype.is_complex for x in op.outputs)


def _is_activation(tensor):
    """Whether a tensor is neither a weight nor a constant."""
    op = tensor.op
    if op.type in ("Const", "ReadVariableOp", "NoOp", *ops.METADATA):
        return False
    # Captures: variables.
    return tensor.dtype not in (tf.resource, tf.variant, tf.string)
