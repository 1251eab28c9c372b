"""A cluster of ranks in one thread: the real policies, over tiers that are dictionaries.

Every action of the policies is carried out one at a time, in an order that the seed decides, and a failure may
strike between any two. The content of an object is what a reader would compute from it, so that a chain that mixes
two pasts shows. The ranks look around, meet and open a generation in the order in which
:mod:`tiercheck.checkpointer` has them do so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from tests.simulation.movers import State
from tests.simulation.surveys import Found, Surveys, shards
from tests.simulation.tiers import Node
from tiercheck.errors import RecoveryError
from tiercheck.keys import CommitKey, Key, LineageKey, ShardKey, Stream
from tiercheck.policy.commit import to_commit
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery import opening
from tiercheck.policy.recovery.agreement import NO_MARK, agreed, reach
from tiercheck.policy.recovery.consensus import Readable, RecoveryPoint, decide
from tiercheck.policy.recovery.lineage import Branch, Lineage, LineageRecord
from tiercheck.policy.recovery.opening import Reach, anew
from tiercheck.policy.recovery.plan import Plan, plan

BASES_MAX = 3
"""What admission counts on for a rank in its first tier."""
NEVER = -1


class Cluster(Surveys):
    """Ranks that train in lock step, and fail.

    ``moves``: after a failure ranks may come back on each other's nodes, or on spare ones. ``stays_away``: after a
    failure some tier may not answer, for a while. ``decays``: copies may be damaged. ``snapshots``: between bases the
    ranks capture snapshots, not differentials. ``saves_fail``: now and then a capture fails on some rank alone.
    """

    def __init__(
        self,
        *arguments: Any,
        moves: bool = False,
        stays_away: bool = False,
        decays: bool = False,
        snapshots: bool = False,
        saves_fail: bool = False,
        has_constants: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        has_constants = has_constants and not self.folds
        self.moves, self.stays_away, self.decays = moves, stays_away, decays
        self.snapshots, self.saves_fail = snapshots, saves_fail
        self.has_constants = has_constants
        outliving = self.peers or self.shared
        self.failures = ["software", *(["node"] if outliving else []), *(["rack"] if self.shared else [])]
        self.opening_fails, self.step_fails = 0.1, 0.02
        self.restarts = 0
        self.due: set[int] = set()
        """The ranks whose newest capture failed: until they have another base, they capture nothing else."""
        self.spares = [Node()] if moves else []
        self.in_flight: list[Callable[[], None]] = []
        """What a process had asked of the durable tier when it was killed, and is still to arrive there."""
        self.history: dict[tuple[str, int, int], State] = {}
        """What was captured: (token of the generation, version, rank) -> state."""
        self.referred: dict[tuple[str, int, int], object] = {}
        """The content of the constants that a base refers to, by the same."""
        self.trained_to = 0
        self.recover(None, 0)

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
        if self.folds:
            self.make_room()  # the movers are no further behind
        elif version % self.base_every == 0:
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

    @property
    def token(self) -> str:
        return self.lineage.branches[self.generation].token

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
            if all(self.has_room(index) and (self.folded(index) or index in self.due) for index in range(self.world)):
                return
            if self.saves_fail and not progress:
                return  # the deadline passes, and training goes on
            assert progress, "training waits for room for a base, and nothing makes any"
            progress = self.act()

    def capture(self, index: int) -> None:
        rank = self.ranks[index]
        version = rank.version
        self.history[self.token, version, index] = rank.state
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
        self.history[self.token, rank.version, index] = rank.state
        # A version gets one base: where its capture is modelled twice, both are the same.
        again = rank.node.memory.contents.shard(CommitKey(self.generation, rank.version), index)
        refers_to = self.constants(index) if again is None else again.refers_to
        rank.node.memory[ShardKey.base(self.generation, rank.version, index, refers_to)] = rank.state
        staying = [
            key
            for key in rank.node.memory
            if isinstance(key, ShardKey) and key.stream is Stream.BASE and key.rank == index
        ]
        gone = self.retention.reclaimable(self.observe(index), (0,))[0]
        assert len([key for key in staying if key not in gone]) <= BASES_MAX, "more bases than admission counted"

    def constants(self, index: int) -> tuple[int, ...]:
        """What the rank's next base refers to: now and then to new ones, or to none, since all has changed."""
        if not self.has_constants:
            return ()
        rank = self.ranks[index]
        drawn = self.random.random()
        if drawn < 0.1:
            rank.refers_to = ()
        elif drawn < 0.3 or not rank.refers_to:
            rank.refers_to = self.generation, rank.version
            rank.node.memory[ShardKey.constant(self.generation, rank.version, index)] = self.token, rank.version
        if rank.refers_to:
            generation, version = rank.refers_to
            key = ShardKey.constant(generation, version, index)
            self.referred[self.token, rank.version, index] = rank.node.memory[key]
        return rank.refers_to

    def bring_constants(self, found: Found) -> None:
        """What the recovered bases refer to comes to the first tier: the next ones may refer to it as well."""
        for index, (rank, point) in enumerate(zip(self.ranks, found.points or (), strict=False)):
            chosen = plan(point, index, found.sound(index))
            assert isinstance(chosen, Plan)
            rank.refers_to = chosen.anchor.key.refers_to
            if chosen.constants is not None:
                key = chosen.constants.key
                rank.node.memory[key] = self.tiers_of(index)[chosen.constants.tier][key]

    # Failures

    def fail(self, kind: str) -> None:
        """Every process dies; ``node`` takes one node's memory along, and what it kept for another; ``rack`` all."""
        before, promised = self.watermark(), self.promised()
        if self.random.random() < 0.5:
            # Some ranks had already captured the next version when the failure struck, others had not.
            for index in self.random.sample(range(self.world), self.random.randrange(self.world)):
                self.ranks[index].state = (*self.ranks[index].state, self.random.getrandbits(32))
                self.capture(index)
                due = self.ranks[index].version % self.base_every == 0 and not self.folds
                if due and not self.agrees and self.has_room(index):
                    self.capture_due_base(index)
        if self.shared and self.random.random() < 0.3:
            self.leave_in_flight()
        lost = {"software": [], "node": [self.random.choice(self.nodes)], "rack": self.nodes}[kind]
        for node in lost:
            self.lose(node)
        if kind == "software":
            promised = self.trained_to
        elif kind == "rack":
            promised = NEVER
        if self.decays:
            if self.random.random() < 0.4:
                self.decay()
            # What is damaged is lost; nothing else is.
            promised = min(promised, self.within_reach())
            before = before if before is not None and before.version <= promised else None
        self.recover(before, promised)

    def leave_in_flight(self) -> None:
        """The coordinator's last commit is on its way: it arrives after the next generation has opened."""
        for key in to_commit(self.observe(0), self.roles[-1].index):
            self.in_flight.append(partial(self.durable.__setitem__, key, None))

    def lose(self, node: Node, other: Node | None = None) -> None:
        other = other or Node()
        for rank in self.ranks:
            if rank.node is node:
                rank.node = other

    def decay(self) -> None:
        for _ in range(self.random.randrange(1, 4)):
            tier = self.random.choice(self.tiers())
            held = sorted(shards(tier), key=str)
            tier.damaged.update(self.random.sample(held, min(len(held), 1)))

    # What is promised, whatever the policies do

    def promised(self) -> int:
        """The newest version that the failure of any one node would leave within reach."""
        return min(map(self.left_without, self.nodes)) if self.peers or self.shared else NEVER

    def left_without(self, lost: Node) -> int:
        other = Node()
        self.lose(lost, other)
        left = self.within_reach()
        self.lose(other, lost)
        return left

    def within_reach(self, lineage: Lineage | None = None, *, anywhere: bool = False) -> int:
        """The newest version that all ranks can come to. ``anywhere``: by what lies in sight of any of them."""
        held: list[Iterable[ShardKey]] = [(source.key for source in self.whole(index)) for index in range(self.world)]
        if anywhere:
            sight = [tier for tier in self.tiers() if not self.is_away(tier)]
            everything = [key for tier in sight for key in shards(tier) if key not in tier.damaged]
            held = [[key for key in everything if key.rank == index] for index in range(self.world)]
        points = decide([Readable.of(each) for each in held], lineage or self.lineage)
        return points[0].last if points else NEVER

    def whole(self, index: int) -> set[Copy]:
        """The rank's copies that can be read."""
        return {
            Copy(tier, key)
            for tier, held in enumerate(self.tiers_of(index))
            for key in shards(held, index)
            if key not in held.damaged
        }

    # Recovery

    def recover(self, before: CommitKey | None, promised: int) -> None:
        """The processes start again. ``before``: the watermark; ``promised``: the version that must be reached."""
        self.restarts += 1
        home, spares = [rank.node for rank in self.ranks], self.spares
        moved = self.moves and self.random.random() < 0.5
        if moved:
            self.move()
        self.lose_touch()
        while True:
            try:
                found = self.meet()
                break
            except RecoveryError as refusal:
                if self.away:
                    self.away = []  # somebody sees to it
                elif moved:
                    self.put_back(home, spares)
                    moved = False
                else:
                    assert before is None, f"base {before} was committed, and the start is refused: {refusal}"
                    assert promised <= 0, f"{promised} was promised, and the start is refused: {refusal}"
                    self.wipe()
        # What lies in a node's memory is out of reach of a rank that left it.
        self.resume(found, before, NEVER if moved else promised)
        if not self.open_generation(found):
            self.put_back(home, spares)
            self.away = []
            self.recover(before, promised)

    def move(self) -> None:
        old = self.nodes
        nodes = old + self.spares
        self.random.shuffle(nodes)
        places = dict(zip(old, nodes, strict=False))
        for rank in self.ranks:
            rank.node = places[rank.node]
        self.spares = nodes[len(old) :]

    def put_back(self, home: list[Node], spares: list[Node]) -> None:
        for rank, node in zip(self.ranks, home, strict=True):
            rank.node = node
        self.spares = spares

    def lose_touch(self) -> None:
        """Some tier does not answer. If ranks may be on other nodes, the durable one does: their memory may be old."""
        self.away = [tier for tier in self.tiers() if self.is_away(tier)]
        if self.stays_away and self.random.random() < 0.5:
            kept = [node.kept for node in self.nodes] if self.peers else []
            behind = [*kept, *([self.durable] if self.shared and not self.moves else [])]
            self.away += self.random.sample(behind, min(len(behind), 1))

    def wipe(self) -> None:
        """Nothing that all ranks can read is left: the user removes what there is, and the job begins anew."""
        for tier in [*self.tiers(), *(tier for node in self.spares for tier in (node.memory, node.kept))]:
            tier.clear()
        self.in_flight = []

    def resume(self, found: Found, before: CommitKey | None, promised: int) -> None:
        points, lineage = found.points, found.past.lineage
        if points is None:
            assert before is None, f"base {before} was committed, and nothing was recovered"
            assert promised <= 0, f"{promised} was promised, and nothing was recovered"
            held = [key for tier in self.tiers() for key in shards(tier) if lineage.admits(key.generation, key.last)]
            trained = max((key.last for key in held), default=0)
            assert trained == 0, f"versions up to {trained} lie here, and they were taken for a new job"
            for rank in self.ranks:
                rank.state, rank.refers_to = (), ()
            return
        for index, (rank, point) in enumerate(zip(self.ranks, points, strict=True)):
            token = lineage.branches[point.generation].token
            rank.state = self.rebuild(point, index, found.sound(index), token)
            assert rank.state == self.history[token, point.last, index], "another state than was captured"
        if before is not None:
            if not found.past.away:
                assert lineage.admits(before.generation, before.version), "the watermark lies in another future"
            assert points[0].last >= before.version, "behind the watermark"
        assert points[0].last >= promised, f"{promised} was promised, {points[0].last} was recovered"
        seen = NEVER if self.shared else self.within_reach(lineage, anywhere=True)
        assert points[0].last >= seen, f"{seen} lies on other ranks' nodes, and {points[0].last} was recovered"

    def rebuild(self, point: RecoveryPoint, index: int, sources: frozenset[Copy], token: str) -> State:
        chosen = plan(point, index, sources)
        assert isinstance(chosen, Plan), f"rank {index}: {chosen}"
        tiers = self.tiers_of(index)
        state: State = tiers[chosen.anchor.tier][chosen.anchor.key]  # type: ignore[assignment]
        if chosen.constants is not None:
            read = tiers[chosen.constants.tier][chosen.constants.key]
            assert read == self.referred[token, point.anchor, index], "another object than the base refers to"
        for source in chosen.batches:
            steps: State = tiers[source.tier][source.key]  # type: ignore[assignment]
            for version, step in zip(source.key.versions, steps, strict=True):
                if len(state) < version <= point.last:
                    state = (*state, step)
        return state

    def open_generation(self, found: Found) -> bool:
        """``False``: all die before anything was deleted or captured."""
        past, points = found.past, found.points
        self.generation = past.taken + 1
        parent, left_at = (max(point.generation for point in points), points[0].last) if points else (0, 0)
        branch = Branch(self.generation, parent, left_at, self.world, f"token {self.restarts}")
        record = LineageRecord.of(branch, past.worth_telling(parent))
        for tier in self.tiers():
            if not self.is_away(tier):
                tier[LineageKey(self.generation)] = record
        if points and self.random.random() < self.opening_fails / 2:
            return False
        self.lineage = Lineage.of({*past.branches, branch})
        self.trained_to = left_at
        self.due.clear()
        self.clear_tiers(found, left_at if points else None)
        self.bring_constants(found)
        for arrives in self.in_flight:
            arrives()
        self.in_flight = []
        for index in range(self.world):
            if self.random.random() < 1 - self.opening_fails:
                self.capture_base(index)
            else:
                # This rank dies before its first base is whole: the generation has no anchor, its parent counts.
                self.fail(self.random.choice(self.failures[:2]))
                break
        return True

    def clear_tiers(self, found: Found, reached: int | None) -> None:
        """What each rank deletes before anything is captured (:func:`tiercheck.opening.agreement.clear_tiers`)."""
        lineage, owned = found.past.lineage, found.past.owned
        sound = [found.sound(index) for index in range(self.world)]
        points = found.points or [None] * self.world
        plans = [plan(point, index, sound[index]) if point else None for index, point in enumerate(points)]
        constants = [each.constants if isinstance(each, Plan) else None for each in plans]
        recovered = [None if each is None else each.key for each in constants]
        known = anew([Reach.of(each, self.roles, lineage) for each in sound], reached)
        for rank in self.ranks:
            rank.mark = known.mark
        promised = self.promised() if known.mark == NO_MARK else known.mark
        unsure = found.past.unsure
        failed = False
        for index in self.random.sample(range(self.world), self.world):
            for tier, held in enumerate(self.tiers_of(index)):
                if self.is_away(held) or self.roles[tier].shared:
                    continue
                if tier and self.stays_away and self.random.random() < 0.2:
                    failed = True  # the neighbour has answered, and takes no deletion: the movers make up for it
                    continue
                seen = {Copy(tier, key) for key in shards(held) if key.rank == index or key.rank not in unsure}
                gone = opening.superseded_at_opening(
                    seen, index, self.roles, lineage, known.versions, sound[index], owned, recovered[index]
                )
                for source in gone:
                    del held[source.key]
        # Of a neighbour's memory that did not answer nobody knows what a node's failure would leave.
        checked = found.points and self.peers and not (self.shared or self.saves_fail or self.decays or self.away)
        assert not checked or self.promised() >= promised, "a node's failure would cost more"
        if not found.past.away and not failed:
            self.check_freed()

    def check_freed(self) -> None:
        for index in range(self.world):
            for held in self.tiers_of(index)[: -1 if self.shared else None]:
                using = {other for other in range(self.world) if any(held is each for each in self.tiers_of(other))}
                left = {key.rank for key in shards(held) if key.stream is not Stream.CONSTANT}  # those go later
                assert left <= using, "memory of ranks that moved away is not freed"


def is_base(key: Key, generation: int, rank: int) -> bool:
    return isinstance(key, ShardKey) and key.stream is Stream.BASE and (key.generation, key.rank) == (generation, rank)
