"""The figures of the tiers, in the order in which they are measured."""

from benchmarks.figures import Figure, Settings
from benchmarks.tiers import nvme, peak, peer, s3, shm

__all__ = ["FIGURES"]

FIGURES: tuple[Figure[Settings], ...] = (*shm.FIGURES, *nvme.FIGURES, *peer.FIGURES, *s3.FIGURES, *peak.FIGURES)
