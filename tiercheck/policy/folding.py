"""Which base is folded next: the newest one in the first tier, and the differentials after it, up to the version that
is due.

A base is due at each multiple of the interval, on every rank alike. What is folded is as good as what is captured, so
all other policies see a base, and do not ask who made it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiercheck.keys import ShardKey
from tiercheck.policy.observation import Observation
from tiercheck.policy.placement import own_bases, own_differentials

__all__ = ["Fold", "differentials_after_base", "folds_from", "gap_after", "next_fold", "waiting"]


@dataclass(frozen=True)
class Fold:
    """``base``, and the ``differentials`` after it, oldest first, become ``target``."""

    base: ShardKey
    differentials: tuple[ShardKey, ...]
    target: ShardKey


def next_fold(seen: Observation, interval: int) -> Fold | None:
    """What can be folded now; ``None``: nothing is due, or something of it is not there."""
    base, chain = _chain(seen)
    if base is None:
        return None
    due = (base.last // interval + 1) * interval
    chain = [key for key in chain if key.last <= due]
    if not chain or chain[-1].last < due:
        return None
    return Fold(base, tuple(chain), ShardKey.base(base.generation, due, base.rank))


def waiting(seen: Observation, interval: int) -> int:
    """The number of bases that are due, as the newest differential says, and not there yet."""
    base, chain = _chain(seen)
    if base is None or not chain:
        return 0
    return chain[-1].last // interval - base.last // interval


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
    that are recorded while it is folded. Training waits before there are more."""
    return 2 * interval


def folds_from(seen: Observation) -> int | None:
    """The version of the base that the next fold begins with: differentials after it must stay in the first tier, and
    no fold needs those before. ``None``: nothing can be folded."""
    base, _ = _chain(seen)
    return None if base is None else base.last


def _chain(seen: Observation) -> tuple[ShardKey | None, list[ShardKey]]:
    """The newest base of the first tier, and the unbroken run of differentials after it."""
    held = seen.contents[0]
    bases = own_bases(seen, held)
    if not bases:
        return None, []
    run: list[ShardKey] = []
    reached = bases[-1].last
    for key in own_differentials(seen, held):
        if key.first == reached + 1:
            run.append(key)
            reached = key.last
    return bases[-1], run
