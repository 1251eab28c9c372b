"""What a rank wants moved, written down where its mover finds it again.

A trainer nominates its objects to the agent of its node by publishing this record in its first tier, which outlives
the processes of both: an agent that was killed and started again reads there all it needs, and keeps no journal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tiercheck.hierarchy import Hierarchy, Tier

__all__ = ["NominatedTier", "Nomination"]


class NominatedTier(NamedTuple):
    name: str
    url: str
    """Every field of it filled in for the rank. It holds no secrets."""
    codec: str = ""
    """As :class:`~tiercheck.hierarchy.Tier` has it."""


@dataclass(frozen=True)
class Nomination:
    """One rank's objects, of one generation, and the policies they are moved by."""

    tiers: tuple[NominatedTier, ...]
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
    def from_object(cls, value: Any) -> Nomination:
        """Raises ``ValueError`` for anything but what :meth:`to_object` returns."""
        numbers = ("rank", "world_size", "generation", "batch", "keep_last", "keep_every")
        if not isinstance(value, dict) or set(value) != {"tiers", "node", *numbers}:
            raise ValueError(f"a nomination has the fields tiers, node, {', '.join(numbers)}")
        if not isinstance(value["node"], str):
            raise ValueError(f"the nomination's node is {value['node']!r}")
        for name in numbers:
            if type(value[name]) is not int or value[name] < 0:
                raise ValueError(f"the nomination's {name} is {value[name]!r}")
        tiers: list[NominatedTier] = []
        for each in value["tiers"] if isinstance(value["tiers"], list | tuple) else ():
            match each:
                case [str(name), str(url), str(codec)]:
                    tiers.append(NominatedTier(name, url, codec))
                case _:
                    raise ValueError(f"the nomination's tier {each!r} is no name, URL and codec")
        if not tiers:
            raise ValueError("a nomination has at least one tier")
        return cls(tuple(tiers), value["node"], **{name: value[name] for name in numbers})
