"""Exact gradient checkpointing of functions: see `engine`."""

from tfckpt.recompute.engine import recompute
from tfckpt.recompute.errors import RecomputeError
from tfckpt.recompute.switch import is_recomputing, no_recompute

__all__ = ["RecomputeError", "is_recomputing", "no_recompute", "recompute"]
