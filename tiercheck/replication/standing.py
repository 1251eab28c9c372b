"""How a rank's tiers stand, by what is known of them: what its mover's status works out, and does not count."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tiercheck.policy.commit import uncommitted
from tiercheck.policy.damage import base_needed_after
from tiercheck.policy.first_tier import awaits_base, held_up_by
from tiercheck.policy.observation import Copy, Observation
from tiercheck.policy.placement import Placement, own_bases
from tiercheck.policy.recovery.agreement import needs_agreement, reach
from tiercheck.policy.watermark import watermark

__all__ = ["standing"]


def standing(
    seen: Observation, placement: Placement, without_copy: Collection[Copy], *, has_room: bool
) -> dict[str, Any]:
    """Fields of :class:`tiercheck.replication.handle.MoverStatus`.

    ``without_copy``: what no tier has a copy of. ``has_room``: the first tier may take a base.
    """
    mark = watermark(seen)
    return {
        "watermark": mark.version if mark else None,
        "uncommitted": uncommitted(seen),
        "held_up_by": held_up_by(seen, placement),
        "awaits_base": awaits_base(seen, placement),
        "reached_versions": placement.reached(seen),
        "undrained_bases": placement.undrained(seen),
        "has_room": has_room,
        "newest_base": max((base.last for base in own_bases(seen, seen.contents[0])), default=-1),
        "reach": reach(seen) if needs_agreement(seen.roles, seen.world_size) else (),
        "base_needed_after": base_needed_after(seen, without_copy, has_room=has_room),
    }
