"""Gradient checkpointing of one Keras layer.

`Recompute(layer)` gives the layer itself another class: a subclass of its own
with the same name, whose `call` goes through `tfckpt.recompute`. A
`keras.layers.Wrapper` would put one more level into variable paths and weight
files; this way names, paths, the order of weights and files stay what they
were, and weights load both ways.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras

from tfckpt import _compat, recomputation

_CONFIG_KEY = "tfckpt_recompute"
_REGISTERED_NAME = "tfckpt>Recompute"


class Recompute:
    """Makes a layer recompute its activations in the backward pass.

    The given layer is changed and returned: `Recompute(layer) is layer`. It
    keeps its name, variables, config entries and attributes, and becomes an
    instance of `Recompute` beside its own class. The setting is saved in
    `.keras` files and kept by `clone_model`. A layer that is a `Recompute`
    already is returned as it is.

    Memory: of the layer's activations only its inputs are kept. Time: one
    more forward pass of the layer. `Recompute` around each of n blocks keeps
    n inputs; around layers of one operation it saves nothing.

    Args:
        layer: a `keras.Layer`, or a model used as one, built or not.

    Raises:
        TypeError: `layer` is not a `keras.Layer`.
        ValueError: `layer` was made under `keras.RematScope`, which
            recomputes on its own, and wrongly.

    Example:

    >>> import keras
    >>> block = tfckpt.Recompute(keras.layers.Dense(4, name="mlp"))
    >>> block.build((None, 3))
    >>> [weight.path for weight in block.weights]
    ['mlp/kernel', 'mlp/bias']
    >>> isinstance(block, keras.layers.Dense)
    True
    """

    def __new__(cls, layer: keras.Layer):  # noqa: D102, see the class
        if cls is not Recompute:
            # A subclass made below; only ever made by changing the class.
            raise TypeError(
                f"{cls.__name__} with recomputation can't be made directly. "
                f"Use tfckpt.Recompute({cls.__name__}(...))."
            )
        if isinstance(layer, Recompute):
            return layer
        if not isinstance(layer, keras.Layer):
            raise TypeError(
                "tfckpt.Recompute takes a keras.Layer (for other functions "
                f"use tfckpt.recompute). Received: {layer!r} of type "
                f"{type(layer).__name__}."
            )
        if _compat.remat_mode(layer):
            raise ValueError(
                f"The layer '{layer.name}' was made under keras.RematScope, "
                "which would recompute it a second time. Make it outside of "
                "that scope."
            )
        layer.__class__ = _recomputing_class(type(layer))
        layer.quantize = functools.partial(_quantize, layer, layer.quantize)
        return layer

    def __init__(self, layer: keras.Layer):
        # Python calls this on what `__new__` returns, which is made already.
        del layer

    def get_config(self) -> dict[str, Any]:
        """The config of the plain layer, and which class that is."""
        with _as_plain(self):
            config = self.get_config()
            plain = keras.saving.serialize_keras_object(self)
        identity = {
            key: plain.get(key)
            for key in ("module", "class_name", "registered_name")
        }
        return {**config, _CONFIG_KEY: identity}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the plain layer, whose class can be found by its name."""
        with _as_plain(self):
            make, arguments = self.__reduce__()
        return _unpickle, (make, arguments)

    @classmethod
    def from_config(cls, config: dict[str, Any], **kwargs: Any) -> keras.Layer:
        """Makes the plain layer from its config, and wraps it."""
        config = dict(config)
        identity = config.pop(_CONFIG_KEY)
        layer = keras.saving.deserialize_keras_object(
            {**identity, "config": config}, **kwargs
        )
        return Recompute(layer)


keras.saving.get_custom_objects()[_REGISTERED_NAME] = Recompute


@contextlib.contextmanager
def _as_plain(layer: keras.Layer) -> Iterator[None]:
    """Gives the layer its own class back for a while.

    Keras looks at the class of a layer to find out what its config is.
    """
    recomputing = type(layer)
    layer.__class__ = recomputing.plain_class
    try:
        yield
    finally:
        layer.__class__ = recomputing


def _unpickle(make, arguments) -> keras.Layer:
    return Recompute(make(*arguments))


def _quantize(layer: keras.Layer, quantize, *args: Any, **kwargs: Any) -> None:
    """Keras quantizes its own classes, but no subclass of them."""
    with _as_plain(layer):
        quantize(*args, **kwargs)


@functools.cache
def _recomputing_class(plain: type[keras.Layer]) -> type[keras.Layer]:
    """The subclass of `plain`, of the same name, that recomputes its call."""

    def recomputed(name):
        method = getattr(plain, name)

        @recomputation.wraps(method)
        def call(self, *args, **kwargs):
            bound = method.__get__(self)
            return recomputation.recompute(bound)(*args, **kwargs)

        return call

    cls = type(
        plain.__name__,
        (Recompute, plain),
        {
            "__module__": __name__,
            "__doc__": plain.__doc__,
            "plain_class": plain,
            "call": recomputed("call"),
            "quantized_call": recomputed("quantized_call"),
        },
    )
    cls = keras.saving.register_keras_serializable("tfckpt", "Recompute")(cls)
    # One name for all of these classes: `from_config` finds the plain one.
    keras.saving.get_custom_objects()[_REGISTERED_NAME] = Recompute
    return cls
