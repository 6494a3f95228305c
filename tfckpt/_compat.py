"""Every private name of TensorFlow and Keras that tfckpt can't do without.

Each function here says what it reaches for and why no public name does the
same. `tests/compat_test.py` tries each of them on every supported version and
fails when the list grows unnoticed.
"""

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from keras.src.backend.common import (
    global_state,
    masking,
    name_scope,
    symbolic_scope,
    variables,
)
from keras.src.layers import layer as layer_module
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.python.autograph.impl import api
from tensorflow.python.eager import (
    context,
    execute,
    forwardprop_util,
    record,
)
from tensorflow.python.framework import op_callbacks, op_def_registry
from tensorflow.python.ops import (
    control_flow_util,
    control_flow_v2_func_graphs,
)

# --------------------------------------------------------------------------
# TensorFlow: what records, and on which device
# --------------------------------------------------------------------------


def records() -> bool:
    """Whether any tape or accumulator of this thread is recording.

    `tf.GradientTape` can't be asked from outside whether one is active.
    """
    return record.could_possibly_record()


def is_watched(tensor: Any) -> bool:
    """Whether some recording tape watches `tensor` (no public query)."""
    return record.should_record_backprop([tensor])


def has_tangent(tensors: list[Any]) -> bool:
    """Whether a `tf.autodiff.ForwardAccumulator` follows one of `tensors`.

    Tapes opened inside an accumulator do not see its tensors, so forward mode
    has to be told apart, and an accumulator can't be asked from outside.
    """
    return bool(forwardprop_util.pack_tangents(tensors).tangents)


@contextlib.contextmanager
def stopped_recording() -> Iterator[None]:
    """Stops every tape of this thread.

    `tf.init_scope` does that too, but in a graph it also leaves the graph.
    """
    with record.stop_recording():
        yield


def watch_variables() -> Any:
    """A context with `watched_variables()`: the trainable ones read in it.

    A `tf.GradientTape` has the same list, but also keeps every activation.
    """
    return record.VariableWatcher()


def device_name() -> str:
    """The device that the code around asks for ("" where it asks for none).

    A tensor tells where it is, not where it was asked to be.
    """
    if tf.executing_eagerly():
        return context.context().device_name or ""
    return device_of_graph(tf.compat.v1.get_default_graph())


def device_of_graph(graph: Any) -> str:
    """The innermost device that ops added to `graph` now are asked to use."""
    for frame in graph._device_function_stack.peek_objs():
        if frame.raw_string:
            return frame.raw_string
    return ""


def calling_layer() -> Any:
    """The layer whose `add_loss` called the caller of this function.

    `StatelessScope.add_loss` is not told which layer calls.
    """
    return inspect.currentframe().f_back.f_back.f_locals.get("self")


def compiled_by_xla() -> bool:
    """Whether the ops built now belong to a function compiled by XLA."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return control_flow_util.GraphOrParentsInXlaContext(graph)


def hlo_module(serialized: bytes) -> Any:
    """XLA's optimized program, with its plan of buffers.

    The compiler hands it out by a public method, but the message's class is
    private.
    """
    return hlo_pb2.HloProto.FromString(serialized)


def is_stateful(op_type: str) -> bool:
    """Whether ops of this type have state or effects.

    `op.op_def` is public, but an op of eager mode has none to ask.
    """
    definition = op_def_registry.get(op_type)
    return definition is not None and definition.is_stateful


def in_vectorized_map() -> bool:
    """Whether `tf.vectorized_map` traces the code; only its frame tells."""
    return _on_stack({"_pfor_impl"})


def in_custom_gradient(until: Any = None) -> bool:
    """Whether `tf.custom_gradient` runs the code; only its frames tell.

    Args:
        until: a code object; frames outside of it don't count.
    """
    names = {"_eager_mode_decorator", "_graph_mode_decorator"}
    return _on_stack(names, until)


def _on_stack(names: set[str], until: Any = None) -> bool:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not until:
        if frame.f_code.co_name in names:
            return True
        frame = frame.f_back
    return False


def unconverted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps AutoGraph out of `function`, but not out of what it calls.

    `tf.autograph.experimental.do_not_convert` does both.
    """
    return api.autograph_artifact(function)


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as AutoGraph would call it here, if it is at work here.

    Code that calls a user's function is asked to do that itself, with these
    names of `tf.__internal__`.
    """
    status = tf.__internal__.autograph.control_status_ctx()
    if tf.executing_eagerly() or status.status.name != "ENABLED":
        return function
    return tf.__internal__.autograph.tf_convert(function, status)


def tensor_id(tensor: Any) -> int:
    """An id that is never used again, unlike Python's, once it is freed."""
    return tensor._id


_observers = 0
_observers_lock = threading.Lock()


@contextlib.contextmanager
def observed_ops(callback: Callable[..., None]) -> Iterator[None]:
    """Calls `callback(op_type, inputs, attrs, outputs, ...)` for eager ops.

    Nothing public shows what an eager function reads from outside. The list
    of callbacks belongs to a thread, but the switch that TensorFlow throws
    when it gets empty does not, so the switch is thrown here again while
    another thread still observes.
    """
    global _observers
    with _observers_lock:
        _observers += 1
        op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        with _observers_lock:
            _observers -= 1
            op_callbacks.remove_op_callback(callback)
            if _observers:
                execute.execute = execute.execute_with_callbacks


def local_capture(tensor: Any) -> Any:
    """What ops of the graph that is being built read in place of `tensor`.

    The graphs of gradients of loops and branches hand down what the forward
    pass left, and don't tell tapes of it.
    """
    if tf.executing_eagerly():
        return tensor
    graph = tf.compat.v1.get_default_graph()
    if getattr(tensor, "graph", None) is graph:
        return tensor
    return graph.capture(tensor)


def variable_dtype(handle: Any) -> tf.DType | None:
    """The dtype of the variable behind a resource handle, None if unknown.

    Tables, iterators and generators have handles too; only variables carry
    this in their (private) handle data.
    """
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    return tf.as_dtype(data.shape_and_type[0].dtype)


def function_definition(name: str) -> Any:
    """The `FunctionDef` of a traced function by name, None if there is none.

    A `tf.function` can be asked for its graph, the name in an op can't.
    """
    if not context.context().has_function(name):
        return None
    return context.context().get_function_def(name)


def is_control_flow_graph(graph: Any) -> bool:
    """Whether `graph` is a branch or a loop body, traced anew every time.

    A `tf.function` keeps its trace; these do not, but only their private
    class tells.
    """
    return isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph)


# --------------------------------------------------------------------------
# Keras: state that its layers read while they are called
# --------------------------------------------------------------------------

_AMBIENT = (
    "current_call_ctx",
    "autocast_scope",
    "name_scope_stack",
    "remat_scope_stack",
)


def ambient_state() -> dict[str, Any]:
    """Keras' thread-local state that decides what a call computes.

    `training` of the enclosing call, automatic casting, name scopes and
    `RematScope`: none can be read or entered again by a public name. The call
    context is copied, since later calls write in it.
    """
    state = {name: global_state.get_global_attribute(name) for name in _AMBIENT}
    call_context = state["current_call_ctx"]
    copied = layer_module.CallContext(entry_layer=None)
    if call_context is not None:
        vars(copied).update(vars(call_context))
    # Without a context a layer takes itself for the outermost one and
    # clears its losses; a recomputation must not.
    state["current_call_ctx"] = copied
    for name in ("name_scope_stack", "remat_scope_stack"):
        if state[name] is not None:
            state[name] = list(state[name])
    return state


@contextlib.contextmanager
def restored_ambient_state(state: dict[str, Any]) -> Iterator[None]:
    """Puts what `ambient_state` returned in place for a while."""
    before = {
        name: global_state.get_global_attribute(name) for name in _AMBIENT
    }
    _set_global_attributes(state)
    try:
        yield
    finally:
        _set_global_attributes(before)


def _set_global_attributes(state: dict[str, Any]) -> None:
    for name, value in state.items():
        # `set_global_attribute` can't set None over a value in some versions.
        setattr(global_state.GLOBAL_STATE_TRACKER, name, value)


def current_path() -> str:
    """The path of the layer being called ("" outside of any)."""
    return name_scope.current_path()


def in_symbolic_scope() -> bool:
    """Whether Keras only infers shapes (its placeholders are plain ones)."""
    return symbolic_scope.in_symbolic_scope()


def remat_mode(layer: Any) -> Any:
    """Keras' own rematerialization of a layer; it is in no config."""
    return getattr(layer, "_remat_mode", None)


def get_mask(tensor: Any) -> Any:
    """The Keras mask that a tensor carries, or None."""
    return masking.get_keras_mask(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Attaches a Keras mask to a tensor."""
    masking.set_keras_mask(tensor, mask)


def get_logits(tensor: Any) -> Any:
    """The logits that probabilities were made of, or None.

    Keras' activations leave them on their result (a private attribute), and
    its cross-entropies take them in place of the probabilities.
    """
    return getattr(tensor, "_keras_logits", None)


def set_logits(tensor: Any, logits: Any) -> None:
    """Makes probabilities carry their logits; see `get_logits`."""
    tensor._keras_logits = logits


# What Keras makes a tensor carry: how it is put there, how it is read.
CARRIED = ((set_mask, get_mask), (set_logits, get_logits))


def stored_value(variable: Any) -> Any:
    """The `tf.Variable` of a Keras variable, None while not initialized.

    The public `value` is looked up in the current `StatelessScope` and cast
    by automatic casting.
    """
    return variable._value


def initialize_variables() -> None:
    """Initializes the variables created inside a `StatelessScope`.

    Keras does that when the outermost scope ends; a call that is to be
    differentiated needs the true values while it is in the scope.
    """
    scope = global_state.get_global_attribute("stateless_scope")
    global_state.GLOBAL_STATE_TRACKER.stateless_scope = None
    try:
        variables.initialize_all_variables()
    finally:
        global_state.GLOBAL_STATE_TRACKER.stateless_scope = scope
