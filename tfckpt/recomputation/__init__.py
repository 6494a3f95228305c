"""Exact gradient checkpointing of functions: see `engine`."""

from tfckpt.recomputation.engine import recompute
from tfckpt.recomputation.errors import RecomputeError
from tfckpt.recomputation.keeping import PRODUCTS, REDUCTIONS, keep, products
from tfckpt.recomputation.observe import refusing
from tfckpt.recomputation.switch import is_recomputing, no_recompute
from tfckpt.recomputation.wrapping import wraps

__all__ = [
    "PRODUCTS",
    "REDUCTIONS",
    "RecomputeError",
    "is_recomputing",
    "keep",
    "no_recompute",
    "products",
    "recompute",
    "refusing",
    "wraps",
]
