"""The search for the longest sequence within a memory limit."""

import entry_point
import examples_zoo
import measuring
import memory_limit
import pytest
import train_text


@pytest.mark.parametrize("limit", [64, 100, 1000, 12345, 10**6])
def test_longest_is_near_and_never_too_long(limit):
    tried = []

    def fits(length):
        tried.append(length)
        return length <= limit

    found = memory_limit.longest(fits, start=64, most=50_000)
    truth = min(limit, 50_000)
    assert truth / (1 + 1 / 8) - 1 <= found <= truth
    assert len(tried) < 20
    # Memory grows with the square of the length: no wild guesses.
    assert max(tried) <= max(64, 2 * truth)


def test_nothing_fits():
    assert memory_limit.longest(lambda length: False, start=64, most=999) == 0


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2**31), ("1.5 MiB", 3 * 2**19), ("1000", 1000), ("1kib", 1024)],
)
def test_sizes(text, size):
    assert memory_limit.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "2 parsec", "1.2.3"])
def test_bad_sizes(text):
    with pytest.raises(entry_point.UserError, match="such as 2GiB"):
        memory_limit.parse_size(text)


def test_the_program_refuses_a_bad_size():
    options = examples_zoo.options(train_text, "--memory_limit=much")
    with pytest.raises(entry_point.UserError, match="'much'"):
        train_text.main(options)


def test_search_prints_the_longest_of_both(monkeypatch, capsys):
    """Without us a byte takes 2 MiB, with us 0.5 MiB, of 256 MiB."""
    steps = set()

    def measure(program, options, *, limit):
        assert program == train_text.__file__
        steps.add(options["steps"])
        each = 2**19 if options["recompute"] else 2**21
        total = options["sequence_length"] * each
        return {"total": total} if total <= limit else None

    monkeypatch.setattr(measuring, "measure", measure)
    train_text.main(examples_zoo.options(train_text, "--memory_limit=256MiB"))
    printed = capsys.readouterr().out
    assert "without tfckpt, 128 bytes: 256 MiB" in printed
    assert "without tfckpt, 256 bytes: too much" in printed
    assert "with tfckpt, 512 bytes: 256 MiB" in printed
    found = [line.split("│")[1:3] for line in printed.splitlines()]
    found = [[cell.strip() for cell in cells] for cells in found if cells]
    assert found == [["without tfckpt", "128"], ["with tfckpt", "512"]]
    assert steps == {2}


def test_a_process_over_the_limit_is_ended():
    options = measuring.as_dict(examples_zoo.options(train_text))
    assert measuring.measure(train_text.__file__, options, limit=2**20) is None
