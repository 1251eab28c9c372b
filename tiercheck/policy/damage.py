"""What damaged copies cost, and when they are deleted.

A copy that has failed verification counts as absent in every other decision. But it tells the next start that the job
has a past, and how new that past is. So a damaged copy stays as long as a sound copy would, and is deleted by the same
rules. What is left is then what retention leaves if nothing is damaged.

Memory has room for two bases that stay, and for the base that is being captured. So no more than two bases stay there,
sound and damaged ones together, and the damaged ones are deleted first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tiercheck.keys import Key, ShardKey, Stream
from tiercheck.policy.observation import Copy, Observation
from tiercheck.policy.placement import Placement, own_bases, own_snapshots
from tiercheck.policy.watermark import BASES_IN_VOLATILE_TIERS, Retention

__all__ = ["base_needed_after", "base_without_constants", "lost", "outlived"]


def lost(seen: Observation, damaged: Iterable[Copy], placement: Placement) -> list[Copy]:
    """The damaged copies whose content no tier holds, and which nothing newer supersedes. Constants may be of an older
    generation than the bases that refer to them. By ``placement`` a base may stay in the first tier: it supersedes
    nothing in the others."""
    return [
        copy
        for copy in damaged
        if (copy.key.generation == seen.generation or copy.key.stream is Stream.CONSTANT)
        and not _is_made_up_for(seen, copy.key, placement)
    ]


def base_needed_after(seen: Observation, lost: Iterable[Copy], *, has_room: bool = True) -> int | None:
    """The version after which only a newer base makes later versions recoverable, from the first tier or at all;
    ``None`` if there is none. ``has_room``: the first tier may take a base. If only that tier lacks something, the base
    waits for room, and other tiers serve recoveries meanwhile."""
    # A base at the version of a lost differential replaces the differential. The next snapshot replaces a lost one.
    # Without constants, no base that refers to them is any.
    needed = [
        key.last - 1 if key.stream is Stream.DIFFERENTIAL else max(key.last, _newest_referring(seen, key))
        for key in (copy.key for copy in lost)
        if key.stream is not Stream.SNAPSHOT
    ]
    base = base_without_constants(seen)
    if base is not None and (has_room or not any(contents.completes(base) for contents in seen.contents)):
        needed.append(base.last)
    return max(needed, default=None)


def base_without_constants(seen: Observation) -> ShardKey | None:
    """The rank's newest base in the first tier, if that tier lacks the constants that the base refers to. Other tiers
    may have them. Until a base is captured, which stores them again, none can be folded, and no recovery starts from
    this tier."""
    bases = own_bases(seen, seen.contents[0])
    return bases[-1] if bases and not seen.contents[0].completes(bases[-1]) else None


def _newest_referring(seen: Observation, constants: ShardKey) -> int:
    """The newest version of the rank's bases of this generation that refer to these constants; -1 if there is none."""
    bases = (base for contents in seen.contents for base in own_bases(seen, contents))
    return max((base.first for base in bases if base.constants == constants), default=-1)


def outlived(seen: Observation, retention: Retention, damaged: Collection[Copy]) -> dict[int, list[Key]]:
    """Per tier index, the damaged copies that may be deleted. ``seen``: the observation without them."""
    if not damaged:
        return {}
    as_if_sound = retention.reclaimable(seen.after((copy.tier, copy.key) for copy in damaged))
    sound = retention.reclaimable(seen)
    gone: dict[int, list[Key]] = {}
    for role in seen.roles:
        here = sorted(copy.key for copy in damaged if copy.tier == role.index)
        going = set(here).intersection(as_if_sound[role.index])
        if not role.shared:
            bases = [key for key in here if key.stream is Stream.BASE and key not in going]
            staying = set(seen.contents[role.index].bases(seen.rank)).difference(sound[role.index])
            places = max(0, BASES_IN_VOLATILE_TIERS - len(staying))
            going |= set(bases[: max(0, len(bases) - places)])
        gone[role.index] = [key for key in here if key in going]
    return gone


def _is_made_up_for(seen: Observation, key: ShardKey, placement: Placement) -> bool:
    differential = key.stream is Stream.DIFFERENTIAL
    if any(contents.covers(key) if differential else key in contents for contents in seen.contents):
        return True
    bases = (base for contents in seen.contents for base in own_bases(seen, contents))
    newest = max((base.first for base in bases if not placement.stays(seen, base, seen.durable)), default=-1)
    if key.stream is Stream.CONSTANT:  # a newer base refers to others, or to none
        return _newest_referring(seen, key) < newest
    if key.stream is Stream.BASE:
        return newest > key.last
    if key.stream is Stream.SNAPSHOT:
        newer = (each.last for contents in seen.contents for each in own_snapshots(seen, contents))
        return max(newest, *newer, -1) >= key.last
    return newest >= key.last
