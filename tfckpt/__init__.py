"""Exact gradient checkpointing for Keras 3 on TensorFlow."""

from tfckpt.layers import Recompute
from tfckpt.recomputation import (
    RecomputeError,
    is_recomputing,
    no_recompute,
    recompute,
)

__all__ = [
    "Recompute",
    "RecomputeError",
    "is_recomputing",
    "no_recompute",
    "recompute",
]
