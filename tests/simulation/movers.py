"""The ranks of a simulated cluster, what each sees, and what their movers do: one action at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from tests.simulation.tiers import Node, Tier
from tiercheck.keys import CommitKey, Key, LineageKey, MarkerKey, ShardKey, Stream, own_prefixes
from tiercheck.policy import watermark as marks
from tiercheck.policy.commit import COORDINATOR, superseded, to_commit, to_mark
from tiercheck.policy.folding import Fold, next_fold, waiting
from tiercheck.policy.guard import checked_deletions
from tiercheck.policy.observation import Contents, Observation, Role
from tiercheck.policy.peers import RankLocation, peer_of
from tiercheck.policy.placement import Placement, Transfer
from tiercheck.policy.policies import kept_by
from tiercheck.policy.recovery.agreement import NO_MARK, needs_agreement
from tiercheck.policy.recovery.lineage import Lineage, LineageRecord, strangers
from tiercheck.policy.watermark import Retention
from tiercheck.types import Survives

NOTHING = Contents()
State = tuple[int, ...]
"""A state is the sequence of the random steps that led to it."""


@dataclass(frozen=True)
class Decision:
    """What a rank decided, and what it saw. Policies are pure: while it sees the same, it decides the same."""

    seen: Observation
    tiers: list[Tier]
    question: object
    answer: Any

    def holds(self, seen: Observation, tiers: list[Tier], question: object) -> bool:
        same = self.question == question and self.seen == seen
        return same and all(one is other for one, other in zip(self.tiers, tiers, strict=True))


@dataclass
class Rank:
    node: Node
    state: State = ()
    mark: int | None = NO_MARK
    """What its mover was told."""
    refers_to: tuple[int, ...] = ()
    """The generation and version of the constants to which its next base may refer."""

    @property
    def version(self) -> int:
        return len(self.state)


class Movers:
    """``world`` ranks, ``per_node`` on each node. All that happens is drawn from ``seed``.

    ``shared``: there is a durable tier that all ranks see. ``peers``: each rank's objects are kept by the node of its
    peer, a rank on the next node. ``folds``: bases are folded, each few versions one for the first tier alone.
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
        per_node: int = 1,
        folds: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.world, self.per_node, self.base_every = world, per_node, base_every
        places = [RankLocation(f"node {index // per_node}") for index in range(world)]
        self.peer = [peer_of(index, places) for index in range(world)]
        assert not peers or None not in self.peer, "a node alone has no peer"
        survive = [Survives.PROCESS, *([Survives.NODE] if peers else []), *([Survives.RACK] if shared else [])]
        self.roles = tuple(Role(index, each.name, each) for index, each in enumerate(survive))
        self.peers, self.shared = peers, shared
        self.agrees = needs_agreement(self.roles, world)
        self.folds = folds
        self.placement = Placement(batch, interval=base_every, fold_every=1 + seed % 3) if folds else Placement(batch)
        self.keep_last = self.random.choice([1, 2, 3])
        self.keep_every = self.random.choice([0, 0, base_every])
        self.retention = Retention(kept_by(self.keep_last, self.keep_every), self.placement)
        self.outage = False
        """The durable tier takes nothing."""
        self.away: list[Tier] = []
        """Tiers that did not answer when the present generation began, and have not answered since."""
        nodes = [Node() for _ in range(0, world, per_node)]
        self.ranks = [Rank(nodes[index // per_node]) for index in range(world)]
        self.durable = Tier()
        self.generation = 0
        self.lineage = Lineage(())
        self.decisions: dict[tuple[str, int], Decision] = {}
        """What each rank decided last."""

    @property
    def nodes(self) -> list[Node]:
        """Where the ranks run."""
        return list(dict.fromkeys(rank.node for rank in self.ranks))

    def tiers_of(self, index: int) -> list[Tier]:
        peer = self.peer[index]
        return [
            self.ranks[index].node.memory,
            *([self.ranks[peer].node.kept] if self.peers and peer is not None else []),
            *([self.durable] if self.shared else []),
        ]

    def tiers(self) -> list[Tier]:
        return [tier for index in range(self.world) for tier in self.tiers_of(index)]

    def is_away(self, tier: Tier) -> bool:
        return any(tier is each for each in self.away)

    def observe(self, index: int) -> Observation:
        """Of a tier that has not answered yet the rank knows nothing."""
        contents = tuple(
            NOTHING
            if self.is_away(tier)
            else tier.listed(self.prefixes(index))
            if tier is self.durable
            else tier.contents
            for tier in self.tiers_of(index)
        )
        mark = self.ranks[index].mark if self.agrees else None
        return Observation(self.roles, contents, index, self.world, self.generation, self.lineage, mark, True)

    def prefixes(self, index: int) -> tuple[str, ...]:
        """What a rank lists of a tier that all ranks share."""
        return own_prefixes(index, coordinator=index == COORDINATOR)

    def watermark(self) -> CommitKey | None:
        return marks.watermark(self.observe(0))

    def undrained(self, index: int) -> int:
        return self.placement.undrained(self.observe(index))

    def has_room(self, index: int) -> bool:
        seen = self.observe(index)
        return self.undrained(index) < 2 and self.retention.has_room(seen, self.reclaimable(seen)[0])

    def reclaimable(self, seen: Observation) -> dict[int, list[Key]]:
        """What nothing needs any more, by tier: asked for when the rank wants room, and when its mover decides."""
        found: dict[int, list[Key]] = self.decided("reclaimable", seen, lambda: self.retention.reclaimable(seen))
        return found

    def decided(self, about: str, seen: Observation, decide: Callable[[], Any], *more: object) -> Any:
        """What ``decide`` answers, or has answered when the rank saw the same."""
        tiers, question = self.tiers_of(seen.rank), (self.retention, *more)
        last = self.decisions.get((about, seen.rank))
        if last is None or not last.holds(seen, tiers, question):
            last = self.decisions[about, seen.rank] = Decision(seen, tiers, question, decide())
        return last.answer

    def folded(self, index: int) -> bool:
        """Whether no base of the rank is due that is still to be folded."""
        seen = self.observe(index)
        return not self.folds or not waiting(seen, self.due_to_fold(index))

    def due_to_fold(self, index: int) -> range:
        """What the rank has left to its mover."""
        return range(self.base_every, self.ranks[index].version + 1, self.base_every)

    def next_fold(self, seen: Observation) -> Fold | None:
        return next_fold(seen, self.due_to_fold(seen.rank), self.placement.fold_every, self.base_every)

    # What the movers do

    def act(self, *, closing: bool = False) -> bool:
        """One action of some rank's mover; ``False`` where no rank has anything to do."""
        if self.away and (closing or self.random.random() < 0.05):
            self.answer()
            return True
        order = list(range(self.world))
        self.random.shuffle(order)
        for index in order:
            seen = self.observe(index)
            assert superseded(seen) is None
            actions = self.actions(index, seen, closing)
            if actions:
                self.random.choice(actions)()
                return True
        if self.away:
            self.answer()
            return True
        return False

    def answer(self) -> None:
        """Tiers that were away answer. Before anything else the movers record the generation there."""
        for tier in self.away:
            captured = [key.generation for key in tier if isinstance(key, ShardKey)]
            others = strangers(self.lineage, tier.recorded, captured)
            assert tier is not self.durable or not others, "another job went on"
            self.record(tier)
        self.away = []

    def record(self, tier: Tier) -> None:
        """The generation, with what it knows of its ancestors: some opened while the tier did not answer."""
        if LineageKey(self.generation) not in tier:
            branches = self.lineage.branches
            tier[LineageKey(self.generation)] = LineageRecord.of(branches[self.generation], branches.values())

    def actions(self, index: int, seen: Observation, closing: bool) -> list[Callable[[], None]]:
        tiers = self.tiers_of(index)
        blocked = {role.index for role in self.roles if self.is_away(tiers[role.index])}
        blocked |= {role.index for role in self.roles if role.shared and self.outage}
        return self.decided("actions", seen, lambda: self.decide(tiers, seen, closing, blocked), closing, blocked)

    def decide(
        self, tiers: list[Tier], seen: Observation, closing: bool, blocked: Collection[int]
    ) -> list[Callable[[], None]]:
        transfers = self.retention.wanted(seen, self.placement.transfers(seen, closing=closing))
        found: list[Callable[[], None]] = [
            partial(self.do_transfer, tiers, transfer)
            for transfer in transfers
            if transfer.target_tier not in blocked
            if transfer.target.stream is not Stream.BASE or transfer.target == first_base(transfers, transfer)
        ]
        for role in self.roles:
            if role.index not in blocked:
                found += [partial(self.do_mark, shard) for shard in to_mark(seen, role.index)]
                found += [partial(self.do_commit, seen.rank, key) for key in to_commit(seen, role.index)]
        fold = self.next_fold(seen) if self.folds else None
        if fold is not None and self.has_room(seen.rank):
            found.append(partial(self.do_fold, tiers[0], fold))
        reclaimable = self.reclaimable(seen)
        assert not checked_deletions(seen, reclaimable, "retention")[1], "what is deleted is needed"
        for tier, gone in reclaimable.items():
            if tier not in blocked:
                found += [
                    partial(self.do_delete, tiers[tier], seen.rank, key) for key in gone[:1]
                ]  # in the policy's order
        return found

    def do_transfer(self, tiers: list[Tier], transfer: Transfer) -> None:
        sources = [tiers[transfer.source_tier][key] for key in transfer.sources]
        content: object = sources[0]
        if transfer.target.stream is Stream.DIFFERENTIAL:
            content = tuple(step for source in sources for step in cast(State, source))
        tiers[transfer.target_tier][transfer.target] = content

    def do_fold(self, memory: Tier, fold: Fold) -> None:
        state = cast(State, memory[fold.base])
        for key in fold.differentials:
            state = (*state, *cast(State, memory[key]))
        base = fold.base
        memory[ShardKey.base(base.generation, fold.version, base.rank, base.refers_to)] = state

    def do_mark(self, shard: ShardKey) -> None:
        assert shard in self.durable
        self.durable[MarkerKey(CommitKey.of(shard), shard.rank, refers_to=shard.refers_to)] = None

    def do_commit(self, index: int, key: CommitKey) -> None:
        assert index == 0
        for rank in range(self.world):
            shard = self.durable.contents.shard(key, rank)
            assert shard is not None, "committed, but not whole"
            assert self.durable.contents.completes(shard), "committed, and what it refers to is not there"
        self.durable[key] = None

    def do_delete(self, tier: Tier, index: int, key: Key) -> None:
        del tier[key]


def first_base(transfers: list[Transfer], like: Transfer) -> ShardKey:
    """Bases go to a tier one after the other."""
    bases = (each.target for each in transfers if each.target_tier == like.target_tier)
    return next(target for target in bases if target.stream is Stream.BASE)
