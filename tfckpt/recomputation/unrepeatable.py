"""Ops that can't be run a second time with the outcome of the first.

Random ops with a state of their own would draw other numbers, what assigns a
`tf.Variable` would assign it twice, and what an iterator, a queue or a Python
function returns the second time nobody knows. (Keras variables are assigned
through a scope, see `state`; no op is seen for them.)
"""

import functools

from tfckpt import _compat
from tfckpt.recomputation import errors

RANDOM = frozenset(
    [
        "AllCandidateSampler",
        "FixedUnigramCandidateSampler",
        "FractionalAvgPool",
        "FractionalMaxPool",
        "LearnedUnigramCandidateSampler",
        "LogUniformCandidateSampler",
        "Multinomial",
        "NonDeterministicInts",
        "ParameterizedTruncatedNormal",
        "RandomCrop",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "RngReadAndSkip",
        "RngSkip",
        "SampleDistortedBoundingBox",
        "SampleDistortedBoundingBoxV2",
        "StatefulRandomBinomial",
        "StatefulStandardNormal",
        "StatefulStandardNormalV2",
        "StatefulTruncatedNormal",
        "StatefulUniform",
        "StatefulUniformFullInt",
        "StatefulUniformInt",
        "ThreadUnsafeUnigramCandidateSampler",
        "TruncatedNormal",
        "UniformCandidateSampler",
    ]
)


def refuse(op_type: str, label: str, name: str = "") -> None:
    """Raises if an op, or a function that it calls, can't be repeated.

    Args:
        op_type: its type; the name of the function for a call in eager mode.
        label: names the recomputed function.
        name: of the op, which in a graph begins with the layer's path.

    Raises:
        RecomputeError: it draws random numbers or assigns.
    """
    # In a graph the name of the op begins with the layer's path.
    layer = name or _compat.current_path()
    where = f" (in '{layer}')" if layer else ""
    if op_type in RANDOM:
        raise errors.RecomputeError(
            f"{label}{where} draws random numbers with the op "
            f"{op_type}, whose state can't be set back: the recomputation "
            "would draw others and the gradient would belong to them. Use "
            "keras.random with a keras.random.SeedGenerator (or "
            "tf.random.stateless_*), draw outside and pass the result as "
            "an argument, or leave this part out of recomputation."
        )
    if _assigns(op_type):
        raise errors.RecomputeError(
            f"{label}{where} assigns a tf.Variable (op {op_type}), "
            "and the recomputation would assign it a second time. Use a "
            "keras.Variable (self.add_weight(trainable=False)), which is "
            "assigned once, or leave this part out of recomputation."
        )
    if _is_unrepeatable(op_type):
        raise errors.RecomputeError(
            f"{label}{where} runs the op {op_type}, which has state or calls "
            "Python: the recomputation can't be held to its first outcome. "
            "Run it outside and pass the result as an argument, or leave this "
            "part out of recomputation."
        )


# Ops with state or effects that may run twice: they read, call what is looked
# into itself, check, print, or reduce over replicas.
_HARMLESS = (
    "Assert",
    "Case",
    "Collective",
    "Cudnn",
    "If",
    "LookupTableFind",
    "LookupTableSize",
    "Nccl",
    "PartitionedCall",
    "Placeholder",
    "Print",
    "ReadVariableOp",
    "ResourceGather",
    "StatefulPartitionedCall",
    "TPU",
    "TensorArray",
    "VarHandleOp",
    "VarIsInitializedOp",
    "VariableShape",
    "While",
    "Xla",
)


def _is_unrepeatable(op_type: str) -> bool:
    return (
        op_type in RANDOM
        or _assigns(op_type)
        or (_compat.is_stateful(op_type) and not op_type.startswith(_HARMLESS))
    )


def _assigns(op_type: str) -> bool:
    return op_type.startswith(
        ("Assign", "ResourceScatter", "ResourceApply", "ResourceSparseApply")
    ) or op_type in ("ResourceStridedSliceAssign", "ResourceCountUpTo")


@functools.lru_cache(maxsize=4096)
def unrepeatable_ops(name: str) -> frozenset[str]:
    """The types of such ops in a traced function."""
    found, seen, todo = set(), set(), [name]
    while todo:
        name = todo.pop()
        if not name or name in seen:
            continue
        seen.add(name)
        definition = _compat.function_definition(name)
        if definition is None:
            continue
        for node in definition.node_def:
            if _is_unrepeatable(node.op):
                found.add(node.op)
            todo.append(node.op)
            for attr in node.attr.values():
                todo.append(attr.func.name)
                todo.extend(f.name for f in attr.list.func)
    return frozenset(found)
