"""The way of ranks whose optimizer's step takes all of them: they replay the same steps, from the same base.

Muon under FSDP2 multiplies matrices whose parts lie on several ranks. A rank that replays fewer steps than another one
would leave that one waiting.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tiercheck.errors import RecoveryError
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.consensus import Readable, RecoveryPoint, from_one_base
from tiercheck.policy.recovery.lineage import Lineage
from tiercheck.recovery.ranks import Ranks

__all__ = ["point_from_one_base"]


async def point_from_one_base(
    own: Iterable[Copy], lineage: Lineage, ranks: Ranks, lost: Collection[int] = ()
) -> RecoveryPoint:
    """The newest version that all ranks but those ``lost`` come to so. ``own``: what this one can read. Collective.
    Errors: ``RecoveryError`` if they have no base in common."""

    def tell() -> list[tuple[int, int, int]]:
        runs = Readable.of(source.key for source in own).runs(lineage)
        return [(*base, last) for base, last in runs.items()]

    told = await ranks.gather("the bases of each rank", tell, kind=list[tuple[int, int, int]])
    left = [each for rank, each in enumerate(told) if rank not in lost]
    point = from_one_base([{(generation, base): last for generation, base, last in each} for each in left])
    if point is None:
        raise RecoveryError(
            "the optimizer's step takes all ranks, and they have no base in common from which all could replay the "
            "same steps: bring back what holds one of each rank"
        )
    return point
