"""Recovery of several ranks: they meet at one version, whatever each of them has lost, or all refuse."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.runtime.test_group import on_all_ranks
from tests.watched import Tamper, Watched, flipped
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import JobConflict, Mismatch, RecoveryError
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.integrations.torch import attach
from tiercheck.runtime.group import SimulatedGroup
from tiercheck.tiers.memory import MemoryDriver

WORLD = 2
CONFIG = CheckpointConfig(base_every=4, batch=2, deadline_s=30)


class Cluster:
    """Ranks as threads: a memory each, as if each were a node, and a directory that all see."""

    def __init__(self, root: Path, config: CheckpointConfig = CONFIG, tamper: Tamper | None = None) -> None:
        self.memory = f"restore-{uuid.uuid4().hex}"
        self.root = root / "durable"
        self.config = config
        wrap = None if tamper is None else lambda driver: Watched(driver, tamper)
        durable = Tier(f"nvme://{self.root}?survives=rack", wrap=wrap)
        self.hierarchy = Hierarchy.of(f"memory://{self.memory}-{{rank}}", durable)

    def run(self, last: int, *, flush_at: int | None = None, width: Callable[[int], int] = lambda _: 4) -> list[Any]:
        """A life of the job up to version ``last``, ended as by a crash; per rank its recovery and its weights."""

        def act(group: SimulatedGroup) -> tuple[Any, dict[int, list[float]]]:
            model = torch.nn.Linear(3, width(group.rank))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float(group.rank))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            checkpointer: Checkpointer = attach(model, optimizer, self.hierarchy, group=group, config=self.config)
            weights = {}
            try:
                while checkpointer.version < last:
                    step(model, optimizer, checkpointer.version + 1, group.rank)
                    checkpointer.end_iteration()
                    weights[checkpointer.version] = model.weight.flatten().tolist()
                    if checkpointer.version == flush_at:
                        checkpointer.flush()
                return checkpointer.recovery, weights
            finally:
                checkpointer.abort()

        return on_all_ranks(WORLD, act)

    def lose(self, rank: int) -> None:
        MemoryDriver.forget(f"{self.memory}-{rank}")

    def forget(self) -> None:
        for rank in range(WORLD):
            self.lose(rank)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, version: int, rank: int) -> None:
    optimizer.zero_grad()
    model(torch.full((2, 3), float(version + rank))).pow(2).sum().backward()
    optimizer.step()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.forget()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, list[float]]]:
    cluster = Cluster(tmp_path_factory.mktemp("reference"))
    outcome = [weights for _, weights in cluster.run(10)]
    cluster.forget()
    return outcome


def check(outcome: list[Any], reference: list[dict[int, list[float]]], version: int) -> None:
    for rank, (recovery, weights) in enumerate(outcome):
        assert recovery.version == version
        assert weights == {later: reference[rank][later] for later in range(version + 1, 11)}


def test_all_ranks_resume_where_they_were(cluster: Cluster, reference: list[dict[int, list[float]]]) -> None:
    cluster.run(7)
    check(cluster.run(10), reference, 7)


def test_a_rank_that_lost_its_memory_takes_the_others_back_to_what_is_durable(
    cluster: Cluster, reference: list[dict[int, list[float]]]
) -> None:
    cluster.run(7, flush_at=5)
    cluster.lose(1)
    outcome = cluster.run(10)
    # Version 6 may have been sent with its batch 5..6, or 5 alone by the flush: never more than the batch is lost.
    assert outcome[0][0].version in (5, 6)
    check(outcome, reference, outcome[0][0].version)
    assert {tier for _, tier in outcome[0][0].sources} == {"memory"}
    assert {tier for _, tier in outcome[1][0].sources} == {"nvme"}
    lost = [row for row in outcome[0][0].matrix if (row.ranks, row.tier) == (((1, 1),), "memory")]
    assert [(row.anchor, row.differentials) for row in lost] == [(False, ())]


def test_a_damaged_copy_of_one_rank_moves_all_of_them(
    cluster: Cluster, reference: list[dict[int, list[float]]]
) -> None:
    cluster.run(7, flush_at=7)
    cluster.forget()
    (batch,) = cluster.root.glob("r00001/g*/differential/*-000000000006.safetensors")
    content = bytearray(batch.read_bytes())
    content[len(content) // 2] ^= 0x10
    batch.write_bytes(content)
    outcome = cluster.run(10)
    assert outcome[0][0].version == 4
    check(outcome, reference, 4)
    assert outcome[0][0].quarantined == ()
    ((key, tier, _),) = outcome[1][0].quarantined
    assert (key, tier) == (str(batch.relative_to(cluster.root)), "nvme")


def test_a_damaged_base_falls_back_to_the_one_before(cluster: Cluster, reference: list[dict[int, list[float]]]) -> None:
    cluster.run(7, flush_at=7)
    cluster.forget()
    (base,) = cluster.root.glob("r00000/g*/base/000000000004.safetensors")
    base.write_bytes(base.read_bytes()[:-1])
    outcome = cluster.run(10)
    check(outcome, reference, 7)
    assert [recovery.point.anchor for recovery, _ in outcome] == [0, 4], "each from the newest base that it has"


LONG = CheckpointConfig(base_every=1000, batch=2, deadline_s=30)


@pytest.mark.parametrize(("bad", "reached"), [(16, 14), (10, 8)])
def test_a_copy_that_goes_bad_after_it_was_verified_moves_all_of_them(tmp_path: Path, bad: int, reached: int) -> None:
    """Rank 0 has replayed everything by then, and rank 1 some of it: both begin again with the base."""

    def tamper(key: str, nth: int, content: bytearray) -> bytearray:
        return (
            flipped(content)
            if nth == 2 and key.startswith("r00001/") and key.endswith(f"-{bad:012d}.safetensors")
            else content
        )

    cluster = Cluster(tmp_path, LONG)
    reference = [weights for _, weights in cluster.run(18, flush_at=18)]
    cluster.forget()
    cluster = Cluster(tmp_path, LONG, tamper)
    first, second = cluster.run(18)
    assert [recovery.version for recovery, _ in (first, second)] == [reached, reached]
    assert [len(recovery.quarantined) for recovery, _ in (first, second)] == [0, 1]
    for rank, (_, weights) in enumerate((first, second)):
        assert weights == {version: reference[rank][version] for version in range(reached + 1, 19)}
    cluster.forget()


def test_one_rank_with_another_model_stops_all_of_them(cluster: Cluster) -> None:
    cluster.run(5)
    first, second = cluster.run(10, width=lambda rank: 4 + rank)
    assert isinstance(first, Mismatch)
    assert isinstance(second, Mismatch)
    assert str(first) == str(second)
    for words in ("weight was (4, 3), and is (5, 3) here", "against"):
        assert words in str(first)


def test_nothing_in_common_is_refused_by_all(cluster: Cluster) -> None:
    cluster.run(5, flush_at=5)
    cluster.lose(0)
    for base in cluster.root.glob("r00000/g*/base/*.safetensors"):
        base.unlink()
    for outcome in cluster.run(10):
        assert isinstance(outcome, RecoveryError)
        assert "there is no base that every rank can read" in str(outcome)
        assert "rank 1: memory, nvme" in str(outcome)


def test_two_jobs_that_start_at_once_on_different_nodes_do_not_both_run(tmp_path: Path) -> None:
    """Each chooses generation 1; the conditional put of its record in the shared tier lets one of them have it."""
    shared = f"nvme://{tmp_path}/durable?survives=rack"

    def act(group: SimulatedGroup) -> Any:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        class Alone(SimulatedGroup):
            """A job of one rank, that opens its generation just when the other one does."""

            def __init__(self) -> None:
                self.rank, self.world_size = 0, 1

            def all_gather(self, message: bytes, *, what: str, deadline_s: float) -> list[bytes]:
                if what == "choosing the generation":
                    group.all_gather(b"", what="both have chosen", deadline_s=30)
                return [message]

        job = Alone()
        elsewhere = f"memory://node-{uuid.uuid4().hex}"
        return attach(model, optimizer, Hierarchy.of(elsewhere, shared), group=job, config=CONFIG)

    # The claim of a node would see the other process; these two stand for processes of two nodes.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiercheck.runtime.front.ProcessLock", NoClaim)
        outcomes = on_all_ranks(2, act)
    winners = [each for each in outcomes if isinstance(each, Checkpointer)]
    losers = [each for each in outcomes if isinstance(each, JobConflict)]
    for winner in winners:
        winner.abort()
    assert len(winners) == len(losers) == 1
    assert "another job opened generation 1" in str(losers[0])


class NoClaim:
    def __init__(self, tiers: object, rank: int, start: str) -> None: ...

    def release(self) -> None: ...
