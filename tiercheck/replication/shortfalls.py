"""What no tier, or not every tier, will have of what was captured, though nothing is left to do."""

from __future__ import annotations

from collections.abc import Collection

from tiercheck.errors import CapacityExceeded, Corruption
from tiercheck.policy.damage import lost
from tiercheck.policy.observation import Copy, Observation
from tiercheck.policy.placement import Placement

__all__ = ["check_all_arrived"]


def check_all_arrived(seen: Observation, damaged: Collection[Copy], placement: Placement, *, closing: bool) -> None:
    """Errors: ``Corruption`` if something was damaged before it could be copied, and nothing newer makes up for it;
    ``CapacityExceeded`` if a tier that was full gets no more before the next base. ``closing``: none is to come."""
    if without_copy := lost(seen, damaged, placement):
        first = min(without_copy)
        raise Corruption(
            f"{len(without_copy)} captured objects were damaged before they could be copied on; versions from "
            f"{first.key.first} on are safe again with the next base",
            tier=seen.roles[first.tier].name,
            key=str(first.key),
        )
    for role in () if closing else seen.roles[1:]:
        if (version := placement.held_back(seen, role)) is not None:
            raise CapacityExceeded(
                f"versions from {version} on wait for the next base: the tier has been full, and so far from a base "
                "they would take the next one's room. Flush after that base, or give the tier more room and start "
                "again",
                tier=role.name,
            )
