"""Exact gradient checkpointing for Keras 3 on TensorFlow.

A model trains in a fraction of its activation memory, at the price of about
one more forward pass, with the same numbers: gradients, variables and random
draws.
"""

import keras

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "tfckpt works with TensorFlow, but Keras runs on "
        f"{keras.backend.backend()!r}. Set the environment variable "
        "KERAS_BACKEND=tensorflow before keras is imported."
    )

from tfckpt import cost, distribute, memory, planners
from tfckpt.accumulation import GradientAccumulator
from tfckpt.layers import Recompute
from tfckpt.plan import Plan, PlanError
from tfckpt.planning import make_plan
from tfckpt.recomputation import (
    RecomputeError,
    is_recomputing,
    keep,
    no_recompute,
    recompute,
)
from tfckpt.segmented_model import SegmentedModel
from tfckpt.training import AccumulatingTrainer, Callback, ResumeTraining

__version__ = "0.1.0"

__all__ = [
    "AccumulatingTrainer",
    "Callback",
    "GradientAccumulator",
    "Plan",
    "PlanError",
    "Recompute",
    "RecomputeError",
    "ResumeTraining",
    "SegmentedModel",
    "cost",
    "distribute",
    "is_recomputing",
    "keep",
    "make_plan",
    "memory",
    "no_recompute",
    "planners",
    "recompute",
]
