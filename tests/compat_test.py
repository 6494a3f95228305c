"""Every private name that tfckpt uses still does what it is used for."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfckpt
from tfckpt import _compat, _compat_graph, _compat_training

X = tf.constant([[1.0, 2.0]])

# It must not grow unnoticed: each entry can break with a new version.
CALLS = {
    "ambient_state",
    "calling_layer",
    "compiled_by_xla",
    "converted",
    "current_path",
    "device_name",
    "device_of_graph",
    "function_definition",
    "get_logits",
    "get_mask",
    "has_tangent",
    "hlo_module",
    "local_capture",
    "in_custom_gradient",
    "in_symbolic_scope",
    "in_vectorized_map",
    "initialize_variables",
    "is_control_flow_graph",
    "is_stateful",
    "is_watched",
    "observed_ops",
    "records",
    "remat_mode",
    "restored_ambient_state",
    "set_logits",
    "set_mask",
    "stopped_recording",
    "stored_value",
    "tensor_id",
    "unconverted",
    "variable_dtype",
    "watch_variables",
}
GRAPH = {
    "arguments_of",
    "call_operation",
    "compile_arguments",
    "enter_context",
    "enter_inputs",
    "fill_in",
    "functional_class",
    "functional_of",
    "has_history",
    "is_outermost",
    "layer_scopes",
    "layers_beside",
    "leave_context",
    "nodes_in_order",
    "runs_as_keras",
    "standardize_inputs",
}


TRAINING = {
    "all_layers",
    "begin_at",
    "build_metrics",
    "compute_loss",
    "loss_tracker",
    "metrics_built",
    "output_losses",
    "passes_training",
    "reduced_already",
    "reported_losses",
    "split_losses",
    "wrapped_optimizers",
}


@pytest.mark.parametrize(
    ("module", "expected"),
    [(_compat, CALLS), (_compat_graph, GRAPH), (_compat_training, TRAINING)],
)
def test_the_list_does_not_grow(module, expected):
    found = {
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }
    assert found == expected
    for name in found:
        assert inspect.getdoc(getattr(module, name)), name


def test_recording():
    assert not _compat.records()
    with tf.GradientTape() as tape:
        tape.watch(X)
        assert _compat.records()
        assert _compat.is_watched(X)
        with _compat.stopped_recording():
            y = 2.0 * X
        assert not _compat.is_watched(y)
    assert not _compat.has_tangent([X])
    with tf.autodiff.ForwardAccumulator(X, X):
        assert _compat.has_tangent([X])


def test_variables_are_reported():
    variable = tf.Variable(1.0)
    with _compat.stopped_recording(), _compat.watch_variables() as watcher:
        variable * 2.0
    assert [v is variable for v in watcher.watched_variables()] == [True]
    assert _compat.variable_dtype(variable.handle) == tf.float32
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
    assert _compat.variable_dtype(table.resource_handle) is None


def test_ops_are_observed():
    eager, graph = [], []

    def note(into):
        def callback(op, inputs, attrs, outputs, op_name=None, graph=None):
            into.append(op.decode() if isinstance(op, bytes) else op)
            return outputs

        return callback

    with _compat.observed_ops(note(eager)):
        tf.tanh(X)
    tf.sin(X)

    @tf.function
    def function(x):
        with _compat.observed_ops(note(graph)):
            y = tf.tanh(x)
        return tf.sin(y)

    function(X)
    assert eager == ["Tanh"]
    assert graph == ["Tanh"]


def test_devices():
    assert _compat.device_name() == ""
    with tf.device("CPU:1"):
        assert "CPU:1" in _compat.device_name()

        @tf.function
        def inside():
            with tf.device("CPU:0"):
                devices.append(_compat.device_name())

        devices = []
        inside()
    assert "CPU:0" in devices[0]


@pytest.mark.parametrize("jit_compile", [True, False])
def test_compiled_by_xla(jit_compile):
    found = []

    @tf.function(jit_compile=jit_compile)
    def function(x):
        found.append(_compat.compiled_by_xla())
        return x

    function(X)
    assert found == [jit_compile]
    assert not _compat.compiled_by_xla()


def test_graphs():
    kinds, captured = [], []

    @tf.function
    def function(x):
        def body(i, y):
            graph = tf.compat.v1.get_default_graph()
            kinds.append(_compat.is_control_flow_graph(graph))
            captured.append(_compat.local_capture(x).graph is graph)
            return i + 1, y + x

        graph = tf.compat.v1.get_default_graph()
        kinds.append(_compat.is_control_flow_graph(graph))
        return tf.while_loop(lambda i, y: i < 2, body, (0, x))

    function(X)
    assert kinds == [False, True]
    assert captured == [True]


def test_functions_are_found_by_name():
    function = tf.function(lambda x: tf.tanh(x)).get_concrete_function(X)
    name = function.function_def.signature.name
    definition = _compat.function_definition(name)
    assert "Tanh" in [node.op for node in definition.node_def]
    assert _compat.function_definition("no such function") is None


def test_what_is_stateful_and_what_runs():
    assert _compat.is_stateful("RandomUniform")
    assert not _compat.is_stateful("Tanh")
    assert not _compat.is_stateful("no such op")
    found = []

    def body(x):
        found.append(_compat.in_vectorized_map())
        return 2.0 * x

    body(X)
    tf.vectorized_map(body, X)
    assert found == [False, True]

    @tf.custom_gradient
    def custom(x):
        found.append(_compat.in_custom_gradient())
        found.append(_compat.in_custom_gradient(until=custom_code))
        return x, lambda upstream: upstream

    custom_code = custom.__wrapped__.__code__
    custom(X)
    tf.function(custom, autograph=False)(X)
    assert found[2:] == [True, False] * 2
    assert not _compat.in_custom_gradient()


def test_tensor_ids_are_not_used_again():
    ids = {_compat.tensor_id(tf.constant(float(i))) for i in range(100)}
    assert len(ids) == 100


def test_autograph():
    def choose(x):
        if tf.reduce_sum(x) > 0:
            return x
        return -x

    def call(x):
        return _compat.converted(choose)(x)

    function = tf.function(_compat.unconverted(call))
    np.testing.assert_array_equal(function(-X), X)
    assert _compat.converted(choose) is choose  # in eager mode


def test_ambient_state():
    found = []

    class Layer(keras.layers.Layer):
        def call(self, x, training=None):
            found.append(
                (_compat.current_path(), keras.Variable(1.0).dtype, training)
            )
            state.append(_compat.ambient_state())
            return x

    class Inner(keras.layers.Layer):
        def call(self, x, training=None):
            found.append(training)
            return x

    state = []
    layer = Layer(name="outer", dtype="mixed_bfloat16")
    layer(X, training=True)
    inner = Inner()
    with _compat.restored_ambient_state(state[0]):
        assert _compat.current_path() == "outer"
        inner(X)
    assert found[0] == ("outer", "bfloat16", True)
    assert found[1] is True
    assert _compat.current_path() == ""
    assert not _compat.in_symbolic_scope()


def test_masks_and_remat():
    x = tf.identity(X)
    assert _compat.get_mask(x) is None
    _compat.set_mask(x, tf.constant([True]))
    assert _compat.get_mask(x) is not None


def test_logits():
    x = tf.constant([[1.0, 2.0]])
    assert _compat.get_logits(x) is None
    assert _compat.get_logits(keras.activations.softmax(x)) is x
    y = tf.identity(x)
    _compat.set_logits(y, x)
    assert _compat.get_logits(y) is x
    assert not _compat.remat_mode(keras.layers.Dense(1))


def test_variables_made_in_a_scope():
    with keras.StatelessScope():
        layer = keras.layers.Dense(2)
        layer.build((None, 2))
        assert _compat.stored_value(layer.kernel) is None
        _compat.initialize_variables()
        assert isinstance(_compat.stored_value(layer.kernel), tf.Variable)
        assert _compat.stored_value(layer.kernel) is not None
    np.testing.assert_array_equal(layer.bias, [0.0, 0.0])


def test_graph_of_a_model():
    inputs = keras.Input((2,))
    dense = keras.layers.Dense(2, name="dense")
    model = keras.Model(inputs, dense(dense(inputs)))
    model.compile("sgd", "mse")
    assert _compat_graph.functional_of(model) is model
    assert isinstance(model, _compat_graph.functional_class())
    assert _compat_graph.runs_as_keras(model)
    nodes = _compat_graph.nodes_in_order(model)
    assert [node.operation for node in nodes] == [dense, dense]
    assert _compat_graph.arguments_of(nodes[0])[0][0] is inputs
    assert _compat_graph.has_history(model.output)
    assert _compat_graph.layers_beside(model, model) == []
    assert _compat_graph.compile_arguments(model)["loss"] == "mse"
    assert _compat_graph.is_outermost(model)
    segmented = tfckpt.SegmentedModel.from_model(model, plan=2)
    np.testing.assert_array_equal(segmented(X), model(X))


def _compiled_model(**options):
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(1, name="out")(inputs))
    model.compile("sgd", "mse", metrics=["mae"], **options)
    return model


def test_training_state_of_a_model():
    model = _compiled_model()
    assert _compat_training.passes_training(model)
    assert _compat_training.loss_tracker(model).name == "loss"
    assert not _compat_training.metrics_built(model)
    _compat_training.build_metrics(model, (X, X[:, :1]))
    assert _compat_training.metrics_built(model)
    assert _compat_training.output_losses(model).built
    _compat_training.begin_at(model, 2)
    epochs = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: epochs.append(epoch)
    )
    model.fit(X, X[:, :1], epochs=4, verbose=0, callbacks=[note])
    assert epochs == [2, 3]


def test_losses_of_outputs_are_reported():
    inputs = keras.Input((2,))
    outputs = [keras.layers.Dense(1, name=name)(inputs) for name in "ab"]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", ["mse", "mae"], loss_weights=[2.0, 3.0])
    _compat_training.split_losses(model)
    _compat_training.split_losses(_compiled_model())
    y = [X[:, :1], X[:, 1:]]
    y_pred = model(X)
    found = []

    def report(loss, factor, *args):
        found.append((loss.name, factor))
        return loss(*args)

    plain = _compat_training.compute_loss(model, X, y, y_pred, None)
    with _compat_training.reported_losses(report):
        loss = _compat_training.compute_loss(model, X, y, y_pred, None)
    assert found == [
        ("mse", 2.0),
        ("mae", 3.0),
    ]
    assert float(plain) == float(loss)
    # Those of a part are not logged; others are.
    metrics = _compat_training.output_losses(model).metrics
    assert [float(metric.count) for metric in metrics] == [1.0, 1.0]


def test_optimizers_do_not_add_up_what_is_reduced(strategy):
    with strategy.scope():
        variable = tf.Variable(0.0)
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([variable])

    def apply():
        optimizer.apply([tf.constant(-1.0)], [variable])

    strategy.run(apply)
    assert float(tf.convert_to_tensor(variable)) == 2.0
    with _compat_training.reduced_already(optimizer):
        strategy.run(apply)
    assert float(tf.convert_to_tensor(variable)) == 3.0
    strategy.run(apply)
    assert float(tf.convert_to_tensor(variable)) == 5.0


def test_optimizers_in_optimizers():
    inner = keras.optimizers.SGD()
    multi = keras.optimizers.MultiOptimizer(lambda variable: inner)
    outer = keras.optimizers.LossScaleOptimizer(multi)
    multi.build([keras.Variable(1.0)])
    found = _compat_training.wrapped_optimizers(outer)
    assert {id(each) for each in found} == {id(outer), id(multi), id(inner)}


def test_layers_in_layers():
    class Holder(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.held = [keras.layers.Dense(1)]

        def call(self, x):
            return self.held[0](x)

    holder = Holder()
    inputs = keras.Input((2,))
    model = keras.Sequential([inputs, keras.Sequential([holder])])
    assert holder.held[0] in _compat_training.all_layers(model)


def test_who_adds_a_loss():
    class Scope(keras.StatelessScope):
        def add_loss(self, loss):
            found.append(_compat.calling_layer())

    class Adds(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.sum(x))
            return x

    found, layer = [], Adds()
    with Scope(collect_losses=True):
        layer(X)
    assert found == [layer]
