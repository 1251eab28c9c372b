"""What the ranks do with what they found: an error is no damage, damage costs what it hits, a past is no new job."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.failing import Failing
from tests.training import Training, memory
from tests.unit.recovery.test_restorer import CONFIG, WORLD, Cluster, check, reference
from tests.watched import rewritten
from tiercheck.checkpointer import Checkpointer
from tiercheck.errors import (
    CapacityExceeded,
    Mismatch,
    NotFound,
    NothingListens,
    RecoveryError,
    TierError,
    Transient,
    Unauthorized,
)
from tiercheck.hierarchy import Hierarchy
from tiercheck.keys import LineageKey, ShardKey
from tiercheck.policy.observation import Copy, Role
from tiercheck.policy.recovery.lineage import Branch, Lineage, LineageRecord, strangers
from tiercheck.recovery.finding import refusals
from tiercheck.recovery.finding.past import Past
from tiercheck.recovery.finding.survey import Survey
from tiercheck.recovery.finding.told import Told
from tiercheck.replication.objects.records import seal, unseal
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.wrappers.base import Call, Operation
from tiercheck.types import Survives

__all__ = ["reference"]

SOON = replace(CONFIG, deadline_s=2)


class Trouble:
    """The durable tier's: what :attr:`says` returns is raised."""

    def __init__(self) -> None:
        self.says: Callable[[Call], Exception | None] = lambda call: None
        self.raised = 0

    def __call__(self, call: Call) -> Exception | None:
        error = self.says(call)
        self.raised += error is not None
        return error


@pytest.fixture
def trouble() -> Trouble:
    return Trouble()


@pytest.fixture
def cluster(tmp_path: Path, trouble: Trouble) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    memory, durable = cluster.hierarchy.tiers
    cluster.hierarchy = Hierarchy.of(memory, replace(durable, wrap=lambda driver: Failing(driver, trouble)))
    yield cluster
    cluster.forget()


def failing(operation: Operation, part: str, error: Callable[[], TierError], times: int = 10**9) -> Any:
    left = [times]

    def says(call: Call) -> Exception | None:
        if call.operation is operation and part in (call.key or "") and left[0]:
            left[0] -= 1
            return error()
        return None

    return says


ERRORS = [
    lambda: Transient("503 slow down"),
    lambda: Unauthorized("403 forbidden"),
    lambda: TierError("the call took over 10 s"),
]


BASE, BATCH = "r00001/g000001/base/000000000004.safe", "r00001/g000001/differential/"


@pytest.mark.parametrize(("part", "error"), [*((BASE, error) for error in ERRORS), (BATCH, ERRORS[0])])
def test_an_error_that_passes_costs_nothing(
    cluster: Cluster, trouble: Trouble, reference: Any, part: str, error: Callable[[], TierError]
) -> None:
    cluster.run(7, flush_at=7)
    cluster.forget()
    trouble.says = failing(Operation.GET, part, error, times=2)
    outcome = cluster.run(10)
    assert trouble.raised == 2
    check(outcome, reference, 7)
    assert [recovery.quarantined for recovery, _ in outcome] == [(), ()]


def test_an_error_that_stays_refuses_and_nothing_older_is_restored(
    cluster: Cluster, trouble: Trouble, reference: Any
) -> None:
    cluster.run(7, flush_at=7)
    cluster.forget()
    cluster.config = SOON
    trouble.says = failing(Operation.GET, BASE, ERRORS[1])
    first, second = cluster.run(10)
    for outcome in (first, second):
        assert isinstance(outcome, RecoveryError)
        for word in ("rank 1", "tier nvme", "r00001/g000001/base/000000000004.safetensors", str(ERRORS[1]())):
            assert word in str(outcome)
    assert not list(cluster.root.glob("r*/g000002")), "nothing was begun"
    trouble.says = lambda call: None
    check(cluster.run(10), reference, 7)


def test_another_copy_is_read_meanwhile(cluster: Cluster, trouble: Trouble, reference: Any) -> None:
    cluster.run(7, flush_at=7)
    cluster.lose(1)
    trouble.says = failing(Operation.GET, "r00000/", ERRORS[0])
    check(cluster.run(10), reference, 7)


def test_a_copy_not_found_once_is_asked_for_again(cluster: Cluster, trouble: Trouble, reference: Any) -> None:
    cluster.run(7, flush_at=7)
    cluster.forget()
    trouble.says = failing(Operation.GET, "r00001/g000001/base/", lambda: NotFound("not yet"), times=1)
    outcome = cluster.run(10)
    check(outcome, reference, 7)
    assert outcome[1][0].quarantined == ()


def lineages(cluster: Cluster) -> list[Path]:
    return sorted((cluster.root / "job" / "lineage").iterdir())


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: b"T" + content[1:]])
def test_a_damaged_lineage_record_costs_nothing_that_another_copy_tells(
    cluster: Cluster, reference: Any, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    cluster.run(5)
    cluster.run(7)
    for record in lineages(cluster):
        record.write_bytes(damage(record.read_bytes()))
    outcome = cluster.run(10)
    check(outcome, reference, 7)
    assert {(key, tier) for key, tier, _ in outcome[0][0].quarantined} == {
        ("job/lineage/g000001", "nvme"),
        ("job/lineage/g000002", "nvme"),
    }
    assert "lineage record is set aside" in caplog.text and "job/lineage/g000001" in caplog.text


def test_a_damaged_record_that_nobody_needs_blocks_no_restart(cluster: Cluster, reference: Any) -> None:
    """Its number counts as taken: the next generation passes it over."""
    cluster.run(7)
    for name, content in (("g000002", b"garbage"), ("g000005", seal(LineageKey(4), {}))):
        (cluster.root / "job" / "lineage" / name).write_bytes(content)
    outcome = cluster.run(10, flush_at=10)
    check(outcome, reference, 7)
    assert list(cluster.root.glob("r*/g000006")) and (cluster.root / "job" / "lineage" / "g000006").is_file()


def test_a_directory_under_a_records_name_is_passed_over(cluster: Cluster, reference: Any) -> None:
    cluster.run(7)
    (cluster.root / "job" / "lineage" / "g000002").mkdir()
    (cluster.root / "job" / "lineage" / "g000003").mkdir()
    (cluster.root / "job" / "lineage" / "g000003" / "foreign").write_text("what is this")
    check(cluster.run(10), reference, 7)


def test_two_histories_of_one_number_are_refused_by_name(cluster: Cluster, tmp_path: Path) -> None:
    """The memory of one job, and the store of another."""
    cluster.run(5)
    other = Cluster(tmp_path / "other")
    other.run(6)
    shutil.rmtree(cluster.root)
    other.root.rename(cluster.root)
    for outcome in cluster.run(10):
        assert isinstance(outcome, RecoveryError)
        assert "two jobs have each opened a generation 1" in str(outcome)
        assert "memory of rank 0" in str(outcome) and "nvme" in str(outcome)
    other.forget()


def test_a_shard_of_another_history_is_set_aside(cluster: Cluster, tmp_path: Path, reference: Any) -> None:
    cluster.run(7, flush_at=7)
    cluster.forget()
    other = Cluster(tmp_path / "other")
    other.run(7, flush_at=7)
    name = "r00001/g000001/base/000000000004.safetensors"
    shutil.copy(other.root / name, cluster.root / name)
    outcome = cluster.run(10)
    check(outcome, reference, 7)
    ((key, tier, reason),) = outcome[1][0].quarantined
    assert (key, tier) == (name, "nvme")
    assert "written by another job" in reason
    other.forget()


def swap_memories(cluster: Cluster) -> None:
    """The nodes stay, and each rank comes back on the other one."""
    first, second = (MemoryDriver(f"{cluster.memory}-{rank}").store for rank in range(2))
    first.objects, second.objects = second.objects, first.objects


@pytest.mark.parametrize("on_nothing_left", ["refuse", "restart"])
def test_ranks_on_each_others_nodes_are_no_new_job(tmp_path: Path, on_nothing_left: str) -> None:
    cluster = Cluster(tmp_path, replace(CONFIG, on_nothing_left=on_nothing_left))
    cluster.hierarchy = Hierarchy.of(cluster.hierarchy.tiers[0])
    cluster.run(7)
    swap_memories(cluster)
    for outcome in cluster.run(10):
        assert isinstance(outcome, RecoveryError)
        assert "rank 0: rank 1's up to 7 in memory" in str(outcome)
        assert "rank 1: rank 0's up to 7 in memory" in str(outcome)
        assert "start the ranks on the nodes where they were" in str(outcome)
    swap_memories(cluster)
    assert [recovery.version for recovery, _ in cluster.run(10)] == [7, 7]
    cluster.forget()


def test_a_lineage_that_had_versions_is_no_new_job(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.run(5, flush_at=5)
    cluster.run(7)
    cluster.forget()
    for generation in cluster.root.glob("r*/g*"):
        shutil.rmtree(generation)
    for outcome in cluster.run(10):
        assert isinstance(outcome, RecoveryError)
        assert "generation 2 left generation 1 at version 5" in str(outcome)
    cluster.forget()


def test_commits_without_the_versions_are_no_new_job(tmp_path: Path) -> None:
    """Of a job's only generation nothing else tells what was trained in it."""

    def life(last: int, **config: Any) -> tuple[Checkpointer, list[int]]:
        url, training = memory(), Training()
        checkpointer = training.attach(Hierarchy.of(url, f"nvme://{tmp_path}?survives=rack"), base_every=4, **config)
        for version in range(1, last + 1):
            training.step(version)
        checkpointer.close()
        MemoryDriver.forget(url.removeprefix("memory://"))
        committed = [int(path.name) for path in tmp_path.glob("job/commits/g*/*")]
        for rank in tmp_path.glob("r*"):
            shutil.rmtree(rank)
        return checkpointer, committed

    _, committed = life(6)
    assert max(committed) == 4
    with pytest.raises(RecoveryError, match=r"versions up to 4 were saved.*tell of version 4"):
        life(6)
    life(0, on_nothing_left="restart")
    checkpointer, _ = life(1)
    assert checkpointer.recovery is None, "what was given up tells of nothing"


def test_what_is_left_of_a_job_that_captured_nothing_is_a_new_job(cluster: Cluster) -> None:
    cluster.run(0)
    cluster.forget()
    for generation in cluster.root.glob("r*/g*"):
        shutil.rmtree(generation)
    assert [recovery for recovery, _ in cluster.run(3)] == [None, None]


def test_where_nothing_is_left_a_job_may_begin_anew(
    tmp_path: Path, reference: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A node was lost before its first base had left it. The new lineage is the one that later recoveries know."""
    cluster = Cluster(tmp_path, replace(CONFIG, base_every=100, batch=100))
    memory = cluster.hierarchy.tiers[0]
    cluster.hierarchy = Hierarchy.of(memory)
    cluster.run(7)
    cluster.lose(0)
    for outcome in cluster.run(10):
        assert isinstance(outcome, RecoveryError)
        assert "rank 0: nothing; rank 1: memory" in str(outcome)
        assert 'on_nothing_left="restart"' in str(outcome)
    cluster.config = replace(cluster.config, on_nothing_left="restart")
    for recovery, weights in cluster.run(4):
        assert recovery is None
        assert set(weights) == {1, 2, 3, 4}
    assert "given up, and training begins anew at version 0" in caplog.text
    outcome = cluster.run(10)
    assert [recovery.point.generation for recovery, _ in outcome] == [2, 2]
    check(outcome, reference, 4)
    cluster.forget()


def test_generations_of_another_history_are_found() -> None:
    first, second = Branch(1, 0, 0, 1, "a" * 16), Branch(18, 1, 7, 1, "b" * 16)
    lineage = Lineage.of([first, second])
    assert strangers(lineage, recorded=[1, 2], captured=[1, 2]) == [2], "it went on without us"
    assert strangers(lineage, recorded=[1, 2, 18], captured=[1, 2]) == [], "a start that failed before ours"
    assert strangers(lineage, recorded=[1, 2], captured=[1]) == [], "nothing was captured in it"


def test_what_ranks_of_another_number_have_lost_is_no_new_job(cluster: Cluster) -> None:
    cluster.run(5, flush_at=5)
    record = LineageKey(1)
    for path in lineages(cluster):
        path.unlink()
    cluster.forget()
    (cluster.root / str(record)).write_bytes(seal(record, Branch(1, 0, 0, WORLD + 1, "a" * 16)))
    for outcome in cluster.run(10):
        assert isinstance(outcome, RecoveryError)


class Away:
    """A store that is down, for every call, opening included."""

    def __init__(self, operations: set[Operation] | None = None) -> None:
        self.operations = operations

    def __call__(self, call: Call) -> Exception | None:
        if self.operations is None or call.operation in self.operations:
            return Transient("503 the store is down")
        return None


def test_a_first_start_fails_at_once_where_nothing_listens_at_the_stores_address(
    cluster: Cluster, trouble: Trouble
) -> None:
    trouble.says = lambda call: NothingListens("the connection was refused", tier="s3://bucket")
    for outcome in cluster.run(1):
        assert isinstance(outcome, RecoveryError)
        for words in ("tier nvme: the connection was refused (tier 's3://bucket')", "correct its address"):
            assert words in str(outcome)
    opened, room, looked, looked_again = WORLD, 1, WORLD, WORLD  # rank 0 asks how much room there is
    assert trouble.raised == opened + room + looked + looked_again, "once more when nobody found a past, and no more"


class Hurried(asyncio.SelectorEventLoop):
    """Its clock runs so many times as fast."""

    SPEED = 20.0

    def __init__(self) -> None:
        super().__init__()
        select = self._selector.select
        self._selector.select = lambda timeout=None: select(timeout and timeout / self.SPEED)

    def time(self) -> float:
        return self.SPEED * super().time()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercheck.runtime.loop_thread.asyncio.new_event_loop", Hurried)


@pytest.mark.usefixtures("hurried")
def test_a_first_start_waits_for_a_store_that_throttles_and_says_so(
    cluster: Cluster, trouble: Trouble, caplog: pytest.LogCaptureFixture
) -> None:
    """For 35 s every listing, and then every put for a while, is refused with an error that passes."""
    cluster.config = replace(CONFIG, deadline_s=300)
    began: list[float] = []

    def slow_down(call: Call) -> Exception | None:
        began.append(time.monotonic())
        passed_s = Hurried.SPEED * (began[-1] - began[0])
        until_s = {Operation.LIST: 35.0, Operation.PUT: 40.0}.get(call.operation, 0.0)
        return Transient("503 SlowDown") if passed_s < until_s else None

    trouble.says = slow_down
    assert [recovery for recovery, _ in cluster.run(2)] == [None, None]
    assert "tier nvme is waited for, for up to 300 s: 503 SlowDown" in caplog.text


def test_a_store_where_nothing_listens_for_a_while_is_waited_for_where_there_is_a_past(
    cluster: Cluster, trouble: Trouble, reference: Any
) -> None:
    cluster.run(7, flush_at=7)
    cluster.lose(1)
    trouble.says = lambda call: NothingListens("the connection was refused") if trouble.raised < 4 * WORLD else None
    check(cluster.run(10), reference, 7)


def test_an_outage_of_the_store_does_not_keep_a_job_from_resuming_out_of_memory(
    cluster: Cluster, trouble: Trouble, reference: Any
) -> None:
    cluster.run(7, flush_at=5)
    cluster.config = replace(CONFIG, deadline_s=4)
    trouble.says = Away()
    outcome = cluster.run(8)
    assert [recovery.version for recovery, _ in outcome] == [7, 7]
    assert "tier nvme of rank 0 could not be asked what it holds (503" in outcome[0][0].notes[0]
    assert not list(cluster.root.glob("job/lineage/g000018")), "what could not be seen was not written to"
    trouble.says = lambda call: None
    check(cluster.run(10, flush_at=10), reference, 8)
    told = unseal(lineages(cluster)[-1].read_bytes(), LineageRecord, key=LineageKey(19), tier="nvme").told
    assert [branch.generation for branch in told] == [1, 18], "the next one's record tells of it"
    cluster.forget()
    check(cluster.run(10), reference, 10)


@pytest.mark.usefixtures("hurried")
def test_the_generation_is_recorded_before_anything_is_written(
    cluster: Cluster, trouble: Trouble, reference: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.run(5, flush_at=5)
    cluster.config = replace(CONFIG, deadline_s=200)
    put: list[str] = []

    def says(call: Call) -> Exception | None:
        """The store is back once training is under way."""
        if "is recorded in tier nvme later" not in caplog.text and call.operation in (Operation.LIST, Operation.PUT):
            return Transient("503 the store is down")
        if call.operation is Operation.PUT:
            put.append(str(call.key))
        return None

    trouble.says = says
    outcome = cluster.run(10, flush_at=10)
    assert "generation 18 is recorded in tier nvme later" in caplog.text
    check(outcome, reference, 5)
    assert put[0] == "job/lineage/g000018", "fenced first"


def test_another_job_that_went_on_in_the_store_meanwhile_has_won(cluster: Cluster, trouble: Trouble) -> None:
    cluster.run(5, flush_at=5)
    elsewhere = Cluster(cluster.root.parent)
    elsewhere.run(7, flush_at=7)  # on other nodes, from the store
    elsewhere.forget()
    cluster.config = replace(CONFIG, deadline_s=4)
    trouble.says = Away()
    cluster.run(6)
    trouble.says = lambda call: None
    for outcome in cluster.run(10):
        assert isinstance(outcome, RecoveryError)
        assert "nvme holds versions of generation 2" in str(outcome)


def test_what_memory_does_not_serve_waits_for_the_store_and_is_refused(cluster: Cluster, trouble: Trouble) -> None:
    cluster.run(7, flush_at=7)
    cluster.lose(1)
    cluster.config = SOON
    trouble.says = Away()
    for outcome in cluster.run(10):
        assert isinstance(outcome, RecoveryError)
        for word in ("tier nvme", "rank 1", "503 the store is down", "nothing is restored"):
            assert word in str(outcome)


def test_a_damaged_copy_in_memory_is_not_replaced_by_something_older_while_the_store_is_away(
    cluster: Cluster, trouble: Trouble, reference: Any
) -> None:
    cluster.run(7, flush_at=7)
    store = MemoryDriver(f"{cluster.memory}-1").store
    (key,) = (key for key in store.objects if "r00001/g000001/differential/000000000006-" in key)
    whole = store.objects[key]
    store.objects[key] = replace(whole, content=memoryview(bytes(whole.content)[:-1] + b"?"))
    cluster.config = SOON
    trouble.says = Away()
    for outcome in cluster.run(10):
        assert isinstance(outcome, RecoveryError)
        assert "it may hold something newer" in str(outcome)
    trouble.says = lambda call: None
    outcome = cluster.run(10)
    check(outcome, reference, 7)
    assert len(outcome[1][0].quarantined) == 1


def test_a_copy_of_no_use_is_not_forgotten_when_the_store_is_asked_again(
    cluster: Cluster, trouble: Trouble, caplog: pytest.LogCaptureFixture
) -> None:
    """It is whole, in memory, and newer than what the store has: nothing older is restored in its place."""
    cluster.run(7, flush_at=5)
    for path in cluster.root.glob("r*/g000001/differential/00000000000[67]-*"):
        path.unlink()
    store = MemoryDriver(f"{cluster.memory}-1").store
    (key,) = (key for key in store.objects if "r00001/g000001/differential/000000000006-" in key)

    def unknown(name: str, value: Any) -> Any:
        if name.endswith("/record"):
            value["gradients"] = {master: {**each, "codec": "tomorrow"} for master, each in value["gradients"].items()}
        return value

    whole = store.objects[key]
    content = memoryview(rewritten(bytearray(whole.content), objects=unknown))
    store.objects[key] = replace(whole, content=content)
    held = set(store.objects)
    cluster.config = SOON
    trouble.says = lambda call: None if "is not used from tier" in caplog.text else Transient("503 the store is down")
    for outcome in cluster.run(10):
        assert isinstance(outcome, Mismatch)
        assert "there is no codec 'tomorrow'" in str(outcome)
    assert trouble.raised
    assert set(store.objects) == held


@pytest.mark.parametrize("error", [CapacityExceeded("no space left"), Unauthorized("read-only")])
def test_a_full_or_read_only_store_does_not_stop_what_memory_can_serve(
    cluster: Cluster, trouble: Trouble, reference: Any, error: TierError
) -> None:
    cluster.run(7, flush_at=7)
    trouble.says = lambda call: error if call.operation is Operation.PUT else None

    assert [recovery.version for recovery, _ in cluster.run(8)] == [7, 7]
    cluster.forget()
    for outcome in cluster.run(10):
        assert isinstance(outcome, RecoveryError | TierError), "memory did not serve it"
        assert str(error) in str(outcome)


def seen_by(rank: int, tier: int, base: int, last: int) -> Survey:
    """A base and the differentials up to ``last``, in one tier; the durable one is away."""
    shards = [ShardKey.base(1, base, rank), *(ShardKey.differential(1, v, v, rank) for v in range(base + 1, last + 1))]
    found = frozenset(Copy(tier, key) for key in shards)
    return Survey(sources=found, branches=frozenset({(0, Branch(1, 0, 0, 2, "a" * 16))}), away=((2, "503"),))


@pytest.mark.parametrize(("base", "last", "serves"), [(20, 24, True), (10, 15, False)])
def test_a_neighbours_memory_serves_without_the_store_where_no_newer_base_can_be_committed_there(
    base: int, last: int, serves: bool
) -> None:
    """A node is lost while the store is away. What its neighbour has may be behind a base that was committed."""
    roles = [Role(0, "shm", Survives.PROCESS), Role(1, "peer", Survives.NODE), Role(2, "s3", Survives.RACK)]
    whole = seen_by(0, 0, 20, 25)
    old = frozenset(Copy(0, key) for key in (source.key for source in seen_by(0, 0, 10, 19).sources))
    past = Past.of([replace(whole, sources=whole.sources | old), seen_by(1, 1, base, last)], roles, "here")
    version = past.version()
    assert version == last
    assert not past.in_memory(version), "its own memory is lost: the store is asked until the deadline"
    assert past.covers(version) is serves
    assert "rank 0, tier s3: 503" in str(refusals.cannot_ask(past, version))


def test_a_snapshot_tells_of_the_base_that_it_was_made_for() -> None:
    """That base may have been committed in the store that is away."""
    roles = [Role(0, "shm", Survives.PROCESS), Role(1, "peer", Survives.NODE), Role(2, "s3", Survives.RACK)]
    survey = seen_by(0, 0, 10, 10)
    past = Past.of([survey], roles, "here")
    assert past.covers(past.version())
    later = Copy(0, ShardKey.snapshot(1, 20, 22, 0))
    past = Past.of([replace(survey, sources=survey.sources | {later})], roles, "here")
    assert not past.covers(past.version())


ROLES = [Role(0, "shm", Survives.PROCESS), Role(1, "peer", Survives.NODE)]


def past_of(*ranks: list[tuple[int, ShardKey]], branches: list[Branch], away: bool = False) -> Past:
    """By rank, what lies in its tiers. ``away``: that of rank 0's neighbour does not answer."""
    return Past.of(surveys_of(*ranks, branches=branches, away=away), ROLES, "here")


def surveys_of(*ranks: list[tuple[int, ShardKey]], branches: list[Branch], away: bool = False) -> list[Survey]:
    return [
        Survey(
            sources=frozenset(Copy(tier, key) for tier, key in held if key.rank == rank),
            others=frozenset(Copy(tier, key) for tier, key in held if key.rank != rank),
            branches=frozenset((0, branch) for branch in branches),
            generations=frozenset((tier, key.generation) for tier, key in held),
            away=((1, "it does not answer"),) if away and not rank else (),
        )
        for rank, held in enumerate(ranks)
    ]


def test_what_neighbours_kept_does_not_pass_over_a_newer_past_on_other_ranks_nodes() -> None:
    """Each rank came back on the other's node, and finds an old base of its own among what that node kept for it."""
    old = [(1, ShardKey.base(1, 4, rank)) for rank in (0, 1)]
    new = [(0, ShardKey.differential(1, 9, 9, rank)) for rank in (0, 1)]
    branches = [Branch(1, 0, 0, 2, "a" * 16)]
    past = past_of([old[0], new[1]], [old[1], new[0]], branches=branches)
    assert past.version() == 4
    with pytest.raises(RecoveryError, match=r"versions up to 9 of every rank .* version 4 only .* up to 9 in shm"):
        refusals.check(past)
    refusals.check(past_of([old[0]], [old[1], new[0]], branches=branches))  # of rank 1 there is nothing newer anywhere


def test_a_generation_that_captured_nothing_cuts_nothing_off_while_a_tier_is_away() -> None:
    held = [[(0, ShardKey.base(1, 6, rank))] for rank in (0, 1)]
    old = [[*each, (0, ShardKey.base(1, 0, rank))] for rank, each in enumerate(held)]
    branches = [Branch(1, 0, 0, 2, "a" * 16), Branch(2, 1, 0, 2, "b" * 16)]
    past = past_of(*old, branches=branches, away=True)
    assert past.version() == 0
    assert not past.in_memory(0)
    assert not past.covers(0)
    assert past_of(*old, branches=branches).version() == 6


def test_a_past_of_which_every_copy_is_damaged_is_no_new_job() -> None:
    base = ShardKey.base(1, 6, 0)
    (survey,) = surveys_of([(0, base)], branches=[Branch(1, 0, 0, 1, "a" * 16)])
    past = Past.of([survey], ROLES, "here")
    left = replace(survey, sources=frozenset())
    past = past.after({0: Told.of(left, ["shm", "peer"], 0, {Copy(0, base)})})
    assert past.version() is None
    with pytest.raises(RecoveryError, match="versions up to 6 were saved"):
        refusals.check_nothing_is_lost(past, restart=False)


def test_what_is_on_other_ranks_nodes_is_no_advice_if_other_ranks_have_saved(caplog: pytest.LogCaptureFixture) -> None:
    """Each rank sees the other's newest shard, and of a third one, which another layout had, there is no base."""
    seen = [[(0, ShardKey.differential(1, 9, 9, rank))] for rank in (1, 0)]
    past = past_of(*seen, branches=[Branch(1, 0, 0, 2, "a" * 16)])
    with pytest.raises(RecoveryError, match="have the agents there answer"):
        refusals.check_nothing_is_lost(past, restart=True)
    with pytest.raises(RecoveryError, match=r"no base of rank 2.*on_nothing_left="):
        refusals.check_nothing_is_lost(past, restart=False, lacking="no base of rank 2")
    refusals.check_nothing_is_lost(past, restart=True, lacking="no base of rank 2")
    assert "They are given up, and training begins anew" in caplog.text


def test_other_nodes_are_asked_only_if_the_ranks_own_memory_does_not_lead_to_the_newest_version() -> None:
    def shards(rank: int, last: int, generation: int = 1) -> list[ShardKey]:
        steps = (ShardKey.differential(generation, version, version, rank) for version in range(11, last + 1))
        return [ShardKey.base(generation, 10, rank), *steps]

    def in_tiers(*held: tuple[int, list[ShardKey]]) -> list[tuple[int, ShardKey]]:
        return [(tier, key) for tier, keys in held for key in keys]

    branches = [Branch(1, 0, 0, 2, "a" * 16)]
    placed = in_tiers((0, shards(0, 14)), (1, shards(0, 14))), in_tiers((0, shards(1, 13)), (1, shards(1, 13)))
    assert not past_of(*placed, branches=branches).asks_other_nodes, "each sees its own"
    swapped = in_tiers((0, shards(1, 13)), (1, shards(1, 13))), in_tiers((0, shards(0, 14)), (1, shards(0, 14)))
    assert past_of(*swapped, branches=branches).asks_other_nodes, "each is on the other's node"
    assert past_of([], [], branches=[]).asks_other_nodes, "nothing is here: it may be elsewhere"
    unseen = [*branches, Branch(2, 1, 13, 2, "b" * 16)]
    assert past_of(*placed, branches=unseen).asks_other_nodes, "a generation was opened, and nothing of it is here"
    # What this rank has of an older generation leads to a version, and others see something newer of it.
    later = [*branches, Branch(2, 1, 12, 2, "b" * 16)]
    stale = (
        in_tiers((0, shards(0, 12)), (0, shards(1, 16, generation=2))),
        in_tiers((0, shards(1, 12)), (0, shards(0, 16, generation=2))),
    )
    past = past_of(*stale, branches=later)
    assert past.version() == 12
    assert past.in_memory(12)
    assert past.asks_other_nodes
