"""Whole jobs on a device that reorders: recorder, copier and closer in their threads, and a loop on its own stream."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

from tests.device_state import DeviceState
from tests.reordering import Reordering
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.format import container
from tiercheck.hierarchy import Hierarchy
from tiercheck.keys import ShardKey, Stream, parse
from tiercheck.streams.device import reading
from tiercheck.streams.gradients import staged
from tiercheck.streams.records import iteration
from tiercheck.streams.records.base import read_base
from tiercheck.streams.records.recorded import read_differentials
from tiercheck.tiers.shm.driver import ShmDriver
from tiercheck.tiers.shm.namespaces import remove_namespace

SHAPES = {"one": (7, 9), "two": (1300,)}
VERSIONS = 10
NEWEST_BASE = 9


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(staged, "CHUNK_NBYTES", 4096)
    monkeypatch.setattr(reading, "CHUNK_NBYTES", 1024)
    monkeypatch.setattr(iteration, "processors_of_rank", lambda: 64)
    name = f"reordered-{uuid.uuid4().hex[:8]}"
    made: list[Loop] = []
    monkeypatch.setattr(Loop, "made", made)
    yield name
    for loop in made:
        loop.checkpointer.abort()
    remove_namespace(name)


class Loop:
    """A loop on a stream of its own. Gradients are overwritten right after the step, as by ``zero_grad``, and freed."""

    made: ClassVar[list[Loop]] = []

    def __init__(
        self,
        device: Reordering,
        name: str,
        monkeypatch: pytest.MonkeyPatch,
        kind: type[DeviceState] = DeviceState,
        **config: Any,
    ) -> None:
        monkeypatch.setattr(iteration, "device_of", lambda tensors: device)
        self.device = device
        self.state = kind(device, shapes=SHAPES)
        settings = CheckpointConfig(bases="capture", **{"base_every": 3, "deadline_s": 60.0, **config})
        self.name = name
        self.training = device.side("training")
        with device.on(self.training):
            self.checkpointer = Checkpointer(self.state, Hierarchy.of(f"shm://{name}?size=64MiB"), config=settings)
        self.made.append(self)

    def iterate(self) -> None:
        state, device = self.state, self.device
        with device.on(self.training):
            version = state.version + 1
            gradients = state.backward()
            self.checkpointer.capture(version, gradients)
            state.step()
            self.checkpointer.stepped(version)
            for each in gradients.values():
                device.write(each, lambda memory: memory.fill_(float("nan")))
                device.free(self.training, self.training, partial(each.data.fill_, 77.0))
            self.checkpointer.complete(version)
            self.checkpointer.begin_iteration()
            state.forward()

    def check(self) -> tuple[set[int], set[int]]:
        """What is in the tier is what training had. Returns the versions of its bases and differentials."""
        with self.device.on(self.training):
            self.checkpointer.flush()
        found: tuple[set[int], set[int]] = set(), set()
        for key, shard in shards_of(self.name).items():
            shard.verify()
            if key.stream is Stream.BASE:
                found[0].add(key.first)
                base, true = read_base(shard, tier="shm", alone=True), self.state.at(key.first)
                for name, tensor in true["masters"].items():
                    assert torch.equal(base.masters[name], tensor), f"base {key.first} (seed {self.device.seed})"
                    moment = base.optimizer_state[name]["moment"]
                    assert torch.equal(moment, true["state"][name]["moment"]), f"base {key.first}"
            elif key.stream is Stream.DIFFERENTIAL:
                found[1].add(key.first)
                (record,) = read_differentials(shard, tier="shm")
                for name, tensor in self.state.true_gradients(key.first).items():
                    assert torch.equal(record.gradient(name), tensor), f"{key.first} (seed {self.device.seed})"
        return found


def shards_of(name: str) -> dict[ShardKey, container.Shard]:
    async def read() -> dict[ShardKey, container.Shard]:
        found = {}
        async with ShmDriver(name, size=64 << 20, make=False) as driver:
            async for info in driver.list(""):
                key = parse(info.key)
                if isinstance(key, ShardKey):
                    found[key] = container.parse(bytes(await driver.get(info.key)))
        return found

    return asyncio.run(read())


@pytest.mark.parametrize("seed", range(6))
def test_every_version_is_in_the_tier_as_training_had_it(seed: int, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(Reordering(seed), job, monkeypatch)
    for _ in range(VERSIONS):
        loop.iterate()
    bases, differentials = loop.check()
    assert max(bases) == NEWEST_BASE
    assert set(range(NEWEST_BASE + 1, VERSIONS + 1)) <= differentials
    stats = loop.checkpointer.stats
    assert stats.differentials == VERSIONS and stats.failed_saves == 0
    assert stats.bases == 1 + VERSIONS // 3
    loop.checkpointer.close()
    loop.device.finish()
    loop.state.check_now()


def test_a_write_that_torch_does_not_count_costs_the_record_and_brings_a_base(
    job: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(Reordering(3), job, monkeypatch, base_every=50)
    for _ in range(3):
        loop.iterate()
    with loop.device.on(loop.training):
        loop.device.write_unseen(loop.state.masters()["two"], lambda master: master.mul_(2))
    loop.state.doubled("two")
    for _ in range(4):
        loop.iterate()
    bases, differentials = loop.check()
    assert 4 not in differentials, "nobody may believe that it leads from version 3 to 4"
    assert max(bases) > 4
    assert "past torch's counters" in caplog.text
    loop.checkpointer.close()


class SaidToBeBfloat16(DeviceState):
    """Gradients that are called bf16 numbers times one scale, and are not."""

    def gradient_dtypes(self) -> dict[str, torch.dtype]:
        return dict.fromkeys(SHAPES, torch.bfloat16)

    def true_gradients(self, version: int) -> dict[str, torch.Tensor]:
        found = super().true_gradients(version)
        return {name: (each.double().abs() + 0.1).sqrt().float() for name, each in found.items()}


@pytest.mark.parametrize("seed", range(3))
def test_gradients_that_are_not_what_the_framework_says_cost_a_base(
    seed: int, job: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    loop = Loop(Reordering(seed), job, monkeypatch, SaidToBeBfloat16, base_every=50)
    for _ in range(VERSIONS):
        loop.iterate()
    bases, differentials = loop.check()
    assert "not bf16 numbers times one scale" in caplog.text
    assert 1 not in differentials and 1 < max(bases) < 6
    assert set(range(max(bases) + 1, VERSIONS + 1)) <= differentials, "later ones are stored whole"
    assert loop.checkpointer.stats.failed_saves == 0
    loop.checkpointer.close()


def test_a_job_that_is_given_up_leaves_nothing_on_its_way(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(Reordering(1), job, monkeypatch)
    for _ in range(4):
        loop.iterate()
    with loop.device.on(loop.training):
        gradients = loop.state.backward()
        loop.checkpointer.capture(5, gradients)  # and no step
    loop.checkpointer.abort()
    before = shards_of(job).keys()
    loop.device.finish()  # what was on its way would be written now
    for shard in shards_of(job).values():
        shard.verify()
    assert shards_of(job).keys() == before
