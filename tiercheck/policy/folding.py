"""Which base is folded next: the newest one in the first tier, and the differentials after it, up to the version that
is due.

The recorder says which versions are due: all ranks ask the same cadence, and come to the same versions. What is folded
is as good as what is captured, so all other policies see a base, and do not ask who made it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tiercheck.keys import ShardKey
from tiercheck.policy.observation import Observation
from tiercheck.policy.placement import own_bases, own_differentials

__all__ = ["DUE_MAX", "Fold", "differentials_after_base", "folds_from", "gap_after", "lag", "next_fold", "waiting"]

DUE_MAX = 4
"""So many bases may be left to be folded at a time. One after another is: there are two only if the mover was started
anew, and is told once more."""


@dataclass(frozen=True)
class Fold:
    """``base``, and the ``differentials`` after it, oldest first, become the base of ``version``."""

    base: ShardKey
    differentials: tuple[ShardKey, ...]
    version: int


def next_fold(seen: Observation, due: Collection[int]) -> Fold | None:
    """What can be folded now, of the versions that are ``due``; ``None``: nothing is due, or something of it is not
    there."""
    base, chain = _chain(seen)
    left = waiting(seen, due)
    if base is None or not left:
        return None
    chain = [key for key in chain if key.last <= left[0]]
    if not chain or chain[-1].last < left[0]:
        return None
    return Fold(base, tuple(chain), left[0])


def waiting(seen: Observation, due: Collection[int]) -> list[int]:
    """The versions that are ``due`` and not there yet, oldest first. A newer base stands for those before it."""
    base, _ = _chain(seen)
    return [] if base is None else sorted(version for version in due if version > base.last)


def lag(seen: Observation, due: Collection[int]) -> int:
    """How many versions were recorded since the oldest one that is due and not there yet; 0 if nothing is."""
    left = waiting(seen, due)
    newest = max((key.last for key in own_differentials(seen, seen.contents[0])), default=0)
    return max(0, newest - left[0]) if left else 0


def gap_after(seen: Observation) -> int | None:
    """The version after which a differential is missing that a fold would need; ``None`` if there is none."""
    base, chain = _chain(seen)
    if base is None:
        return None
    reached = chain[-1].last if chain else base.last
    newest = max((key.last for key in own_differentials(seen, seen.contents[0])), default=reached)
    return reached if newest > reached else None


def differentials_after_base(interval: int) -> int:
    """k: the most differentials that folds need to stay in the first tier: those up to the base that is due, and those
    that are recorded while it is folded. If that takes until the next base is due, training waits, or captures it."""
    return 2 * interval


def folds_from(seen: Observation) -> int | None:
    """The version of the base that the next fold begins with: differentials after it must stay in the first tier, and
    no fold needs those before. ``None``: nothing can be folded."""
    base, _ = _chain(seen)
    return None if base is None else base.last


def _chain(seen: Observation) -> tuple[ShardKey | None, list[ShardKey]]:
    """The newest base of the first tier that has there what it refers to, and the unbroken run of differentials after
    it."""
    held = seen.contents[0]
    bases = [base for base in own_bases(seen, held) if held.completes(base)]
    if not bases:
        return None, []
    run: list[ShardKey] = []
    reached = bases[-1].last
    for key in own_differentials(seen, held):
        if key.first == reached + 1:
            run.append(key)
            reached = key.last
    return bases[-1], run
