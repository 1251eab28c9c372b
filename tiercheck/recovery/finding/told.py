"""What a rank tells the others of what it has found: some hundred bytes, however long its chain is.

Each rank knows its own copies, and plans its own reads. The others need to know which versions it can come to, and what
tells of a past. Versions and generations are told as ranges.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from tiercheck import schema
from tiercheck.keys import ShardKey, Stream
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.consensus import Reachable, Readable
from tiercheck.policy.recovery.spans import Span, contain, spans_of
from tiercheck.recovery.finding.survey import Survey, lineage_digest

__all__ = ["Other", "OwnedCopies", "Told", "packed_others", "unpacked_others"]

T = TypeVar("T")

NOTHING = -1
ERROR_CHARACTERS_MAX = 200

Other = tuple[int, int, int, int]
"""The newest shard of another rank in a tier inside the node: tier, rank, generation, last version."""


@schema.ready
@dataclass(frozen=True)
class Told:
    """What one rank has found in all its tiers. What is told by tier is in the hierarchy's order."""

    reach: Reachable
    """The versions that it can come to."""
    in_first: Reachable
    """By what its first tier holds alone."""
    own: tuple[tuple[Span, ...], ...]
    """By tier, the generations of its own shards, damaged ones among them."""
    captured: tuple[tuple[Span, ...], ...]
    """By tier, the generations of its shards; in a tier inside a node, of any rank's."""
    recorded: tuple[tuple[Span, ...], ...]
    """By tier, the generations that have a lineage record, or of which one tells."""
    lineages: tuple[int, ...]
    """By tier, a digest of the branches that the lineage records tell of; 0 if there are none. Behind the job's tiers
    those of the other nodes, if it has looked there."""
    taken: int
    """The highest number that any generation here has, had, or was to have."""
    newest: int
    """The newest generation of any shard here; 0 if there is none."""
    newest_base: int
    """The newest base of that generation of which a shard tells; -1 if there is none."""
    newest_trained: tuple[int, int]
    """The newest generation of any shard, damaged ones among them, and its newest version; (0, -1) if there is none."""
    last: tuple[int, ...]
    """By tier, the newest version of any shard of its own, damaged ones among them; -1 if there is none."""
    sound: int
    """The newest version of any sound shard of its own; -1 if there is none."""
    away: tuple[tuple[int, str], ...] = ()
    """Tiers that could not be listed, and why."""
    others_last: int = NOTHING
    """The newest version of any other rank's shard; -1 if there is none. The shards: :func:`packed_others`."""
    constants: tuple[tuple[Span, ...], ...] = ()
    """By tier, the generations of its constants; empty if it has none."""
    whole: Reachable = ()
    """The versions that it could come to if the job could use each copy that is whole; empty if it can."""
    unusable: tuple[tuple[str, str], ...] = ()
    """Why it cannot use such copies, and which: the first ones."""
    other_nodes: tuple[Span, ...] = ()
    """The generations of its shards in the memory of other nodes."""
    committed: Reachable = ()
    """The versions of commit records, in tiers that all ranks share."""
    stores: tuple[str, ...] = ()
    """As of :class:`~tiercheck.recovery.finding.survey.Survey`."""

    @classmethod
    def of(
        cls,
        survey: Survey,
        tiers: Sequence[str],
        rank: int,
        failed: Collection[Copy] = (),
        unusable: Mapping[Copy, str] | None = None,
        named_max: int = 3,
        other_nodes: Sequence[str] = (),
    ) -> Told:
        """``tiers``: their names; ``other_nodes``: of those behind them. ``failed``: copies that are none any more; the
        survey is without them. ``unusable``: those of them that are whole, and why the job cannot use them."""
        places = range(len(tiers))
        names = [*tiers, *other_nodes]
        found = [generation for tier, generation in survey.generations if tier >= len(tiers)]
        own = [*survey.sources, *failed]
        captured = [each for each in own if each.key.stream is not Stream.CONSTANT]
        constants = [each for each in own if each.key.stream is Stream.CONSTANT]
        held = [source.key for source in survey.sources | survey.others]
        newest = max((key.generation for key in held), default=0)
        bases = [key for key in held if key.generation == newest and key.stream in (Stream.BASE, Stream.SNAPSHOT)]
        whole = unusable or {}
        return cls(
            reach=Readable.of(source.key for source in survey.sources).reach(),
            in_first=Readable.of(source.key for source in survey.sources if source.tier == 0).reach(),
            own=tuple(spans_of({each.key.generation for each in captured if each.tier == tier}) for tier in places),
            captured=tuple(spans_of(_of_tier(survey.generations, tier)) for tier in places),
            recorded=tuple(spans_of(_of_tier(survey.recorded, tier)) for tier in places),
            lineages=tuple(lineage_digest(_of_tier(survey.branches, tier)) for tier in range(len(names))),
            taken=survey.taken,
            newest=newest,
            newest_base=max((key.first - (key.stream is Stream.SNAPSHOT) for key in bases), default=NOTHING),
            newest_trained=max(
                ((each.key.generation, each.key.last) for each in (*own, *survey.others)), default=(0, NOTHING)
            ),
            last=tuple(_last(each.key for each in own if each.tier == tier) for tier in places),
            sound=_last(source.key for source in survey.sources),
            away=tuple((tier, error[:ERROR_CHARACTERS_MAX]) for tier, error in survey.away),
            constants=tuple(
                spans_of({each.key.generation for each in constants if each.tier == tier}) for tier in places
            )
            if constants
            else (),
            others_last=_last(each.key for each in survey.others),
            whole=Readable.of(source.key for source in (*survey.sources, *whole)).reach() if whole else (),
            unusable=tuple(
                (why, f"rank {rank}, tier {names[source.tier]}: {source.key}")
                for source, why in sorted(whole.items())[:named_max]
            ),
            other_nodes=spans_of(found),
            committed=tuple(
                (generation, spans_of(each.version for each in survey.commits if each.generation == generation))
                for generation in sorted({each.generation for each in survey.commits})
            ),
            stores=tuple(sorted(survey.stores)),
        )


def packed_others(survey: Survey) -> bytes:
    """The newest shard of each other rank in the tiers inside the node. It is told beside the rest, which most ranks
    have in common, and unpacked only if it matters."""
    others = [(each.tier, each.key.rank, each.key.generation, each.key.last) for each in survey.others]
    return schema.pack(sorted(others)) if others else b""


def unpacked_others(packed: bytes) -> list[Other]:
    return msgspec.msgpack.decode(packed, type=list[Other]) if packed else []


def _of_tier(pairs: Iterable[tuple[int, T]], tier: int) -> set[T]:
    return {value for where, value in pairs if where == tier}


def _last(keys: Iterable[ShardKey]) -> int:
    return max((key.last for key in keys), default=NOTHING)


class OwnedCopies(Container[Copy]):
    """The copies that their owners see. In each tier a generation has brought a rank's shards to one place: an owner
    that sees some of them sees that place."""

    def __init__(self, told: Sequence[Told]) -> None:
        self._told = told

    def __contains__(self, copy: object) -> bool:
        if not isinstance(copy, Copy) or copy.key.rank >= len(self._told):
            return False
        told = self._told[copy.key.rank]
        if copy.key.stream is Stream.CONSTANT:
            return bool(told.constants) and contain(told.constants[copy.tier], copy.key.generation)
        return contain(told.own[copy.tier], copy.key.generation)
