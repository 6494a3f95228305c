"""A Keras model read into the calls that it makes, in their order.

Nested Functional and Sequential models are flattened for running: their
calls stand in the place of the nested call. Everything that the nested call
does besides is kept with them: `training` as it is resolved on entry, the
conversion of the inputs, name and autocast scopes. A nested model that does
more than that stays one call; `tfckpt.flattening` decides.

The order is Keras' own: by decreasing depth. Random layers that share a seed
generator draw in this order, so a plan never changes it.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from tfckpt import _compat_graph as compat
from tfckpt import flattening


@dataclasses.dataclass(frozen=True, eq=False)
class Nested:
    """A nested model whose calls are made one by one.

    Attributes:
        path: Path of the call of the nested model.
        model: The model.
        functional: What runs it.
        parent: The nested model around it, None for the model itself.
        training: What the call passed as `training` when it was recorded.
        training_given: Whether it passed anything.
    """

    path: str
    model: Any
    functional: Any
    parent: "Nested | None"
    training: Any
    training_given: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """What happens between a nested model's call and its first layer.

    Attributes:
        nested: The nested model.
        node: The recorded call of the nested model.
        feeds: For each tensor read: id in the node, key; none where nothing
            is done to the inputs.
        outputs: For each input of the nested model its key where it is
            converted, None where the tensor goes in as it is.
        masked: Whether the call passes masks. Keras attaches them to the
            tensors that go in, where later readers find them too.
    """

    nested: Nested
    node: Any
    feeds: tuple[tuple[int, int], ...]
    outputs: tuple[int | None, ...]
    masked: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of a layer or an operation.

    Tensors are named by keys, numbers in the order in which they are made.

    Attributes:
        path: Name of the operation after those of the nested models around
            it; a second call of a shared layer is "name#2".
        operation: The layer or operation.
        node: Keras' record of the call.
        feeds: For each tensor read: id in the node, key.
        outputs: Keys of the outputs.
        entries: Nested models that are entered before the call.
        leaves: Nested models that are left after it.
        owners: Nested models around it, the outermost first.
        expected: For tensors that go into a nested model as they are: key,
            what the model expects, its path.
    """

    path: str
    operation: Any
    node: Any
    feeds: tuple[tuple[int, int], ...]
    outputs: tuple[int, ...]
    entries: tuple[Entry, ...] = ()
    leaves: tuple[Nested, ...] = ()
    owners: tuple[Nested, ...] = ()
    expected: tuple[tuple[int, Any, str], ...] = ()

    @property
    def steps(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Keys read and made, for each entry and then for the call itself."""
        steps = [
            (entry.feeds, tuple(k for k in entry.outputs if k is not None))
            for entry in self.entries
        ]
        steps.append((self.feeds, self.outputs))
        return tuple(
            (tuple(dict.fromkeys(k for _, k in feeds)), made)
            for feeds, made in steps
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """The calls of a model in the order in which Keras makes them.

    Attributes:
        calls: The calls.
        inputs: Keys of the model's inputs, flat.
        outputs: Keys of the model's outputs, flat.
        names: Name of each tensor, by key.
        specs: Shape and dtype of each tensor as recorded, by key.
    """

    calls: tuple[Call, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    names: tuple[str, ...]
    specs: tuple[Any, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the calls."""
        return tuple(call.path for call in self.calls)

    @functools.cached_property
    def nested(self) -> tuple[Nested, ...]:
        """The flattened models."""
        return tuple({n for call in self.calls for n in call.owners})

    def is_current(self) -> bool:
        """Whether the flattened models still run the way they were read."""
        return all(
            compat.functional_of(n.model) is n.functional
            and flattening.runs_its_graph_only(n.model)
            for n in self.nested
        )

    def live(self) -> tuple[tuple[int, ...], ...]:
        """Returns for each call the tensors that must outlive it.

        These are outputs of this call and earlier ones that a later call
        reads or the model returns. The model's inputs live anyway.
        """
        last = dict.fromkeys(range(len(self.specs)), -1)
        made = {}
        for position, call in enumerate(self.calls):
            for read, outputs in call.steps:
                last.update((key, position) for key in read)
                made.update((key, position) for key in outputs)
        last.update((key, len(self.calls)) for key in self.outputs)
        return tuple(
            tuple(k for k, at in made.items() if at <= position < last[k])
            for position in range(len(self.calls))
        )


def read(model: Any) -> Graph:
    """Reads a Functional or built Sequential model.

    Raises:
        ValueError: The model has no graph.
    """
    functional = compat.functional_of(model)
    if functional is None:
        raise ValueError(
            f"'{model.name}' of type {type(model).__name__} has no graph of "
            "calls. Expected a Functional model or a built Sequential."
        )
    reader = _Reader()
    known = {
        id(x): reader.new_key(x, x.name) for x in functional.inputs
    }  # An input that stands there twice has the later value, as in Keras.
    inputs = tuple(range(len(functional.inputs)))
    reader.walk(functional, known, (), {})
    return Graph(
        calls=tuple(reader.calls),
        inputs=inputs,
        outputs=tuple(known[id(x)] for x in functional.outputs),
        names=tuple(reader.names),
        specs=tuple(reader.specs),
    )


class _Reader:
    """Walks through the nodes of a model and of those nested in it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.names: list[str] = []
        self.specs: list[Any] = []
        self._paths: set[str] = set()
        self._entries: list[Entry] = []

    def new_key(self, tensor: Any, name: str) -> int:
        self.names.append(name)
        self.specs.append(tensor)
        return len(self.specs) - 1

    def walk(
        self,
        functional: Any,
        known: dict[int, int],
        owners: tuple[Nested, ...],
        expected: Mapping[int, tuple[Any, str]],
    ) -> None:
        """Adds the calls of a model.

        Args:
            functional: The model.
            known: Keys of its tensors by id; its inputs at first.
            owners: The nested models around its calls.
            expected: By id, the inputs that go in as they are.
        """
        for node in compat.nodes_in_order(functional):
            if any(id(x) not in known for x in node.input_tensors):
                continue  # Keras skips these too.
            path = self._new_path(owners, node.operation.name)
            inner = flattening.flattened(node)
            if inner is not None:
                self._enter(node, path, inner, known, owners)
                continue
            names = [path]
            if len(node.outputs) > 1:
                names = [f"{path}:{i}" for i in range(len(node.outputs))]
            keys = tuple(map(self.new_key, node.outputs, names))
            known.update(zip(map(id, node.outputs), keys, strict=True))
            self.calls.append(
                Call(
                    path=path,
                    operation=node.operation,
                    node=node,
                    feeds=_feeds(node, known),
                    outputs=keys,
                    entries=tuple(self._entries),
                    owners=owners,
                    expected=tuple(
                        (known[id(x)], *expected[id(x)])
                        for x in node.input_tensors
                        if id(x) in expected
                    ),
                )
            )
            self._entries = []

    def _enter(self, node, path, functional, known, owners):
        args, kwargs = compat.arguments_of(node)
        nested = Nested(
            path=path,
            model=node.operation,
            functional=functional,
            parent=owners[-1] if owners else None,
            training=kwargs.get("training"),
            training_given="training" in kwargs,
        )
        given = args[0] if args else kwargs["inputs"]
        inner, outputs, expected = {}, [], {}
        direct = flattening.direct_inputs(given, functional)
        for index, (spec, x) in enumerate(
            zip(functional.inputs, direct, strict=True)
        ):
            if x is not None:
                inner[id(spec)] = known[id(x)]
                expected[id(spec)] = (spec, path)
                outputs.append(None)
            else:
                key = self.new_key(spec, f"{path}:input_{index}")
                inner[id(spec)] = key
                outputs.append(key)
        converts = any(key is not None for key in outputs)
        masked = any(m is not None for m in flattening.masks_in(kwargs))
        self._entries.append(
            Entry(
                nested=nested,
                node=node,
                feeds=_feeds(node, known) if converts or masked else (),
                outputs=tuple(outputs),
                masked=masked,
            )
        )
        self.walk(functional, inner, (*owners, nested), expected)
        self.calls[-1] = dataclasses.replace(
            self.calls[-1], leaves=(*self.calls[-1].leaves, nested)
        )
        for x, y in zip(node.outputs, functional.outputs, strict=True):
            known[id(x)] = inner[id(y)]

    def _new_path(self, owners, name):
        prefix = f"{owners[-1].path}/" if owners else ""
        path, number = prefix + name, 1
        while path in self._paths:
            number += 1
            path = f"{prefix}{name}#{number}"
        self._paths.add(path)
        return path


def _feeds(node, known):
    return tuple((id(x), known[id(x)]) for x in node.input_tensors)
