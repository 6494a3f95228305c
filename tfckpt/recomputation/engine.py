"""Gradient checkpointing of a function, exactly.

The function runs once without being recorded; its gradient is a custom one
that runs it again on the same inputs and the same state, and differentiates
that (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost";
rematerialization; Griewank and Walther 2000 call it checkpointing).

`tf.recompute_grad` does this for functions without state. It can't carry the
following, measured with TensorFlow 2.21, and wrapping it does not help, as
they happen inside of it, so the custom gradient here is our own:

- an input or weight that is not connected gets 0 instead of None, and rows
  of an embedding become a dense gradient;
- `x + 0.0` as its data dependency changes -0.0, copies every input and fails
  for bool and complex tensors;
- second order with respect to weights, and forward mode, fail.

Not done: in eager mode a `tf.GradientTape` that the function itself opens
does not record in the forward pass (in a `tf.function` it does).
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfckpt import _compat
from tfckpt.recomputation import (
    ambient,
    arguments,
    errors,
    keeping,
    observe,
    ordering,
    state,
    switch,
    tapes,
    wrapping,
)


def recompute(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function keep its inputs only, and run again for its gradient.

    A drop-in for `tf.recompute_grad`, with the numbers of `fn` itself:
    outputs, gradients (also which are None), random draws and every Keras
    variable, in eager mode, in a `tf.function` and under XLA. When nothing
    records a gradient, `fn` just runs. Pass what is large as an argument:
    what `fn` reads from its surroundings is kept, and what it makes of that
    alone may be kept too.

    Args:
        fn: a function, layer or model. Positional and keyword arguments and
            results may be nested structures of tensors of any dtype, sparse
            and ragged tensors, None and any Python value; only tensors are
            treated as such. Tensors that `fn` reads from its surroundings
            are differentiated too. Keras variables that it assigns are
            assigned once, when it has run.

    Returns:
        A function with the signature of `fn`. Unlike `tfckpt.Recompute`, it
        is no layer: an attribute of a layer or model that holds it does not
        track the variables of `fn`.

    Raises:
        TypeError: `fn` is not callable, or is given an iterator.
        RecomputeError: when called, if `fn` does what can't be repeated:
            stateful random ops (`tf.random.uniform`), assignments to a
            `tf.Variable`, iterators, Python functions; or reads a weight
            inside a `tf.custom_gradient`. In the gradient, if the second run
            does something else: choices in Python, other shapes, a raw
            `tf.Variable` that was assigned (in a graph the last is a
            `tf.errors.InvalidArgumentError`, and under XLA, which drops
            assertions, it goes unnoticed: assign such variables after the
            gradient).

    Example:

    >>> import keras, tensorflow as tf
    >>> layer = keras.layers.Dense(2, kernel_initializer="ones")
    >>> dropout = keras.layers.Dropout(0.5, seed=1)
    >>> block = tfckpt.recompute(lambda x: dropout(layer(x), training=True))
    >>> with tf.GradientTape() as tape:
    ...     loss = tf.reduce_sum(block(tf.ones([1, 3])))
    >>> tape.gradient(loss, layer.trainable_variables)[0].shape
    TensorShape([3, 2])
    """
    if not callable(fn):
        raise TypeError(
            "tfckpt.recompute takes a function, layer or model. Received: "
            f"{fn!r} of type {type(fn).__name__}."
        )

    @wrapping.wraps(fn)
    def recomputed(*args, **kwargs):
        if not switch.wanted() or arguments.is_symbolic((args, kwargs)):
            return _compat.converted(fn)(*args, **kwargs)
        return _Recomputation(fn, args, kwargs).forward()

    return _compat.unconverted(recomputed)


class _Recomputation:
    """One call: what its gradient needs to know.

    The gradient is taken with respect to the sources: tensors among the
    arguments, each read of a Keras variable, tensors read from outside, and
    trainable `tf.Variable`s read from outside.
    """

    def __init__(self, fn, args, kwargs):
        self._fn = _compat.converted(fn)
        self._label = _label(fn)
        self._inputs = arguments.Structure((args, kwargs))
        self._ambient = ambient.Ambient()

    def forward(self):
        """Runs the function and attaches the gradient to its results."""
        inputs = self._inputs.tensors
        if _compat.has_tangent(inputs):
            return self._plainly()
        # Tensors of its own: the function may hold the same ones, and what it
        # reads from outside is differentiated by another way.
        handed = self._remade([tf.identity(tensor) for tensor in inputs])
        keeper = keeping.Keeper(self._label)
        observer = observe.Observer(self._label, handed, keeper)
        with (
            switch.no_recompute(),
            tapes.unrecorded(),
            observer.observing(),
            _compat.watch_variables() as watcher,
            state.ForwardScope(
                self._label, observer, _Recomputation._call.__code__
            ) as scope,
        ):
            result = self._call(handed)
            self._eager = tf.executing_eagerly()
            outputs = self._results(result, observer)
            observer.results(outputs.tensors)
        self._keeper = keeper
        sources = self._sources(observer, watcher, scope)
        if _compat.has_tangent(sources):
            return self._plainly()
        # Keras drops the losses of a layer when it is called anew.
        kept = {id(loss) for loss in scope.losses}
        self._losses = [
            i
            for i, (_, loss) in enumerate(scope.layer_losses)
            if id(loss) in kept
        ]
        losses = [scope.layer_losses[i] for i in self._losses]
        tensors = self._attach(
            [*outputs.tensors, *(loss for _, loss in losses)], sources
        )
        for variable, value in scope.updates.values():
            variable.assign(value)
        count = len(outputs.tensors)
        for (layer, _), loss in zip(losses, tensors[count:], strict=True):
            layer.add_loss(loss)
        with observe.unnoticed():
            tensors = outputs.remade(tensors[:count])
        return outputs.pack(tensors)

    def _call(self, tensors):
        args, kwargs = self._inputs.pack(tensors)
        return self._fn(*args, **kwargs)

    def _remade(self, inputs):
        with observe.unnoticed():
            return self._inputs.remade(inputs)

    def _results(self, result, observer):
        # A jacobian's second run may be in a graph where the first was not.
        return arguments.Structure(
            result, lambda x: not self._eager and observer.made(x)
        )

    def _plainly(self):
        """Without recomputation, which forward mode can't see through."""
        with switch.no_recompute():
            return self._call(self._inputs.tensors)

    def _sources(self, observer, watcher, scope):
        inputs = self._inputs.tensors
        self._reads = scope.reads
        # Read again, where tapes see it; nothing has been assigned yet.
        reads = [
            state.read(variable, scope.original_scope)[0]
            for variable in self._reads
        ]
        self._trace = observer.trace
        self._captured = observer.captured
        raw = [
            variable
            for variable in watcher.watched_variables()
            if variable.ref() not in scope.raw
        ]
        if self._eager:
            # Tapes follow a variable from where it is read while they record.
            for variable in raw:
                variable.read_value()
        self._variables = observer.raw_variables(raw)
        self._groups = tapes.repeated([*inputs, *self._reads])
        self._grouped = {i for group in self._groups for i in group}
        sources = [*inputs, *reads, *self._captured]
        sources += [variable.value for variable in self._variables]
        self._watched = [tapes.may_be_asked_for(tensor) for tensor in sources]
        return sources

    def _attach(self, tensors, sources):
        """Gives the results a gradient that runs the function again."""
        self._specs = [(x.dtype, x.shape) for x in tensors]
        # A tensor that is returned twice is attached once, so that what its
        # readers contribute to its gradient is added in one sum.
        first = {id(x): i for i, x in reversed(list(enumerate(tensors)))}
        places = [
            i
            for i, x in enumerate(tensors)
            if arguments.is_differentiable(x) and first[id(x)] == i
        ]
        if not places or not any(self._watched):
            return tensors
        # Results that the loss does not depend on get a gradient of zeros,
        # which must not turn the None of what leads to them alone into 0.
        live = []

        @tf.custom_gradient
        def attached(*sources):
            def gradient(*upstream):
                asked = sorted(live) if len(places) > 1 else [0]
                live.clear()
                return self._backward(
                    sources,
                    [places[i] for i in asked],
                    [tf.convert_to_tensor(upstream[i]) for i in asked],
                )

            # The function's own gradient ends here, in a graph too.
            return [tf.stop_gradient(tensors[i]) for i in places], gradient

        results = list(tensors)
        for i, (place, tensor) in enumerate(
            zip(places, attached(*sources), strict=True)
        ):
            if len(places) > 1:
                tensor = tapes.noticed(tensor, i, live)
            results[place] = tensor
        return [
            results[first[id(x)]] if arguments.is_differentiable(x) else x
            for x in tensors
        ]

    def _backward(self, sources, places, upstream):
        """The gradients of `sources`: None where there is no connection."""
        gradients = [None] * len(sources)
        if not places:
            return gradients
        n_inputs, n_reads = len(self._inputs.tensors), len(self._reads)
        reads = slice(n_inputs, n_inputs + n_reads)
        with (
            self._ambient.restored(),
            switch.recomputing(),
            tf.GradientTape(watch_accessed_variables=False) as tape,
        ):
            ordered, upstream = ordering.ordered(
                [*sources[: reads.stop], *self._keeper.tensors],
                self._tied(),
                upstream,
            )
            fresh, kept = ordered[: reads.stop], ordered[reads.stop :]
            # Nothing is watched yet: probabilities have a gradient of their
            # own, beside that of their logits.
            fresh[:n_inputs] = self._remade(fresh[:n_inputs])
            leaves = [
                *fresh,
                *self._captured,
                *(variable.handle for variable in self._variables),
            ]
            # In the gradient of a loop or branch the function reads something
            # in the place of a captured tensor, and tapes don't know of it.
            local = {
                reads.stop + i: _compat.local_capture(tensor)
                for i, tensor in enumerate(self._captured)
            }
            for i, leaf in enumerate(leaves):
                if self._watched[i]:
                    tape.watch([leaf, local.get(i, leaf)])
            order = []
            used = set(range(len(leaves))) - set(range(n_inputs, reads.stop))

            def handed(i):
                if i not in self._grouped or not self._watched[i]:
                    return leaves[i]
                return tapes.noticed(leaves[i], i, order)

            def read(position, assigned):
                i = n_inputs + position
                used.add(i)
                if assigned is not None:
                    leaves[i] = tf.identity(assigned)
                    if self._watched[i]:
                        tape.watch(leaves[i])
                return handed(i)

            inputs = [handed(i) for i in range(n_inputs)]
            keeper = keeping.Keeper(self._label, self._keeper, kept)
            observer = observe.Observer(self._label, inputs, keeper)
            scope = state.ReplayScope(
                self._label,
                self._reads,
                leaves[n_inputs : reads.stop],
                read,
                observer,
            )
            for variable in self._variables:
                variable.check()
            with scope, observer.observing():
                result = self._call(inputs)
                results = self._results(result, observer).tensors
        results += [scope.layer_losses[i] for i in self._losses]
        self._check(results)
        self._trace.compare(observer.trace)
        asked = [i for i in sorted(used) if self._watched[i]]
        with scope.closed():
            found, found_locally = tape.gradient(
                [results[place] for place in places],
                [
                    [leaves[i] for i in asked],
                    [local.get(i, leaves[i]) for i in asked],
                ],
                output_gradients=upstream,
            )
        for i, *each in zip(asked, found, found_locally, strict=True):
            gradients[i] = each[1] if each[0] is None else each[0]
        return ordering.together(self._in_order(gradients, order), n_inputs)

    def _in_order(self, gradients, order):
        """Puts the gradients of one tensor or variable in the plain order.

        They are added up outside, and the order in which a tape meets the
        readers of a tensor, which the sum's rounding depends on, is known
        only now.
        """
        found = list(gradients)
        for group in self._groups:
            met = [gradients[i] for i in order if i in group]
            met += [None] * (len(group) - len(met))
            for i, gradient in zip(group, met, strict=True):
                found[i] = gradient
        return found

    def _tied(self):
        """Inputs, state of random generators, what is kept; see `ordering`."""
        inputs = [True] * len(self._inputs.tensors)
        reads = [not v.trainable for v in self._reads]
        return inputs + reads + [True] * len(self._keeper.tensors)

    def _check(self, results):
        """The recomputed results must have the dtypes and shapes they had."""
        found = [(x.dtype, x.shape) for x in results]
        if len(found) != len(self._specs) or any(
            dtype != dtype_before or not shape.is_compatible_with(shape_before)
            for (dtype, shape), (dtype_before, shape_before) in zip(
                found, self._specs, strict=False
            )
        ):
            raise errors.RecomputeError(
                f"The recomputation of {self._label} returned other tensors "
                f"than its forward pass. Forward: {_specs(self._specs)}. "
                f"Recomputed: {_specs(found)}. It must do the same both "
                "times: no shapes that depend on data which has changed, no "
                "counters or random choices in Python."
            )


def _label(fn: Any) -> str:
    owner = getattr(fn, "__self__", fn)
    if isinstance(owner, keras.Operation):
        return f"{type(owner).__name__} '{owner.name}'"
    return f"function '{getattr(fn, '__qualname__', type(fn).__name__)}'"


def _specs(specs: list[tuple[tf.DType, tf.TensorShape]]) -> str:
    return ", ".join(f"{dtype.name}{list(shape)}" for dtype, shape in specs)
