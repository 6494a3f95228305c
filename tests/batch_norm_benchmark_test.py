"""`benchmarks/batch_norm.py` on small networks."""

import batch_norm
import pytest
import rich.console


def test_curves_of_exact_are_those_of_the_big_batch(tmp_path):
    curves = batch_norm.losses(1, 3, list)
    big = curves["big batch"]
    assert curves["exact"] == pytest.approx(big, rel=1e-4)
    assert curves["micro"] != pytest.approx(big, rel=1e-3)
    path = tmp_path / "curves.png"
    batch_norm.draw(curves, path)
    assert path.stat().st_size > 10_000


def test_tables():
    console = rich.console.Console(record=True, width=80)
    mib = 2**20
    console.print(
        batch_norm._memory_table(
            {
                "batch of 1": 10 * mib,
                "big batch": 410 * mib,
                "exact, 8 micro-batches": 210 * mib,
            }
        )
    )
    console.print(
        batch_norm._time_table({"big batch": [2.0, 1.0], "exact": [3.0, 2.0]})
    )
    text = console.export_text()
    assert "200 │    0.500" in text
    assert "exact     │   1.75 │   1.50 │    2.00" in text
