"""A Keras model that recomputes its activations segment by segment.

Gradient checkpointing of a whole model: the forward pass keeps the tensors
at the boundaries of the segments of a plan, the backward pass runs each
segment again (`tfckpt.planners` names the source). Layers, names, variables
and files are those of the plain model.
"""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import keras

from tfckpt import _compat_graph as compat
from tfckpt import conversion, segmentation, segments, training
from tfckpt import graph as graph_lib
from tfckpt import plan as plan_lib

# On the outputs that `clone_model` makes from a model: that model's plan.
_MARK = "_tfckpt_plan"


@keras.saving.register_keras_serializable(package="tfckpt")
class SegmentedModel(training.AccumulatingTrainer, keras.Model):
    """A Functional model whose activations are recomputed.

    Trains to the same numbers as `keras.Model(inputs, outputs)` (where sums
    may round by their order, see `tfckpt.segments`), in less
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
            each of these calls. A `tfckpt.Plan`, as `tfckpt.make_plan` makes
            it: that plan.
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
            asked, shape = marked or (segmentation.DEFAULT, shape)
        super().__init__(*args, **kwargs)
        self._segmentation = segmentation.Segmentation(self, asked, shape)

    @classmethod
    def from_model(
        cls,
        model: keras.Model,
        *,
        plan: Any = segmentation.DEFAULT,
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
        functional = conversion.checked_functional(cls, model, input_shape)
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
            if isinstance(model, training.AccumulatingTrainer):
                arguments |= model.window_options()
            # It is scaled already if it is to be.
            arguments["optimizer"] = model.optimizer
            segmented.compile(**arguments, auto_scale_loss=False)
            # They may have been set after `compile`.
            segmented.run_eagerly = model.run_eagerly
            segmented.jit_compile = model.jit_compile
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
                keep_last=compat.is_outermost(self),
            ),
        )
        if isinstance(outputs, (list, tuple)) and len(outputs) == 1:
            return outputs[0]
        return outputs

    def graph_of_calls(self) -> graph_lib.Graph | None:
        """Returns the calls that the model makes; None if nobody knows."""
        if type(self).call is not SegmentedModel.call:
            return None
        return self._segmentation.graph(self)

    def measure(self, x: Any, y: Any = None, **options: Any) -> Any:
        """Measures a training step, next to what the plan predicts.

        Memory is that of fresh processes on a CPU, and of the device
        elsewhere; times are with the plan and without, by turns. Weights,
        optimizer, metrics and seeds stay as they are. It takes a minute.

        Args:
            x: Inputs of one step.
            y: Targets, if the model is compiled with a loss. Else the loss is
                the mean square of the outputs.
            **options: See `tfckpt.measurement.measure`.

        Returns:
            A `tfckpt.measurement.Measurement`; print it.
        """
        # It makes models of this class.
        measurement = importlib.import_module("tfckpt.measurement")
        return measurement.measure(self, x, y, **options)

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
        # A private method of Keras, overridden here because it has to be one
        # of the class: the only method of the model that `clone_model` goes
        # through before it makes the clone from its inputs and outputs.
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
        inspect.Parameter("plan", _KEYWORD, default=segmentation.DEFAULT),
        inspect.Parameter("input_shape", _KEYWORD, default=None),
        inspect.Parameter("name", _KEYWORD, default=None),
        inspect.Parameter("trainable", _KEYWORD, default=None),
    ]
)


def _unmarked(outputs):
    """Takes the plan of a cloned model off the clone's outputs."""
    marked = None
    for x in keras.tree.flatten(outputs):
        if hasattr(x, _MARK):
            marked = getattr(x, _MARK)
            delattr(x, _MARK)
    return marked
