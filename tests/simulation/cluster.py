"""A cluster of ranks in one thread: the real policies, over tiers that are dictionaries.

Every action of the policies is carried out one at a time, in an order that the seed decides, and a failure may
strike between any two. The content of an object is what a reader would compute from it, so that a chain that mixes
two pasts shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tiercheck.keys import CommitKey, Key, LineageKey, MarkerKey, ShardKey, Stream
from tiercheck.policy.commit import superseded, to_commit, to_mark
from tiercheck.policy.consensus import Readable, RecoveryPoint, decide
from tiercheck.policy.lineage import Branch, Lineage
from tiercheck.policy.observation import Contents, Observation, Role
from tiercheck.policy.placement import Placement, Transfer
from tiercheck.policy.recovery import Plan, Source, plan
from tiercheck.policy.watermark import Retention, watermark
from tiercheck.types import Survives

Tier = dict[Key, object]
State = tuple[int, ...]
"""A state is the sequence of the random steps that led to it."""


@dataclass
class Rank:
    """Each rank is a node."""

    memory: Tier = field(default_factory=dict)
    peer: Tier = field(default_factory=dict)
    """What the next node's memory keeps for this one."""
    state: State = ()

    @property
    def version(self) -> int:
        return len(self.state)


class Cluster:
    """``world`` ranks that train in lock step. All that happens is drawn from ``seed``. ``snapshots``: between bases
    they capture snapshots, not differentials; now and then one of these, or a base, fails on some rank alone."""

    def __init__(
        self, seed: int, world: int, base_every: int, batch: int, *, peers: bool, snapshots: bool = False
    ) -> None:
        self.random = random.Random(seed)
        self.world = world
        self.base_every = base_every
        assert world > 1 or not peers, "a node alone has no peer"
        survive = [Survives.PROCESS, *([Survives.NODE] if peers else []), Survives.RACK]
        self.roles = tuple(Role(index, each.name, each) for index, each in enumerate(survive))
        self.peers = peers
        self.placement = Placement(batch)
        self.retention = Retention(keep_last=self.random.choice([1, 2, 3]), batch=batch)
        self.snapshots = snapshots
        self.saves_fail = snapshots
        self.due: set[int] = set()
        """The ranks whose newest base failed: until they have another one, they capture no snapshot."""
        self.ranks = [Rank() for _ in range(world)]
        self.durable: Tier = {}
        self.generation = 0
        self.history: dict[tuple[int, int, int], State] = {}
        """What was captured: (generation, version, rank) -> state."""
        self.trained_to = 0
        self.open_generation(None)

    # Training

    def step(self) -> None:
        """One iteration of every rank, its captures included. Waits where bases have not drained, as capture does."""
        while any(self.undrained(rank) >= 2 for rank in range(self.world)):
            if not self.act():
                raise AssertionError("training waits for bases to drain, and nothing drains them")
        for rank in self.ranks:
            rank.state = (*rank.state, self.random.getrandbits(32))
        order = list(range(self.world))
        self.random.shuffle(order)
        for index in order:
            self.capture(index)
        self.trained_to = self.ranks[0].version

    def capture(self, index: int) -> None:
        rank = self.ranks[index]
        version = rank.version
        if self.snapshots:
            # Without a base there is nothing that a snapshot could be the change since.
            bases = [key.first for key in rank.memory if is_base(key, self.generation, index)]
            if index in self.due or not bases or self.one_fails():
                self.capture_base(index)
            else:
                snapshot = ShardKey.snapshot(self.generation, max(bases), version, index)
                rank.memory[snapshot] = rank.state[max(bases) :]
        else:
            rank.memory[ShardKey.differential(self.generation, version, version, index)] = rank.state[-1:]
        self.history[self.generation, version, index] = rank.state
        if version % self.base_every == 0:
            if self.one_fails():
                self.due.add(index)
            else:
                self.capture_base(index)

    def one_fails(self) -> bool:
        return self.saves_fail and self.random.random() < 0.1

    def capture_base(self, index: int) -> None:
        rank = self.ranks[index]
        self.due.discard(index)
        self.history[self.generation, rank.version, index] = rank.state
        rank.memory[ShardKey.base(self.generation, rank.version, index)] = rank.state

    def undrained(self, index: int) -> int:
        held = [key.first for key in self.ranks[index].memory if is_base(key, self.generation, index)]
        newest = max((key.first for key in self.durable if is_base(key, self.generation, index)), default=-1)
        return sum(version > newest for version in held)

    # What the movers do

    def observe(self, index: int) -> Observation:
        contents = tuple(Contents.of((key, 1) for key in tier) for tier in self.tiers_of(index))
        return Observation(self.roles, contents, index, self.world, self.generation, self.lineage)

    def tiers_of(self, index: int) -> list[Tier]:
        rank = self.ranks[index]
        return [rank.memory, *([rank.peer] if self.peers else []), self.durable]

    def act(self, *, closing: bool = False) -> bool:
        """One action of some rank's mover; ``False`` where no rank has anything to do."""
        order = list(range(self.world))
        self.random.shuffle(order)
        for index in order:
            seen = self.observe(index)
            assert superseded(seen) is None
            actions = self.actions(index, seen, closing)
            if actions:
                kind, payload = self.random.choice(actions)
                getattr(self, f"do_{kind}")(index, payload)
                return True
        return False

    def actions(self, index: int, seen: Observation, closing: bool) -> list[tuple[str, object]]:
        found: list[tuple[str, object]] = [
            ("transfer", transfer) for transfer in self.placement.transfers(seen, closing=closing)
        ]
        for role in self.roles:
            found += [("mark", key) for key in to_mark(seen, role.index)]
            found += [("commit", key) for key in to_commit(seen, role.index)]
        for tier, gone in self.retention.reclaimable(seen).items():
            found += [("delete", (tier, key)) for key in gone[:1]]  # one at a time, in the policy's order
        return found

    def do_transfer(self, index: int, transfer: Transfer) -> None:
        tiers = self.tiers_of(index)
        sources = [tiers[transfer.source_tier][key] for key in transfer.sources]
        content: object = sources[0]
        if transfer.target.stream is Stream.DIFFERENTIAL:
            content = tuple(step for source in sources for step in source)
        tiers[transfer.target_tier][transfer.target] = content

    def do_mark(self, index: int, key: MarkerKey) -> None:
        assert ShardKey.base(key.generation, key.version, key.rank) in self.durable
        self.durable[key] = None

    def do_commit(self, index: int, key: CommitKey) -> None:
        assert index == 0
        for rank in range(self.world):
            assert ShardKey.base(key.generation, key.version, rank) in self.durable, "committed, but not whole"
        self.durable[key] = None

    def do_delete(self, index: int, target: tuple[int, Key]) -> None:
        tier, key = target
        del self.tiers_of(index)[tier][key]

    # Failures and recovery

    def fail(self, kind: str) -> None:
        """Every process dies; ``node`` takes one node's memory along, and what it kept for another; ``rack`` all."""
        before = self.watermark()
        if self.random.random() < 0.5:
            # Some ranks had already captured the next version when the failure struck, others had not.
            for index in self.random.sample(range(self.world), self.random.randrange(self.world)):
                self.ranks[index].state = (*self.ranks[index].state, self.random.getrandbits(32))
                self.capture(index)
        lost = {"software": [], "node": [self.random.randrange(self.world)], "rack": list(range(self.world))}[kind]
        for index in lost:
            self.lose_node(index)
        self.recover(kind, before)

    def lose_node(self, index: int) -> None:
        self.ranks[index].memory = {}
        self.ranks[index - 1].peer = {}

    def recover(self, kind: str, before: CommitKey | None) -> None:
        branches = {value for tier in self.tiers() for key, value in tier.items() if isinstance(key, LineageKey)}
        lineage = Lineage.of(branches)  # type: ignore[arg-type]
        sources = [self.sources(index) for index in range(self.world)]
        points = decide([Readable.of(source.key for source in each) for each in sources], lineage)
        point = points[0] if points else None
        if points is None or point is None:
            assert before is None, f"base {before} was committed, and nothing can be recovered"
            assert kind != "software" or self.trained_to == 0, "nothing was lost, and nothing can be recovered"
            for rank in self.ranks:
                rank.state = ()
        else:
            for index, rank in enumerate(self.ranks):
                rank.state = self.rebuild(points[index], index, sources[index])
                assert rank.state == self.history[point.generation, point.last, index]
            if before is not None:
                reached = (lineage_position(lineage, point.generation), point.last)
                assert reached >= (lineage_position(lineage, before.generation), before.version), "behind the watermark"
            if kind == "software":
                assert point.last >= self.trained_to, f"{self.trained_to} was in memory, {point.last} was recovered"
        self.open_generation(point, branches)  # type: ignore[arg-type]

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
        return {
            Source(tier, key)
            for tier, held in enumerate(self.tiers_of(index))
            for key in held
            if isinstance(key, ShardKey) and key.rank == index
        }

    def open_generation(self, point: RecoveryPoint | None, branches: set[Branch] | None = None) -> None:
        self.generation = max((branch.generation for branch in branches or ()), default=0) + 1
        parent, left_at = (point.generation, point.last) if point else (0, 0)
        branch = Branch(self.generation, parent, left_at, self.world, f"token-{self.generation}")
        self.lineage = Lineage.of({*(branches or ()), branch})
        for tier in self.tiers():
            tier[LineageKey(self.generation)] = branch
        self.trained_to = left_at
        for index in range(self.world):
            if self.random.random() < 0.9:
                self.capture_base(index)
            else:
                # This rank dies before its first base is whole: the generation has no anchor, its parent counts.
                self.fail(self.random.choice(["software", "node"]))
                return

    def tiers(self) -> list[Tier]:
        return [tier for index in range(self.world) for tier in self.tiers_of(index)]

    def watermark(self) -> CommitKey | None:
        return watermark(self.observe(0))


def is_base(key: Key, generation: int, rank: int) -> bool:
    return isinstance(key, ShardKey) and key.stream is Stream.BASE and (key.generation, key.rank) == (generation, rank)


def lineage_position(lineage: Lineage, generation: int) -> int:
    """Larger is newer; a generation outside the chain is the job's past no more."""
    order = [each for each, _ in lineage.chain]
    assert generation in order, f"generation {generation} was committed and is not in the lineage {order}"
    return -order.index(generation)
