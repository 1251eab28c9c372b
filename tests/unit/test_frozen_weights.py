"""What does not change is stored once, and referred to: by bases, by tiers, by restarts. Whole jobs with frozen weights
and small trained adapters, compared bit for bit."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import tiercheck
from tiercheck.config import CheckpointConfig
from tiercheck.errors import RecoveryError, TierCheckError
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.integrations.torch import attach
from tiercheck.keys import CommitKey, Key, ShardKey, Stream, parse
from tiercheck.policy.compose.retention import KeepLast
from tiercheck.policy.policies import Policies
from tiercheck.testing.faults import Fault, FaultPlan, FaultyDriver, Killed, Moment, Point
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.types import Fidelity

WIDTH = 160
FROZEN_NBYTES = 4 * WIDTH * WIDTH
TRAINED_NBYTES_MAX = 32 << 10
"""Of the adapters, their moments, what is no tensor, and headers."""


class Adapted(torch.nn.Module):
    """A frozen weight and two small trained ones beside it; a buffer that each forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen.requires_grad_(False)
        self.down = torch.nn.Linear(WIDTH, 2, bias=False)
        self.up = torch.nn.Linear(2, WIDTH, bias=False)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        found: torch.Tensor = self.frozen(batch) + self.up(self.down(batch))
        return found


@dataclass
class Job:
    """``trained``: also the frozen weight is, from the beginning."""

    states: dict[int, dict[str, bytes]] = field(default_factory=dict)
    checkpointer: Any = None
    stepped: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        self.model = Adapted()
        self.optimizer = torch.optim.AdamW([*self.model.down.parameters(), *self.model.up.parameters()], lr=1e-2)

    def attach(self, hierarchy: Hierarchy, **options: Any) -> Job:
        bases = options.pop("bases", "capture")
        config = CheckpointConfig(base_every=3, batch=1, deadline_s=30.0, mover="trainer", bases=bases, audit_every=1)
        self.checkpointer = attach(
            self.model, self.optimizer, hierarchy, config=config, policies=Policies(retention=KeepLast(2)), **options
        )
        self.stepped = self.checkpointer.version
        return self

    def train(self, last: int) -> Job:
        for version in range(self.stepped + 1, last + 1):
            batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(version))
            self.optimizer.zero_grad()
            self.model(batch).pow(2).mean().backward()
            self.optimizer.step()
            self.between(version)
            if self.checkpointer is not None:
                self.checkpointer.end_iteration()
            self.stepped = version
            self.states[version] = self.state()
        return self

    def between(self, version: int) -> None:
        """What the loop does between the step and the end of the iteration."""

    def state(self) -> dict[str, bytes]:
        tensors = dict(self.model.state_dict())
        for index, state in enumerate(self.optimizer.state_dict()["state"].values()):
            tensors |= {f"{index}.{key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
        return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}

    def close(self) -> None:
        self.checkpointer.close()


@dataclass
class Place:
    """A memory that outlives the process, and a directory."""

    root: Path
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def memory(self) -> str:
        return f"memory://frozen-{self.name}"

    @property
    def durable(self) -> Path:
        return self.root / self.name

    @property
    def url(self) -> str:
        return f"nvme://{self.durable}?survives=rack"

    def hierarchy(self, plan: FaultPlan | None = None) -> Hierarchy:
        def faulty(driver: TierDriver) -> TierDriver:
            return driver if plan is None else FaultyDriver(driver, plan)

        return Hierarchy.of(Tier(self.memory, wrap=faulty), Tier(self.url, wrap=faulty))

    def lose_memory(self) -> None:
        MemoryDriver.forget(f"frozen-{self.name}")

    def in_memory(self) -> list[str]:
        async def listed() -> list[str]:
            driver = MemoryDriver(f"frozen-{self.name}")
            await driver.open()
            names = [info.key async for info in driver.list()]
            await driver.close()
            return names

        return asyncio.run(listed())

    def held(self) -> dict[Key, Path]:
        """What the directory holds."""
        files = {str(path.relative_to(self.durable)): path for path in self.durable.rglob("*") if path.is_file()}
        return {key: path for name, path in files.items() if (key := parse(name)) is not None}

    def of(self, stream: Stream) -> dict[ShardKey, Path]:
        held = sorted((key, path) for key, path in self.held().items() if isinstance(key, ShardKey))
        return {key: path for key, path in held if key.stream is stream}

    def check_whole(self) -> None:
        """What a commit record speaks of is there, and what that refers to."""
        held = self.held()
        bases = {CommitKey.of(key): key for key in held if isinstance(key, ShardKey) and key.stream is Stream.BASE}
        for key in held:
            if isinstance(key, CommitKey):
                assert key in bases, f"{key} without its base"
                assert bases[key].constants is None or bases[key].constants in held, f"{bases[key]} refers to nothing"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.lose_memory()


@pytest.fixture(scope="module")
def reference() -> Job:
    return Job().train(16)


def resumed(place: Place, reference: Job, version: int, last: int) -> Job:
    """A job that resumes at the version, and goes on as if nothing had happened."""
    job = Job().attach(place.hierarchy())
    assert job.checkpointer.recovery.version == version
    assert job.checkpointer.recovery.fidelity is Fidelity.EXACT
    assert job.state() == reference.states[version]
    assert job.train(last).state() == reference.states[last]
    return job


def test_a_base_is_as_large_as_what_is_trained(place: Place, reference: Job) -> None:
    job = Job().attach(place.hierarchy())
    job.train(10).close()
    (constants,) = place.of(Stream.CONSTANT).items()
    bases = place.of(Stream.BASE)
    assert len(bases) >= 2
    assert constants[1].stat().st_size > FROZEN_NBYTES
    for key, path in bases.items():
        assert key.constants == constants[0]
        assert path.stat().st_size < TRAINED_NBYTES_MAX < FROZEN_NBYTES / 3
    place.check_whole()
    resumed(place, reference, 10, 12).close()


def test_a_restart_refers_to_what_its_ancestor_stored(place: Place, reference: Job) -> None:
    Job().attach(place.hierarchy()).train(5).close()
    written = {key: path.stat().st_mtime_ns for key, path in place.of(Stream.CONSTANT).items()}
    resumed(place, reference, 5, 9).close()
    place.lose_memory()
    resumed(place, reference, 9, 16).close()
    assert {key: path.stat().st_mtime_ns for key, path in place.of(Stream.CONSTANT).items()} == written
    assert {key.generation for key in place.of(Stream.BASE)} == {3}, "older bases are gone"
    place.check_whole()


class Thawing(Job):
    """The frozen weight is written to in the middle, past torch's counters; few elements of it change."""

    def between(self, version: int) -> None:
        if version in (5, 6, 7):
            self.model.frozen.weight.data[3, 5] += version


def test_a_frozen_weight_that_changes_is_stored_again_with_the_right_bits(place: Place) -> None:
    reference = Thawing().train(14)
    job = Thawing().attach(place.hierarchy())
    job.train(14).close()
    place.check_whole()
    place.lose_memory()
    after = Thawing().attach(place.hierarchy())
    assert after.state() == reference.states[14]
    after.close()
    assert max(key.first for key in place.of(Stream.CONSTANT)) > 5, "it stands still again: it is stored once more"
    assert len(place.of(Stream.CONSTANT)) == 1, "nothing refers to what was stored before"


class Loading(Job):
    """Other weights are loaded in the middle of the run."""

    def between(self, version: int) -> None:
        if version == 5:
            state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
            state["frozen.weight"] *= 2
            self.model.load_state_dict(state)


def test_weights_that_are_loaded_in_the_middle_are_stored_once_more(place: Place) -> None:
    reference = Loading().train(10)
    Loading().attach(place.hierarchy()).train(10).close()
    assert all(path.stat().st_size < TRAINED_NBYTES_MAX for path in place.of(Stream.BASE).values())
    place.lose_memory()
    after = Loading().attach(place.hierarchy())
    assert after.state() == reference.states[10]
    after.close()


def test_constants_lost_or_damaged_in_one_tier_are_read_from_another(place: Place, reference: Job) -> None:
    Job().attach(place.hierarchy()).train(5).close()
    (path,) = place.of(Stream.CONSTANT).values()
    path.unlink()
    resumed(place, reference, 5, 9).close()
    (path,) = place.of(Stream.CONSTANT).values()  # it is brought there again, since bases there refer to it
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    resumed(place, reference, 9, 12).close()


@pytest.mark.parametrize("bases", ["capture", "fold"])
def test_constants_that_memory_has_lost_are_stored_there_again(place: Place, reference: Job, bases: str) -> None:
    """Bases go on being captured, and folded, though another tier holds what was lost."""
    job = Job().attach(place.hierarchy(), bases=bases).train(5)
    job.checkpointer.flush()
    lost = [name for name in place.in_memory() if "/constant/" in name]
    for name in lost:
        del MemoryDriver(f"frozen-{place.name}").store.objects[name]
    job.checkpointer.flush()  # the mover sees it
    for version in range(6, 17):
        job.train(version).checkpointer.flush()
    keys = [key for name in place.in_memory() if isinstance(key := parse(name), ShardKey)]
    newest = max(key for key in keys if key.stream is Stream.BASE)
    assert newest.constants in keys
    assert str(newest.constants) not in lost
    job.close()
    mover = job.checkpointer.stats.mover
    assert mover.not_folded == ""
    assert (mover.folded_bases > 2) is (bases == "fold"), "folding goes on from the captured base"
    # The one that stores them again may be one that is due.
    assert job.checkpointer.stats.bases in ((2,) if bases == "fold" else (6, 7))
    place.check_whole()
    resumed(place, reference, 16, 16).close()
    place.lose_memory()
    after = Job().attach(place.hierarchy())
    assert after.state() == reference.states[16]
    after.close()


def test_a_base_without_its_constants_is_none(place: Place) -> None:
    Job().attach(place.hierarchy()).train(5).close()
    place.lose_memory()
    (path,) = place.of(Stream.CONSTANT).values()
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(RecoveryError, match="constant"):
        Job().attach(place.hierarchy())
    path.unlink()
    with pytest.raises(RecoveryError, match="no base that every rank can read"):
        Job().attach(place.hierarchy())


def test_what_is_stored_once_is_shown_verified_exported_and_copied(
    place: Place, reference: Job, tmp_path: Path
) -> None:
    copied = Place(tmp_path, uuid.uuid4().hex)
    job = Job().attach(place.hierarchy()).train(5)
    job.checkpointer.flush()  # else the base of version 6 may be there first, and nothing needs version 5
    job.train(6).close()
    with tiercheck.open(place.url) as archive:
        kinds = {stored.stream for generation in archive.generations for stored in generation.stored}
        assert Stream.CONSTANT in kinds
        names = {spec.name for spec in archive.show(6).tensors}
        assert {"extra/frozen.weight", "master/up.weight", "extra/seen"} <= names
        assert archive.verify().healthy
        for version in (5, 6):
            archive.export(tmp_path / f"{version}.safetensors", version=version)
        archive.copy(copied.url, version=6)
    from safetensors.torch import load_file

    for version in (5, 6):
        exported = load_file(tmp_path / f"{version}.safetensors")
        found = {name: tensor.numpy().tobytes() for name, tensor in exported.items()}
        assert found == {name: reference.states[version][name] for name in found}
        assert "frozen.weight" in found
    resumed(copied, reference, 6, 7).close()
    copied.lose_memory()


Struck = tuple[str, str | None, Moment]


def struck(point: Point) -> Struck:
    return point.call, point.key, point.moment


def live(place: Place, plan: FaultPlan, last: int) -> Job:
    job = Job()
    try:
        job.attach(place.hierarchy(plan)).train(last).close()
    except (Killed, TierCheckError):
        assert plan.dead, "only a kill ends this job"
    finally:
        if job.checkpointer is not None:
            job.checkpointer.abort()
    return job


def test_a_kill_around_the_constants_costs_nothing_that_had_returned(tmp_path: Path, reference: Job) -> None:
    """At calls that concern them, or the bases that refer to them, in either tier. Every place is struck in
    tests/simulation/test_kills_in_a_life.py, in virtual time."""
    plan = FaultPlan()
    live(Place(tmp_path), plan, 4)
    about = ("/constant/", "/base/", "job/commits/")
    targets = sorted({struck(each) for each in plan.points if any(what in str(each.key) for what in about)}, key=str)
    assert len(targets) > 15
    for target in targets[::4]:
        place = Place(tmp_path)
        plan = FaultPlan((Fault(lambda point, target=target: struck(point) == target, Killed),))  # type: ignore[misc]
        killed = live(place, plan, 4)
        place.check_whole()
        job = Job().attach(place.hierarchy())
        assert job.checkpointer.version >= killed.stepped
        assert job.train(6).state() == reference.states[6]
        job.close()
        place.check_whole()
        place.lose_memory()


@pytest.mark.parametrize("lost", [False, True])
class WithTable(Job):
    """Beside the frozen weight there is a large buffer, which the loop writes to once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.register_buffer("table", torch.zeros(WIDTH, WIDTH))

    def between(self, version: int) -> None:
        if version == 10:
            self.model.table[0] += 1


def test_a_folded_base_refers_to_what_the_one_before_refers_to(place: Place) -> None:
    """A buffer that has changed is stored with each folded base from then on, and a restart brings new constants."""
    reference = WithTable().train(24)
    job = WithTable().attach(place.hierarchy(), bases="fold")
    for last in range(3, 19, 3):  # each base is seen
        job.train(last).checkpointer.flush()
        newest, path = max(place.of(Stream.BASE).items())
        assert newest.first == last
        assert newest.constants in place.of(Stream.CONSTANT)
        assert 0 <= path.stat().st_size - (FROZEN_NBYTES if last > 10 else 0) < TRAINED_NBYTES_MAX
    job.train(19).close()
    stats = job.checkpointer.stats
    assert stats.mover.audited_bases == stats.mover.folded_bases
    assert (stats.bases, stats.mover.folded_bases) == (2, 5), "the second one brings the buffer that stands still"
    place.check_whole()
    place.lose_memory()
    after = WithTable().attach(place.hierarchy(), bases="fold")
    assert (after.checkpointer.version, after.checkpointer.recovery.fidelity) == (19, Fidelity.EXACT)
    assert after.state() == reference.states[19]
    assert after.train(24).state() == reference.states[24]
    after.close()
    assert (after.checkpointer.stats.bases, after.checkpointer.stats.mover.folded_bases) == (2, 1)
    assert {key.generation for key in place.of(Stream.CONSTANT)} == {2}
    place.check_whole()


def test_a_restart_goes_on_folding_with_what_its_ancestor_stored(place: Place, reference: Job) -> None:
    Job().attach(place.hierarchy(), bases="fold").train(7).close()
    place.lose_memory()
    after = Job().attach(place.hierarchy(), bases="fold")
    assert after.state() == reference.states[7]
    assert after.train(14).state() == reference.states[14]
    after.close()
    assert (after.checkpointer.stats.bases, after.checkpointer.stats.mover.folded_bases) == (1, 2)
    assert {key.generation for key in place.of(Stream.CONSTANT)} == {1}, "nothing is stored again"
    place.check_whole()


def test_a_write_to_what_folded_bases_refer_to_is_found_by_its_audit(place: Place) -> None:
    """No sample is of the element, and torch does not count the write."""
    job = Job().attach(place.hierarchy(), bases="fold").train(5)
    job.checkpointer.flush()
    job.model.frozen.weight.data[0, 0] += 1
    job.train(7).close()
    mover = job.checkpointer.stats.mover
    assert (mover.audited_bases, mover.differing_version, mover.differing) == (1, 6, ("extra/frozen.weight",))
    place.lose_memory()
    after = Job().attach(place.hierarchy(), bases="fold")
    assert after.state() == job.states[7]
    after.close()
    place.check_whole()


class LoadingFolded(Loading):
    """The same, with folded bases."""

    def attach(self, hierarchy: Hierarchy, **options: Any) -> Job:
        return super().attach(hierarchy, bases="fold", **options)


def test_weights_that_are_loaded_while_bases_are_folded_are_stored_once_more(place: Place) -> None:
    reference = Loading().train(16)
    job = LoadingFolded().attach(place.hierarchy())
    job.train(16).close()
    assert job.checkpointer.stats.mover.folded_bases >= 2
    assert all(path.stat().st_size < TRAINED_NBYTES_MAX for path in place.of(Stream.BASE).values())
    place.lose_memory()
    after = LoadingFolded().attach(place.hierarchy())
    assert after.state() == reference.states[16]
    after.close()
