"""The figures of the kernels that start whole jobs; tests/unit/benchmarks has the others."""

from __future__ import annotations

import pytest

from benchmarks.kernels.figures import FIGURES
from benchmarks.kernels.settings import KernelSettings
from benchmarks.training import SetUp

pytestmark = pytest.mark.cluster

TINY = SetUp(width=32, layers=1, heads=2, seed=3, sequence=32, micro_batch=1)


async def test_a_figure_of_the_demo_runs_its_trainers() -> None:
    """Of a snapshot, which needs the most memory."""
    pytest.importorskip("deepspeed")
    tiny = KernelSettings(elements=1 << 17, replay_elements=20_000, pairs=5, threads=1, setup=TINY, encode_steps=3)
    (figure,) = (each for each in FIGURES if each.name == "encode.total.snapshot/step")
    measured = await figure.measure(tiny)
    assert measured.summary.pairs == 2 * tiny.encode_steps
    assert 0 < measured.summary.value < measured.summary.ceiling
    assert measured.details["ranks"] == 2
