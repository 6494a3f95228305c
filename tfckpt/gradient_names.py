"""Names of accumulated gradients, in memory and in files.

Gradients that are divided by different numbers are accumulated apart, in groups
that are numbered as they are met. "sum_0_3" is group 0's gradient of variable
3, "weight_0" the weight of group 0; other names are counters.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np


def of_sum(group: str, index: int) -> str:
    """Returns the name of a group's gradient of one variable."""
    return f"sum_{group}_{index}"


def of_weight(group: str) -> str:
    """Returns the name of a group's weight."""
    return f"weight_{group}"


def sums(values: Mapping[str, Any]) -> Iterator[tuple[str, int, Any]]:
    """Yields group, index and value of each gradient among named values."""
    for name, value in values.items():
        if name.startswith("sum_"):
            _, group, index = name.split("_")
            yield group, int(index), value


def weights(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields group and value of each weight among named values."""
    for name, value in values.items():
        if name.startswith("weight_"):
            yield name.split("_")[1], value


@dataclasses.dataclass
class Book:
    """What an accumulator knows of its gradients.

    Attributes:
        variables: Those whose gradients are accumulated.
        pending: Named values of a file, until there is a place for them.
        state: The accumulator's variables by name.
        connected: Group and index of each gradient that there ever was.
    """

    variables: tuple[Any, ...]
    pending: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    connected: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    _groups: dict[str, str] = dataclasses.field(default_factory=dict)
    _undivided: set[str] = dataclasses.field(default_factory=set)

    def group(self, denominator: str, *, divided: bool) -> str:
        """Returns the group of a denominator, a new one if it is new."""
        found = self._groups.setdefault(denominator, str(len(self._groups)))
        if not divided:
            self._undivided.add(found)
        return found

    def divided(self) -> list[str]:
        """Returns the groups whose sums are divided."""
        found = {group for group, _ in weights(self.state)}
        return sorted(found - self._undivided)

    def note_connected(self, values: Mapping[str, Any]) -> None:
        """Finds out from named values which gradients there were."""
        for group, index, value in sums(values):
            if np.any(value):
                self.connected.add((group, index))


def check(values: Mapping[str, np.ndarray], variables: Sequence[Any]) -> None:
    """Raises a ValueError if named values are not of these variables."""
    for _, index, value in sums(values):
        if index >= len(variables):
            expected = f"only {len(variables)} variables are trained"
        elif tuple(variables[index].shape) != value.shape:
            expected = (
                f"'{variables[index].name}' has shape "
                f"{tuple(variables[index].shape)}"
            )
        else:
            continue
        raise ValueError(
            "The file holds gradients accumulated for other variables: "
            f"number {index} has shape {value.shape}, but {expected}. "
            "Expected a file that the same model has saved, with the same "
            "layers trainable."
        )
