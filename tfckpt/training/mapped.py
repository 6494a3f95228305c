"""A function of a micro-batch, mapped over those of a batch in their order.

As `batches.for_each`, whose loops these are; but what the function returns is
put together again: rows of samples into those of the batch, and what there is
once for each micro-batch into a stack.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfckpt import _compat
from tfckpt.training import batches

Results = tuple[list[tf.Tensor], list[tf.Tensor]]


def mapped(
    body: Callable[[Any, Sequence[tf.Tensor]], Results],
    data: Any,
    each: Sequence[tf.Tensor],
    parts: int | tuple[int, ...],
    specs: tuple[Sequence[tf.TensorSpec], Sequence[tf.TensorSpec]],
) -> Results:
    """Calls `body` with one micro-batch after another.

    Args:
        body: Called with a part of `data` and its item of each of `each`.
            Returns rows of samples, and others.
        data: A structure of tensors with samples along their first axis, and
            of None.
        each: Tensors with an item for each micro-batch.
        parts: Number of micro-batches, or their sizes.
        specs: What `body` returns: shapes and dtypes of the rows, whose
            number is None, and of the others.

    Returns:
        The rows of all micro-batches, and the others stacked.
    """
    size = batches.size_of(data)
    rows, others = _mapped(body, data, each, parts, size, specs)
    for x in rows:
        x.set_shape([size if isinstance(size, int) else None, *x.shape[1:]])
    return rows, others


def _mapped(body, data, each, parts, size, specs):
    if tf.executing_eagerly():
        results = []
        for index in range(batches.count_of(parts, size)):
            start, stop = batches.bounds(parts, size, index)
            part = batches.sliced(data, start, stop)
            results.append(body(part, [x[index] for x in each]))
        if not results:
            # A replica without samples.
            rows, others = specs
            return (
                [tf.zeros([0, *x.shape[1:]], x.dtype) for x in rows],
                [tf.zeros([0, *x.shape], x.dtype) for x in others],
            )
        return _together(results, tf.stack)
    if not _compat.compiled_by_xla():
        return _loop(
            lambda index: batches.part_of(data, parts, size, index),
            lambda index, part: body(part, [x[index] for x in each]),
            batches.count_of(parts, size),
            specs,
            lambda rows: rows.concat(),
        )
    results, start, done = [], 0, 0
    for count, samples in batches.runs(parts, size):
        results.append(
            _loop(
                batches.taker(data, start, count, samples),
                lambda index, part, done=done: body(
                    part, [tf.gather(x, index + done) for x in each]
                ),
                count,
                specs,
                _joined,
                samples,
            )
        )
        start += count * samples
        done += count
    return _together(results, lambda x: tf.concat(x, 0))


def _together(results, stack):
    rows = zip(*(rows for rows, _ in results), strict=True)
    others = zip(*(others for _, others in results), strict=True)
    return [tf.concat(x, 0) for x in rows], [stack(x) for x in others]


def _joined(rows):
    stacked = rows.stack()
    shape = tf.shape(stacked)
    shape = tf.concat([[shape[0] * shape[1]], shape[2:]], 0)
    return tf.ensure_shape(
        tf.reshape(stacked, shape), [None, *stacked.shape[2:]]
    )


def _loop(take, body, count, specs, join, samples=None):
    def array(spec, first):
        shape = [*first, *spec.shape[len(first) :]]
        return tf.TensorArray(
            spec.dtype, count, infer_shape=False, element_shape=shape
        )

    known = samples if isinstance(samples, int) else None
    rows = [array(spec, [known]) for spec in specs[0]]
    others = [array(spec, []) for spec in specs[1]]

    def step(index, rows, others):
        new = body(index, take(index))
        return index + 1, *(
            [
                into.write(index, x)
                for into, x in zip(arrays, tensors, strict=True)
            ]
            for arrays, tensors in zip((rows, others), new, strict=True)
        )

    _, rows, others = tf.while_loop(
        lambda index, *_: index < count,
        step,
        (tf.constant(0), rows, others),
        parallel_iterations=1,
    )
    return [join(x) for x in rows], [x.stack() for x in others]
