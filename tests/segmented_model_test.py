"""`SegmentedModel` against the plain model with the same weights."""

import os
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests import equality, model_zoo
from tfckpt import graph, planners
from tfckpt import plan as plan_lib
from tfckpt.segmented_model import SegmentedModel

# Keras warns when a mask enters a nested model, with us and without.
pytestmark = pytest.mark.filterwarnings("ignore:Layer 'core':UserWarning")

# Where gradients are sums of three or more that TensorFlow adds in another
# order: what losses inside a segment contribute comes after what the model's
# loss does, not before; and segments in a segment add up what they contribute
# to a weight or tensor that several of them read.
_ROUNDS = {
    "losses": ["eager", "graph"],
    "shared, nested": ["eager", "graph"],
    "nested, nested": ["eager", "graph"],
    "dictionaries, nested": ["graph"],
}


def _segmented(asked):
    """Returns what makes a segmented model by `plan` or one of these plans."""
    plans = {
        "all": lambda paths: list(paths),
        "nested": lambda paths: plan_lib.Plan(_halves(paths)),
        "kept": _keeping,
    }

    def wrap(model):
        make = plans.get(asked)
        return SegmentedModel.from_model(
            model, plan=make(graph.read(model).paths) if make else asked
        )

    return wrap


def _halves(paths):
    """Segments in segments, down to single calls; the last ones are kept."""
    if len(paths) == 1:
        return (plan_lib.Segment(paths, recomputed=False),)
    first, second = paths[: len(paths) // 2], paths[len(paths) // 2 :]
    inside = _halves(first) if len(first) > 1 else ()
    return (plan_lib.Segment(first, segments=inside), *_halves(second))


def _keeping(paths):
    """Three segments, which keep all that can be kept."""
    made = planners.uniform(paths, min(3, len(paths)))
    return plan_lib.Plan(
        tuple(
            plan_lib.Segment(
                s.calls, s.recomputed, kept=s.calls if s.recomputed else ()
            )
            for s in made.segments
        )
    )


def _subject(name, wrap, training=True):
    model = model_zoo.make(name)
    wrapped = wrap(model)
    names = model_zoo.ZOO[name][1]

    def call(*inputs):
        if isinstance(names, dict):
            return wrapped(
                dict(zip(names, inputs, strict=True)), training=training
            )
        return wrapped(*inputs, training=training)

    return equality.Subject(call, model.variables, lambda: wrapped.losses)


def _flat_inputs(name):
    return keras.tree.flatten(model_zoo.inputs_of(name))


def _check(name, asked, mode, training=True):
    rounds = mode in _ROUNDS.get(name, ()) or mode in _ROUNDS.get(
        f"{name}, {asked}", ()
    )
    # TensorFlow fuses products with their bias, except where the product
    # itself is kept.
    fused = asked == "kept" and mode == "graph" and not equality.WITHOUT_ONEDNN
    rounds |= fused
    if rounds:
        # The same comparison, with the tolerance that it has under XLA.
        found = []
        for wrap in (lambda model: model, _segmented(asked)):
            keras.utils.clear_session(free_memory=False)
            keras.utils.set_random_seed(1)
            subject = _subject(name, wrap, training)
            # Rounding of the weights grows in further steps.
            steps = 1 if fused else 2
            found.append(
                equality.train(subject, _flat_inputs(name), mode, steps)
            )
        for step, pair in enumerate(zip(*found, strict=True)):
            equality.compare(*pair, "xla", f"step {step}")
        return
    equality.check(
        lambda wrap: _subject(name, wrap, training),
        _flat_inputs(name),
        _segmented(asked),
        mode,
    )


@pytest.mark.parametrize("asked", ["sqrt", 2, "all", "nested", "kept"])
@pytest.mark.parametrize("name", model_zoo.ZOO)
def test_equals_plain_model_eager(name, asked):
    _check(name, asked, "eager")


@pytest.mark.parametrize("asked", ["sqrt", "all", "nested", "kept"])
@pytest.mark.parametrize("name", model_zoo.ZOO)
def test_equals_plain_model_graph(name, asked):
    _check(name, asked, "graph")


def test_kept_calls_are_exact_in_a_graph_without_onednn():
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-n0", __file__),
            *("-k", "test_equals_plain_model_graph and kept"),
        ],
        env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:]


@pytest.mark.parametrize("asked", ["sqrt", "nested", "kept"])
@pytest.mark.parametrize("name", model_zoo.ZOO)
def test_equals_plain_model_xla(name, asked):
    _check(name, asked, "xla")


@pytest.mark.parametrize("training", [None, False])
@pytest.mark.parametrize("name", ["nested", "chain", "residual"])
def test_training_is_resolved_as_in_the_plain_model(name, training):
    _check(name, "all", "eager", training)


class _TrainsByDefault(layers.Layer):
    """Its `training` stays in Keras' call context for those after it."""

    def call(self, x, training=True):
        return x * (2.0 if training else 3.0)


class _Hides(layers.Layer):
    """A dropout that finds `training` in Keras' call context only."""

    def __init__(self, seed):
        super().__init__()
        self.dropout = layers.Dropout(0.5, seed=seed)

    def call(self, x):
        return self.dropout(x)


@pytest.mark.parametrize("training", [None, True, False])
@pytest.mark.parametrize("asked", [1, 3, "all"])
def test_training_leaks_as_in_the_plain_model(training, asked):
    def make(wrap):
        within = keras.Input((4,))
        x = _TrainsByDefault()(within)
        x = layers.Dense(4)(layers.Dropout(0.5, seed=1)(x))
        core = keras.Model(within, layers.Dropout(0.5, seed=2)(x), name="core")
        inputs = keras.Input((4,))
        x = core(inputs, training=False)
        x = _Hides(3)(x)
        x = _TrainsByDefault()(x)
        x = layers.BatchNormalization()(core(x))
        # Given as None, it hides what the layers before have left.
        within = keras.Input((4,))
        last = keras.Model(within, _Hides(4)(within))
        x = last(_TrainsByDefault()(x), training=None)
        model = keras.Model(inputs, x)
        wrapped = wrap(model)
        return equality.Subject(
            lambda x: wrapped(x, training=training), model.variables
        )

    inputs = [np.random.default_rng(0).normal(size=(4, 4)).astype("float32")]
    equality.check(make, inputs, _segmented(asked), "eager")


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("asked", [1, 2, "all"])
def test_a_mask_passed_to_a_nested_model(asked, mode):
    """Keras leaves it on the tensor, and a later layer finds it there."""

    def make(wrap):
        inputs = keras.Input((5, 3))
        mask = keras.Input((5,), dtype="bool")
        x = layers.Dense(3)(inputs)
        within = keras.Input((5, 3))
        y = layers.LSTM(3, return_sequences=True)(within)
        core = keras.Model(within, layers.Dense(3)(y), name="core")
        y = layers.GlobalAveragePooling1D()(core(x, mask=mask))
        z = layers.GlobalAveragePooling1D()(x)
        y = layers.Dense(3)(layers.Dense(3)(y))
        model = keras.Model([inputs, mask], layers.Add()([y, z]))
        names = [each.operation.name for each in graph.read(model).calls]
        assert names.index("lstm") < names.index("global_average_pooling1d_1")
        wrapped = wrap(model)
        return equality.Subject(
            lambda *inputs: wrapped(list(inputs)), model.variables
        )

    random = np.random.default_rng(0)
    inputs = [
        random.normal(size=(4, 5, 3)).astype("float32"),
        np.arange(5) < np.array([[1], [3], [5], [2]]),
    ]
    equality.check(make, inputs, _segmented(asked), mode)


@pytest.mark.parametrize("method", ["call", "stateless_call"])
def test_without_a_call_context(method):
    """`call` alone: each layer's call is then Keras' outermost one."""
    x = model_zoo.inputs_of("nested")
    results = []
    for wrap in (lambda model: model, _segmented("all")):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        model = wrap(model_zoo.make("nested"))
        if method == "call":
            y = model.call(x, training=True)
            state = [v.numpy() for v in model.variables]
            # Nothing of the call is left: this layer is outermost.
            ones = np.ones(64, "float32")
            np.testing.assert_array_equal(layers.Dropout(0.5)(ones), ones)
        else:
            y, state = model.stateless_call(
                [v.value for v in model.trainable_variables],
                [v.value for v in model.non_trainable_variables],
                x,
                training=True,
            )
        results.append([y, *state])
    for plain, ours in zip(*results, strict=True):
        np.testing.assert_array_equal(plain, ours)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", ["nested", "residual", "attention"])
def test_mixed_precision(policy, name):
    keras.config.set_dtype_policy(policy)
    _check(name, "all", "eager")


def test_a_nested_model_with_its_own_dtype_policy():
    def make(wrap):
        inputs = keras.Input((4,))
        x = layers.Dense(4, dtype="float32")(inputs)
        within = keras.Input((4,), dtype="bfloat16")
        core = keras.Model(
            within, layers.Dense(4, dtype="mixed_bfloat16")(within)
        )
        core.dtype_policy = keras.DTypePolicy("mixed_bfloat16")
        x = layers.Dense(4)(core(x))
        model = keras.Model(inputs, x)
        wrapped = wrap(model)
        return equality.Subject(wrapped, model.variables)

    inputs = [np.ones((2, 4), "float32")]
    equality.check(make, inputs, _segmented("all"), "eager")


class _ReadsDouble(layers.Layer):
    """A float64 weight, which an autocast scope rounds when it is read."""

    def build(self, shape):
        self.w = self.add_weight(
            shape=(), dtype="float64", initializer=lambda *_, **__: 0.1
        )

    def call(self, x):
        return keras.ops.cast(keras.ops.cast(x, "float64") * self.w, x.dtype)


def test_layers_run_in_the_scopes_of_the_models_around_them():
    within = keras.Input((4,))
    core = keras.Model(within, _ReadsDouble(name="inner")(within), name="core")
    core.dtype_policy = keras.DTypePolicy("mixed_bfloat16")
    inputs = keras.Input((4,))
    model = keras.Model(inputs, core(inputs))
    ours = _segmented("all")(model)
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    np.testing.assert_array_equal(ours(x), model(x))
    # Profiles show the names: ".../core_1/inner_1/mul".
    traced = tf.function(lambda x: ours(x)).get_concrete_function(x)
    names = [op.name for op in traced.graph.get_operations()]
    assert any(re.search(r"core\w*/inner\w*/", name) for name in names)


# -- Training through fit ---------------------------------------------------


def _fit(make, wrap, steps=20, **compile_arguments):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    equality.exact_graphs()
    model = wrap(make())
    model.compile(optimizer=keras.optimizers.Adam(0.01), **compile_arguments)
    x = np.random.default_rng(1).normal(size=(8 * steps, 6, 6, 3))
    y = np.random.default_rng(2).integers(0, 3, 8 * steps)
    history = model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    return model, history.history["loss"]


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_twenty_steps_of_fit(run_eagerly):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    results = [
        _fit(
            model_zoo.residual,
            wrap,
            loss=loss,
            run_eagerly=run_eagerly,
            metrics=["accuracy"],
        )
        for wrap in (lambda model: model, _segmented("sqrt"))
    ]
    (plain, plain_loss), (ours, our_loss) = results
    assert plain_loss == our_loss
    for a, b in zip(plain.variables, ours.variables, strict=True):
        np.testing.assert_array_equal(a, b, a.path)
    for a, b in zip(
        plain.optimizer.variables, ours.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(a, b, a.path)


def test_twenty_steps_of_fit_under_xla():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    losses = [
        _fit(model_zoo.residual, wrap, loss=loss, jit_compile=True)[1]
        for wrap in (lambda model: model, _segmented("sqrt"))
    ]
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_trainable_toggles():
    """Weights get gradients exactly when they are trainable."""
    model = model_zoo.make("chain")
    ours = SegmentedModel.from_model(model, plan=3)
    x = model_zoo.inputs_of("chain")
    for frozen in (["dense_0", "dense_1"], ["head"], []):
        for layer in ours.layers:
            layer.trainable = layer.name not in frozen
        before = {v.path: v.numpy() for v in ours.variables}
        ours.compile("sgd", "mse")
        ours.fit(x, np.ones((4, 3)), verbose=0)
        for v in ours.trainable_variables:
            assert np.any(v.numpy() != before[v.path]), v.path
        for name in frozen:
            for v in ours.get_layer(name).variables:
                np.testing.assert_array_equal(v, before[v.path])


def _ops(function, *args):
    """Counts operations in a traced function and those that it calls."""
    found = {}
    todo = [function.get_concrete_function(*args).graph.as_graph_def()]
    for nodes in (
        [node for graph_def in todo for node in graph_def.node],
        [
            node
            for graph_def in todo
            for each in graph_def.library.function
            for node in each.node_def
        ],
    ):
        for node in nodes:
            if node.op not in ("Identity", "NoOp"):
                found[node.op] = found.get(node.op, 0) + 1
    return found


@pytest.mark.parametrize("step", ["test_step", "predict_step"])
@pytest.mark.parametrize("name", ["residual", "nested"])
def test_no_extra_ops_where_nothing_is_trained(step, name):
    x = tf.convert_to_tensor(model_zoo.inputs_of(name))
    counts = []
    for wrap in (lambda model: model, _segmented("all")):
        model = wrap(model_zoo.make(name))
        model.compile("sgd", "mse")
        y = model(x)
        model.evaluate(x, y, verbose=0)
        function = tf.function(getattr(model, step), autograph=False)
        counts.append(_ops(function, (x, y)))
    assert counts[0] == counts[1]


# -- from_model --------------------------------------------------------------


def _compiled(name="chain"):
    model = model_zoo.make(name)
    model.compile(
        optimizer=keras.optimizers.Adam(0.02),
        loss="mse",
        metrics=["mae"],
        run_eagerly=True,
    )
    return model


def test_from_model_shares_and_keeps():
    model = _compiled()
    model.get_layer("dense_0").trainable = False
    x, y = model_zoo.inputs_of("chain"), np.ones((4, 3))
    model.fit(x, y, verbose=0)
    ours = SegmentedModel.from_model(model, plan=3)
    assert ours.name == model.name
    assert ours.layers == model.layers
    assert list(map(id, ours.variables)) == list(map(id, model.variables))
    assert ours.optimizer is model.optimizer
    assert ours.loss == "mse"
    assert ours.run_eagerly
    assert ours.dtype_policy == model.dtype_policy
    assert not ours.get_layer("dense_0").trainable
    assert ours.get_layer("dense_1").trainable
    ours.fit(x, y, verbose=0)
    assert model.optimizer.iterations == 2
    assert set(ours.evaluate(x, y, verbose=0, return_dict=True)) == {
        "loss",
        "mae",
    }
    # The original still works, on the same weights.
    np.testing.assert_array_equal(model.predict(x, verbose=0), ours(x))


def test_from_model_keeps_trainable_and_policy():
    keras.config.set_dtype_policy("mixed_float16")
    model = _compiled()
    model.trainable = False
    keras.config.set_dtype_policy("float32")
    model.get_layer("head").trainable = True
    ours = SegmentedModel.from_model(model)
    assert not ours.trainable
    assert model.get_layer("head").trainable
    assert ours.dtype_policy.name == "mixed_float16"
    # Scaled once, and by the same object.
    assert ours.optimizer is model.optimizer
    assert not isinstance(
        ours.optimizer.inner_optimizer, keras.optimizers.LossScaleOptimizer
    )


def test_from_model_replans():
    first = SegmentedModel.from_model(model_zoo.make("chain"), plan=2)
    second = SegmentedModel.from_model(first, plan=4)
    assert len(second.plan.segments) == 4
    assert len(first.plan.segments) == 2
    assert SegmentedModel.from_model(first, plan=None).plan is None


def test_the_constructor():
    x = keras.Input((3,))
    y = layers.Dense(2)(layers.Dense(3)(x))
    assert len(SegmentedModel(x, y, plan=2).plan.segments) == 2
    assert SegmentedModel(inputs=x, outputs=y, name="n").name == "n"
    assert not SegmentedModel(x, y, trainable=False).trainable
    with pytest.raises(TypeError, match="from_model"):
        SegmentedModel()
    with pytest.raises(TypeError, match="from_model"):
        SegmentedModel(keras.Model(x, y))


def test_application():
    """A whole network from keras.applications, in structure and gradient."""
    model = keras.applications.MobileNetV2(
        (32, 32, 3), weights=None, classes=2, alpha=0.35
    )
    ours = SegmentedModel.from_model(model)
    assert 8 < len(ours.plan.segments) < 16
    x = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype("float32")
    gradients = []
    for each in (model, ours):
        with tf.GradientTape() as tape:
            y = each(x, training=True)
        gradients.append(tape.gradient(y, model.trainable_variables))
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_array_equal(a, b)


# -- Files, copies -----------------------------------------------------------


def _plans_for(model):
    paths = graph.read(model).paths
    return [
        None,
        "sqrt",
        3,
        [paths[1], paths[3]],
        planners.uniform(paths, 2),
    ]


def _same(a, b):
    """Holds that two models have one plan and one function."""
    assert type(a) is type(b)
    assert a.plan == b.plan
    assert a.get_config()["plan"] == b.get_config()["plan"]


def _sequential():
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(4, activation="tanh"),
            keras.Sequential(
                [layers.Dense(4), layers.BatchNormalization()], name="inner"
            ),
            layers.Dropout(0.2, seed=1),
            layers.Dense(3),
        ]
    )


def _nested():
    """Models in models; Keras can't load one that stands in two others."""
    within = keras.Input((6,))
    x = layers.Dense(6, activation="tanh", name="one")(within)
    core = keras.Model(within, layers.Add()([x, within]), name="core")
    within = keras.Input((6,))
    x = layers.BatchNormalization(name="norm")(core(core(within)))
    backbone = keras.Model(within, [x, layers.Dense(6)(x)], name="backbone")
    inputs = keras.Input((6,))
    x, y = backbone(_sequential()(inputs) @ np.ones((3, 6), "float32"))
    return keras.Model(inputs, layers.Dense(2)(layers.Add()([x, y])))


_MAKERS = {
    "nested": (_nested, "nested"),
    "dictionaries": (model_zoo.dictionaries, "dictionaries"),
    "shared": (model_zoo.shared, "shared"),
    "sequential": (_sequential, "chain"),
}


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("name", _MAKERS)
def test_save_and_load(name, which, tmp_path):
    make, inputs = _MAKERS[name]
    model = make()
    x = model_zoo.inputs_of(inputs)
    ours = SegmentedModel.from_model(model, plan=_plans_for(model)[which])
    ours.compile("adam", "mse")
    ours.fit(x, ours(x), verbose=0)
    ours.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    _same(loaded, ours)
    assert loaded.optimizer.iterations == 1
    keras.tree.map_structure(np.testing.assert_array_equal, loaded(x), ours(x))
    _same(SegmentedModel.from_config(ours.get_config()), ours)
    _same(keras.models.model_from_json(ours.to_json()), ours)


@pytest.mark.parametrize("name", _MAKERS)
def test_weights_load_both_ways(name, tmp_path):
    make, inputs = _MAKERS[name]
    x = model_zoo.inputs_of(inputs)
    plain, other = make(), make()
    ours = SegmentedModel.from_model(other, plan=2)
    path = tmp_path / "model.weights.h5"
    plain.save_weights(path)
    ours.load_weights(path)
    keras.tree.map_structure(np.testing.assert_array_equal, ours(x), plain(x))
    for v in ours.trainable_variables:
        v.assign(v + 1.0)
    ours.save_weights(path)
    plain.load_weights(path)
    keras.tree.map_structure(np.testing.assert_array_equal, ours(x), plain(x))
    assert [v.path for v in other.variables] == [v.path for v in ours.variables]


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("compiled", [False, True])
def test_clone_model_keeps_the_plan(which, compiled):
    model = model_zoo.make("nested")
    ours = SegmentedModel.from_model(model, plan=_plans_for(model)[which])
    if compiled:
        ours.compile("sgd", "mse")
    clone = keras.models.clone_model(ours)
    _same(clone, ours)
    assert clone.compiled == compiled
    assert clone.layers[1] is not ours.layers[1]
    _same(keras.models.clone_model(ours, input_tensors=keras.Input((6,))), ours)
    _same(
        keras.models.clone_model(ours, clone_function=lambda layer: layer), ours
    )
    # A model made from a clone's tensors is not a clone.
    again = SegmentedModel(clone.input, clone.output)
    assert again.get_config()["plan"] == "sqrt"
    # As a part of another model.
    inputs = keras.Input((6,))
    outer = keras.Model(inputs, ours(inputs))
    for recursive in (False, True):
        copy = keras.models.clone_model(outer, recursive=recursive)
        _same(copy.layers[-1], ours)
    assert SegmentedModel(outer.input, outer.output).plan.calls == (ours.name,)


@keras.saving.register_keras_serializable(package="segmented_model_test")
class _OwnStep(SegmentedModel):
    def train_step(self, data):
        return {"own": 1.0, **super().train_step(data)}


def test_a_subclass_with_its_own_step(tmp_path):
    ours = _OwnStep.from_model(model_zoo.make("chain"), plan=3)
    ours.compile("sgd", "mse")
    ours.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    _same(loaded, ours)
    _same(keras.models.clone_model(ours), ours)
    x = model_zoo.inputs_of("chain")
    for each in (ours, loaded):
        assert "own" in each.fit(x, np.ones((4, 3)), verbose=0).history


def test_export(tmp_path):
    ours = SegmentedModel.from_model(model_zoo.make("nested"), plan="sqrt")
    x = model_zoo.inputs_of("nested")
    ours.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(exported.serve(x), ours(x), rtol=1e-5)


def test_everything_else_is_as_in_a_plain_model():
    model = model_zoo.make("nested")
    ours = SegmentedModel.from_model(model)
    assert ours.get_layer("backbone") is model.get_layer("backbone")
    assert ours.count_params() == model.count_params()
    assert ours.input_shape == model.input_shape
    assert ours.output_shape == model.output_shape
    texts = []
    for each in (model, ours):
        each.summary(print_fn=lambda text, **_: texts.append(text))
    assert len(texts) == 2
    assert texts[0] == texts[1]


def test_callbacks_and_restored_state(tmp_path):
    ours = SegmentedModel.from_model(_compiled(), plan=3)
    x, y = model_zoo.inputs_of("chain"), np.ones((4, 3))
    path = tmp_path / "{epoch}.keras"
    ours.fit(
        x,
        y,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[
            keras.callbacks.ModelCheckpoint(path),
            keras.callbacks.EarlyStopping("loss", patience=5),
        ],
    )
    assert (
        keras.models.load_model(tmp_path / "1.keras").optimizer.iterations == 1
    )
    # Keras doesn't save the state of the dropouts' seeds.
    loaded = keras.models.load_model(tmp_path / "2.keras")
    for a, b in zip(
        loaded.trainable_variables + loaded.optimizer.variables,
        ours.trainable_variables + ours.optimizer.variables,
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_symbolic_calls():
    ours = SegmentedModel.from_model(model_zoo.make("nested"))
    assert ours.compute_output_shape((None, 6)) == (None, 2)
    inputs = keras.Input((6,))
    assert ours(inputs).shape == (None, 2)


def test_wrong_inputs_are_refused_as_in_the_plain_model():
    model = model_zoo.make("dictionaries")
    ours = SegmentedModel.from_model(model)
    for each in (model, ours):
        with pytest.raises(ValueError):
            each({"a": np.ones((2, 4)), "b": np.ones((2, 7))})


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("plan", [["p", "b"], ["b"], ["a"]])
def test_probabilities_that_are_returned_and_read_later(plan, jit_compile):
    """Keras finds their logits by the op that made them."""

    class Probabilities(keras.layers.Layer):
        def call(self, x):
            return tf.nn.softmax(60.0 * x)

    def losses(plan):
        keras.utils.clear_session()
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4,))
        x = keras.layers.Dense(3, name="a")(inputs)
        p = Probabilities(name="p")(x)
        y = keras.layers.Dense(3, name="b")(p)
        y = keras.layers.Dense(3, name="c")(y)
        model = SegmentedModel(inputs, [p, y], plan=plan)
        model.compile(
            "sgd", ["categorical_crossentropy", "mse"], jit_compile=jit_compile
        )
        x = np.random.RandomState(0).randn(8, 4).astype("float32")
        y = np.eye(3, dtype="float32")[np.arange(8) % 3]
        return model.fit(x, [y, y], epochs=2, verbose=0).history["loss"]

    plain = losses(None)
    assert plain[0] > 17
    np.testing.assert_allclose(losses(plan), plain, rtol=1e-5)
