"""What can't be recomputed exactly, as one class of error."""


class RecomputeError(RuntimeError):
    """A function can't be recomputed with the numbers of its forward pass.

    The message names the function, the layer (its path) or variable, what it
    did, and the way out. In the forward pass it is raised before any Keras
    variable is changed; in the gradient, where a second run turns out to do
    something else, the state has moved once, as the forward pass moved it.

    Example:

    >>> try:
    ...     raise RecomputeError("tf.random.uniform in 'noise'")
    ... except RuntimeError as error:
    ...     print(error)
    tf.random.uniform in 'noise'
    """

    # AutoGraph raises an error of a user's function as what it is only if
    # its class has this constructor.
    __init__ = Exception.__init__
