"""A Keras model that recomputes its activations segment by segment.

Gradient checkpointing of a whole model: the forward pass keeps the tensors
at the boundaries of the segments of a plan, the backward pass runs each
segment again (`tfckpt.plan` names the source). Layers, names, variables and
files are those of the plain model.
"""

import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfckpt import _compat_graph as compat
from tfckpt import graph as graph_lib
from tfckpt import plan as plan_lib
from tfckpt import recomputation, segments

# What an unknown size counts as when a plan has to be settled: only the
# proportions of the segments depend on it, never a number in the training.
_UNKNOWN_SIZE = 128

_DEFAULT = "sqrt"

# On the outputs that `clone_model` makes from a model: that model's plan.
_MARK = "_tfckpt_plan"


@keras.saving.register_keras_serializable(package="tfckpt")
class SegmentedModel(keras.Model):
    """A Functional model whose activations are recomputed.

    Trains to the same numbers as `keras.Model(inputs, outputs)`, in less
    memory and more time: about one more forward pass, less the last segment.
    Nested models are segmented too. The last segment is not recomputed,
    except when this model is itself called inside a layer or model; where
    nothing records gradients, nothing is recomputed.

    Everything else is as in a plain model: `compile`, `fit`, `save` (the
    plan is saved too), `clone_model`, `get_layer`, weights and their files.

    Args:
        inputs: Inputs of the model, as for `keras.Model`.
        outputs: Outputs of the model, as for `keras.Model`.
        plan: Which calls are recomputed together. `None`: recompute nothing.
            `"sqrt"`: about the square root of the number of calls, in
            segments of equal output bytes. An int: so many segments, of
            equal output bytes. A list of call paths such as
            `["conv1", "backbone/block2", "dense#2"]`: a segment ends with
            each of these calls. A `tfckpt.plan.Plan`: that plan.
        input_shape: Shape of the input with the batch dimension, or a
            structure of shapes like `inputs`. Needed only to settle a plan
            before the first batch where the model leaves sizes open.
        name: Name of the model.
        trainable: Whether its variables are trained.

    Raises:
        PlanError: The plan can't be made for this model.

    Example:

    >>> inputs = keras.Input((8,))
    >>> x = inputs
    >>> for i in range(4):
    ...     x = keras.layers.Dense(8, name=f"dense_{i}")(x)
    >>> model = SegmentedModel(inputs, x, plan=2)
    >>> print(model.plan)
    Plan: 2 segments, 4 calls, 2 recomputed
    segment 1, recomputed: 2 calls
        dense_0
        dense_1
      boundary: dense_1
    segment 2, not recomputed: 2 calls
        dense_2
        dense_3
      boundary: dense_3
    """

    # Keras only remakes a Functional subclass as its own class, in
    # `clone_model` and from a file, if its constructor has this form. What
    # the arguments are is said in `__signature__`.
    def __init__(self, *args, **kwargs):
        asked = kwargs.pop("plan", _MARK)
        shape = kwargs.pop("input_shape", None)
        outputs = kwargs.get("outputs", args[1] if len(args) > 1 else None)
        if len(args) + ("inputs" in kwargs) + ("outputs" in kwargs) < 2:
            raise TypeError(
                f"{type(self).__name__} takes `inputs` and `outputs`, as "
                f"keras.Model does. Received: {args!r}, {kwargs!r}. A model "
                "that exists is segmented by `SegmentedModel.from_model`."
            )
        marked = _unmarked(outputs)
        if asked is _MARK:
            asked, shape = marked or (_DEFAULT, shape)
        super().__init__(*args, **kwargs)
        self._segmentation = _Segmentation(self, asked, shape)

    @classmethod
    def from_model(
        cls,
        model: keras.Model,
        *,
        plan: Any = _DEFAULT,
        input_shape: Any = None,
    ) -> "SegmentedModel":
        """Returns a model that segments `model` and shares its layers.

        Training one trains the other. Name, dtype policy, `trainable` and
        the state of `compile`, with the same optimizer, are those of
        `model`.

        Args:
            model: A Functional or Sequential model.
            plan: See the class.
            input_shape: See the class. An unbuilt Sequential is built with
                it.

        Raises:
            TypeError: `model` has no graph, or methods that would be lost.
            ValueError: `model` is a Sequential that is not built.
        """
        functional = _checked_functional(cls, model, input_shape)
        segmented = cls(
            functional.input,
            functional.output,
            plan=plan,
            input_shape=input_shape,
            name=model.name,
            trainable=model.trainable,
        )
        segmented.dtype_policy = model.dtype_policy
        segmented.autocast = model.autocast
        segmented.supports_masking = model.supports_masking
        segmented.activity_regularizer = model.activity_regularizer
        if model.compiled:
            arguments = compat.compile_arguments(model)
            # It is scaled already if it is to be.
            arguments["optimizer"] = model.optimizer
            segmented.compile(**arguments, auto_scale_loss=False)
        return segmented

    @property
    def plan(self) -> plan_lib.Plan | plan_lib.Unsettled | None:
        """The plan; `Unsettled` until sizes are known, None if none."""
        return self._segmentation.plan

    def call(self, inputs, training=None, mask=None, **kwargs):
        """Runs the model; see `keras.Model.call`."""
        if self._segmentation.asked is None or any(
            isinstance(x, keras.KerasTensor) for x in keras.tree.flatten(inputs)
        ):
            return super().call(inputs, training=training, mask=mask, **kwargs)
        flat = compat.standardize_inputs(self, inputs, mask)
        graph, parts = self._segmentation.settled(self, flat)
        run = segments.Run(graph, {"training": training, **kwargs})
        outputs = keras.tree.pack_sequence_as(
            self.output,
            run(
                parts,
                flat,
                recomputation.recompute,
                keep_last=compat.is_outermost(self),
            ),
        )
        if isinstance(outputs, (list, tuple)) and len(outputs) == 1:
            return outputs[0]
        return outputs

    def get_config(self) -> dict[str, Any]:
        """Returns the config of `keras.Model`, and the plan as asked for."""
        return super().get_config() | self._segmentation.get_config()

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> "SegmentedModel":
        """Returns the model that `get_config` describes."""
        config = dict(config)
        if isinstance(config.get("plan"), Mapping):
            config["plan"] = plan_lib.Plan.from_config(config["plan"])
        return super().from_config(config, custom_objects=custom_objects)

    def _run_through_graph(self, *args, **kwargs):
        # The only method of the model that `clone_model` goes through before
        # it makes the clone from its inputs and outputs.
        outputs = super()._run_through_graph(*args, **kwargs)
        if hasattr(self, "_segmentation"):
            for x in keras.tree.flatten(outputs):
                if isinstance(x, keras.KerasTensor) and compat.has_history(x):
                    asked = self._segmentation.asked
                    setattr(x, _MARK, (asked, self._segmentation.input_shape))
        return outputs


_KEYWORD = inspect.Parameter.KEYWORD_ONLY
SegmentedModel.__signature__ = inspect.Signature(
    [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for name in ("inputs", "outputs")
    ]
    + [
        inspect.Parameter("plan", _KEYWORD, default=_DEFAULT),
        inspect.Parameter("input_shape", _KEYWORD, default=None),
        inspect.Parameter("name", _KEYWORD, default=None),
        inspect.Parameter("trainable", _KEYWORD, default=None),
    ]
)


class _Segmentation:
    """What a model was asked to plan, and what came of it.

    An object of its own, so that Keras does not look into it for layers.
    """

    def __init__(self, model: Any, asked: Any, input_shape: Any) -> None:
        self.asked = _checked_plan(asked)
        self.input_shape = input_shape
        self._shapes = _flat_shapes(model, input_shape)
        self._graph = graph_lib.read(model)
        self._parts = None
        self.plan = None
        if self.asked is not None:
            self._settle(self._shapes, unknown=None)

    def get_config(self) -> dict[str, Any]:
        asked = self.asked
        if isinstance(asked, plan_lib.Plan):
            asked = asked.get_config()
        elif isinstance(asked, tuple):
            asked = list(asked)
        return {"plan": asked, "input_shape": self.input_shape}

    def settled(self, model: Any, flat: Sequence[Any]):
        """Returns the graph and its parts, settling the plan if need be."""
        if not self._graph.is_current():
            self._graph = graph_lib.read(model)
            self._parts = None
        if self._parts is None:
            shapes = self._shapes or [
                None if x is None else tuple(x.shape) for x in flat
            ]
            self._settle(shapes, unknown=_UNKNOWN_SIZE)
        return self._graph, self._parts

    def _settle(self, shapes, unknown):
        graph = self._graph
        batch_size = next((s[0] for s in shapes or () if s), None)
        specs = graph.infer(shapes)

        def measure(batch_size):
            return [
                graph_lib.tensor_bytes(spec, batch_size, unknown)
                for spec in specs
            ]

        plan = self._make(measure(batch_size or 1), unknown)
        self.plan = plan
        if isinstance(plan, plan_lib.Unsettled):
            return
        known = measure(batch_size)
        self.plan = plan_lib.annotate(
            plan,
            [_total(known, call) for call in graph.calls],
            [
                [(graph.names[key], known[key]) for key in keys]
                for keys in graph.live()
            ],
        )
        self._parts = segments.split(graph, self.plan)

    def _make(self, sizes, unknown):
        graph, asked = self._graph, self.asked
        if isinstance(asked, plan_lib.Plan):
            return asked
        if isinstance(asked, tuple):
            return plan_lib.at_boundaries(graph.paths, asked)
        calls = [_total(sizes, call) for call in graph.calls]
        live = [[sizes[key] for key in keys] for keys in graph.live()]
        if isinstance(asked, int):
            # Says what is wrong with the number even before sizes are known.
            plan_lib.uniform(graph.paths, asked)
        if None in calls or any(None in keys for keys in live):
            if unknown is None:
                position = calls.index(None) if None in calls else 0
                return plan_lib.Unsettled(
                    asked,
                    f"the size of the output of '{graph.paths[position]}' is "
                    "not known before the first batch. Give `input_shape` to "
                    "know it earlier.",
                )
            # Tensors of unknown item size (strings, sparse) count nothing.
            calls = [size or 0 for size in calls]
            live = [[size or 0 for size in keys] for keys in live]
        cuts = [sum(keys) for keys in live]
        if isinstance(asked, int):
            return plan_lib.uniform(graph.paths, asked, calls, cuts)
        return plan_lib.sqrt(graph.paths, calls, cuts)


def _total(sizes, call):
    made = [sizes[key] for _, outputs in call.steps for key in outputs]
    return None if None in made else sum(made)


def _checked_plan(asked):
    if asked is None or isinstance(asked, plan_lib.Plan) or asked == _DEFAULT:
        return asked
    if isinstance(asked, (list, tuple)) and all(
        isinstance(path, str) for path in asked
    ):
        return tuple(asked)
    if not isinstance(asked, (bool, str)):
        try:
            return operator.index(asked)
        except TypeError:
            pass
    raise plan_lib.PlanError(
        '`plan` is None, "sqrt", a number of segments, a list of call paths '
        f"or a Plan. Received: {asked!r} of type {type(asked).__name__}."
        + (f" Did you mean [{asked!r}]?" if isinstance(asked, str) else "")
    )


def _flat_shapes(model, input_shape):
    if input_shape is None:
        return None
    shapes = []
    keras.tree.map_shape_structure(
        lambda shape: shapes.append(tuple(shape)), input_shape
    )
    expected = [tuple(x.shape) for x in model.inputs]
    if len(shapes) != len(expected) or any(
        len(a) != len(b)
        or any(
            x is not None and y not in (x, None)
            for x, y in zip(b, a, strict=True)
        )
        for a, b in zip(shapes, expected, strict=True)
    ):
        raise plan_lib.PlanError(
            "`input_shape` is the shape of each input, the batch dimension "
            f"first. Received: {input_shape!r}. Expected something like "
            f"{expected[0] if len(expected) == 1 else expected}."
        )
    return shapes


def _unmarked(outputs):
    """Takes the plan of a cloned model off the clone's outputs."""
    marked = None
    for x in keras.tree.flatten(outputs):
        if hasattr(x, _MARK):
            marked = getattr(x, _MARK)
            delattr(x, _MARK)
    return marked


def _checked_functional(cls, model, input_shape):
    kind = type(model).__name__
    if not isinstance(model, keras.Model):
        raise TypeError(
            "SegmentedModel.from_model takes a keras.Model. Received: "
            f"{model!r} of type {kind}. For a layer there is "
            "tfckpt.Recompute, for a function tfckpt.recompute."
        )
    if isinstance(model, keras.Sequential):
        if not compat.functional_of(model) and input_shape is not None:
            model.build(input_shape)
        if not compat.functional_of(model):
            raise ValueError(
                f"The Sequential '{model.name}' is not built, so its calls "
                f"are not known. Received: input_shape={input_shape!r}. Add "
                "a keras.Input first, call `build`, or give `input_shape` "
                "with the batch dimension, such as (None, 32). A Sequential "
                "that takes several inputs has no graph; use "
                "tfckpt.Recompute for its layers."
            )
    functional = compat.functional_of(model)
    if functional is None:
        raise TypeError(
            f"'{model.name}' is a subclassed model ({kind}): what its `call` "
            "does can't be read as a graph. Expected a Functional or "
            "Sequential model. Wrap the layers that it calls in "
            "tfckpt.Recompute instead."
        )
    lost = _lost_methods(cls, model)
    if lost:
        raise TypeError(
            f"'{model.name}' of type {kind} has methods that "
            f"{cls.__name__} would lose: {', '.join(lost)}. Put them into a "
            f"class of your own, `class Segmented{kind}(tfckpt.Segmented"
            f"Model)`, and call `Segmented{kind}.from_model(model)`; or, if "
            "you don't need them, segment `keras.Model(model.input, "
            "model.output)`; or wrap its layers in tfckpt.Recompute."
        )
    beside = compat.layers_beside(model, functional)
    if beside:
        names = ", ".join(layer.name for layer in beside)
        raise TypeError(
            f"'{model.name}' holds layers that are not in its graph, which "
            f"{cls.__name__} would lose: {names}. Segment `keras.Model("
            "model.input, model.output)`, and attach them to the result."
        )
    return functional


def _lost_methods(cls, model):
    """Returns names of methods of the model's class that `cls` lacks."""
    # How it is made and saved is replaced on purpose.
    replaced = {"get_config", "from_config"}
    lost = set()
    for base in type(model).__mro__:
        if base in cls.__mro__ or base.__module__.split(".")[0] == "keras":
            continue
        for name, value in vars(base).items():
            method = callable(value) or isinstance(
                value, (property, classmethod, staticmethod)
            )
            if not method or name in replaced:
                continue
            if name.startswith("__") and name != "__call__":
                continue
            if not _has_own(cls, name):
                lost.add(name)
    # Keras itself sets `build` and `quantize` on every layer.
    lost.update(
        name
        for name, value in vars(model).items()
        if callable(value)
        and callable(getattr(type(model), name, None))
        and name not in ("build", "quantize")
    )
    return sorted(lost)


def _has_own(cls, name):
    return any(
        name in vars(base)
        for base in cls.__mro__
        if base.__module__.split(".")[0] not in ("keras", "tfckpt")
        and base is not object
    )
