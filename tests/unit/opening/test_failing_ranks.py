"""A rank that fails tells the others, which do not wait for it; and races and records that went wrong."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training import Training, memory
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import DeadlineExceeded, JobConflict, RecoveryError, SaveError, Transient
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.keys import LineageKey
from tiercheck.opening.startup import _Startup
from tiercheck.policy.recovery.lineage import Branch
from tiercheck.replication.objects.generation import open_generation
from tiercheck.runtime.group import SimulatedGroup
from tiercheck.testing.faults import FaultPlan, FaultyDriver
from tiercheck.tiers.shm.namespaces import namespace_path, remove_namespace
from tiercheck.types import ObjectInfo, Payload, PutMode

DEADLINE_S = 30.0


def ranks(body: Callable[[int, SimulatedGroup], Any]) -> dict[int, Any]:
    """What ``body`` returns or raises on each of two ranks."""
    ended: dict[int, Any] = {}

    def one(rank: int, group: SimulatedGroup) -> None:
        try:
            ended[rank] = body(rank, group)
        except Exception as error:
            ended[rank] = error

    threads = [threading.Thread(target=one, args=(rank, group)) for rank, group in enumerate(SimulatedGroup.of(2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return ended


def checkpointer_of(group: SimulatedGroup, hierarchy: Hierarchy, **replaced: Any) -> Checkpointer:
    training = Training()
    provider = ModuleProvider(training.model, training.optimizer)
    for method, instead in replaced.items():
        setattr(provider, method, instead)
    config = CheckpointConfig(deadline_s=DEADLINE_S)
    return Checkpointer(provider, hierarchy, group=group, config=config)


@pytest.mark.parametrize("method", ["load", "refresh", "restore_host_state", "identity"])
def test_a_rank_that_fails_in_its_recovery_tells_the_others(method: str) -> None:
    urls = [memory(), memory()]
    ended = ranks(lambda rank, group: checkpointer_of(group, Hierarchy.of(urls[rank])).abort())
    assert ended == {0: None, 1: None}

    def fails(*_: Any, **__: Any) -> None:
        raise ArithmeticError("out of memory")

    def second_life(rank: int, group: SimulatedGroup) -> None:
        checkpointer_of(group, Hierarchy.of(urls[rank]), **({method: fails} if rank == 1 else {})).abort()

    ended = ranks(second_life)
    assert isinstance(ended[1], ArithmeticError)
    assert isinstance(ended[0], RecoveryError)
    assert "rank 1 reports: ArithmeticError: out of memory" in str(ended[0])


def test_a_rank_that_fails_when_all_is_restored_tells_the_others() -> None:
    urls = [memory(), memory()]

    def life(rank: int, group: SimulatedGroup, **failing: Any) -> None:
        training = Training()
        provider = ModuleProvider(training.model, training.optimizer)
        if rank == 1 and "identity" in failing:
            identity = provider.identity
            provider.identity = lambda: failing["identity"](identity)
        caveats = failing.get("caveats", tuple) if rank == 1 else tuple
        config = CheckpointConfig(deadline_s=DEADLINE_S)
        checkpointer = Checkpointer(provider, Hierarchy.of(urls[rank]), group=group, config=config, caveats=caveats)
        if not failing:
            training.backward(1)
            checkpointer.capture(1, provider.gradients())
            training.optimizer.step()
            checkpointer.complete(1)
        checkpointer.abort()

    def no_identity(identity: Callable[[], Any]) -> Any:
        """When the fidelity is worked out; not before."""
        if sys._getframe(2).f_code.co_name == "reached":
            raise ArithmeticError("not this time")
        return identity()

    def no_caveats() -> tuple[str, ...]:
        raise ArithmeticError("not this time")

    ended = ranks(life)
    assert ended == {0: None, 1: None}
    for failing in ({"identity": no_identity}, {"caveats": no_caveats}):
        ended = ranks(lambda rank, group, failing=failing: life(rank, group, **failing))
        assert isinstance(ended[1], ArithmeticError), ended
        assert isinstance(ended[0], RecoveryError)
        assert "rank 1 reports: ArithmeticError: not this time" in str(ended[0])


def test_a_rank_that_cannot_flush_tells_the_others(tmp_path: Path) -> None:
    def life(rank: int, group: SimulatedGroup) -> None:
        plan = FaultPlan.full(after_puts=1) if rank else FaultPlan()
        durable = Tier(f"nvme://{tmp_path}?survives=rack", wrap=lambda driver: FaultyDriver(driver, plan))
        checkpointer = checkpointer_of(group, Hierarchy.of(memory(), durable))
        if rank == 1:  # the other one may be slow
            checkpointer._job.recorder._requests._deadline_s = 0.5
        checkpointer.close()

    ended = ranks(life)
    assert isinstance(ended[1], SaveError)
    assert isinstance(ended[0], RecoveryError)
    assert "rank 1 reports: flushing the tiers" in str(ended[0])


class Silent(FaultyDriver):
    """Takes no lineage record, and does not say so."""

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        if key.startswith("job/lineage"):
            await asyncio.Event().wait()
        return await super().put(key, payload, mode=mode)


@pytest.mark.parametrize("late", ["opening the generation", "beginning to save"])
def test_a_rank_that_runs_out_of_time_gives_the_generation_back_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """Its own time-out is no failure of the ranks' group: they still agree, at once."""
    begin, opens = _Startup.begin, late == "opening the generation"

    async def begin_late(startup: _Startup, *given: Any) -> Any:
        if startup.ranks.rank == 1:
            await startup.ranks.call(asyncio.Event().wait(), "making the first base")
        return await begin(startup, *given)

    if not opens:
        monkeypatch.setattr(_Startup, "begin", begin_late)

    def life(rank: int, group: SimulatedGroup) -> None:
        silent = Tier(memory(), wrap=lambda driver: Silent(driver, FaultPlan()))
        hierarchy = Hierarchy.of(silent if rank == 1 and opens else memory(), f"nvme://{tmp_path}?survives=rack")
        training = Training()
        provider = ModuleProvider(training.model, training.optimizer)
        Checkpointer(provider, hierarchy, group=group, config=CheckpointConfig(deadline_s=2.0))

    ended = ranks(life)
    assert isinstance(ended[1], Transient if opens else DeadlineExceeded), ended
    assert isinstance(ended[0], RecoveryError), ended
    assert f"{late}: rank 1 reports: " in str(ended[0])
    assert not [each for each in (tmp_path / "job").rglob("*") if each.is_file()]


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield name
    remove_namespace(name)


def test_versions_whose_lineage_is_lost_are_not_passed_over(name: str) -> None:
    hierarchy = Hierarchy.of(f"shm://{name}?size=64MiB")
    for version in (1, 2):
        training = Training()
        checkpointer = training.attach(hierarchy)
        training.step(version)
        checkpointer.abort()
    record = namespace_path(name) / str(LineageKey(2))
    record.write_bytes(record.read_bytes()[:-1])
    with pytest.raises(RecoveryError, match=r"versions of generation 2, but its record job/lineage/g000002 is missing"):
        Training().attach(hierarchy)


def test_who_loses_the_race_for_a_generation_leaves_no_record_of_its_own(tmp_path: Path) -> None:
    async def race() -> list[str]:
        durable = f"nvme://{tmp_path}?survives=rack"
        async with Hierarchy.of(memory(), durable).open() as winner, Hierarchy.of(memory(), durable).open() as loser:
            await open_generation(winner, Branch(1, 0, 0, 1, "winner"))
            with pytest.raises(JobConflict):
                await open_generation(loser, Branch(1, 0, 0, 1, "loser"))
            return [info.key async for info in loser.first.driver.list()]

    assert asyncio.run(race()) == []
