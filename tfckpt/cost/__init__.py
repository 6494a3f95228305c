"""What each call of a model costs: bytes, operations, time.

`of_graph` finds it from the graph and a batch size, without running
anything; `register` tells what can't be found out; `measured` measures times.
"""

from tfckpt.cost.calls import register
from tfckpt.cost.model import of_graph
from tfckpt.cost.profile import measured
from tfckpt.cost.state import optimizer_bytes, variable_bytes
from tfckpt.cost.tracing import Traced

__all__ = [
    "Traced",
    "measured",
    "of_graph",
    "optimizer_bytes",
    "register",
    "variable_bytes",
]
