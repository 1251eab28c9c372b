"""What goes, and what stays, where the ranks have to agree on it: without a shared tier, and at opening."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import until
from tests.training import Training, faulty, memory
from tests.unit.opening.test_failing_ranks import ranks
from tiercheck import kernels, keys
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import DeadlineExceeded, GroupError, RecoveryError, SaveError, TierError, Transient
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.keys import ShardKey, Stream
from tiercheck.opening.agreement import Agreement, clear_tiers
from tiercheck.recovery.finding.past import Past
from tiercheck.recovery.finding.survey import Survey
from tiercheck.recovery.ranks import Ranks
from tiercheck.recovery.restored import Restored
from tiercheck.replication.mover import MoverStatus
from tiercheck.runtime.front import ThreadScheduler, run
from tiercheck.runtime.group import BlockingGroup, SimulatedGroup, SingleProcess
from tiercheck.testing.faults import Fault, FaultPlan, FaultyDriver, Moment, Point
from tiercheck.tiers.registry import make_driver

BASE_EVERY = 4
DEADLINE_S = 30.0


class Job:
    """Two ranks, each with memory of its own and another tier that outlives its node; no tier is shared."""

    def __init__(self, root: Path, *, shared: bool = False) -> None:
        self.memories = [memory(), memory()]
        apart = [f"nvme://{root}/{rank}?survives=node" for rank in (0, 1)]
        self.others = [f"nvme://{root}?survives=rack"] * 2 if shared else apart

    def start(
        self,
        rank: int,
        group: SimulatedGroup,
        *,
        first: Tier | str = "",
        other: Tier | str = "",
        deadline_s: float = DEADLINE_S,
    ) -> tuple[Training, Checkpointer]:
        training = Training()
        provider = ModuleProvider(training.model, training.optimizer)
        hierarchy = Hierarchy.of(first or self.memories[rank], other or self.others[rank])
        config = CheckpointConfig(base_every=BASE_EVERY, batch=2, keep_last=1, deadline_s=deadline_s)
        return training, Checkpointer(provider, hierarchy, group=group, config=config)

    def bases(self, url: str, rank: int) -> list[tuple[int, int]]:
        """(generation, version) of a rank's bases in a tier."""
        return sorted((key.generation, key.first) for key in shards(url) if key.rank == rank and is_base(key))


def train(
    training: Training, checkpointer: Checkpointer, last: int, *, writes: Callable[[int], bool] = lambda _: False
) -> None:
    """``writes``: behind which steps the loop writes to the parameters, so that the version needs a base."""
    provider = ModuleProvider(training.model, training.optimizer)
    for version in range(checkpointer.version + 1, last + 1):
        training.backward(version)
        checkpointer.capture(version, provider.gradients())
        training.optimizer.step()
        if writes(version):
            checkpointer.stepped(version)
            with torch.no_grad():
                for parameter in training.model.parameters():
                    parameter.clamp_(-0.5, 0.5)
        checkpointer.complete(version)


def shards(url: str) -> list[ShardKey]:
    async def listed() -> list[ShardKey]:
        async with make_driver(url) as driver:
            return [key async for info in driver.list() if isinstance(key := keys.parse(info.key), ShardKey)]

    return asyncio.run(listed())


def is_base(key: ShardKey) -> bool:
    return key.stream is Stream.BASE


def same_version(ended: dict[int, object]) -> object:
    assert ended[0] == ended[1], ended
    return ended[0]


def test_a_rank_that_dies_again_and_again_before_its_opening_base_costs_nothing(tmp_path: Path) -> None:
    """The other rank has bases of every attempt by then; the one that both have must not be deleted for them."""
    job = Job(tmp_path)

    def first_life(rank: int, group: SimulatedGroup) -> int:
        training, checkpointer = job.start(rank, group)
        train(training, checkpointer, 6)
        checkpointer.flush()
        checkpointer.abort()
        return checkpointer.version

    def short_life(rank: int, group: SimulatedGroup) -> int:
        dies = rank == 0
        first = faulty(job.memories[rank], lambda at: dies and at.call == "publish" and "base" in str(at.key))
        _, checkpointer = job.start(rank, group, first=first)
        if dies:
            with pytest.raises(SaveError):
                run(checkpointer._job.recorder.finish_base())
        else:
            checkpointer.flush()
        checkpointer.abort()
        assert checkpointer.recovery is not None
        return checkpointer.recovery.version

    assert same_version(ranks(first_life)) == 6
    for _ in range(4):
        assert same_version(ranks(short_life)) == 6
        for rank in (0, 1):
            assert len(job.bases(job.memories[rank], rank)) <= 3


def test_starts_that_end_before_any_version_exists_fill_no_memory(tmp_path: Path) -> None:
    """Rank 0 never gets its first base into its memory: no rank begins, and what rank 1 has captured is taken back."""
    job = Job(tmp_path)

    def short_life(rank: int, group: SimulatedGroup) -> int:
        first = faulty(job.memories[0], lambda at: at.call == "publish" and "base" in str(at.key)) if not rank else ""
        with pytest.raises(RecoveryError if rank else SaveError, match="version 0 could not be saved: no room"):
            job.start(rank, group, first=first)
        return len(job.bases(job.memories[rank], rank))

    for _ in range(4):
        assert same_version(ranks(short_life)) == 0


def test_training_waits_for_the_rank_whose_bases_do_not_arrive_and_names_it(tmp_path: Path) -> None:
    job = Job(tmp_path)
    plan = FaultPlan.full(after_puts=3)  # the lineage record, the opening base and one differential

    def life(rank: int, group: SimulatedGroup) -> str:
        stuck = Tier(job.others[rank], wrap=lambda driver: FaultyDriver(driver, plan)) if rank else job.others[rank]
        training, checkpointer = job.start(rank, group, other=stuck, deadline_s=2.0)
        try:
            with pytest.raises(SaveError) as caught:
                train(training, checkpointer, 10 * BASE_EVERY)
        finally:
            checkpointer.abort()
        assert len(job.bases(job.memories[rank], rank)) <= 3
        return str(caught.value)

    for said in ranks(life).values():
        assert "furthest behind is rank 1 (nvme" in str(said), said
    # Nothing is lost all the same: both have what the mark needs.
    lasting = ranks(lambda rank, group: recovered(job, rank, group, first=memory()))
    assert same_version(lasting) in (0, 1, BASE_EVERY)  # the third put is of a differential, or of the next base


def recovered(job: Job, rank: int, group: SimulatedGroup, first: str = "") -> int:
    _, checkpointer = job.start(rank, group, first=first)
    checkpointer.abort()
    return -1 if checkpointer.recovery is None else checkpointer.recovery.version


def test_what_all_ranks_have_twice_lets_older_bases_go(tmp_path: Path) -> None:
    job = Job(tmp_path)

    def life(rank: int, group: SimulatedGroup) -> list[int]:
        training, checkpointer = job.start(rank, group)
        train(training, checkpointer, 5 * BASE_EVERY + 1)
        checkpointer.close()
        return [version for _, version in job.bases(job.memories[rank], rank)]

    for kept in ranks(life).values():
        assert isinstance(kept, list)
        assert kept[-2:] == [4 * BASE_EVERY, 5 * BASE_EVERY]
        assert len(kept) <= 3
    job.memories[0] = memory()  # a node is lost
    assert same_version(ranks(lambda rank, group: recovered(job, rank, group))) == 5 * BASE_EVERY + 1


@pytest.mark.parametrize("dies", ["before its opening base is whole", "after a few versions"])
def test_a_crash_loop_does_not_fill_the_first_tier(tmp_path: Path, dies: str) -> None:
    """No durable tier takes anything all the while."""
    url, crashes = memory(), 8
    versions: list[int] = []
    for crash in range(crashes):
        plan = FaultPlan.full(after_puts=1)  # the lineage record
        durable = Tier(f"nvme://{tmp_path}?survives=rack", wrap=lambda driver, plan=plan: FaultyDriver(driver, plan))
        fails = dies.startswith("before") and crash > 0
        first = faulty(url, lambda at, fails=fails: fails and at.call == "publish" and "base" in str(at.key))
        training = Training()
        checkpointer = training.attach(Hierarchy.of(first, durable), base_every=50)
        versions.append(checkpointer.version)
        if not fails:
            for version in range(checkpointer.version + 1, checkpointer.version + 4):
                training.step(version)
        checkpointer.abort()
        bases = [key for key in shards(url) if is_base(key)]
        assert len(bases) <= 3, [str(key) for key in bases]
        assert len(shards(url)) <= 3 + 3 * 3
    trained = [0, *[3] * (crashes - 1)] if dies.startswith("before") else list(range(0, 3 * crashes, 3))
    assert versions == trained


def test_a_crash_loop_before_the_first_commit_fills_no_shared_tier(tmp_path: Path) -> None:
    """Each life, the bases of some ranks come there, and the job ends before all have."""
    job = Job(tmp_path, shared=True)
    lives = 5

    def life(rank: int, group: SimulatedGroup, *, fails: bool) -> int:
        refused = faulty(job.others[rank], lambda at: at.call == "put" and "base" in str(at.key))
        training, checkpointer = job.start(rank, group, other=refused if fails and not rank else "")
        recovered = checkpointer.version
        if fails and rank:
            generation = checkpointer.generation
            until(lambda: own(rank)[-1][0] == generation and len(own(rank)) <= 3, "the base of this life, and no pile")
        elif not fails:
            train(training, checkpointer, max(6, recovered))
            checkpointer.flush()
        checkpointer.abort()
        return recovered

    def own(rank: int) -> list[tuple[int, int]]:
        return job.bases(job.others[rank], rank)

    assert same_version(ranks(lambda rank, group: life(rank, group, fails=False))) == 0
    committed = [own(rank) for rank in (0, 1)]
    for _ in range(lives):
        assert same_version(ranks(lambda rank, group: life(rank, group, fails=True))) == 6
        assert set(committed[1]) <= set(own(1)), "what is committed stays"
    assert len(own(1)) == len(committed[1]) + 1
    assert own(0) == committed[0]
    job.memories = [memory(), memory()]
    assert same_version(ranks(lambda rank, group: life(rank, group, fails=False))) == 6


def test_what_a_rank_left_on_another_node_goes_before_anything_is_captured(tmp_path: Path) -> None:
    """The ranks come back on each other's nodes, and the memory there is as full as it may be."""
    job = Job(tmp_path, shared=True)

    def first_life(rank: int, group: SimulatedGroup) -> int:
        training, checkpointer = job.start(rank, group)
        train(training, checkpointer, BASE_EVERY + 1)
        checkpointer.close()
        return checkpointer.version

    ranks(first_life)
    used = [sum(1 for _ in shards(url)) for url in job.memories]
    assert all(used)
    job.memories.reverse()

    def second_life(rank: int, group: SimulatedGroup) -> int:
        _, checkpointer = job.start(rank, group)
        found = {key.rank for key in shards(job.memories[rank])}
        checkpointer.abort()
        assert found <= {rank}, found
        assert checkpointer.recovery is not None
        return checkpointer.recovery.version

    assert same_version(ranks(second_life)) == BASE_EVERY + 1


@pytest.mark.parametrize("comes_back", [False, True])
def test_what_lies_in_a_tier_that_was_away_at_the_survey_is_not_deleted(tmp_path: Path, comes_back: bool) -> None:
    """Two ranks of one node, whose other tier is away for rank 1 while they look: until the end, or until a generation
    opens. Their memory serves the recovery, and is cleared all the same."""
    job = Job(tmp_path)
    job.memories[1] = job.memories[0]
    job.others[1] = job.others[0]

    kernels.warm_up()  # what a deadline of a few seconds has no time for

    def first_life(rank: int, group: SimulatedGroup) -> int:
        stuck = faulty(job.others[rank], lambda at: at.call == "put" and "/base/000000000004." in str(at.key))
        training, checkpointer = job.start(rank, group, other=stuck, deadline_s=2.0)
        train(training, checkpointer, 6)
        with pytest.raises(SaveError):
            checkpointer.flush()
        checkpointer.abort()
        return checkpointer.version

    def second_life(rank: int, group: SimulatedGroup) -> int:
        asked: list[str] = []

        def strikes(at: Point) -> bool:
            asked.append(at.call)
            return at.moment is Moment.BEFORE and (at.call == "put" if comes_back and "put" in asked else True)

        away = FaultPlan((Fault(strikes, lambda: Transient("it is away"), 2**30),))
        other = Tier(job.others[rank], wrap=lambda driver: FaultyDriver(driver, away)) if rank else job.others[rank]
        _, checkpointer = job.start(rank, group, other=other, deadline_s=2.0)
        checkpointer.abort()
        assert checkpointer.recovery is not None
        return checkpointer.recovery.version

    assert same_version(ranks(first_life)) == 6
    before = {key for key in shards(job.others[1]) if key.rank == 1}
    assert same_version(ranks(second_life)) == 6
    assert {key for key in shards(job.others[1]) if key.rank == 1} >= before
    assert (1, 0) not in job.bases(job.memories[1], 1)


async def test_a_tier_that_was_away_when_the_rank_looked_is_not_cleared(tmp_path: Path) -> None:
    """Nothing was recovered, so that no shard is needed any more; of what lies in that tier nobody knows."""
    old = str(ShardKey.base(1, 4, 0))
    hierarchy = Hierarchy.of(memory(), f"nvme://{tmp_path}/own?survives=node").open()
    async with hierarchy:
        for tier in hierarchy.tiers:
            await tier.driver.put(old, [b"x"])
        past = Past.of([Survey(away=((1, "it is away"),))], hierarchy.roles, "")
        alone = Ranks(BlockingGroup(SingleProcess()), AtOnce(), DEADLINE_S)
        await clear_tiers(alone, hierarchy, Restored(None, past), generation=2)
        left = [[info.key async for info in tier.driver.list()] for tier in hierarchy.tiers]
    assert left == [[], [old]]


class AtOnce:
    """A scheduler that calls in the loop of the test, and waits as long as it takes."""

    async def call(self, work: Coroutine[Any, Any, object], what: str, deadline_s: float) -> object:
        return await work


class Told:
    """A mover that can come to the first versions, and does not answer once it is told that both ranks can."""

    def __init__(self, *, hangs: bool) -> None:
        self.status = MoverStatus(reach=((0, BASE_EVERY),))
        self.hangs = hangs

    async def agree(self, mark: int) -> None:
        if self.hangs and mark == BASE_EVERY:
            raise DeadlineExceeded("the agent 'node' (process 7) lives, but has not answered Agree within 2 s")


def test_a_mover_that_does_not_answer_when_the_mark_is_agreed_on_is_heard_of_by_all() -> None:
    def life(rank: int, group: SimulatedGroup) -> None:
        scheduler = ThreadScheduler()
        try:
            agreement = Agreement(BlockingGroup(group), Told(hangs=rank == 1), scheduler, DEADLINE_S)
            run(agreement.settle(2 * BASE_EVERY))
        finally:
            run(scheduler.close())

    ended = ranks(life)
    assert isinstance(ended[1], DeadlineExceeded)
    assert isinstance(ended[0], RecoveryError)
    assert "rank 1 reports: the agent 'node' (process 7) lives, but has not answered" in str(ended[0])


def test_a_rank_that_closes_after_a_failed_save_tells_those_who_wait_for_it_why(tmp_path: Path) -> None:
    job = Job(tmp_path)

    def life(rank: int, group: SimulatedGroup) -> None:
        def strikes(at: Point) -> bool:
            return rank == 0 and at.moment is Moment.BEFORE and f"-{BASE_EVERY:012}" in str(at.key)

        plan = FaultPlan((Fault(strikes, lambda: TierError("the memory is broken"), 2**30),))
        broken = Tier(job.memories[rank], wrap=lambda driver: FaultyDriver(driver, plan))
        training, checkpointer = job.start(rank, group, first=broken)
        try:
            train(training, checkpointer, BASE_EVERY)
        finally:
            checkpointer.close() if rank == 0 else checkpointer.abort()

    for error in ranks(life).values():
        assert isinstance(error, GroupError | SaveError), error
        assert f"rank 0 had failed before: version {BASE_EVERY} could not be saved: the memory is broken" in str(error)


@pytest.mark.parametrize("apart", [False, True], ids=["memory alone", "memory and a tier that outlives the node"])
@pytest.mark.parametrize("every", [1, 3])
def test_bases_that_are_needed_between_those_that_are_due_make_room_for_one_another(
    tmp_path: Path, every: int, apart: bool
) -> None:
    """Rank 0 alone needs them, or both do, in each step; and what all ranks can come to stays."""
    job = Job(tmp_path)
    last = 5 * BASE_EVERY + 3

    def start(rank: int, group: SimulatedGroup) -> tuple[Training, Checkpointer]:
        training = Training()
        provider = ModuleProvider(training.model, training.optimizer)
        hierarchy = Hierarchy.of(job.memories[rank], *([job.others[rank]] if apart else []))
        config = CheckpointConfig(base_every=2 * BASE_EVERY, batch=2, keep_last=1, deadline_s=DEADLINE_S)
        return training, Checkpointer(provider, hierarchy, group=group, config=config)

    def first_life(rank: int, group: SimulatedGroup) -> bytes:
        training, checkpointer = start(rank, group)
        train(training, checkpointer, last, writes=lambda version: version % every == 0 and (every == 1 or not rank))
        checkpointer.flush()
        checkpointer.abort()
        assert len(job.bases(job.memories[rank], rank)) <= 4
        assert not apart or len(job.bases(job.others[rank], rank)) <= 4
        return training.parameters()

    def second_life(rank: int, group: SimulatedGroup) -> bytes:
        training, checkpointer = start(rank, group)
        checkpointer.abort()
        assert checkpointer.recovery is not None
        assert checkpointer.recovery.version == last
        return training.parameters()

    first = ranks(first_life)
    assert ranks(second_life) == first
