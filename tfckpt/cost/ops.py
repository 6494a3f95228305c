"""Floating-point operations and memory traffic of single ops of a graph.

Operations count as one for each multiplication and each addition. What is no
product counts a few operations for each element, and is limited by the bytes
that it moves: a "roofline" (Williams et al. 2009, "Roofline: an insightful
visual performance model for multicore architectures").
"""

import math
from typing import Any

import tensorflow as tf

# Operations that a machine does in the time in which it moves one byte. About
# 8 on two CPU cores, 13 (float32) to 100 (bfloat16) on an A100.
FLOPS_PER_BYTE = 10

# Ops whose output lies in the memory of their input.
ALIASES = frozenset(
    [
        "CheckNumerics",
        "ExpandDims",
        "Identity",
        "IdentityN",
        "PreventGradient",
        "Reshape",
        "Squeeze",
        "StopGradient",
    ]
)
# Ops that only look at the shape of their input.
METADATA = frozenset(
    [
        "BroadcastGradientArgs",
        "OnesLike",
        "Rank",
        "Shape",
        "ShapeN",
        "Size",
        "ZerosLike",
    ]
)
# Operations for each element, where it is not one.
_PER_ELEMENT = {
    "Erf": 20,
    "Exp": 10,
    "Log": 10,
    "LogSoftmax": 15,
    "Pow": 20,
    "Rsqrt": 4,
    "Sigmoid": 12,
    "Softmax": 15,
    "Softplus": 15,
    "Sqrt": 4,
    "StatelessRandomUniformV2": 20,
    "Tanh": 15,
}
_FREE = frozenset(["Const", "NoOp", "Placeholder", "ReadVariableOp"])


def tensor_bytes(tensor: tf.Tensor) -> int:
    """Bytes of a tensor of a graph; 0 where its size is not known."""
    elements = tensor.shape.num_elements()
    if elements is None or tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    return elements * tensor.dtype.size


def flops(op: Any) -> float:
    """Floating-point operations of an op of a graph."""
    count = _PRODUCTS.get(op.type)
    if count is not None:
        return count(op) or 0.0
    if op.type in ALIASES or op.type in METADATA or op.type in _FREE:
        return 0.0
    elements = max(
        (tensor.shape.num_elements() or 0 for tensor in _tensors(op)), default=0
    )
    return float(_PER_ELEMENT.get(op.type, 1) * elements)


def time(op: Any) -> float:
    """Time of an op, in operations that a machine does meanwhile."""
    if op.type in ALIASES or op.type in METADATA or op.type in _FREE:
        return 0.0
    return max(flops(op), FLOPS_PER_BYTE * sum(map(tensor_bytes, _tensors(op))))


def workspace(op: Any) -> int:
    """Bytes that an op takes for itself while it runs.

    As measured on a CPU: oneDNN's convolutions copy the filter, or its
    gradient, to another layout; the gradient of a maximum of windows finds
    the maxima again, with their places as int64.
    """
    if position := _FILTERS.get(op.type):
        kind, index = position
        return tensor_bytes(getattr(op, kind)[index])
    if op.type == "MaxPoolGrad":
        maxima = op.inputs[1]
        return tensor_bytes(maxima) + tf.int64.size * _size(maxima)
    return 0


def _tensors(op):
    return [*op.inputs, *op.outputs]


def _size(tensor):
    return tensor.shape.num_elements() or 0


def _matmul(op):
    inner = op.inputs[0].shape[0 if op.get_attr("transpose_a") else 1]
    return 2.0 * _size(op.outputs[0]) * (inner or 0)


def _batch_matmul(op):
    inner = op.inputs[0].shape[-2 if op.get_attr("adj_x") else -1]
    return 2.0 * _size(op.outputs[0]) * (inner or 0)


def _einsum(op):
    equation = op.get_attr("equation").decode().replace(" ", "")
    labels = {}
    for term, tensor in zip(
        equation.split("->")[0].split(","), op.inputs, strict=False
    ):
        shape = tensor.shape.as_list()
        if "..." in term:
            before, after = term.split("...")
            middle = len(shape) - len(before) - len(after)
            term = [*before, *(f".{i}" for i in range(-middle, 0)), *after]
        labels.update(zip(term, shape, strict=False))
    scale = 2.0 if len(op.inputs) > 1 else 1.0
    return scale * math.prod(size or 0 for size in labels.values())


def _filter(kernel):
    """Operations for each element of the output, by the kernel's shape."""
    return 2.0 * math.prod(size or 0 for size in kernel[:-1])


def _convolution(op):
    return _size(op.outputs[0]) * _filter(op.inputs[1].shape.as_list())


def _convolution_input(op):
    return _size(op.inputs[2]) * _filter(op.inputs[1].shape.as_list())


def _convolution_filter(op):
    return _size(op.inputs[2]) * _filter(op.outputs[0].shape.as_list())


def _depthwise(kernel, output):
    return 2.0 * _size(output) * math.prod(size or 0 for size in kernel[:2])


# Where an op has the filter of its convolution, or its gradient.
_FILTERS = {
    "Conv2D": ("inputs", 1),
    "Conv2DBackpropFilter": ("outputs", 0),
    "Conv2DBackpropInput": ("inputs", 1),
    "Conv3D": ("inputs", 1),
    "Conv3DBackpropFilterV2": ("outputs", 0),
    "Conv3DBackpropInputV2": ("inputs", 1),
}
_PRODUCTS = {
    "BatchMatMul": _batch_matmul,
    "BatchMatMulV2": _batch_matmul,
    "BatchMatMulV3": _batch_matmul,
    "Conv2D": _convolution,
    "Conv2DBackpropFilter": _convolution_filter,
    "Conv2DBackpropInput": _convolution_input,
    "Conv3D": _convolution,
    "Conv3DBackpropFilterV2": _convolution_filter,
    "Conv3DBackpropInputV2": _convolution_input,
    "DepthwiseConv2dNative": lambda op: _depthwise(
        op.inputs[1].shape.as_list(), op.outputs[0]
    ),
    "DepthwiseConv2dNativeBackpropFilter": lambda op: _depthwise(
        op.outputs[0].shape.as_list(), op.inputs[2]
    ),
    "DepthwiseConv2dNativeBackpropInput": lambda op: _depthwise(
        op.inputs[1].shape.as_list(), op.inputs[2]
    ),
    "Einsum": _einsum,
    "MatMul": _matmul,
}
