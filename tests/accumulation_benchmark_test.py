"""`benchmarks/accumulation.py` at tiny sizes; and the bars it is held to."""

import statistics

import accumulation as benchmark
import pytest
from absl import flags

from tfckpt import memory

_POOL = {"TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"}


def test_it_prints_its_tables(capsys):
    values = flags.FlagValues()
    benchmark.define_flags(values)
    values(
        [
            "program",
            "--batch_size=2",
            "--depth=1",
            "--width=4",
            "--rounds=1",
            "--measure=time,collectives",
        ]
    )
    benchmark.main(values)
    printed = capsys.readouterr().out
    assert "1 in an update, 0 outside" in printed
    for name in benchmark.methods(2):
        assert name in printed


def _peak(batch, **options):
    peak, held = memory.measure_in_process(
        f"{benchmark.__file__}:epoch_peak",
        batch,
        16,
        512,
        options,
        environment=_POOL,
    )
    return peak, held


@pytest.mark.alone
def test_memory_is_that_of_one_micro_batch():
    """Flat in k, and at most 1.1 times it for a batch in eight parts."""
    plain, _ = _peak(2048)
    window, held = _peak(2048, gradient_accumulation_steps=8)
    parts = statistics.median(
        _peak(16384, micro_batches=8)[0] for _ in range(3)
    )
    whole, _ = _peak(16384)
    # Gradients of 16 layers and a head.
    gradients = 4 * 512 * (8 + 15 * 512 + 16 + 1)
    assert held == pytest.approx(gradients, rel=0.001)
    assert window <= 1.02 * plain + held
    assert parts <= 1.1 * plain + held
    assert parts < 0.5 * whole
