"""The costs of all calls of a model."""

import json
import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfckpt import _compat_graph as compat
from tfckpt import costs as costs_lib
from tfckpt import graph as graph_lib
from tfckpt import plan as plan_lib
from tfckpt import sizes
from tfckpt.cost import calls, state, tracing

# What an unknown size counts as.
_UNKNOWN_SIZE = 128


def of_graph(
    graph: graph_lib.Graph,
    *,
    batch_size: int,
    shapes: Sequence[Sequence[int | None] | None] | None = None,
) -> costs_lib.Costs:
    """Returns what a training step costs, call by call, without running it.

    Args:
        graph: The model's graph.
        batch_size: Examples in a step.
        shapes: Shapes of the model's inputs, flat, where it leaves some open.
    """
    return Walk(graph, batch_size, shapes).costs()


class Walk:
    """Goes through the calls of a graph once.

    Args:
        graph: The model's graph.
        batch_size: Examples in a step.
        shapes: Shapes of the model's inputs, flat, where it leaves some open.
    """

    def __init__(self, graph, batch_size, shapes):
        self._graph = graph
        self._batch_size = batch_size
        specs = sizes.infer(graph, shapes)
        self._unknown = any(
            None in specs[key].shape[1:] for key in graph.inputs
        )
        self._specs = [self._spec(spec) for spec in specs]
        self._sizes = [
            sizes.tensor_bytes(spec, batch_size, _UNKNOWN_SIZE) or 0
            for spec in specs
        ]
        self._root = list(range(len(specs)))
        self._active = [False] * len(specs)
        self._traced: dict[Any, tracing.Traced] = {}
        self._weights: dict[int, Any] = {}
        self._guessed: list[str] = []

    def costs(self) -> costs_lib.Costs:
        """Returns what the calls cost; to be called once."""
        found = [self._call(call) for call in self._graph.calls]
        # A tensor that lies in another's memory is that one.
        gradients = [
            size if flows and root == key else 0
            for key, (size, flows, root) in enumerate(
                zip(self._sizes, self._active, self._root, strict=True)
            )
        ]
        tensors = [
            size if root == key else 0
            for key, (size, root) in enumerate(
                zip(self._sizes, self._root, strict=True)
            )
        ]
        return costs_lib.Costs(
            calls=tuple(found),
            sizes=tuple(tensors),
            gradients=tuple(gradients),
            names=self._graph.names,
            inputs=self._graph.inputs,
            outputs=tuple(
                dict.fromkeys(self._root[key] for key in self._graph.outputs)
            ),
            batch_size=self._batch_size,
            notes=self._notes(),
        )

    def _notes(self):
        notes = []
        if self._unknown:
            notes.append(
                f"Sizes that the model leaves open count as {_UNKNOWN_SIZE}; "
                "give input_shape."
            )
        if self._guessed:
            paths = [path for path, _ in self._guessed]
            error = self._guessed[0][1]
            notes.append(
                "Guessed as keeping inputs and outputs, for they can't be "
                f"traced: {', '.join(paths[:5])}"
                + (" ..." if len(paths) > 5 else "")
                + f" ({type(error).__name__}: {_message(error)}); see "
                "tfckpt.cost.register."
            )
        return tuple(notes)

    def _spec(self, spec):
        shape = [
            size
            if size is not None
            else (_UNKNOWN_SIZE if axis else self._batch_size)
            for axis, size in enumerate(spec.shape)
        ]
        return tf.TensorSpec(shape, keras.backend.standardize_dtype(spec.dtype))

    def _call(self, call):
        entered = {}
        for entry in call.entries:
            # What a nested model makes of its inputs is nearly always the
            # tensor itself.
            given = [key for _, key in entry.feeds]
            if len(given) == len(entry.outputs) and not entry.masked:
                entered.update(zip(entry.outputs, given, strict=True))
        for key, given in entered.items():
            if key is not None:
                self._root[key] = self._root[given]
                self._active[key] = self._active[given]
        keys = _read(call)
        found = self._cost(call)
        active = bool(_variables(call.operation)) or any(
            self._active[key] for key in keys
        )
        for position, (key, alias) in enumerate(
            zip(call.outputs, found.aliases, strict=False)
        ):
            if found.specs and found.specs[position].shape.is_fully_defined():
                self._specs[key] = found.specs[position]
            if alias is not None:
                self._root[key] = self._root[keys[alias]]
            self._sizes[key] = found.outputs[position]
            self._active[key] = active and _is_float(self._specs[key])
        reads = tuple(dict.fromkeys(self._root[key] for key in keys))
        makes = tuple(k for k in call.outputs if self._root[k] == k)
        needs = [self._root[keys[i]] for i in found.needs_inputs]
        needs += [self._root[call.outputs[i]] for i in found.needs_outputs]
        return costs_lib.CallCost(
            path=call.path,
            kind=type(call.operation).__name__,
            reads=reads,
            makes=makes,
            needs=tuple(dict.fromkeys(needs)),
            saved=found.saved,
            forward_flops=found.forward_flops,
            backward_flops=found.backward_flops,
            forward_time=found.forward_time,
            backward_time=found.backward_time,
            forward_workspace=found.forward_workspace,
            backward_workspace=found.backward_workspace,
            product_bytes=found.product_bytes,
            product_overlap=found.product_overlap,
            product_flops=found.product_flops,
            product_time=found.product_time,
            product_needs=tuple(
                dict.fromkeys(self._root[keys[i]] for i in found.product_inputs)
            ),
            recomputable=_is_recomputable(call, self._specs),
            weight_gradient_bytes=self._new_weights(call.operation),
        )

    def _new_weights(self, operation):
        new = {id(v): v for v in _variables(operation)}
        new = {k: v for k, v in new.items() if k not in self._weights}
        self._weights.update(new)
        return state.variable_bytes(new.values())

    def _cost(self, call):
        kind = self.kind(call)
        if kind is None:
            return self._trace(call)
        if kind not in self._traced:
            self._traced[kind] = self._trace(call)
        return self._traced[kind]

    def _trace(self, call):
        function, inputs, active, variables = self.traceable(call)
        try:
            ruled = calls.by_rule(
                call.operation, inputs, active, len(call.outputs)
            )
            if ruled is not None:
                return ruled
            traced = tracing.trace(function, inputs, active, variables)
            return calls.corrected(call.operation, traced, traced.specs)
        except plan_lib.PlanError:
            raise
        except Exception as error:  # Whatever a user's layer raises.
            self._guessed.append((call.path, error))
            outputs = [self._specs[key] for key in call.outputs]
            return calls.guess(inputs, outputs)

    def traceable(self, call: graph_lib.Call) -> tuple[Any, ...]:
        """Returns what `tracing.trace` takes, for a call."""
        keys = _read(call)
        return (
            _function(call, keys),
            [self._specs[key] for key in keys],
            [self._active[key] for key in keys],
            [v.value for v in _variables(call.operation)],
        )

    def kind(self, call: graph_lib.Call) -> Any:
        """Returns what is equal for calls that cost the same, None if unknown.

        A class of a user may do anything with its name.
        """
        layer = call.operation
        if not isinstance(layer, keras.Layer) or isinstance(layer, keras.Model):
            return None
        if not type(layer).__module__.startswith("keras."):
            return None
        config = {k: v for k, v in layer.get_config().items() if k != "name"}
        keys = _read(call)
        order = {i: keys.index(key) for i, key in call.feeds}
        structure = keras.tree.map_structure(
            lambda x: f"#{order[id(x)]}" if id(x) in order else repr(x),
            compat.arguments_of(call.node),
        )
        return (
            type(layer),
            json.dumps(config, sort_keys=True, default=repr),
            repr(structure),
            tuple((tuple(s.shape), s.dtype) for s in self._specs_of(keys)),
            tuple(self._active[key] for key in keys),
            len(_variables(layer)),
            tuple(nested.training for nested in call.owners),
        )

    def _specs_of(self, keys):
        return [self._specs[key] for key in keys]


def _message(error):
    """The line of an error that Keras puts its own lines around."""
    lines = re.sub(r"\x1b\[\d*m", "", str(error)).splitlines()
    lines = [
        line for line in lines if line and "Exception encountered" not in line
    ]
    return lines[0][:200] if lines else ""


def _read(call):
    """The keys that a call reads, each once."""
    return tuple(dict.fromkeys(key for _, key in call.feeds))


def _function(call, keys):
    """The call as a function of tensors, in training."""
    training = True
    for nested in call.owners:
        if nested.training_given and nested.training is not None:
            training = nested.training

    def run(*tensors):
        by_key = dict(zip(keys, tensors, strict=True))
        args, kwargs = compat.fill_in(
            call.node, {i: by_key[key] for i, key in call.feeds}
        )
        with compat.layer_scopes([nested.model for nested in call.owners]):
            return compat.call_operation(
                call.operation, {"training": training}, args, kwargs
            )

    return run


def _variables(operation):
    return getattr(operation, "trainable_variables", ())


def _is_float(spec):
    return spec.dtype.is_floating or spec.dtype.is_complex


def _is_recomputable(call, specs):
    """False for what only reads ids: an embedding."""
    return any(_is_float(specs[key]) for _, key in call.feeds)
