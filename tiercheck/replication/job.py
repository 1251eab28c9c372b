"""What a rank wants moved, written down where its mover finds it again.

A trainer registers its objects to the agent of its node by publishing this record in its first tier, which outlives
the processes of both: an agent that was killed and started again reads there all it needs, and keeps no journal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.keys import GENERATION_MAX, RANK_MAX, VERSION_MAX
from tiercheck.tiers.url import URL_CHARS_MAX
from tiercheck.types import is_unicode, shown

__all__ = ["JobTier", "ReplicationJob"]


TIERS_MAX = 16
NAME_CHARS_MAX = 255
_NUMBERS_MAX = {
    "rank": RANK_MAX,
    "world_size": RANK_MAX + 1,
    "generation": GENERATION_MAX,
    "batch": VERSION_MAX,
    "keep_last": VERSION_MAX,
    "keep_every": VERSION_MAX,
}


class JobTier(NamedTuple):
    name: str
    url: str
    """Every field of it filled in for the rank. It holds no secrets."""
    codec: str = ""
    """As :class:`~tiercheck.hierarchy.Tier` has it."""


@dataclass(frozen=True)
class ReplicationJob:
    """One rank's objects, of one generation, and the policies they are moved by."""

    tiers: tuple[JobTier, ...]
    """Fastest first."""
    node: str
    """The agent it is meant for: several, with a name each, can run on one machine."""
    rank: int
    world_size: int
    generation: int
    batch: int
    keep_last: int
    keep_every: int

    @property
    def hierarchy(self) -> Hierarchy:
        return Hierarchy(tuple(Tier(url, name, codec=codec) for name, url, codec in self.tiers))

    def to_object(self) -> dict[str, Any]:
        return {
            "tiers": [list(tier) for tier in self.tiers],
            "node": self.node,
            "rank": self.rank,
            "world_size": self.world_size,
            "generation": self.generation,
            "batch": self.batch,
            "keep_last": self.keep_last,
            "keep_every": self.keep_every,
        }

    @classmethod
    def from_object(cls, value: Any) -> ReplicationJob:
        """Raises ``ValueError`` for anything but what :meth:`to_object` returns."""
        if not isinstance(value, dict) or set(value) != {"tiers", "node", *_NUMBERS_MAX}:
            raise ValueError(f"a replication job has the fields tiers, node, {', '.join(_NUMBERS_MAX)}")
        for name, maximum in _NUMBERS_MAX.items():
            if type(value[name]) is not int or not 0 <= value[name] <= maximum:
                raise ValueError(f"the replication job's {name} is {shown(value[name])}; it must be 0 to {maximum}")
        if not is_text(value["node"], NAME_CHARS_MAX):
            raise ValueError(f"the replication job's node is {shown(value['node'])}")
        tiers = value["tiers"]
        if not isinstance(tiers, list | tuple) or not 1 <= len(tiers) <= TIERS_MAX:
            raise ValueError(f"a replication job has 1 to {TIERS_MAX} tiers")
        return cls(tuple(map(tier_of, tiers)), value["node"], **{name: value[name] for name in _NUMBERS_MAX})


def tier_of(value: Any) -> JobTier:
    match value:
        case [name, url, codec]:
            if is_text(name, NAME_CHARS_MAX) and is_text(url, URL_CHARS_MAX) and is_text(codec, NAME_CHARS_MAX):
                return JobTier(name, url, codec)
    raise ValueError(f"the replication job's tier {shown(value)} is no name, URL and codec")


def is_text(value: Any, chars_max: int) -> bool:
    return isinstance(value, str) and len(value) <= chars_max and is_unicode(value)
