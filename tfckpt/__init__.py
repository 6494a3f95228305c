"""Exact gradient checkpointing for Keras 3 on TensorFlow."""

from tfckpt.recompute import (
    RecomputeError,
    is_recomputing,
    no_recompute,
    recompute,
)

__all__ = ["RecomputeError", "is_recomputing", "no_recompute", "recompute"]
