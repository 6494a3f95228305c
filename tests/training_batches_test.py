"""Which samples are in which micro-batch, recorded without a model."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests import equality
from tfckpt.training import batches

_MOST = 12
# As numbers, and as sizes; a batch may be shorter than either.
_PARTS = (1, 5, 12, (5, 3, 4), (1, 11))


def _expected(size, parts):
    """The rows of each micro-batch, by NumPy's rule."""
    rows = np.arange(size)
    if isinstance(parts, int):
        found = np.array_split(rows, parts)
    else:
        found = np.split(rows, np.cumsum(parts)[:-1])
    return [each.tolist() for each in found if len(each)]


class _Record:
    """A body for `for_each` that writes down what it is given.

    Each row is told by its number, of which it holds the square too.
    """

    def __init__(self):
        self._calls = tf.Variable(0)
        # For each row, the call that it came in and its place there.
        self._seen = tf.Variable(tf.zeros([_MOST, 3], tf.int32))
        self.shapes = []

    def __call__(self, part):
        rows, (squares, nothing) = part["rows"], part["others"]
        assert nothing is None
        self.shapes.append(rows.shape[0])
        count = tf.shape(rows)[0]
        call = tf.fill([count], self._calls.assign_add(1))
        seen = tf.stack([call, tf.range(count), squares[:, 0]], 1)
        self._seen.scatter_nd_update(rows[:, None], seen)
        return [tf.identity(self._seen)]

    def micro_batches(self, size):
        """Returns the rows of each call, and empties the record."""
        seen = self._seen.numpy()[:size]
        np.testing.assert_array_equal(seen[:, 2], np.arange(size) ** 2)
        found = [[] for _ in range(int(self._calls))]
        for row in np.lexsort((seen[:, 1], seen[:, 0])):
            found[seen[row, 0] - 1].append(int(row))
        self._calls.assign(0)
        self._seen.assign(tf.zeros_like(self._seen))
        return found


def _data(rows):
    return {"rows": rows, "others": (rows[:, None] ** 2, None)}


def _stepper(record, parts, mode, known, unrolled=False):
    def step(rows):
        batches.for_each(record, _data(rows), parts, unrolled=unrolled)

    if mode == "eager":
        return step
    signature = None if known else [tf.TensorSpec([None], tf.int32)]
    return tf.function(
        step,
        input_signature=signature,
        jit_compile=mode == "xla",
        autograph=False,
    )


@pytest.mark.parametrize(
    ("mode", "known"),
    [
        ("eager", True),
        ("graph", True),
        ("graph", False),
        ("xla", True),
        ("xla", False),
    ],
)
@pytest.mark.parametrize("parts", _PARTS, ids=str)
def test_each_sample_is_in_one_micro_batch(parts, mode, known):
    """Even, uneven and short batches, in their order."""
    record = _Record()
    step = _stepper(record, parts, mode, known)
    # XLA compiles each size.
    for size in (12, 11, 2) if mode == "xla" else (12, 11, 6, 2, 1):
        step(tf.range(size))
        assert record.micro_batches(size) == _expected(size, parts), size


@pytest.mark.parametrize("parts", [5, (5, 3, 4)], ids=str)
def test_copies_in_a_graph(parts):
    record = _Record()
    step = _stepper(record, parts, "graph", known=True, unrolled=True)
    for size in (12, 6, 2):
        step(tf.range(size))
        expected = _expected(size, parts)
        assert record.micro_batches(size) == expected
        assert record.shapes == [len(each) for each in expected]
        record.shapes.clear()


@pytest.mark.parametrize(
    ("parts", "mode", "known", "shapes"),
    [
        # A loop holds its body once, with the size where that is known.
        (4, "graph", True, [3]),
        ((3, 3, 3, 3), "graph", True, [3]),
        (4, "graph", False, [None]),
        (5, "graph", True, [None]),
        ((3, 3, 3), "graph", True, [None]),
        # XLA has a loop for each size.
        (4, "xla", True, [3]),
        (5, "xla", True, [3, 2]),
        ((5, 5, 2), "xla", True, [5, 2]),
        ((5, 2, 5), "xla", True, [5, 2, 5]),
    ],
    ids=str,
)
def test_a_loop_is_traced_once(parts, mode, known, shapes):
    record = _Record()
    step = _stepper(record, parts, mode, known)
    size = 8 if parts == (3, 3, 3) else 12
    step(tf.range(size))
    assert record.micro_batches(size) == _expected(size, parts)
    assert record.shapes == shapes


def test_xla_drops_no_samples():
    """It can't raise; what sizes leave over is a micro-batch of its own."""
    record = _Record()
    step = _stepper(record, (4, 4), "xla", known=False)
    step(tf.range(11))
    assert record.micro_batches(11) == _expected(11, (4, 4, 3))


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("parts", [3, (2, 1, 3)], ids=str)
@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_what_is_not_dense(kind, parts, mode):
    """Rows [0], [0, 1], [0, 1, 2], ... keep their values."""
    seen = tf.Variable(tf.zeros([6], tf.int32))
    ragged = tf.ragged.range(tf.range(1, 7))
    data = ragged if kind == "ragged" else ragged.to_sparse()

    def body(part):
        if kind == "sparse":
            part = tf.RaggedTensor.from_sparse(part)
        rows = part.row_lengths() - 1
        sums = tf.reduce_sum(part, axis=1) + 100 * tf.cast(
            tf.shape(rows)[0], tf.int32
        )
        seen.scatter_nd_update(rows[:, None], sums)
        return [tf.identity(seen)]

    step = equality.compiled(
        lambda data: batches.for_each(body, data, parts), mode
    )
    step(data)
    lengths = [len(each) for each in _expected(6, parts)]
    sizes = itertools.chain(*([length] * length for length in lengths))
    assert seen.numpy().tolist() == [
        row * (row + 1) // 2 + 100 * size for row, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("parts", "size", "first", "refused"),
    [
        (5, 5, True, False),
        (5, 4, True, True),
        # A later batch may be short.
        (5, 4, False, False),
        ((5, 3), 8, True, False),
        ((5, 3), 7, True, False),
        ((5, 3), 9, True, True),
        ((5, 3), 9, False, True),
    ],
    ids=str,
)
def test_a_batch_that_cannot_be_split(parts, size, first, refused):
    def graph(size, first):
        batches.check(parts, size, first)

    shown = list(parts) if isinstance(parts, tuple) else parts
    text = f"micro_batches={shown}".replace("[", r"\[").replace("]", r"\]")
    text += f".*samples: .*{size}"
    dynamic = tf.function(graph)
    calls = [
        (ValueError, lambda: batches.check(parts, size, first)),
        (
            tf.errors.InvalidArgumentError,
            lambda: dynamic(tf.constant(size), tf.constant(first)),
        ),
    ]
    for error, call in calls:
        if refused:
            with pytest.raises(error, match=f"(?s){text}"):
                call()
        else:
            call()


@pytest.mark.parametrize(
    ("data", "spec"),
    [
        (lambda: tf.zeros([4, 1]), tf.TensorSpec([None, 1])),
        (
            lambda: tf.sparse.from_dense(tf.eye(4)),
            tf.SparseTensorSpec([None, 4]),
        ),
        (
            lambda: tf.ragged.range(tf.range(4)),
            tf.RaggedTensorSpec([None, None], tf.int32),
        ),
    ],
    ids=["dense", "sparse", "ragged"],
)
def test_the_number_of_samples(data, spec):
    # None stands for what is not given, such as sample weights.
    assert batches.size_of((None, {"x": data()})) == 4
    size = tf.function(
        lambda data: batches.size_of((None, data)), input_signature=[spec]
    )
    assert int(size(data())) == 4
