"""Batch normalization across micro-batches and replicas.

`moments` pools means and variances, `listening` lets training give a layer its
statistics, `window` moves the moving statistics once an update.
"""

from tfckpt.normalization.listening import (
    as_normalized,
    can_listen,
    dtype_of,
    layers_of,
    listen,
    under,
)
from tfckpt.normalization.window import Given, MicroBatch, WindowStatistics

__all__ = [
    "Given",
    "MicroBatch",
    "WindowStatistics",
    "as_normalized",
    "can_listen",
    "dtype_of",
    "layers_of",
    "listen",
    "under",
]
