"""Functions that stand for other functions."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any


def wraps(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that gives a function the name and signature of `fn`.

    Unlike `functools.wraps` it leaves no `__wrapped__`: a `tf.function` that
    is given a function with that attribute takes what it finds there.
    """

    def decorate(function):
        functools.update_wrapper(function, fn, updated=())
        del function.__wrapped__
        with contextlib.suppress(TypeError, ValueError):
            function.__signature__ = inspect.signature(fn)
        return function

    return decorate
