"""`SegmentedModel` on random Functional graphs: skips, shared layers, nesting.

Everything is float64 with small whole numbers, so that every sum is exact and
bit-equality can be asked for whatever the order in which TensorFlow adds.
"""

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st
from keras import layers

from tests import equality
from tfckpt import graph
from tfckpt.segmented_model import SegmentedModel

_WIDTH = 3
_EXACT = 2.0**53


class Counts(layers.Layer):
    """Adds how often it was called: what runs twice is seen twice."""

    def build(self, shape):
        self.count = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="count"
        )

    def call(self, x):
        self.count.assign(self.count + 1.0)
        return x + self.count


class SharesSeeds(layers.Layer):
    """Dropout from a generator that several layers draw from."""

    def __init__(self, seeds):
        super().__init__()
        self.seeds = seeds

    def call(self, x, training=False):
        if training:
            return keras.random.dropout(x, 0.5, seed=self.seeds)
        return x


class AddsLoss(layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.sum(x))
        return x - 1.0


def _whole(shape, dtype=None):
    """Weights of -1, 0 and 1."""
    return keras.ops.cast(
        keras.random.randint(shape, -1, 2, seed=_whole.seeds), dtype
    )


# One step of a graph: what is done, to which earlier tensors, with what.
_STEPS = st.tuples(
    st.sampled_from(
        [
            "dense",
            "relu",
            "add",
            "plus",
            "subtract",
            "multiply",
            "concatenate",
            "dropout",
            "count",
            "loss",
            "shared",
            "shared_dropout",
            "split",
            "nest",
            "nest_frozen",
            "again",
            "stop",
        ]
    ),
    st.tuples(*[st.integers(0, 50)] * 3),
    st.integers(0, 3),
)


@st.composite
def _recipes(draw):
    return {
        "inputs": draw(st.integers(1, 3)),
        "steps": draw(st.lists(_STEPS, min_size=2, max_size=14)),
        "within": draw(st.lists(_STEPS, min_size=1, max_size=4)),
        "outputs": draw(st.lists(st.integers(0, 50), min_size=1, max_size=3)),
        "cuts": draw(st.lists(st.integers(0, 50), max_size=5)),
        "seed": draw(st.integers(0, 1000)),
    }


class _Builder:
    """Makes a model from a recipe; twice the same from one seed."""

    def __init__(self, recipe):
        keras.utils.clear_session(free_memory=False)
        _whole.seeds = keras.random.SeedGenerator(recipe["seed"])
        self._dropouts = keras.random.SeedGenerator(recipe["seed"] + 1)
        self._shared = {}
        self._nested = []
        self._recipe = recipe
        self._degree = 0
        self._depth = 0

    def model(self):
        inputs = [keras.Input((_WIDTH,)) for _ in range(self._recipe["inputs"])]
        tensors = self._walk(inputs, self._recipe["steps"])
        picked = [tensors[-1 - i % len(tensors)] for i in self._outputs()]
        return keras.Model(inputs, picked)

    def _outputs(self):
        return [0, *self._recipe["outputs"]]

    def _walk(self, inputs, steps):
        tensors = list(inputs)
        for kind, places, choice in steps:
            # Mostly late tensors, so that graphs get deep; some early ones.
            args = [
                tensors[-1 - min(p, p * p // 25) % len(tensors)] for p in places
            ]
            tensors.extend(self._step(kind, args, choice))
        return tensors

    def _dense(self, name=None):
        return layers.Dense(
            _WIDTH,
            kernel_initializer=_whole,
            bias_initializer=_whole,
            name=name,
        )

    def _step(self, kind, args, choice):
        x, y, z = args
        if kind == "dense":
            return [self._dense()(x)]
        if kind == "relu":
            return [keras.ops.relu(x)]
        if kind == "add":
            return [layers.Add()([x, y, z])]
        if kind == "plus":
            return [x + y]
        if kind == "subtract":
            return [layers.Subtract()([x, y])]
        if kind == "multiply" and self._degree < 2:
            self._degree += 1
            return [layers.Multiply()([x, y])]
        if kind == "concatenate":
            return [self._dense()(layers.Concatenate()([x, y]))]
        if kind == "dropout":
            return [layers.Dropout(0.5, seed=choice)(x)]
        if kind == "shared_dropout":
            return [SharesSeeds(self._dropouts)(x)]
        if kind == "count":
            return [Counts()(x)]
        if kind == "loss":
            return [AddsLoss()(x)]
        if kind == "split":
            parts = keras.ops.split(
                keras.ops.concatenate([x, y], axis=-1), [2], axis=-1
            )
            return [layers.Add()([self._dense()(part) for part in parts])]
        if kind == "stop":
            return [keras.ops.stop_gradient(x)]
        if kind == "shared":
            layer = self._shared.setdefault(
                choice % 2, self._dense(f"shared_{choice % 2}")
            )
            return [layer(x)]
        if kind in ("nest", "nest_frozen"):
            self._nested.append(self._nest(choice))
        if kind in ("nest", "nest_frozen", "again") and self._nested:
            model = self._nested[choice % len(self._nested)]
            given = {"training": False} if kind == "nest_frozen" else {}
            return list(model([x, y], **given))
        return [x + 1.0]

    def _nest(self, choice):
        inputs = [keras.Input((_WIDTH,)) for _ in range(2)]
        steps = self._recipe["within"][: choice + 1]
        if self._depth:
            steps = [s for s in steps if not s[0].startswith("nest")]
        self._depth += 1
        tensors = self._walk(inputs, [("plus", (0, 1, 0), 0), *steps])
        self._depth -= 1
        return keras.Model(inputs, [tensors[-1], tensors[1]])


def _wrap(recipe):
    def wrap(model):
        paths = graph.read(model).paths
        ends = {paths[cut % len(paths)] for cut in recipe["cuts"]}
        return SegmentedModel.from_model(model, plan=sorted(ends))

    return wrap


def _subject(recipe, wrap):
    keras.utils.set_random_seed(recipe["seed"])
    model = _Builder(recipe).model()
    wrapped = wrap(model)
    return equality.Subject(
        lambda *inputs: wrapped(list(inputs), training=True),
        model.variables,
        lambda: wrapped.losses,
    )


def _step(subject, inputs, mode):
    """Outputs, gradients and variables of one step, losses whole numbers."""
    trainable = [v for v in subject.variables if v.trainable]
    none = []

    def step(*inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = tf.nest.flatten(subject.call(*inputs))
            losses = [
                float(i + 1) * tf.reduce_sum(y) for i, y in enumerate(outputs)
            ]
            loss = tf.add_n([*losses, *subject.losses()])
        gradients = tape.gradient(
            loss, [*(v.value for v in trainable), *inputs]
        )
        none[:] = [g is None for g in gradients]
        return [*outputs, loss, *(g for g in gradients if g is not None)]

    found = equality.compiled(step, mode)(*inputs)
    found += [v.value for v in subject.variables]
    return none, [x.numpy() for x in found]


def _check(recipe, mode):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    equality.exact_graphs()
    random = np.random.default_rng(recipe["seed"])
    inputs = [
        tf.constant(random.integers(-2, 3, (2, _WIDTH)), "float64")
        for _ in range(recipe["inputs"])
    ]
    plain_none, plain = _step(
        _subject(recipe, lambda model: model), inputs, mode
    )
    hypothesis.assume(all(np.abs(x).max(initial=0) < _EXACT for x in plain))
    none, ours = _step(_subject(recipe, _wrap(recipe)), inputs, mode)
    assert none == plain_none
    for i, (a, b) in enumerate(zip(plain, ours, strict=True)):
        np.testing.assert_array_equal(b, a, f"value {i}")


@hypothesis.given(_recipes())
@hypothesis.settings(max_examples=20)
def test_random_graphs(recipe):
    _check(recipe, "eager")


@pytest.mark.sweep
@hypothesis.given(_recipes())
@hypothesis.settings(max_examples=400)
def test_many_random_graphs(recipe):
    _check(recipe, "eager")


@pytest.mark.sweep
@hypothesis.given(_recipes())
@hypothesis.settings(max_examples=60)
def test_many_random_graphs_traced(recipe):
    _check(recipe, "graph")
