"""The simulator: memory and time of a training step under any plan.

Only numpy and the standard library are needed here.
"""

from tfckpt.simulator.simulate import Simulator

__all__ = ["Simulator"]
