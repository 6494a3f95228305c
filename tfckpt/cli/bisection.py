"""The largest number whose size is within a limit, in few and dear trials."""

import math
from collections.abc import Callable


def largest(
    size: Callable[[int], float | None],
    limit: float,
    *,
    guess: int = 1,
    most: int = 2**20,
    tolerance: float = 0.0,
    trials: int = 60,
) -> tuple[int, int | None]:
    """Returns the largest number found to fit and the least found not to.

    Sizes that grow in proportion, and a constant, are found in three trials
    or so (regula falsi); others by bisection.

    Args:
        size: The size of a number, 1 or more, which grows with it; None if it
            is too large to be known.
        limit: The size that fits.
        guess: Where to begin.
        most: The largest number tried.
        tolerance: Ends when the two differ by no more than this part of the
            greater one.
        trials: Ends after so many calls of `size`.

    Returns:
        The largest number that fits, 0 if not even 1 does, and the least one
        that doesn't, None if `most` does.

    Example:

    >>> largest(lambda n: 10 * n + 3, 1000)
    (99, 100)
    """
    low, high, known = 0, None, {}
    number = min(max(1, guess), most)
    for trial in range(trials):
        taken = size(number)
        if taken is not None:
            known[number] = taken
        if taken is not None and taken <= limit:
            low = number
        else:
            high = number
        bracketed = high is not None and (
            high - low <= max(1, tolerance * high)
        )
        if bracketed or low >= most:
            break
        # Every fourth halves, so that no kind of growth takes for ever.
        line = None if trial % 4 == 3 else _on_the_line(known, limit)
        number = _next(low, high, most, line, tolerance)
    return low, high


def _on_the_line(known, limit):
    """Where the line through the sizes nearest to the limit meets it."""
    points = sorted(known.items(), key=lambda item: abs(item[1] - limit))[:2]
    if len(points) < 2:
        # From one point, as if nothing were constant.
        return None if not points else _ratio(*points[0], limit)
    (one, first), (other, second) = points
    slope = (second - first) / (other - one)
    return one + (limit - first) / slope if slope > 0 else None


def _ratio(number, taken, limit):
    return number * limit / taken if taken > 0 else None


def _next(low, high, most, line, tolerance):
    if high is None:
        # Sizes may grow slowly, and then fast: no further than twice.
        line = 2 * low if line is None else min(line, 2 * low)
    elif line is None or not low - 1 < line < high:
        # What is known can't be on a line.
        line = (low + high) / 2
    # If the line is right this is the last that fits, or the first that
    # doesn't.
    number = math.floor(line)
    if number <= low * (1 + tolerance / 2):
        number = low + max(1, math.floor(tolerance * low))
    return min(max(low + 1, number), most if high is None else high - 1)
