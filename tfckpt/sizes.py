"""Sizes of the tensors of a graph, before anything runs."""

import math
from collections.abc import Sequence
from typing import Any

import keras

from tfckpt import _compat_graph as compat
from tfckpt import graph as graph_lib

_ITEM_BYTES = {
    "bool": 1,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex64": 8,
    "complex128": 16,
} | {
    f"{kind}{bits}": bits // 8
    for kind in ("float", "int", "uint")
    for bits in (8, 16, 32, 64)
}


def tensor_bytes(
    spec: Any, batch_size: int | None = None, unknown: int | None = None
) -> int | None:
    """Returns the bytes of a tensor, None if a size is not known.

    Args:
        spec: Anything with `shape` and `dtype`.
        batch_size: Stands for an unknown first dimension.
        unknown: Stands for other unknown dimensions.

    >>> tensor_bytes(keras.KerasTensor((None, 3)), batch_size=2)
    24
    """
    if getattr(spec, "sparse", False) or getattr(spec, "ragged", False):
        return None
    sizes = [
        size if size is not None else (unknown if axis else batch_size)
        for axis, size in enumerate(spec.shape)
    ]
    item = _ITEM_BYTES.get(keras.backend.standardize_dtype(spec.dtype))
    if item is None or None in sizes:
        return None
    return math.prod(sizes) * item


def infer(
    graph: graph_lib.Graph,
    shapes: Sequence[Sequence[int | None] | None] | None = None,
) -> tuple[Any, ...]:
    """Returns shape and dtype of every tensor, by key.

    A nested model may be recorded with unknown sizes although its caller
    knows them; then the layers are asked again, symbolically.

    Args:
        graph: The model's graph.
        shapes: Shapes of the model's inputs, flat. Where the model's
            first dimension is unknown, theirs doesn't matter.
    """
    specs: list[Any] = list(graph.specs)
    for key, shape in zip(graph.inputs, shapes or (), strict=False):
        recorded = specs[key]
        if shape is not None and len(shape) == len(recorded.shape):
            shape = tuple(
                r if r is not None or axis == 0 else s
                for axis, (r, s) in enumerate(
                    zip(recorded.shape, shape, strict=True)
                )
            )
            specs[key] = keras.KerasTensor(shape, dtype=recorded.dtype)
    for call in graph.calls:
        for entry in call.entries:
            _infer_entry(entry, specs)
        values = {i: specs[key] for i, key in call.feeds}
        if all(values[id(x)].shape == x.shape for x in call.node.input_tensors):
            continue
        try:
            args, kwargs = compat.fill_in(call.node, values)
            made = call.operation.compute_output_spec(*args, **kwargs)
        except Exception:  # Whatever a user's layer raises: not known.
            continue
        for key, spec in zip(
            call.outputs, keras.tree.flatten(made), strict=False
        ):
            specs[key] = spec
    return tuple(specs)


def _infer_entry(entry, specs):
    # Ranks are adjusted, but sizes only pass where the ranks are equal.
    given = [specs[key] for _, key in entry.feeds]
    if entry.masked or len(given) != len(entry.outputs):
        return
    for x, key in zip(given, entry.outputs, strict=True):
        if key is None:
            continue
        if len(x.shape) == len(specs[key].shape):
            specs[key] = keras.KerasTensor(x.shape, dtype=specs[key].dtype)
