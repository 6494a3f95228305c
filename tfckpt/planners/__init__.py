"""Planners: they choose which calls of a model are recomputed together.

`uniform`, `sqrt`, `every_k` and `at_boundaries` need the paths of the calls;
the others know what the calls cost. Only numpy and the standard library are
needed here.
"""

from tfckpt.planners.baseline import chen
from tfckpt.planners.blocking import blocked
from tfckpt.planners.budgets import budget, frontier, min_memory
from tfckpt.planners.by_bytes import alike
from tfckpt.planners.equal import at_boundaries, every_k, sqrt, uniform
from tfckpt.planners.nested import recursive
from tfckpt.planners.selective import by_type

__all__ = [
    "alike",
    "at_boundaries",
    "blocked",
    "budget",
    "by_type",
    "chen",
    "every_k",
    "frontier",
    "min_memory",
    "recursive",
    "sqrt",
    "uniform",
]
