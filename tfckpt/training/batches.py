"""A batch cut into micro-batches that run one after another.

Nothing is padded: where a batch does not divide evenly the first micro-batches
have one sample more, and a short batch fills fewer micro-batches. So no layer,
loss or metric ever meets a sample that is not there.

The order must be kept by every compiler, or the activations of several
micro-batches live together. A loop keeps it, and is traced once. In eager mode
that is Python's, in a graph one loop over slices of any size. XLA needs sizes
that do not change within a loop: there each run of micro-batches of one size is
a loop.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfckpt import _compat
from tfckpt.training import settings as settings_lib


def size_of(data: Any) -> Any:
    """Samples in a batch: a number if it is known, else an int32 scalar."""
    first = next(x for x in keras.tree.flatten(data) if x is not None)
    known = first.shape[0]
    if known is not None:
        return int(known)
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.int32)
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int32)
    return tf.shape(first)[0]


def check(parts: int | tuple[int, ...], size: Any, first: Any) -> None:
    """Raises if a batch can't be split so.

    Args:
        parts: Number of micro-batches, or their sizes.
        size: Samples in the batch.
        first: Whether this is the first batch, a Python or tensor boolean; a
            later one may be short.
    """
    whole = sum(parts) if isinstance(parts, tuple) else None
    if whole is None:
        text = (
            "micro_batches must be at most the number of samples in the first "
            f"batch. Received: micro_batches={parts}, samples: "
        )
        enough = size >= parts
    else:
        text = (
            "micro_batches must be sizes that add up to the number of samples "
            f"in a batch. Received: micro_batches={list(parts)}, which is "
            f"{whole}, samples: "
        )
        enough = size <= whole
        first = size > 0
    if isinstance(size, int) and not tf.is_tensor(first):
        if first and not enough:
            raise ValueError(f"{text}{size}")
        return
    tf.debugging.Assert(
        tf.logical_or(enough, tf.logical_not(first)), [text, size]
    )


def for_each(
    body: Callable[[Any], Any],
    data: Any,
    parts: int | tuple[int, ...],
    *,
    unrolled: bool = False,
) -> None:
    """Calls `body` with one micro-batch after another.

    Args:
        body: Called with a part of `data`. It returns tensors that are there
            when it is done, for a graph to wait for.
        data: A structure of tensors with samples along their first axis, and
            of None.
        parts: Number of micro-batches, or their sizes.
        unrolled: Whether a graph shall hold a copy of `body` for each.
    """
    size = size_of(data)
    if tf.executing_eagerly() or unrolled:
        count = parts if settings_lib.is_int(parts) else len(parts)
        for index in range(count):
            start, stop = bounds(parts, size, index)
            if not (isinstance(size, int) and start == stop):
                body(sliced(data, start, stop))
    elif _compat.compiled_by_xla():
        start = 0
        for count, each in runs(parts, size):
            _run(body, data, start, count, each)
            start += count * each
    else:
        _loop(body, data, parts, size)


def bounds(
    parts: int | tuple[int, ...], size: Any, index: Any
) -> tuple[Any, Any]:
    """Returns where a micro-batch starts and stops."""
    if settings_lib.is_int(parts):
        base, rest = size // parts, size % parts

        def start(i):
            return i * base + _minimum(i, rest)

        return start(index), start(index + 1)
    ends = [0]
    for each in parts:
        ends.append(ends[-1] + each)
    if tf.is_tensor(index):
        ends = tf.constant(ends)
    return _minimum(ends[index], size), _minimum(ends[index + 1], size)


def _minimum(a, b):
    if tf.is_tensor(a) or tf.is_tensor(b):
        return tf.minimum(a, b)
    return min(a, b)


def sliced(data: Any, start: Any, stop: Any) -> Any:
    """Returns samples of a structure of tensors."""

    def cut(x):
        if isinstance(x, tf.SparseTensor):
            rest = x.dense_shape[1:]
            first = tf.cast([start], tf.int64)
            length = tf.cast([stop - start], tf.int64)
            return tf.sparse.slice(
                x,
                tf.concat([first, tf.zeros_like(rest)], 0),
                tf.concat([length, rest], 0),
            )
        return None if x is None else x[start:stop]

    return keras.tree.map_structure(cut, data)


def count_of(parts: int | tuple[int, ...], size: Any) -> Any:
    """Returns how many micro-batches a batch has: a number or a tensor."""
    if settings_lib.is_int(parts):
        return _minimum(parts, size)
    starts = [sum(parts[:i]) for i in range(len(parts))]
    if isinstance(size, int):
        return sum(start < size for start in starts)
    return tf.reduce_sum(tf.cast(tf.constant(starts) < size, tf.int32))


def part_of(
    data: Any, parts: int | tuple[int, ...], size: Any, index: tf.Tensor
) -> Any:
    """Returns a micro-batch, of known size where all have the same."""
    part = sliced(data, *bounds(parts, size, index))
    if isinstance(size, int):
        equal = {each for count, each in runs(parts, size) if count}
        if len(equal) == 1:
            keras.tree.map_structure(lambda x: _with_size(x, *equal), part)
    return part


def _loop(body, data, parts, size):
    count = count_of(parts, size)

    def step(index):
        part = part_of(data, parts, size, index)
        with tf.control_dependencies(body(part) or ()):
            return index + 1

    tf.while_loop(
        lambda index: index < count,
        lambda index: [step(index)],
        [tf.constant(0)],
        parallel_iterations=1,
    )


def _with_size(x, size):
    if isinstance(x, tf.Tensor):
        x.set_shape([size, *x.shape[1:]])


def runs(parts: int | tuple[int, ...], size: Any) -> list[tuple[Any, Any]]:
    """Returns pairs of a number of micro-batches and their size."""
    known = isinstance(size, int)
    if settings_lib.is_int(parts):
        base, rest = size // parts, size % parts
        found = [(rest, base + 1)]
        if known:
            found.append((parts - rest if base else 0, base))
        else:
            found.append((tf.where(base > 0, parts - rest, 0), base))
    else:
        found = []
        for index in range(len(parts)):
            start, stop = bounds(parts, size, index)
            if not known:
                found.append((tf.cast(stop > start, tf.int32), stop - start))
            elif found and found[-1][1] == stop - start:
                found[-1] = found[-1][0] + 1, stop - start
            else:
                found.append((1, stop - start))
        if not known:
            # No error of a batch that is too large gets out of XLA.
            rest = tf.maximum(size - sum(parts), 0)
            found.append((tf.cast(rest > 0, tf.int32), rest))
    return [
        (count, each)
        for count, each in found
        if not known or (count > 0 and each > 0)
    ]


def _run(body, data, start, count, size):
    """A loop over micro-batches of one size, for XLA."""
    take = taker(data, start, count, size)

    def step(index):
        body(take(index))
        return index + 1

    tf.while_loop(
        lambda index: index < count,
        lambda index: [step(index)],
        [tf.constant(0)],
        parallel_iterations=1,
    )


def taker(
    data: Any, start: Any, count: Any, size: Any
) -> Callable[[tf.Tensor], Any]:
    """Returns what takes one of many micro-batches of equal size.

    Args:
        data: The batch.
        start: Where the first one starts.
        count: How many there are.
        size: Their samples. XLA knows the shapes of what is taken.
    """

    def stacked(x):
        if x is None:
            return None
        part = x[start : start + count * size]
        return tf.reshape(part, tf.concat([[count, size], tf.shape(x)[1:]], 0))

    blocks = keras.tree.map_structure(stacked, data)

    def take_one(index):
        def take(block, x):
            if block is None:
                return None
            part = tf.gather(block, index)
            known = size if isinstance(size, int) else None
            part.set_shape([known, *x.shape[1:]])
            return part

        return keras.tree.map_structure(take, blocks, data)

    return take_one
