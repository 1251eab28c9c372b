"""Which base is folded next: the newest one in the first tier, and the differentials after it, up to the version that
is due.

The recorder says which versions are due: all ranks ask the same cadence, and come to the same versions. What is folded
is as good as what is captured, so all other policies see a base, and do not ask who made it.

In between, the first tier gets a base every few versions, which takes the place of the one before: so the tier holds
few differentials, and a recovery from there replays few, however long the interval is. No other tier gets these bases
(:class:`~tiercheck.policy.placement.Placement`). A fold that is late goes as far as it can: it costs about the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tiercheck.keys import ShardKey
from tiercheck.policy.observation import Observation
from tiercheck.policy.placement import own_bases, own_differentials

__all__ = [
    "DUE_MAX",
    "FOLD_EVERY",
    "Fold",
    "gap_after",
    "lag",
    "newest_usable",
    "next_fold",
    "no_processor_to_fold",
    "waiting",
]

DUE_MAX = 4
"""So many versions the trainer tells the mover at a time. The newest one is left to be folded; those before it are told
once more, for a mover that was started anew."""
FOLD_EVERY = 5
"""Versions from one base of the first tier to the next. A fold reads and writes a whole base, so its cost a version
falls with this number. The differentials that the tier holds are this many, and so are those of a batch."""


@dataclass(frozen=True)
class Fold:
    """``base``, and the ``differentials`` after it, oldest first, become the base of ``version``."""

    base: ShardKey
    differentials: tuple[ShardKey, ...]
    version: int


def no_processor_to_fold(processors: int, ranks: int) -> str:
    """Why the folds of ``ranks`` that share so many processors would take one from training, and what to do; empty if
    one is free."""
    if processors > ranks:
        return ""
    return (
        f"no processor is free for folds: this node's ranks that share processors are {ranks}, and the processors "
        f'that they may use {processors}; to fold all the same, give them more, or say mover="agent" (one process '
        'folds for all of them) or bases="fold" (each has one of its own)'
    )


def next_fold(
    seen: Observation, due: Collection[int], every: int = 0, interval: int = 1, blocked: Collection[int] = ()
) -> Fold | None:
    """What can be folded now, of the versions that are ``due``; ``None``: nothing is due, or something of it is not
    there. ``every``: versions between the bases of the first tier alone, if the cadence's are due at each multiple of
    ``interval``; 0: there are none. ``blocked``: versions where something unusable lies in the base's place."""
    base, chain = _chain(seen)
    if base is None or not chain:
        return None
    left, reached = waiting(seen, due, blocked), chain[-1].last
    # One that is due and was not left to the mover is captured.
    until = left[0] if left else (base.last // interval + 1) * interval - 1
    version: int | None = until
    if not left or reached < until:
        between = range(min(reached, until) // every * every, base.last, -every) if every else ()
        version = next((each for each in between if each not in blocked), None)
    if version is None:
        return None
    return Fold(base, tuple(key for key in chain if key.last <= version), version)


def waiting(seen: Observation, due: Collection[int], blocked: Collection[int] = ()) -> list[int]:
    """The versions that are ``due`` and not there yet, oldest first, but for those that are ``blocked``. A newer base
    stands for those before it."""
    base, _ = _chain(seen)
    return [] if base is None else sorted(version for version in set(due).difference(blocked) if version > base.last)


def lag(seen: Observation, due: Collection[int], blocked: Collection[int] = ()) -> int:
    """How many versions were recorded since the oldest one that is due and not there yet; 0 if nothing is."""
    left = waiting(seen, due, blocked)
    newest = max((key.last for key in own_differentials(seen, seen.contents[0])), default=0)
    return max(0, newest - left[0]) if left else 0


def newest_usable(seen: Observation) -> int:
    """The version of the base that the next one is folded of; -1 if there is none."""
    base, _ = _chain(seen)
    return -1 if base is None else base.last


def gap_after(seen: Observation) -> int | None:
    """The version after which a differential is missing that a fold would need; ``None`` if there is none."""
    base, chain = _chain(seen)
    if base is None:
        return None
    reached = chain[-1].last if chain else base.last
    newest = max((key.last for key in own_differentials(seen, seen.contents[0])), default=reached)
    return reached if newest > reached else None


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
