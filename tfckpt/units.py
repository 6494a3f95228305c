"""Sizes of memory, read and written: "2GiB", "40%", "1.5 MiB"."""

import math
import re

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_BYTES = {unit.lower(): 1024**n for n, unit in enumerate(_BINARY)} | {
    unit: 1000**n for n, unit in enumerate(("b", "kb", "mb", "gb", "tb"))
}
_FORM = re.compile(
    r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*|%)", re.IGNORECASE
)


def parse_size(value: str | int | float) -> int | float:
    """Returns a size in bytes as an int, or a fraction as a float.

    Args:
        value: A text with a unit ("2GiB", "1.5 MB", "4096 B": 1024 or 1000
            bytes a step, as the unit says); a whole number, which is bytes;
            or a fraction above 0 and up to 1: 0.4, "0.4", "40%".

    Raises:
        ValueError: It is none of these.

    Example:

    >>> parse_size("2GiB"), parse_size("1.5 kB"), parse_size(4096)
    (2147483648, 1500, 4096)
    >>> parse_size("0.4"), parse_size("40%")
    (0.4, 0.4)
    """
    if isinstance(value, str):
        return _parse_text(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(_unknown(value))
    return _checked(value, isinstance(value, int), value)


def format_size(size: float | None, digits: int = 4) -> str:
    """Returns a number of bytes as text, in the unit that suits it.

    Args:
        size: Bytes, negative ones too; None is unknown.
        digits: Digits that count.

    Example:

    >>> format_size(1536), format_size(3 * 2**30), format_size(None)
    ('1.5 KiB', '3 GiB', 'unknown')
    """
    if size is None:
        return "unknown"
    step = 0
    while abs(size) >= 1024 and step < len(_BINARY) - 1:
        size /= 1024
        step += 1
    # `g` would write 1023 of three digits or less as 1.02e+03.
    return f"{float(f'{size:.{digits}g}'):,.15g} {_BINARY[step]}"


def _parse_text(text):
    found = _FORM.fullmatch(text.strip())
    if not found:
        raise ValueError(_unknown(text))
    number, unit = found.groups()
    if unit == "%":
        return _checked(float(number) / 100, False, text)
    if not unit:
        whole = number.isdigit()
        return _checked(int(number) if whole else float(number), whole, text)
    if unit.lower() not in _BYTES:
        hint = ""
        if f"{unit.lower()}b" in _BYTES and len(unit) == 1:
            hint = f" Did you mean {number}{unit.upper()}iB?"
        raise ValueError(_unknown(text) + hint)
    # A whole number of bytes stays exact, whatever its size.
    size = (int if number.isdigit() else float)(number) * _BYTES[unit.lower()]
    return _checked(int(size), True, text)


def _checked(number, whole, received):
    if not math.isfinite(number) or number <= 0 or (not whole and number > 1):
        raise ValueError(_unknown(received))
    return number


def _unknown(received):
    return (
        'A size is bytes as a whole number, a text such as "2GiB" or '
        '"500MB", or a fraction above 0 and up to 1, such as 0.4. '
        f"Received: {received!r}."
    )
