"""What may be deleted: reclamation by watermark.

The watermark is the newest base committed in the tier that survives most. It makes these purgeable:

- in a volatile tier: bases older than the newest two, and differentials before the older of the two, when the durable
  tier no longer needs them. Two bases are kept for two reasons: a crash in the middle of a capture never costs the last
  whole base, and ranks that train in lock step are never more than one base apart. So the newest one is enough as soon
  as it is known that no rank needs to go back behind it: when it is committed and the shared tiers have what leads to
  each version before it; or, if bases are folded, when there is a differential after it: then every rank has had that
  version, or (on a GPU) has its record still on its way. A first tier that folds also keeps the differentials that
  another tier is to hold and lacks, and the newest base of that kind;
- in a shared tier: what the retention policy (:mod:`tiercheck.policy.compose.retention`) does not keep. By default the
  last two committed bases stay, and the differentials from the older one on: one interval longer than a recovery needs;
- what another future of the job left behind (versions outside its lineage), when the present generation has a base of
  its own; before that, what starts that failed have left (:mod:`tiercheck.policy.attempts`); what other ranks have left
  in this node's memory, or in its neighbour's; and in shared tiers what ranks left that the job has no more: each of
  the present ones deletes that of a few;
- what a user's request has left behind (:mod:`tiercheck.policy.recovery.request`) goes from the tiers inside the nodes
  alone, until a start says that it may go from the others;
- in a shared tier that is short of room (:attr:`~tiercheck.policy.observation.Observation.short_of_room`):
  differentials before the newest committed base that lead nowhere, or further than placement sends there;
- constants that no base refers to any more, and none will (:func:`~tiercheck.policy.left_behind.unreferred`). Those in
  a tier inside a node go also when only bases of shared tiers do that have them;
- lineage records but for the newest three, when every rank can reach a version of the present generation.

If no tier is shared, the ranks agree on a mark instead (:mod:`tiercheck.policy.recovery.agreement`): each rank keeps
its own way to the mark, and everything newer, in every tier. If it needs bases before the next one is due, and there
is no room for another, those between its way and the newest two go.

A snapshot supersedes those before it. Ranks that train in lock step are never more than one version apart. So a
volatile tier keeps the newest two snapshots, and the newest two of every Nth version, which a shared tier is given. A
shared tier keeps the newest committed snapshot, with the base for which it was made, and later ones.

The newest committed base, and what leads to anything newer than it, is never deleted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from tiercheck.keys import CommitKey, Key, MetricKey, ShardKey, Stream
from tiercheck.policy.attempts import left_by_attempts
from tiercheck.policy.commit import COORDINATOR
from tiercheck.policy.compose.retention import Committed, KeepLast, RetentionPolicy
from tiercheck.policy.guard import Refusal, ask_retention
from tiercheck.policy.left_behind import left_behind, markers_done, records_passed, unreferred
from tiercheck.policy.metrics import metrics_of, to_report
from tiercheck.policy.observation import Contents, Observation, Role
from tiercheck.policy.placement import Placement, Transfer, own_bases, own_differentials
from tiercheck.policy.recovery.agreement import NO_MARK, way_to_mark
from tiercheck.policy.recovery.consensus import Readable, RecoveryPoint
from tiercheck.policy.recovery.relayout import left_to

__all__ = [
    "BASES_IN_VOLATILE_TIERS",
    "SNAPSHOTS_IN_VOLATILE_TIERS",
    "Retention",
    "is_settled",
    "watermark",
]

BASES_IN_VOLATILE_TIERS = 2
SNAPSHOTS_IN_VOLATILE_TIERS = 2


def is_settled(seen: Observation) -> bool:
    """Whether nobody goes back behind the present generation any more."""
    return _is_settled(seen, watermark(seen), None if seen.durable.shared else way_to_mark(seen))


def watermark(seen: Observation) -> CommitKey | None:
    """The newest base of the job's own past that is committed in the tier that survives most. ``None``: there is no
    such base, or no shared tier."""
    commits = seen.contents[seen.durable.index].commits if seen.durable.shared else ()
    return max((each for each in commits if seen.lineage.admits(each.generation, each.version)), default=None)


@dataclass(frozen=True)
class Retention:
    """Which objects stay: what a recovery may need, and what ``policy`` keeps of the job's own past in the shared
    tiers. ``placement``: what each tier is to hold."""

    policy: RetentionPolicy = field(default_factory=KeepLast)
    placement: Placement = field(default_factory=Placement)

    def reclaimable(self, seen: Observation, tiers: Collection[int] | None = None) -> dict[int, list[Key]]:
        """Per tier index, the objects that nothing needs any more: this rank's, and in memory also those that other
        ranks have left behind. Commit records are deleted first: a base that is being deleted must not look
        committed. ``tiers``: the indices that are asked for; by default all."""
        gone: dict[int, list[Key]] = {}
        way = None if seen.durable.shared else way_to_mark(seen)
        mark = watermark(seen)
        settled = _is_settled(seen, mark, way)
        for role in seen.roles:
            if tiers is not None and role.index not in tiers:
                continue
            records = records_passed(seen, role) if settled else []
            if role.shared:
                shared = [key for key in self._shared(seen, role) if not _is_kept(seen, key)]
                gone[role.index] = [*shared, *(records if seen.rank == COORDINATOR else ())]
                continue
            own = self._volatile(seen, role, mark) if seen.durable.shared else self._unshared(seen, role, way)
            if role.index == 0:
                own += self._without_constants(seen, role, own)
            left = left_behind(seen, role) if settled else []
            gone[role.index] = [*own, *unreferred(seen, role), *left, *records]
        if seen.rank == COORDINATOR and 0 in gone:
            gone[0] += self._reports_done(seen)
        return gone

    def wanted(self, seen: Observation, transfers: Sequence[Transfer]) -> list[Transfer]:
        """The transfers without those whose outcome would be deleted again at once."""
        if not transfers:
            return []
        after = seen.after((each.target_tier, each.target) for each in transfers)
        gone = self.reclaimable(after, {each.target_tier for each in transfers})
        return [each for each in transfers if each.target not in gone[each.target_tier]]

    def reports(self, seen: Observation, tier: int) -> list[MetricKey]:
        """The reports that are to be put into the tier, and stay there."""
        if not (reports := to_report(seen, tier)):
            return []
        passed = self._is_passed(seen, seen.roles[tier])
        return [key for key in reports if not passed(key)]

    def refusals(self, seen: Observation) -> list[Refusal]:
        """The decisions of the policies that are not carried out."""
        found = [self._kept(seen, role)[1] for role in seen.roles if role.shared]
        refused = dict.fromkeys(refusal for refusal in found if refusal is not None)
        return [*refused, *self.placement.refusals(seen)]

    def has_room(self, seen: Observation, reclaimable: Sequence[Key] | None = None) -> bool:
        """Whether the first tier may take another base: no more than two of its bases must stay, and under pressure a
        third one, which leads to the mark. ``reclaimable``: what may go from it, if that is known."""
        gone = self.reclaimable(seen, (0,))[0] if reclaimable is None else reclaimable
        bases = seen.contents[0].bases(seen.rank)
        staying = [base for base in bases if base not in gone and base.generation not in seen.lineage.kept]
        to_mark = seen.under_pressure and self.placement.fold_every == 0
        return len(staying) <= BASES_IN_VOLATILE_TIERS + to_mark

    def _volatile(self, seen: Observation, role: Role, mark: CommitKey | None) -> list[Key]:
        contents = seen.contents[role.index]
        superseded = self._superseded(seen, contents)
        bases = contents.bases(seen.rank)
        kept = _newest_bases(seen, contents)
        if not kept or kept[-1].generation != seen.generation:
            return superseded
        settled = mark is not None and mark.generation == seen.generation
        if len(kept) < BASES_IN_VOLATILE_TIERS and not settled:
            return superseded
        folded = role.index == 0 and self.placement.fold_every > 0
        left = [key for key in own_differentials(seen, contents) if key.last <= kept[-1].last]
        if (
            settled
            and _is_enough(seen, contents, kept[-1], mark, folded=folded)
            and (folded or all(self._has_gone_on(seen, key, role) for key in (*kept[:-1], *left)))
        ):
            kept = kept[-1:]
        oldest, durable = kept[0], seen.contents[seen.durable.index]
        newest = max(durable.bases(seen.rank), default=None)

        def drained(key: ShardKey) -> bool:
            """Whether the durable tier does not need this copy any more. When the generation has a committed base,
            that is so if the durable tier has the copy's content, or something newer, or is not to have it: ranks
            whose bases have different versions commit none of them, and must not keep them all."""
            if mark is not None and (key.generation, key.last) <= (mark.generation, mark.version):
                return True
            if not settled:
                return False
            if not self.placement.wants(seen, key, seen.durable):
                return True
            if key.stream is Stream.DIFFERENTIAL:
                return durable.covers(key)
            return newest is not None and (key.generation, key.last) <= (newest.generation, newest.last)

        older = [base for base in bases if base < oldest and drained(base)]
        passed = [
            key
            for key in (*contents.differentials(seen.rank), *contents.snapshots(seen.rank))
            if (key.generation, key.last) <= (oldest.generation, oldest.last) and drained(key)
        ]
        if folded:
            waiting = self._waiting_base(seen, role)
            older = [base for base in older if base != waiting]
            passed = [key for key in passed if self._has_gone_on(seen, key, role)]
        return [*older, *passed, *(key for key in superseded if key not in passed)]

    def _unshared(self, seen: Observation, role: Role, way: RecoveryPoint | None) -> list[Key]:
        """``way``: this rank's way to the mark. It stays, and everything newer. Under pressure, bases between it and
        the newest two go: the ranks move the mark when a base is due, and there may be any number that are needed until
        then."""
        superseded = self._superseded(seen, seen.contents[role.index])
        if way is None:
            if seen.mark != NO_MARK and seen.world_size > 1:
                return []
            # Until there is a mark, the base that the generation opened with stands for the way to it.
            own = [base for base in seen.contents[role.index].bases(seen.rank) if base.generation == seen.generation]
            between = own[1:-BASES_IN_VOLATILE_TIERS] if seen.under_pressure else []
            return [*superseded, *between]
        # Each tier is judged by itself: the others may be lost with a node.
        way = Readable.of(seen.own(role)).ways(seen.lineage.readable).get(way.last, way)
        bases = _newest_bases(seen, seen.contents[role.index])
        if folded := role.index == 0 and self.placement.fold_every > 0:
            bases = bases[-1:]
        newest = [(base.generation, base.first) for base in bases]
        oldest = min([(way.generation, way.anchor), *newest])
        older = [key for key in seen.own(role) if (key.generation, key.last) <= oldest]
        if newest and seen.under_pressure:
            held = seen.contents[role.index].bases(seen.rank)
            older += [base for base in held if oldest < (base.generation, base.first) < newest[0]]
        if folded:
            waiting = self._waiting_base(seen, role)
            older = [key for key in older if key.stream is Stream.BASE or self._has_gone_on(seen, key, role)]
            older = [key for key in older if key != waiting]
        led = ShardKey.snapshot(way.generation, way.anchor, way.last, seen.rank) if way.by_snapshot else None
        anchors = {oldest} if way.by_snapshot else {oldest, (way.generation, way.anchor)}
        passed = [
            key
            for key in older
            if key.stream is not Stream.CONSTANT
            and not (key.stream is Stream.BASE and (key.generation, key.first) in anchors)
        ]
        gone = [key for key in (*passed, *superseded) if key != led]
        return list(dict.fromkeys(gone))

    def _without_constants(self, seen: Observation, role: Role, gone: Collection[Key]) -> list[ShardKey]:
        """Bases that lack what they refer to, and that each other tier has or needs no more: no way leads through them
        here. So that they leave room for one that leads on, no more of them stay than have a place beside the others.
        ``gone``: what goes in any case."""
        contents = seen.contents[role.index]
        bases = [base for base in contents.bases(seen.rank) if base not in gone]
        lacking = [base for base in bases if not contents.completes(base)]
        places = max(0, BASES_IN_VOLATILE_TIERS - (len(bases) - len(lacking)))
        left = [base for base in lacking if self._has_gone_on(seen, base, role)]
        return left[: max(0, len(lacking) - places)]

    def _waiting_base(self, seen: Observation, role: Role) -> ShardKey | None:
        """The newest base that another tier is to hold and lacks. It takes the place of those before it there, so that
        one at most waits for a tier that lags, however long."""
        bases = own_bases(seen, seen.contents[role.index])
        return next((base for base in reversed(bases) if not self._has_gone_on(seen, base, role)), None)

    def _has_gone_on(self, seen: Observation, key: ShardKey, role: Role) -> bool:
        """Whether each tier behind ``role`` has the shard, or is not to have it, or has what is as good there. A newer
        base is as good as a base, and inside the nodes as a differential. In a shared tier it is not: whoever goes back
        to a version of their choice looks for it there."""
        for target in seen.roles[role.index + 1 :]:
            if not self.placement.wants(seen, key, target):
                continue
            held = seen.contents[target.index]
            if key.stream is Stream.BASE:
                if not any(base.first >= key.first for base in own_bases(seen, held)):
                    return False
            elif not target.shared:
                if self.placement.lacking(seen, key, target):
                    return False
            elif not held.covers(key) and self._can_come(seen, target, key):
                return False
        return True

    def _can_come(self, seen: Observation, role: Role, key: ShardKey) -> bool:
        """Whether the differential would be replayed from this shared tier, and stay there."""
        oldest = min((base.first for base in own_bases(seen, seen.contents[role.index])), default=-1)
        if key.last <= oldest or self.placement.leads_nowhere(seen, key, role):
            return False
        kept, _ = self._kept(seen, role)
        passed = (key.generation, key.last) <= (kept.oldest.generation, kept.oldest.version)
        return not passed or kept.leads_through(key)

    def _superseded(self, seen: Observation, contents: Contents) -> list[Key]:
        """Snapshots in a volatile tier that newer ones supersede."""
        own = [key for key in contents.snapshots(seen.rank) if key.generation == seen.generation]
        meeting = [key for key in own if key.last % self.placement.batch == 0]
        kept = {*own[-SNAPSHOTS_IN_VOLATILE_TIERS:], *meeting[-SNAPSHOTS_IN_VOLATILE_TIERS:]}
        return [key for key in own if key not in kept]

    def _shared(self, seen: Observation, role: Role) -> list[Key]:
        contents = seen.contents[role.index]
        commits = _own_commits(seen, contents)
        # Until the generation has a base of its own, it needs what its parents have left.
        if not commits or commits[-1].generation != seen.generation:
            return left_by_attempts(seen, contents)
        kept, _ = self._kept(seen, role)
        oldest, newest = kept.oldest, commits[-1]
        owned = [seen.rank, *left_to(seen.rank, seen.world_size, seen.lineage)]
        gone = [
            base
            for rank in owned
            for base in contents.bases(rank)
            if CommitKey.of(base) not in kept.bases
            and (base.generation, base.first) < (newest.generation, newest.version)
        ]
        common = {commit.generation: commit.version for commit in _led_to(seen, contents)}
        passed = [
            key
            for rank in owned
            for key in (*contents.differentials(rank), *contents.snapshots(rank))
            if (key.generation, key.last) <= (oldest.generation, oldest.version)
            or (key.stream is Stream.SNAPSHOT and key.last < common.get(key.generation, -1))
        ]
        leaving = dict.fromkeys([*passed, *self._taking_room(seen, role, newest)])
        passed = [key for key in leaving if not kept.leads_through(key)]
        # A process of an older generation put these after what they speak of was deleted.
        late = [
            commit
            for commit in (*contents.commits, *contents.snapshot_commits)
            if commit < newest and contents.shard(commit, seen.rank) is None
        ]
        records = [*late, *_commits_of([*gone, *passed], contents)] if seen.rank == COORDINATOR else []
        reports = contents.metrics if seen.rank == COORDINATOR else ()
        markers = markers_done(seen, contents)
        told = filter(self._is_passed(seen, role), reports) if reports else ()
        return [*records, *gone, *passed, *unreferred(seen, role), *markers, *told]

    def _taking_room(self, seen: Observation, role: Role, newest: CommitKey) -> list[ShardKey]:
        """In a tier that is short of room: differentials before the newest committed base that would take that of the
        next one (:meth:`Placement.leads_nowhere`)."""
        if role.index == 0 or role.index not in seen.short_of_room:
            return []
        own = [key for key in own_differentials(seen, seen.contents[role.index]) if key.last <= newest.version]
        return self.placement.leading_nowhere(seen, own, role)

    def _reports_done(self, seen: Observation) -> list[Key]:
        """Reports in the first tier that every shared tier has, or is not to have."""
        if not seen.contents[0].metrics:
            return []
        tiers = [(seen.contents[role.index], self._is_passed(seen, role)) for role in seen.roles if role.shared]
        return [key for key in seen.contents[0].metrics if all(key in held or passed(key) for held, passed in tiers)]

    def _is_passed(self, seen: Observation, role: Role) -> Callable[[MetricKey], bool]:
        """Whether a report speaks of a version that a recovery by this tier cannot come to any more."""
        kept, _ = self._kept(seen, role)
        versions = {version for version, _ in kept.ways} | {base.version for base in kept.bases}

        def passed(key: MetricKey) -> bool:
            if not seen.lineage.admits(key.generation, key.version):
                return True
            return key.version < kept.oldest.version and key.version not in versions

        return passed

    def _kept(self, seen: Observation, role: Role) -> tuple[_Kept, Refusal | None]:
        """What stays in a shared tier, and why the policy was refused."""
        # A restart commits the version that it resumed from once more: that counts as one version, not two.
        latest = {commit.version: commit for commit in _own_commits(seen, seen.contents[role.index])}
        if not latest:
            return _Kept(CommitKey(0, 0)), None
        versions = sorted(latest)
        metrics = metrics_of(seen, seen.contents[role.index], versions[0])
        keep, refusal = ask_retention(self.policy, Committed(role.name, tuple(versions), metrics))

        def anchor(version: int) -> CommitKey:
            return latest[versions[max(0, bisect_right(versions, version) - 1)]]

        newest = max(latest.values())
        oldest = newest if keep.since is None else min(newest, anchor(keep.since))
        ways = {version: anchor(version) for version in keep.versions if versions[0] <= version < newest.version}
        since = {commit for commit in latest.values() if commit >= oldest}
        return _Kept(oldest, frozenset({*since, *ways.values()}), frozenset(ways.items())), refusal


@dataclass(frozen=True)
class _Kept:
    """What a retention policy and the watermark keep in one tier."""

    oldest: CommitKey
    """Every version from here on stays."""
    bases: frozenset[CommitKey] = frozenset()
    ways: frozenset[tuple[int, CommitKey]] = frozenset()
    """Versions before that stay, and the base that leads to each."""

    def leads_through(self, key: ShardKey) -> bool:
        """Whether a way to a kept version leads through this differential or snapshot."""
        for version, anchor in self.ways:
            if key.generation != anchor.generation:
                continue
            if key.stream is Stream.SNAPSHOT:
                if (key.first - 1, key.last) == (anchor.version, version):
                    return True
            elif max(key.first, anchor.version + 1) <= min(key.last, version):
                return True
        return False


def _newest_bases(seen: Observation, contents: Contents) -> list[ShardKey]:
    """This rank's newest two bases in a volatile tier, oldest first. One without the constants that it refers to does
    not count: no recovery starts from it."""
    return [base for base in contents.bases(seen.rank) if contents.completes(base)][-BASES_IN_VOLATILE_TIERS:]


def _is_enough(
    seen: Observation, contents: Contents, newest: ShardKey, mark: CommitKey | None, *, folded: bool
) -> bool:
    """Whether no rank needs to go back behind this rank's newest base. Ranks train in lock step: a rank that has a
    differential has seen every rank publish the version before. On a GPU, other ranks' records may still be on their
    way. If the ranks are killed then, they go on from a base in the durable tier, which has all that leads on from
    there (:meth:`Retention._has_gone_on`): that is rare, and keeping two records more for it would cost every step
    memory.
    """
    if mark is not None and (newest.generation, newest.last) <= (mark.generation, mark.version):
        return True
    return folded and any(key.last > newest.last for key in own_differentials(seen, contents))


def _is_kept(seen: Observation, key: Key) -> bool:
    """Whether the object speaks of a version that a user's request has left behind."""
    return isinstance(key, ShardKey | CommitKey | MetricKey) and key.generation in seen.lineage.kept


def _own_commits(seen: Observation, contents: Contents) -> list[CommitKey]:
    """The committed bases of the job's own past of which this rank's shard is there, and what it refers to. Oldest
    first."""
    held = ((commit, contents.shard(commit, seen.rank)) for commit in contents.commits)
    return [
        commit
        for commit, base in held
        if base is not None and contents.completes(base) and seen.lineage.admits(commit.generation, commit.version)
    ]


def _is_settled(seen: Observation, mark: CommitKey | None, way: RecoveryPoint | None) -> bool:
    """Whether every rank can reach a version without what older generations have captured. That is so if a base of this
    generation is committed, or the mark is newer than the version at which the generation opened. At that version,
    another rank may still need its older copies."""
    if seen.durable.shared:
        return mark is not None and mark.generation == seen.generation
    older = [generation for generation, _ in seen.lineage.chain if generation != seen.generation]
    return way is not None and not any(seen.lineage.admits(generation, way.last) for generation in older)


def _led_to(seen: Observation, contents: Contents) -> list[CommitKey]:
    """The committed snapshots of which this rank has its own here, and the base for which it was made. Oldest first."""
    bases = {(base.generation, base.first) for base in contents.bases(seen.rank)}
    return [
        commit
        for commit in contents.snapshot_commits
        if contents.shard(commit, seen.rank) is not None and (commit.generation, commit.base) in bases
    ]


def _commits_of(shards: Iterable[ShardKey], contents: Contents) -> list[Key]:
    """The commit records of these bases and snapshots."""
    commits = (CommitKey.of(shard) for shard in shards if shard.stream is not Stream.DIFFERENTIAL)
    return [commit for commit in commits if commit in contents]
