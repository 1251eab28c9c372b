"""Which stream goes to which tier.

Versions are captured in the first tier: bases, and one differential a version. Every other tier is to hold each base,
and before it the constants that the base refers to.

A tier inside the cluster (a neighbour's memory) is to hold each differential as soon as possible, so that a failure
of a node costs only what was on its way. A tier outside is to hold differentials in batches of N consecutive
versions, so that a remote store sees one object for N objects of the first tier. A batch is made on the way: its
differentials are read from the faster tier and put as one object.

A differential goes to a tier only if it can be replayed: if consecutive versions lead to it from a base that is there
or is to come. What follows a gap waits for the next base.

A tier outside, or a directory of the node, that has refused something for want of room
(:attr:`Observation.short_of_room`) is filled in the order in which a recovery uses it: a base before what follows it,
then one batch after the other, and no further from a base than the next one is to be. So the next base finds the room
on which admission has counted (:mod:`tiercheck.policy.other_tiers`), and makes room for what comes after it.

A placement policy (:mod:`tiercheck.policy.compose.placement`) may leave shards out of a tier.

Bases that are folded between the intervals stay in the first tier. The others get the differentials that lead there.

Of snapshots only the newest is worth a copy. A tier inside the cluster gets each snapshot while it keeps up. If it does
not keep up, or lies outside, it gets the newest snapshot of every Nth version, since the ranks must meet at the same
versions there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tiercheck.keys import ShardKey, Stream
from tiercheck.policy.compose.placement import INTERVALS_MAX, Candidate, Everywhere, PlacementPolicy
from tiercheck.policy.guard import Refusal, ask_placement
from tiercheck.policy.observation import Contents, Observation, Role
from tiercheck.types import Survives

__all__ = ["Placement", "Transfer"]


@dataclass(frozen=True)
class Transfer:
    """Put ``target`` into tier ``target_tier``, made of ``sources``: a copy of one, or a merge of several."""

    source_tier: int
    target_tier: int
    sources: tuple[ShardKey, ...]
    target: ShardKey


@dataclass(frozen=True)
class Placement:
    """``batch`` is N, the number of consecutive versions in one differential object of a tier outside the cluster.
    ``interval`` is the cadence's: by it bases are counted. ``fold_every``: versions between the bases that the first
    tier alone gets (:mod:`tiercheck.policy.folding`); 0: there are none."""

    batch: int = 5
    policy: PlacementPolicy = field(default_factory=Everywhere)
    interval: int = 50
    fold_every: int = 0

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"a batch holds at least one version, not {self.batch}")
        if self.interval < 1:
            raise ValueError(f"from one base to the next it takes at least one version, not {self.interval}")
        if self.fold_every < 0:
            raise ValueError(f"bases of the first tier are versions apart, not {self.fold_every}")

    def transfers(self, seen: Observation, *, closing: bool = False) -> list[Transfer]:
        """What each slower tier lacks and a faster tier has; bases first.

        ``closing``: no further version will come, so an incomplete batch is copied as it is.
        """
        missing: list[Transfer] = []
        for role in seen.roles[1:]:
            for source in seen.roles[: role.index]:
                missing += self._constants(seen, source, role)
                missing += self._bases(seen, source, role)
            if _is_short(seen, role) and self._base_comes(seen, missing, role):
                continue
            for source in seen.roles[: role.index]:
                missing += self._batches(seen, source, role, closing)
                missing += self._snapshots(seen, source, role, closing)
        return _first_per_target(missing)

    def _constants(self, seen: Observation, source: Role, target: Role) -> Iterator[Transfer]:
        """What bases refer to that the target holds or is to get: it has to be there before them, and goes there again
        if it was lost there."""
        held = seen.contents[target.index]
        bases = [*held.bases(seen.rank), *self._bases_missing(seen, target)]
        for key in dict.fromkeys(base.constants for base in bases):
            if key is not None and key not in held and key in seen.contents[source.index]:
                yield Transfer(source.index, target.index, (key,), key)

    def _bases_missing(self, seen: Observation, target: Role) -> Iterator[ShardKey]:
        for source in seen.roles[: target.index]:
            bases = own_bases(seen, seen.contents[source.index])
            yield from (base for base in bases if self._lacks(seen, base, target))

    def _lacks(self, seen: Observation, base: ShardKey, target: Role) -> bool:
        held = seen.contents[target.index]
        there = own_bases(seen, held)
        newest = there[-1].first if there else -1
        # A base older than the newest there is superseded: it would be copied only to be deleted. But if no tier is
        # shared, the ranks may be able to meet only at that base.
        superseded = base.first < newest and seen.durable.shared
        return base not in held and not superseded and self.wants(seen, base, target)

    def _bases(self, seen: Observation, source: Role, target: Role) -> Iterator[Transfer]:
        held = seen.contents[target.index]
        for base in own_bases(seen, seen.contents[source.index]):
            if not self._lacks(seen, base, target):
                continue
            if held.completes(base):
                yield Transfer(source.index, target.index, (base,), base)
            elif (key := base.constants) and any(key in each for each in seen.contents[: target.index]):
                # Its constants are on their way. A newer base that came first would supersede it, on this rank alone.
                return

    def _base_comes(self, seen: Observation, missing: list[Transfer], target: Role) -> bool:
        """Whether the tier is to get a base, with what it refers to, that is newer than those there."""
        there = own_bases(seen, seen.contents[target.index])
        newest = there[-1].first if there else -1
        keys = (each.target for each in missing if each.target_tier == target.index)
        return any(key.stream is Stream.CONSTANT or key.first > newest for key in keys)

    def _batches(self, seen: Observation, source: Role, target: Role, closing: bool) -> Iterator[Transfer]:
        held = seen.contents[target.index]
        anchors, bases = [base.first for base in own_bases(seen, held)], self._anchors(seen, target)
        # Differentials before the target's oldest base cannot be replayed there.
        floor = min(anchors, default=-1)
        run: list[ShardKey] = []
        for key in own_differentials(seen, seen.contents[source.index]):
            if key.last <= floor:
                continue
            window = self.window(key.first, target)
            if run and (key.first != run[-1].last + 1 or run[-1].first not in window):
                # A later batch has begun, so the run gets no more versions.
                if self._may_go(seen, run[0], target):
                    yield self._merge(source, target, run)
                run = []
            if (
                not held.covers(key)
                and self.wants(seen, key, target)
                and self._leads_on(seen, key, target, bases, closing)
            ):
                run.append(key)
        complete = run and (closing or run[-1].last >= self.window(run[-1].first, target)[-1])
        if complete and self._may_go(seen, run[0], target):
            yield self._merge(source, target, run)

    def _leads_on(
        self, seen: Observation, key: ShardKey, target: Role, bases: frozenset[int], closing: bool = False
    ) -> bool:
        """Whether the differential will be replayed from the tier, and is no further from its base than there is
        room. When the job ends, no base needs that room. ``bases``: :meth:`_anchors`."""
        anchor = _led_from(seen, key, bases)
        return anchor is not None and (closing or not self._is_far(seen, key, anchor, target))

    def leads_nowhere(self, seen: Observation, key: ShardKey, target: Role) -> bool:
        """Whether the differential is none that the tier needs, now or later, though it was asked for there. A tier
        that has no base of the generation may be one that was never seen: of that nobody knows."""
        return bool(self.leading_nowhere(seen, [key], target))

    def leading_nowhere(self, seen: Observation, keys: Sequence[ShardKey], target: Role) -> list[ShardKey]:
        """Those of the differentials of which :meth:`leads_nowhere` says so."""
        there = own_bases(seen, seen.contents[target.index])
        if not there or not keys:
            return []
        bases, newest = self._anchors(seen, target), there[-1].first

        def leads(key: ShardKey) -> bool:
            anchor = _led_from(seen, key, bases)
            return anchor is not None and not (key.last <= newest and self._is_far(seen, key, anchor, target))

        return [key for key in keys if not leads(key)]

    def held_back(self, seen: Observation, target: Role) -> int | None:
        """The first version that a tier which is short of room gets only when it has a newer base; ``None``: none."""
        if not _is_short(seen, target):
            return None
        own, bases = own_differentials(seen, seen.contents[0]), self._anchors(seen, target)
        lacking = (key for key in own if self.lacking(seen, key, target))
        return next((key.first for key in lacking if not self._leads_on(seen, key, target, bases)), None)

    def _may_go(self, seen: Observation, key: ShardKey, target: Role) -> bool:
        """Whether the differential may be put now. What a tier that is short of room gets can be replayed at once:
        nobody knows what will fit after it."""
        if not _is_short(seen, target):
            return True
        lasting = _outliving(seen, target)
        bases = {base.first for held in lasting for base in own_bases(seen, held)}
        versions = {version for held in lasting for each in own_differentials(seen, held) for version in each.versions}
        before = next((version for version in range(key.first - 1, -1, -1) if version not in versions), 0)
        return any(version in bases for version in range(before, key.last))

    def _anchors(self, seen: Observation, target: Role) -> frozenset[int]:
        """The bases from which the tier's differentials may be replayed: those there, or in a tier that outlives it,
        and those on their way there."""
        there = {base.first for held in _outliving(seen, target) for base in own_bases(seen, held)}
        return frozenset(there | {base.first for base in self._bases_missing(seen, target)})

    def _is_far(self, seen: Observation, key: ShardKey, anchor: int, target: Role) -> bool:
        """Whether the differential is further from its base than the next base is to be, in a tier that is short of
        room."""
        return _is_short(seen, target) and key.first > anchor + self._span(seen, anchor, target)

    def _span(self, seen: Observation, anchor: int, target: Role) -> int:
        """The number of versions from this base to the next one that the tier is to get."""
        number = anchor // self.interval
        for more in range(1, INTERVALS_MAX):
            version = (number + more) * self.interval
            if self.asked(ShardKey.base(seen.generation, version, seen.rank), target)[0]:
                return more * self.interval
        return INTERVALS_MAX * self.interval

    def _snapshots(self, seen: Observation, source: Role, target: Role, closing: bool) -> Iterator[Transfer]:
        bases = own_bases(seen, seen.contents[source.index])
        own = own_snapshots(seen, seen.contents[source.index])
        held = own_snapshots(seen, seen.contents[target.index])
        # A snapshot is superseded by a base of its version or later, and by a snapshot there of its version or later.
        floor = max((key.last for key in (*bases, *held)), default=-1)
        for key in reversed(own):
            if key.last <= floor or not self.wants(seen, key, target):
                return
            keeps_up = key.last == floor + 1 and not target.shared
            if closing or keeps_up or key.last % self.batch == 0:
                yield Transfer(source.index, target.index, (key,), key)
                return

    def _merge(self, source: Role, target: Role, run: list[ShardKey]) -> Transfer:
        first = run[0]
        batch = ShardKey.differential(first.generation, first.first, run[-1].last, first.rank)
        return Transfer(source.index, target.index, tuple(run), batch)

    def wants(self, seen: Observation, key: ShardKey, target: Role) -> bool:
        """Whether this rank's shard of the present generation is to go to the tier."""
        if self.stays(seen, key, target):
            return False
        return self.asked(key, target)[0] or self._needs_base(seen, key, target)

    def lacking(self, seen: Observation, key: ShardKey, target: Role) -> bool:
        """Whether the tier is to hold this rank's differential, or what replaces it there, and does not yet."""
        return self._uncovered(seen, key, target) and not self.leads_nowhere(seen, key, target)

    def _uncovered(self, seen: Observation, key: ShardKey, target: Role) -> bool:
        """Whether the tier was to hold the differential, or what replaces it there, and does not."""
        held = seen.contents[target.index]
        if any(base.first >= key.last for base in own_bases(seen, held)) or not self.wants(seen, key, target):
            return False
        return not held.covers(key)

    def reached(self, seen: Observation) -> dict[str, int]:
        """By the name of each tier, the version up to which it has what it is to hold of what this rank has captured:
        differentials or snapshots; bases, if it gets neither."""
        first = seen.contents[0]
        bases = own_bases(seen, first)
        records = own_differentials(seen, first) or own_snapshots(seen, first)
        newest = max((key.last for key in (*bases, *records)), default=-1)
        found = {seen.roles[0].name: newest}
        for role in seen.roles[1:]:
            if not records or not self.asked(records[-1], role)[0]:
                lacking = (base.first - 1 for base in bases if self._lacks(seen, base, role))
            elif records[0].stream is Stream.DIFFERENTIAL:
                lacking = (key.first - 1 for key in records if self._uncovered(seen, key, role))
            else:
                held = seen.contents[role.index]
                there = max((key.last for key in (*own_snapshots(seen, held), *own_bases(seen, held))), default=-1)
                lacking = (there for key in records[-1:] if key.last > there)
            found[role.name] = next(lacking, newest)
        return found

    def undrained(self, seen: Observation) -> int:
        """The number of this rank's bases in the first tier that the durable tier still lacks."""
        there = own_bases(seen, seen.contents[seen.durable.index])
        newest = there[-1].first if there else -1
        captured = own_bases(seen, seen.contents[0])
        return sum(base.first > newest and self.wants(seen, base, seen.durable) for base in captured)

    def asked(self, key: ShardKey, target: Role) -> tuple[bool, Refusal | None]:
        """What the policy says of the shard."""
        number = key.first // self.interval
        shard = Candidate(target.name, target.survives, key.stream, key.first, key.last, number)
        return ask_placement(self.policy, shard)

    def refusals(self, seen: Observation) -> list[Refusal]:
        """The answers of the policy that are no answers, for the newest shards."""
        first = seen.contents[0]
        newest = [held[-1] for held in (own_bases(seen, first), own_differentials(seen, first)) if held]
        found = [self.asked(key, role)[1] for role in seen.roles[1:] for key in newest]
        return list(dict.fromkeys(each for each in found if each is not None))

    def _needs_base(self, seen: Observation, key: ShardKey, target: Role) -> bool:
        """Whether the tier gets this base whatever the policy says: any one until it has one of the generation, one
        that follows the last one there by too many intervals, and one to which no differential leads, though the tier
        gets those."""
        if key.stream is not Stream.BASE:
            return False
        there = own_bases(seen, seen.contents[target.index])
        if not there or key.first // self.interval - there[-1].first // self.interval >= INTERVALS_MAX:
            return True
        return self._replaces_differential(seen, key, target)

    def is_between(self, version: int) -> bool:
        """Whether a base of this version is taken for one that was folded between the intervals."""
        return self.fold_every > 0 and version % self.interval > 0 and version % self.fold_every == 0

    def stays(self, seen: Observation, key: ShardKey, target: Role) -> bool:
        """Whether the base was folded between the intervals, and stays in the first tier. One that replaces a
        differential or a base that differed, and the first one of a generation, goes to the other tiers as well."""
        if key.stream is not Stream.BASE or not self.is_between(key.first):
            return False
        if seen.differing is not None and key.first >= seen.differing:
            return False
        others = (*own_bases(seen, seen.contents[0]), *own_bases(seen, seen.contents[target.index]))
        if not any(base.first < key.first for base in others):
            return False
        return not self._replaces_differential(seen, key, target)

    def _replaces_differential(self, seen: Observation, base: ShardKey, target: Role) -> bool:
        """Whether the tier gets differentials, and none leads to this base."""
        differential = ShardKey.differential(base.generation, base.first, base.first, base.rank) if base.first else base
        if not self.asked(differential, target)[0]:
            return False
        return not any(base.first in each.versions for each in _differentials_anywhere(seen))

    def window(self, version: int, target: Role) -> range:
        """The aligned batch that ``version`` belongs to in the tier: versions 1..N, N+1..2N, and so on."""
        batch = self.batch if target.shared else 1
        first = (version - 1) // batch * batch + 1
        return range(first, first + batch)

    def completes(self, version: int, roles: Sequence[Role]) -> bool:
        """Whether the differential ``version`` completes an object for some tier, or makes one superfluous."""
        if self.fold_every and version % self.fold_every <= 1:
            return True
        return any(version == self.window(version, role)[-1] for role in roles[1:])


def own_bases(seen: Observation, contents: Contents) -> tuple[ShardKey, ...]:
    """The rank's bases of its present generation, oldest first."""
    return contents.of_generation(seen.generation, Stream.BASE, seen.rank)


def own_differentials(seen: Observation, contents: Contents) -> tuple[ShardKey, ...]:
    """The rank's batches of its present generation, oldest first."""
    return contents.of_generation(seen.generation, Stream.DIFFERENTIAL, seen.rank)


def _is_short(seen: Observation, target: Role) -> bool:
    """Whether the tier has refused something for want of room, and is no neighbour's memory: that is made as large as
    it has to be, and is to have each differential as soon as possible."""
    return target.index in seen.short_of_room and target.survives is not Survives.NODE


def _outliving(seen: Observation, target: Role) -> list[Contents]:
    """What the tier holds, and those that outlive it: whoever recovers by the tier has them, too."""
    least = min(target.survives, Survives.RACK)
    roles = (role for role in seen.roles if role is target or role.survives >= least)
    return [seen.contents[role.index] for role in roles]


def _led_from(seen: Observation, key: ShardKey, bases: frozenset[int]) -> int | None:
    """The newest of the bases from which consecutive versions lead to the differential. They may be in any tier."""
    inside = max((base for base in bases if key.first <= base < key.last), default=None)
    return seen.led_from(bases).get(key.first - 1) if inside is None else inside


def _differentials_anywhere(seen: Observation) -> Iterable[ShardKey]:
    return (key for contents in seen.contents for key in own_differentials(seen, contents))


def own_snapshots(seen: Observation, contents: Contents) -> tuple[ShardKey, ...]:
    """The rank's snapshots of its present generation, oldest first."""
    return contents.of_generation(seen.generation, Stream.SNAPSHOT, seen.rank)


def _first_per_target(transfers: list[Transfer]) -> list[Transfer]:
    """If several tiers can give one object, only the fastest tier's transfer."""
    chosen: dict[tuple[int, ShardKey], Transfer] = {}
    for transfer in transfers:
        chosen.setdefault((transfer.target_tier, transfer.target), transfer)
    return list(chosen.values())
