"""Sizes as people write them."""

import pytest

from tfckpt import units


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 * 2**30),
        ("2 gib", 2 * 2**30),
        ("1.5MiB", 3 * 2**19),
        ("2GB", 2 * 10**9),
        ("17 B", 17),
        ("17", 17),
        (17, 17),
        ("9007199254740993", 2**53 + 1),  # No float holds it.
        (" 1 TiB ", 2**40),
    ],
)
def test_sizes_are_bytes(text, size):
    parsed = units.parse_size(text)
    assert parsed == size
    assert isinstance(parsed, int)


@pytest.mark.parametrize("value", ["0.4", "40%", 0.4, ".4", "1.0", 1.0])
def test_fractions_are_floats(value):
    parsed = units.parse_size(value)
    assert isinstance(parsed, float)
    assert parsed == (1.0 if str(value) == "1.0" else 0.4)


@pytest.mark.parametrize(
    "value",
    [
        *("", "GiB", "much", "-2GiB", "2 4", "0", "1.5", "120%", "0.0"),
        *("2XiB", "1e3", "2GiB/s", 0, -1, 1.5, True, None),
        *(float("nan"), float("inf")),
    ],
)
def test_others_are_refused_with_what_was_received(value):
    with pytest.raises(ValueError, match="2GiB") as caught:
        units.parse_size(value)
    assert repr(value) in str(caught.value)


def test_a_bare_letter_is_asked_back():
    with pytest.raises(ValueError, match="Did you mean 8GiB"):
        units.parse_size("8g")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1 KiB"),
        (2**30 * 1.2345, "1.234 GiB"),
        (-3 * 2**20, "-3 MiB"),
        (2**60, "1,049,000 TiB"),
        (None, "unknown"),
    ],
)
def test_sizes_are_written_in_the_unit_that_suits(size, text):
    assert units.format_size(size) == text


@pytest.mark.parametrize("size", [1, 1023, 4096, 5 * 2**30, 3 * 2**40])
def test_what_is_written_can_be_read(size):
    text = units.format_size(size, digits=12).replace(",", "")
    assert units.parse_size(text) == size
