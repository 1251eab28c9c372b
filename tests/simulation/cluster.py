"""A cluster of ranks in one thread: the real policies, over tiers that are dictionaries.

Every action of the policies is carried out one at a time, in an order that the seed decides, and a failure may
strike between any two. The content of an object is what a reader would compute from it, so that a chain that mixes
two pasts shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tiercheck.keys import CommitKey, Key, LineageKey, MarkerKey, ShardKey, Stream
from tiercheck.policy.agreement import NO_MARK, agreed, needs_agreement, reach
from tiercheck.policy.commit import superseded, to_commit, to_mark
from tiercheck.policy.consensus import Readable, RecoveryPoint, decide
from tiercheck.policy.lineage import Branch, Lineage, bearing
from tiercheck.policy.observation import Contents, Observation, Role
from tiercheck.policy.opening import Reach, anew, superseded_at_opening
from tiercheck.policy.placement import Placement, Transfer
from tiercheck.policy.recovery import Plan, Source, plan
from tiercheck.policy.watermark import Retention, watermark
from tiercheck.types import Survives

Tier = dict[Key, object]
State = tuple[int, ...]
"""A state is the sequence of the random steps that led to it."""

BASES_MAX = 3
"""What admission counts on for a rank in its first tier."""
NEVER = -1


@dataclass
class Node:
    """A machine's memory. It outlives the processes, and stays what it is when another rank comes to run there."""

    memory: Tier = field(default_factory=dict)
    kept: Tier = field(default_factory=dict)
    """What it keeps for its neighbour."""


@dataclass
class Rank:
    """One a node."""

    node: Node
    state: State = ()
    mark: int | None = NO_MARK
    """What its mover was told."""

    @property
    def version(self) -> int:
        return len(self.state)


class Cluster:
    """``world`` ranks that train in lock step. All that happens is drawn from ``seed``.

    ``shared``: there is a durable tier that all ranks see. ``peers``: each rank's objects are kept by the next rank's
    node. ``moves``: after a failure ranks may come back on each other's nodes, or on spare ones. ``snapshots``: between
    bases they capture snapshots, not differentials. ``saves_fail``: now and then a capture fails on some rank alone.
    """

    def __init__(
        self,
        seed: int,
        world: int,
        base_every: int,
        batch: int,
        *,
        peers: bool,
        shared: bool = True,
        moves: bool = False,
        snapshots: bool = False,
        saves_fail: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.world = world
        self.base_every = base_every
        assert world > 1 or not peers, "a node alone has no peer"
        survive = [Survives.PROCESS, *([Survives.NODE] if peers else []), *([Survives.RACK] if shared else [])]
        self.roles = tuple(Role(index, each.name, each) for index, each in enumerate(survive))
        self.peers, self.shared, self.moves = peers, shared, moves
        self.failures = ["software", *(["node"] if peers or shared else []), *(["rack"] if shared else [])]
        self.agrees = needs_agreement(self.roles, world)
        self.placement = Placement(batch)
        self.retention = Retention(
            keep_last=self.random.choice([1, 2, 3]), keep_every=self.random.choice([0, 0, base_every]), batch=batch
        )
        self.snapshots = snapshots
        self.saves_fail = saves_fail
        self.outage = False
        """The durable tier takes nothing."""
        self.opening_fails, self.step_fails = 0.1, 0.02
        self.restarts = 0
        self.due: set[int] = set()
        """The ranks whose newest capture failed: until they have another base, they capture nothing else."""
        self.ranks = [Rank(Node()) for _ in range(world)]
        self.spares = [Node()] if moves else []
        self.durable: Tier = {}
        self.in_flight: list[Callable[[], None]] = []
        """What a process had asked of the durable tier when it was killed, and is still to arrive there."""
        self.generation = 0
        self.history: dict[tuple[int, int, int], State] = {}
        """What was captured: (generation, version, rank) -> state."""
        self.trained_to = 0
        self.open_generation(None)

    # Training

    def step(self) -> None:
        """One iteration of every rank, its captures included. Waits where there is no room for a base, as capture
        does."""
        for rank in self.ranks:
            rank.state = (*rank.state, self.random.getrandbits(32))
        order = list(range(self.world))
        self.random.shuffle(order)
        for index in order:
            self.capture(index)
        version = self.ranks[0].version
        if version % self.base_every == 0:
            self.make_room()
            for index in order:
                if self.random.random() < self.step_fails:
                    self.fail(self.random.choice(self.failures))  # some have captured their base, others have not
                    return
                self.due.add(index)
                if self.has_room(index):
                    self.capture_due_base(index)
        if all(self.holds(index, version) for index in order):
            self.trained_to = version
        elif self.snapshots:
            self.trained_to = NEVER  # the others' newest snapshots supersede those that this rank could meet

    def holds(self, index: int, version: int) -> bool:
        """Whether the rank can come to the version by what lies in its node's memory."""
        own = [key for key in self.ranks[index].node.memory if isinstance(key, ShardKey) and key.rank == index]
        return (self.generation, version) in Readable.of(own).points()

    def make_room(self) -> None:
        """Wait for room on every rank; where no tier is shared, the ranks agree on a mark meanwhile."""
        progress = True
        while True:
            if self.agrees:
                mark = agreed([reach(self.observe(index)) for index in range(self.world)])
                for index in self.random.sample(range(self.world), self.world):
                    if self.random.random() < 0.5:
                        progress |= self.act()  # some know the new mark already, others do not
                    progress |= self.ranks[index].mark != mark
                    self.ranks[index].mark = mark
            if all(self.has_room(index) for index in range(self.world)):
                return
            if self.saves_fail and not progress:
                return  # the deadline passes, and training goes on
            assert progress, "training waits for room for a base, and nothing makes any"
            progress = self.act()

    def has_room(self, index: int) -> bool:
        return self.undrained(index) < 2 and self.retention.has_room(self.observe(index))

    def capture(self, index: int) -> None:
        rank = self.ranks[index]
        version = rank.version
        self.history[self.generation, version, index] = rank.state
        bases = [key.first for key in rank.node.memory if is_base(key, self.generation, index)]
        # Without a base there is nothing that a snapshot could be the change since.
        if self.one_fails() or (self.snapshots and not bases):
            self.due.add(index)
        elif self.snapshots and index not in self.due:
            snapshot = ShardKey.snapshot(self.generation, max(bases), version, index)
            rank.node.memory[snapshot] = rank.state[max(bases) :]
        elif not self.snapshots:
            rank.node.memory[ShardKey.differential(self.generation, version, version, index)] = rank.state[-1:]
        if index in self.due and self.has_room(index):
            self.capture_due_base(index)

    def one_fails(self) -> bool:
        return self.saves_fail and self.random.random() < 0.1

    def capture_due_base(self, index: int) -> None:
        if self.one_fails():
            return
        self.due.discard(index)
        self.capture_base(index)

    def capture_base(self, index: int) -> None:
        rank = self.ranks[index]
        self.history[self.generation, rank.version, index] = rank.state
        rank.node.memory[ShardKey.base(self.generation, rank.version, index)] = rank.state
        staying = [
            key
            for key in rank.node.memory
            if isinstance(key, ShardKey) and key.stream is Stream.BASE and key.rank == index
        ]
        gone = self.retention.reclaimable(self.observe(index))[0]
        assert len([key for key in staying if key not in gone]) <= BASES_MAX, "more bases than admission counted"

    def undrained(self, index: int) -> int:
        seen = self.observe(index)
        held = [key.first for key in seen.contents[0].bases(index) if key.generation == self.generation]
        drained = seen.contents[seen.durable.index].bases(index)
        newest = max((key.first for key in drained if key.generation == self.generation), default=-1)
        return sum(version > newest for version in held)

    # What the movers do

    def observe(self, index: int) -> Observation:
        contents = tuple(Contents.of((key, 1) for key in tier) for tier in self.tiers_of(index))
        mark = self.ranks[index].mark if self.agrees else None
        return Observation(self.roles, contents, index, self.world, self.generation, self.lineage, mark)

    def tiers_of(self, index: int) -> list[Tier]:
        neighbour = self.ranks[(index + 1) % self.world]
        return [
            self.ranks[index].node.memory,
            *([neighbour.node.kept] if self.peers else []),
            *([self.durable] if self.shared else []),
        ]

    def act(self, *, closing: bool = False) -> bool:
        """One action of some rank's mover; ``False`` where no rank has anything to do."""
        order = list(range(self.world))
        self.random.shuffle(order)
        for index in order:
            seen = self.observe(index)
            assert superseded(seen) is None
            actions = self.actions(index, seen, closing)
            if actions:
                self.random.choice(actions)()
                return True
        return False

    def actions(self, index: int, seen: Observation, closing: bool) -> list[Callable[[], None]]:
        tiers = self.tiers_of(index)
        transfers = self.retention.wanted(seen, self.placement.transfers(seen, closing=closing))
        found: list[Callable[[], None]] = [
            partial(self.do_transfer, tiers, transfer)
            for transfer in transfers
            if not self.outage or not self.roles[transfer.target_tier].shared
            if transfer.target.stream is not Stream.BASE or transfer.target == first_base(transfers, transfer)
        ]
        for role in self.roles if not self.outage else ():
            found += [partial(self.do_mark, key) for key in to_mark(seen, role.index)]
            found += [partial(self.do_commit, index, key) for key in to_commit(seen, role.index)]
        for tier, gone in self.retention.reclaimable(seen).items():
            if not self.outage or not self.roles[tier].shared:
                found += [partial(self.do_delete, tiers[tier], index, key) for key in gone[:1]]  # in the policy's order
        return found

    def do_transfer(self, tiers: list[Tier], transfer: Transfer) -> None:
        sources = [tiers[transfer.source_tier][key] for key in transfer.sources]
        content: object = sources[0]
        if transfer.target.stream is Stream.DIFFERENTIAL:
            content = tuple(step for source in sources for step in source)  # type: ignore[attr-defined]
        tiers[transfer.target_tier][transfer.target] = content

    def do_mark(self, key: MarkerKey) -> None:
        assert ShardKey.base(key.generation, key.version, key.rank) in self.durable
        self.durable[key] = None

    def do_commit(self, index: int, key: CommitKey) -> None:
        assert index == 0
        for rank in range(self.world):
            assert ShardKey.base(key.generation, key.version, rank) in self.durable, "committed, but not whole"
        self.durable[key] = None

    def do_delete(self, tier: Tier, index: int, key: Key) -> None:
        del tier[key]

    # Failures and recovery

    def fail(self, kind: str) -> None:
        """Every process dies; ``node`` takes one node's memory along, and what it kept for another; ``rack`` all."""
        before, promised = self.watermark(), self.promised()
        if self.random.random() < 0.5:
            # Some ranks had already captured the next version when the failure struck, others had not.
            for index in self.random.sample(range(self.world), self.random.randrange(self.world)):
                self.ranks[index].state = (*self.ranks[index].state, self.random.getrandbits(32))
                self.capture(index)
                if self.ranks[index].version % self.base_every == 0 and not self.agrees and self.has_room(index):
                    self.capture_due_base(index)
        if self.shared and self.random.random() < 0.3:
            self.leave_in_flight()
        lost = {"software": [], "node": [self.random.randrange(self.world)], "rack": list(range(self.world))}[kind]
        for index in lost:
            self.lose_node(index)
        if kind == "software":
            promised = self.trained_to
        elif kind == "rack":
            promised = NEVER
        self.restart(before, promised)

    def leave_in_flight(self) -> None:
        """The coordinator's last commit is on its way: it arrives after the next generation has opened."""
        for key in to_commit(self.observe(0), self.roles[-1].index):
            self.in_flight.append(partial(self.durable.__setitem__, key, None))

    def lose_node(self, index: int) -> None:
        self.ranks[index].node = Node()

    def promised(self) -> int:
        """The newest version that the failure of any one node would leave within reach."""
        if not self.peers:
            return NEVER
        return min(self.left_without(self.ranks[index].node) for index in range(self.world))

    def left_without(self, lost: Node) -> int:
        nodes = [rank.node for rank in self.ranks]
        for rank in self.ranks:
            rank.node = Node() if rank.node is lost else rank.node
        point = self.meeting(self.lineage)
        for rank, node in zip(self.ranks, nodes, strict=True):
            rank.node = node
        return point[0].last if point else NEVER

    def meeting(self, lineage: Lineage) -> tuple[RecoveryPoint, ...] | None:
        return decide([Readable.of(s.key for s in self.sources(index)) for index in range(self.world)], lineage)

    def restart(self, before: CommitKey | None, promised: int) -> None:
        """``before``: the watermark; ``promised``: the version that must be reached."""
        self.restarts += 1
        home, spares = [rank.node for rank in self.ranks], self.spares
        if self.moves and self.random.random() < 0.5:
            self.move()
            if not self.shared and not self.reaches(promised):
                # Refused: there are versions that not every rank reaches. The nodes are put back.
                for rank, node in zip(self.ranks, home, strict=True):
                    rank.node = node
                self.spares = spares
            else:
                promised = NEVER  # what lies in a node's memory is out of reach of a rank that left it
        self.recover(before, promised)

    def reaches(self, version: int) -> bool:
        points = self.meeting(self.lineage)
        return points is not None and points[0].last >= version

    def move(self) -> None:
        nodes = [rank.node for rank in self.ranks] + self.spares
        self.random.shuffle(nodes)
        for rank, node in zip(self.ranks, nodes, strict=False):
            rank.node = node
        self.spares = nodes[self.world :]

    def recover(self, before: CommitKey | None, promised: int) -> None:
        branches = {value for tier in self.tiers() for key, value in tier.items() if isinstance(key, LineageKey)}
        captured = {key.generation for tier in self.tiers() for key in tier if isinstance(key, ShardKey)}
        lineage = Lineage.of(bearing(branches, captured))  # type: ignore[arg-type]
        sources = [self.sources(index) for index in range(self.world)]
        points = self.meeting(lineage)
        if points is None:
            assert before is None, f"base {before} was committed, and nothing can be recovered"
            assert promised <= 0, f"{promised} was promised, and nothing can be recovered"
            if not self.shared:
                self.wipe()
                branches = set()
            for rank in self.ranks:
                rank.state = ()
        else:
            for index, rank in enumerate(self.ranks):
                rank.state = self.rebuild(points[index], index, sources[index])
                assert rank.state == self.history[points[index].generation, points[index].last, index]
            if before is not None:
                assert lineage.admits(before.generation, before.version)
                assert points[0].last >= before.version, "behind the watermark"
            assert points[0].last >= promised, f"{promised} was promised, {points[0].last} was recovered"
        self.open_generation(points, branches)  # type: ignore[arg-type]

    def wipe(self) -> None:
        """Nothing that all ranks can read is left: the user clears the memories, and the job begins anew."""
        for tier in self.tiers():
            tier.clear()
        self.spares = [Node() for _ in self.spares]

    def rebuild(self, point: RecoveryPoint, index: int, sources: set[Source]) -> State:
        chosen = plan(point, index, sources)
        assert isinstance(chosen, Plan), f"rank {index}: {chosen}"
        tiers = self.tiers_of(index)
        state: State = tiers[chosen.anchor.tier][chosen.anchor.key]  # type: ignore[assignment]
        for source in chosen.batches:
            steps: State = tiers[source.tier][source.key]  # type: ignore[assignment]
            for version, step in zip(source.key.versions, steps, strict=True):
                if len(state) < version <= point.last:
                    state = (*state, step)
        return state

    def sources(self, index: int) -> set[Source]:
        return {source for source in self.visible(index) if source.key.rank == index}

    def visible(self, index: int) -> set[Source]:
        """The shards of all ranks that this one sees."""
        return {
            Source(tier, key)
            for tier, held in enumerate(self.tiers_of(index))
            for key in held
            if isinstance(key, ShardKey)
        }

    def open_generation(self, points: tuple[RecoveryPoint, ...] | None, branches: set[Branch] | None = None) -> None:
        captured = {key.generation for tier in self.tiers() for key in tier if isinstance(key, ShardKey)}
        before = Lineage.of(bearing(branches or (), captured))
        self.generation = max((branch.generation for branch in branches or ()), default=0) + 1
        parent, left_at = (max(point.generation for point in points), points[0].last) if points else (0, 0)
        branch = Branch(self.generation, parent, left_at, self.world, f"token-{self.generation}")
        self.lineage = Lineage.of({*(branches or ()), branch})
        for tier in self.tiers():
            tier[LineageKey(self.generation)] = branch
        self.trained_to = left_at
        self.due.clear()
        known = anew([Reach.of(self.sources(index), self.roles, before) for index in range(self.world)], left_at)
        for rank in self.ranks:
            rank.mark = known.mark
        promised = self.promised() if known.mark == NO_MARK else known.mark
        self.clear_tiers(before, known.versions)
        checked = self.peers and not self.shared and not self.saves_fail
        assert not checked or self.promised() >= promised, "a node's failure would cost more"
        for arrives in self.in_flight:
            arrives()
        self.in_flight = []
        for index in range(self.world):
            if self.random.random() < 1 - self.opening_fails:
                self.capture_base(index)
            else:
                # This rank dies before its first base is whole: the generation has no anchor, its parent counts.
                self.fail(self.random.choice(self.failures[:2]))
                return

    def clear_tiers(self, lineage: Lineage, versions: frozenset[int]) -> None:
        """What each rank deletes before anything is captured."""
        owned = {source for index in range(self.world) for source in self.sources(index)}
        for index in self.random.sample(range(self.world), self.world):
            held = self.visible(index)
            sound = self.sources(index)
            for source in superseded_at_opening(held, index, self.roles, lineage, versions, sound, owned):
                self.tiers_of(index)[source.tier].pop(source.key, None)

    def tiers(self) -> list[Tier]:
        return [tier for index in range(self.world) for tier in self.tiers_of(index)]

    def watermark(self) -> CommitKey | None:
        return watermark(self.observe(0))


def first_base(transfers: list[Transfer], like: Transfer) -> ShardKey:
    """Bases go to a tier one after the other."""
    bases = (each.target for each in transfers if each.target_tier == like.target_tier)
    return next(target for target in bases if target.stream is Stream.BASE)


def is_base(key: Key, generation: int, rank: int) -> bool:
    return isinstance(key, ShardKey) and key.stream is Stream.BASE and (key.generation, key.rank) == (generation, rank)
