"""Two ranks that capture snapshots, of which one fails to save something: they still meet at the newest version."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.recorded import fresh
from tests.training import Training, faulty, memory
from tests.unit.opening.test_failing_ranks import ranks
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.keys import ShardKey
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.lineage import Lineage
from tiercheck.recovery.reading.reader import Reader
from tiercheck.runtime.group import SimulatedGroup
from tiercheck.streams.tensors.tensor_state import TensorReader
from tiercheck.types import Fidelity

LAST = 18


@pytest.mark.parametrize("failing", ["base/000000000010", "snapshot/000000000011-000000000012"])
def test_what_fails_on_one_rank_does_not_part_it_from_the_other(tmp_path: Path, failing: str) -> None:
    urls = [memory(), memory()]
    trained: dict[int, bytes] = {}

    def life(rank: int, group: SimulatedGroup, last: int) -> tuple[int, bool, float]:
        training = Training()
        provider = ModuleProvider(training.model, training.optimizer)
        first = faulty(urls[rank], lambda at: at.call == "publish" and failing in str(at.key), times=1 - rank)
        config = CheckpointConfig(codec="snapshot", base_every=10, batch=5, on_save_error="warn")
        hierarchy = Hierarchy.of(first, f"nvme://{tmp_path}?survives=rack")
        checkpointer = Checkpointer(provider, hierarchy, group=group, config=config)
        for version in range(checkpointer.version + 1, last + 1):
            training.backward(version)
            checkpointer.capture(version, provider.gradients())
            training.optimizer.step()
            checkpointer.complete(version)
        assert checkpointer.stats.failed_saves == (1 if last and not rank else 0)
        checkpointer.abort()
        recovery = checkpointer.recovery
        if recovery is None:
            trained[rank] = training.parameters()
            return LAST, False, 0.0
        assert recovery.fidelity is Fidelity.APPROXIMATE
        (base, _), *_ = recovery.sources
        assert ("base" in base) and (recovery.notes[0].startswith("version 18 is base"))
        error = max(abs(a - b) for a, b in zip(floats(training.parameters()), floats(trained[rank]), strict=True))
        return recovery.version, recovery.point.by_snapshot, error

    ranks(lambda rank, group: life(rank, group, LAST))
    ended = ranks(lambda rank, group: life(rank, group, 0))
    for rank in (0, 1):
        version, by_snapshot, error = ended[rank]
        assert (version, by_snapshot) == (LAST, True)
        assert error < 2e-3


def floats(content: bytes) -> list[float]:
    return memoryview(content).cast("f").tolist()


def test_a_snapshot_of_later_versions_in_another_tier_is_not_another_copy() -> None:
    """Else its tier would be given up as silent after half of the time, for nothing."""

    async def check() -> None:
        async with Hierarchy.of(memory()).open() as hierarchy:
            reader = Reader(hierarchy, 0, 1.0, TensorReader(fresh()), Lineage(()))
            wanted = Copy(1, ShardKey.snapshot(1, 0, 40, 0))
            assert not reader.copies.is_in_another_tier(wanted, {wanted, Copy(0, ShardKey.snapshot(1, 0, 50, 0))})
            assert reader.copies.is_in_another_tier(wanted, {wanted, Copy(0, wanted.key)})

    asyncio.run(check())
