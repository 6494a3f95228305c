"""The calls of a stage, made for a micro-batch: once, and then again.

The first time random generators move on, and what they were at is noted. Again,
they draw what they drew. All else that a call assigns or adds to the loss is
refused: it would happen twice, or be lost.
"""

import contextlib
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from tfckpt import _compat, normalization, recomputation, segments
from tfckpt import graph as graph_lib
from tfckpt.normalization import stages

Statistics = Mapping[int, tuple[tf.Tensor, tf.Tensor]]


class StageRun:
    """Makes the calls of stages.

    Args:
        model: The model.
        graph: Its calls.
    """

    def __init__(self, model: keras.Model, graph: graph_lib.Graph):
        self._model, self._graph = model, graph
        self._run = segments.Run(graph, {"training": True})

    def generators(self, stage: stages.Stage) -> list[keras.Variable]:
        """Returns the states of the random generators of a stage."""
        found = {}
        for position in stage.calls:
            operation = self._graph.calls[position].operation
            if isinstance(operation, keras.Layer):
                weights = {id(each) for each in operation.weights}
                for each in operation.variables:
                    if id(each) not in weights:
                        found[id(each)] = each
        return list(found.values())

    def first(
        self,
        stage: stages.Stage,
        arguments: Sequence[tf.Tensor],
        given: Statistics,
    ) -> tuple[dict[int, tf.Tensor], list[tf.Tensor]]:
        """Makes the calls of a stage.

        Args:
            stage: The stage.
            arguments: The tensors that it reads.
            given: Mean and variance of each batch normalization in it.

        Returns:
            Tensors by key, and what the generators were at.
        """
        generators = self.generators(stage)
        drawn = [tf.identity(each.value) for each in generators]
        ends = ", ".join(f"'{self._graph.names[key]}'" for key in stage.outputs)
        label = f"The stage of batch_normalization='exact' that makes {ends}"
        with _OnlyGenerators(generators), recomputation.refusing(label):
            values = self._values(stage, arguments, given)
        return values, drawn

    def again(
        self,
        stage: stages.Stage,
        arguments: Sequence[tf.Tensor],
        given: Statistics,
        drawn: Sequence[tf.Tensor],
    ) -> dict[int, tf.Tensor]:
        """Makes the calls once more; returns the tensors by key."""
        replay = list(zip(self.generators(stage), drawn, strict=True))
        with keras.StatelessScope(replay):
            return self._values(stage, arguments, given)

    def check_samples(
        self,
        stage: stages.Stage,
        values: Mapping[int, tf.Tensor],
        samples: int | tf.Tensor,
    ) -> None:
        """Raises an error if later stages read other rows than samples."""
        for key in stage.outputs:
            text = (
                f"The output of '{self._graph.names[key]}' has not one row "
                "for each sample, so that batch_normalization='exact' can't "
                "cut it into micro-batches. Use 'sync' or 'micro', or keep "
                "the samples along the first axis."
            )
            rows = values[key].shape[0]
            if isinstance(rows, int) and isinstance(samples, int):
                if rows != samples:
                    raise ValueError(text)
            else:
                rows = tf.shape(values[key])[0]
                tf.debugging.assert_equal(rows, samples, text)

    def refuse_what_is_lost(
        self, stage: stages.Stage, values: Mapping[int, tf.Tensor]
    ) -> None:
        """Raises a ValueError if what later stages read can't be kept."""
        for key in stage.outputs:
            if values[key].dtype.is_complex:
                raise ValueError(
                    f"The output of '{self._graph.names[key]}' is complex, "
                    "which batch_normalization='exact' does not differentiate "
                    "from stage to stage. Use 'sync' or 'micro'."
                )
            if _compat.get_mask(values[key]) is not None:
                raise ValueError(
                    f"The output of '{self._graph.names[key]}' has a mask, "
                    "which batch_normalization='exact' does not follow. Use "
                    "'sync' or 'micro', or leave the mask out."
                )

    def _values(self, stage, arguments, given):
        def around(position):
            if position not in given:
                return contextlib.nullcontext()
            return normalization.under(normalization.Given(*given[position]))

        values = dict(zip(stage.arguments, arguments, strict=True))
        self._run.make_calls(self._model, stage.calls, values, around)
        return values


class _OnlyGenerators(keras.StatelessScope):
    """Assigns the states of random generators, and refuses all else."""

    def __init__(self, generators):
        super().__init__(collect_losses=True)
        self._allowed = {id(each) for each in generators}
        self._held = {}

    def add_update(self, update):
        variable, _ = update
        if id(variable) not in self._allowed:
            raise ValueError(
                f"The variable '{variable.path}' is assigned in the forward "
                "pass, which batch_normalization='exact' runs again. Use "
                "'sync' or 'micro', or another layer."
            )
        self._held[id(variable)] = update

    def get_current_value(self, variable):
        held = self._held.get(id(variable))
        return None if held is None else held[1]

    def add_loss(self, loss):
        layer = _compat.calling_layer()
        raise ValueError(
            f"The layer '{layer.path or layer.name}' adds a loss (add_loss, "
            "or an activity regularizer), which batch_normalization='exact' "
            "does not follow. Use 'sync' or 'micro', or leave the loss out."
        )

    def __exit__(self, *args, **kwargs):
        super().__exit__(*args, **kwargs)
        for variable, value in self._held.values():
            variable.assign(value)
