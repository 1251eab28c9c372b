"""The figures of the kernels, in the order in which they are measured."""

from benchmarks.figures import Figure
from benchmarks.kernels import blocks, compaction, device, encode, entropy, replay
from benchmarks.kernels.settings import KernelSettings

__all__ = ["FIGURES"]

FIGURES: tuple[Figure[KernelSettings], ...] = (
    *compaction.FIGURES,
    *blocks.FIGURES,
    *entropy.FIGURES,
    *replay.FIGURES,
    *encode.FIGURES,
    *device.FIGURES,
)
