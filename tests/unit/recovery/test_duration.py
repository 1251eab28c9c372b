"""How long a recovery would take: a range that rests on what was measured, and nothing is written for it."""

from __future__ import annotations

import logging
import re
import shutil
import threading
import uuid
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch

import tiercheck
from tests.archived import LAST, Left
from tests.unmapped_driver import UnmappedDriver
from tiercheck.config import CheckpointConfig
from tiercheck.errors import NotFound
from tiercheck.hierarchy import Hierarchy, OpenTier
from tiercheck.integrations.torch import attach
from tiercheck.keys import ShardKey
from tiercheck.policy.observation import Copy
from tiercheck.recovery import duration as durations
from tiercheck.recovery.duration import TierRate, duration
from tiercheck.streams.replay.rate import replay_rate
from tiercheck.streams.state import ReplayRate
from tiercheck.streams.tensors.provider import Identity, OptimizerIdentity
from tiercheck.streams.tensors.tensor_state import TensorState
from tiercheck.tiers.memory import MemoryDriver


def sizes_of(archive: Any, chosen: Any) -> dict[Copy, int]:
    return {copy: archive.inventory.nbytes(copy) for plan in chosen.plans for copy in plan.sources}


def rate(archive: Any, slow: float, fast: float, latency_s: float = 0.0) -> TierRate:
    return TierRate("nvme", 0, 0, (slow, fast), latency_s, 0)


def test_the_range_is_from_each_rank_by_itself_to_all_sharing_one_rate(finished: Left) -> None:
    with tiercheck.open(finished.url) as archive:
        chosen = archive.plan()
        sizes = [[archive.inventory.nbytes(each) for each in plan.sources] for plan in chosen.plans]
        rates, replay = [rate(archive, 100.0, 200.0, 0.5)], ReplayRate((10.0, 20.0), True)
        tiers, nbytes = archive._hierarchy.tiers, sizes_of(archive, chosen)
        found = duration(chosen.plans, tiers, nbytes, rates, elements=26, replay=replay)
        shortest = max(sum(each) for each in sizes) / 200
        twice = sum(each[0] + 2 * sum(each[1:]) for each in sizes) / 100
        assert found.seconds == pytest.approx((shortest, twice + 0.5 * 2 * (1 + 2) + 26 / 10))
        twofold = duration(chosen.plans, tiers, nbytes, rates, alike=2)
        assert twofold.seconds == pytest.approx((shortest, 2 * (twice + 0.5 * 2 * (1 + 2))))
        mapping = [OpenTier(0, "nvme", MemoryDriver("expected"))]
        mapped = duration(chosen.plans, mapping, nbytes, rates, elements=26, replay=replay)
        assert mapped.seconds == pytest.approx((shortest, sum(map(sum, sizes)) / 100 + 0.5 * 4 + 26 / 10))
        slow = ReplayRate((1e-3, 1e-2), True)
        long = duration(chosen.plans, tiers, nbytes, rates, elements=26, replay=slow)
        assert long.seconds is not None
        assert long.seconds[0] == 26 / 1e-2, "the replay takes longer than the reading, and goes on meanwhile"


def test_parts_of_the_very_objects_are_read_and_nothing_is_written(
    finished: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durations, "PROBE_NBYTES", 5000)
    before = sorted((path, path.stat().st_mtime_ns) for path in finished.root.rglob("*"))
    with tiercheck.open(finished.url) as archive:
        chosen = archive.plan(LAST)
        found = archive.duration(chosen)
        (tier,) = found.tiers
        assert (tier.tier, tier.objects, tier.probed_nbytes) == ("nvme", 4, 3 * 5000)
        assert tier.nbytes == sum(archive.inventory.nbytes(each) for plan in chosen.plans for each in plan.sources)
        assert found.seconds is not None
        assert 0 < found.seconds[0] <= found.seconds[1]
        assert (found.steps, found.elements) == (1, 26)
        assert found.replay is not None
        assert found.replay.kernel, "AdamW's"
        assert archive.duration(archive.plan(12)).replay is None, "a base: nothing is replayed"
    assert sorted((path, path.stat().st_mtime_ns) for path in finished.root.rglob("*")) == before


def test_a_slow_tier_is_asked_for_no_more_than_it_takes_to_know(finished: Left) -> None:
    ticks = count(step=3)
    with tiercheck.open(finished.url) as archive:
        probing = durations.probe(
            archive._hierarchy.tiers,
            sizes_of(archive, archive.plan()),
            deadline_s=30,
            clock=lambda: float(next(ticks)),
        )
        (tier,) = archive._call(probing)
    assert tier.latency_s == 3
    assert tier.bytes_per_s == (tier.probed_nbytes / 3,) * 2, "one object"


def test_what_cannot_be_measured_is_told_and_no_time_is_made_up(left: Left) -> None:
    with tiercheck.open(left.url) as archive:
        chosen = archive.plan()
        shutil.rmtree(left.root / "r00000")
        found = archive.duration(chosen)
    assert found.seconds is None
    assert any(each.startswith("nvme: ") for each in found.unknown)
    assert found.to_object()["seconds"] is None


@pytest.mark.parametrize(
    ("kind", "framework", "kernel", "why"),
    [
        ("torch.optim.adamw.AdamW", "torch", True, ""),
        ("torch.optim.adagrad.Adagrad", "torch", False, ""),
        ("mine.Own", "torch", False, "neither torch's nor registered"),
        ("torch.optim.adagrad.Adagrad", "fsdp-2", False, "on tensors that lie on several ranks"),
    ],
)
def test_the_replay_is_measured_by_the_optimizer_that_took_the_steps(
    kind: str, framework: str, kernel: bool, why: str
) -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    optimizer = OptimizerIdentity(kind, "single_tensor", str(torch.__version__), capability, "cpu")
    parameter = torch.nn.Parameter(torch.zeros(1))
    made = torch.optim.AdamW([parameter]) if kernel else torch.optim.Adagrad([parameter])
    options = [{name: value for name, value in made.param_groups[0].items() if name != "params"}]
    found = replay_rate(Identity(framework, "", "", optimizer), options, 1000)
    assert (found.elements_per_s is None) == bool(why)
    assert (found.kernel, why in found.why_not) == (kernel, True)


def life(url: str, attached: Callable[[], None] = lambda: None) -> None:
    """Of a job that is killed after two more versions."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = attach(model, optimizer, Hierarchy.of(url), config=CheckpointConfig(base_every=100))
    attached()
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        checkpointer.end_iteration()
    checkpointer.abort()


def test_a_recovery_in_the_job_says_how_long_it_will_take_if_that_is_worth_measuring(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    life(url)
    with caplog.at_level(logging.INFO):
        life(url)
        assert "expected to take" not in caplog.text
        monkeypatch.setattr(durations, "WORTH_NBYTES", 0)
        life(url)
        said = r"the recovery of version 4 from base 2 is expected to take \S+ \w+ to .*, 2 replayed steps included"
        assert re.search(said, caplog.text)

        async def refuses(*args: object) -> None:
            raise NotFound("no such object")

        monkeypatch.setattr(durations, "read", refuses)
        life(url)
        assert "is expected to take an unknown time: memory: no such object" in caplog.text

        def fails(state: TensorState) -> None:
            raise MemoryError("no memory for the measuring")

        monkeypatch.setattr(TensorState, "replay_rate", fails)
        life(url)
        assert "is expected to take an unknown time: MemoryError: no memory for the measuring" in caplog.text


def test_what_is_in_memory_is_worth_measuring_only_if_there_is_much_of_it() -> None:
    copy = Copy(0, ShardKey.base(1, 2, 0))
    mapping = [OpenTier(0, "memory", MemoryDriver("worth"))]
    reading = [OpenTier(0, "disk", UnmappedDriver("worth"))]
    worth, times = durations.WORTH_NBYTES, durations.MAPPED_TIMES
    assert [durations.is_worth_measuring({copy: nbytes}, reading) for nbytes in (worth - 1, worth)] == [False, True]
    mapped = [durations.is_worth_measuring({copy: nbytes}, mapping) for nbytes in (worth, worth * times)]
    assert mapped == [False, True]


def test_a_recovery_does_not_wait_for_a_replay_that_takes_long_to_measure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url, may_end = f"memory://{uuid.uuid4().hex}", threading.Event()

    def measure() -> ReplayRate:
        may_end.wait(60)
        return ReplayRate(None, False, "it took too long")

    monkeypatch.setattr(TensorState, "replay_rate", lambda state: (20, measure))
    monkeypatch.setattr(durations, "WORTH_NBYTES", 0)
    monkeypatch.setattr(durations, "SAYING_S", 0.1)
    life(url)
    with caplog.at_level(logging.INFO):
        life(url, attached=may_end.set)
    why = "measuring the tiers and the replay did not finish within 0.1 s"
    assert f"the recovery of version 2 from base 0 is expected to take an unknown time: {why}" in caplog.text
