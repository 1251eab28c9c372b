"""Read errors and damage, drawn by a seed: a recovery under errors reaches what one without them reaches, or refuses.

Two ranks train and die; some memory is lost, some copies are damaged. A recovery without errors says what can be
reached. Then the tiers are put back as they were, but for one copy of a lineage record, which is damaged. The same
recovery is made while calls to them fail: some a few times, some for good. It may refuse.
It never goes on from anything older.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.failing import Failing
from tests.simulation.seeds import play_each
from tests.unit.recovery.test_restorer import CONFIG, Cluster
from tiercheck.errors import RecoveryError, TierCheckError, TierError, Transient, Unauthorized
from tiercheck.hierarchy import Hierarchy, OpenTier
from tiercheck.keys import LineageKey
from tiercheck.policy.recovery.lineage import LineageRecord
from tiercheck.recovery.finding import survey
from tiercheck.recovery.reading.copies import Copies
from tiercheck.replication.objects import lineage_records, records
from tiercheck.replication.objects.lineage_records import SetAside
from tiercheck.tiers.memory import MemoryDriver, StoredObject
from tiercheck.tiers.wrappers.base import Call, Operation

SEEDS = range(12)
LAST = 14
ERRORS: tuple[Callable[[], TierError], ...] = (
    lambda: Transient("503 slow down"),
    lambda: Unauthorized("403 forbidden"),
    lambda: TierError("the connection broke"),
)


class Errors:
    """Which calls fail, and how often. Before :meth:`arm` none does."""

    def __init__(self) -> None:
        self.rules: list[tuple[Operation, str, Callable[[], TierError], list[int]]] = []

    def arm(self, rng: random.Random, keys: list[str]) -> None:
        for _ in range(rng.randint(1, 4)):
            operation = rng.choice([Operation.GET, Operation.GET, Operation.GET, Operation.LIST])
            part = rng.choice(keys) if operation is Operation.GET else ""
            self.rules.append((operation, part, rng.choice(ERRORS), [rng.choice([1, 2, 10**9])]))

    def __call__(self, call: Call) -> Exception | None:
        for operation, part, error, left in self.rules:
            if call.operation is operation and part in (call.key or "") and left[0]:
                left[0] -= 1
                return error()
        return None


class Job:
    """A cluster whose tiers can be put back as they were."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.rng, self.errors = rng, Errors()
        self.cluster = Cluster(root / "job", replace(CONFIG, deadline_s=1.5))
        memory, durable = self.cluster.hierarchy.tiers
        failing = replace(durable, wrap=lambda driver: Failing(driver, self.errors))
        self.cluster.hierarchy = Hierarchy.of(memory, failing)
        self.aside = root / "aside"

    @property
    def stores(self) -> list[dict[str, StoredObject]]:
        return [MemoryDriver(f"{self.cluster.memory}-{rank}").store.objects for rank in range(2)]

    def suffer(self) -> None:
        rng, cluster = self.rng, self.cluster
        cluster.config = replace(CONFIG, deadline_s=30)
        version = 0
        for _ in range(rng.randint(1, 2)):
            version += rng.randint(2, 6)
            cluster.run(version, flush_at=rng.choice([None, version, version]))
        cluster.config = replace(CONFIG, deadline_s=1.5, base_every=100)  # nothing but the recovery has to wait
        for rank in range(2):
            if rng.random() < 0.7:
                cluster.lose(rank)
        for _ in range(rng.choice([0, 0, 1, 2])):
            self.damage()

    def damage(self) -> None:
        place = self.rng.randrange(3)
        if place == 2:
            path = self.rng.choice(sorted(path for path in self.cluster.root.rglob("*") if path.is_file()))
            path.write_bytes(self.broken(path.read_bytes()))
        elif store := self.stores[place]:
            key = self.rng.choice(sorted(store))
            store[key] = replace(store[key], content=memoryview(self.broken(bytes(store[key].content))))

    def broken(self, content: bytes) -> bytes:
        at = self.rng.randrange(len(content))
        return content[:at] if self.rng.random() < 0.3 else content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]

    def damage_a_record(self) -> None:
        """One copy of a lineage record, of which there are others: nothing is lost with it."""
        durable = self.cluster.root
        held = [("", str(path.relative_to(durable))) for path in durable.rglob("lineage/*") if path.is_file()]
        held += [(str(place), key) for place, store in enumerate(self.stores) for key in store if "lineage/" in key]
        copies = [key for _, key in held]
        place, key = self.rng.choice(sorted(each for each in held if copies.count(each[1]) > 1) or [("", "")])
        if place:
            store = self.stores[int(place)]
            store[key] = replace(store[key], content=memoryview(self.broken(bytes(store[key].content))))
        elif key:
            (durable / key).write_bytes(self.broken((durable / key).read_bytes()))

    def keep(self) -> None:
        self.kept = [dict(store) for store in self.stores]
        shutil.copytree(self.cluster.root, self.aside)

    def put_back(self) -> None:
        for store, kept in zip(self.stores, self.kept, strict=True):
            store.clear()
            store.update(kept)
        shutil.rmtree(self.cluster.root)
        shutil.copytree(self.aside, self.cluster.root)

    def outcome(self) -> Any:
        """The version that both ranks recovered, and what they trained from there; or the error."""
        first, second = self.cluster.run(LAST)
        if isinstance(first, Exception) or isinstance(second, Exception):
            assert isinstance(first, TierCheckError) and isinstance(second, TierCheckError), (first, second)
            return first
        assert (first[0] and first[0].version) == (second[0] and second[0].version)
        return first[0] and first[0].version, first[1], second[1]


def play(seed: int, root: Path) -> str:
    """What became of the recovery under errors. Errors: ``AssertionError`` where it goes on from something older."""
    rng = random.Random(seed)
    job = Job(root, rng)
    try:
        job.suffer()
        job.keep()
        expected = job.outcome()
        job.put_back()
        files = (path for path in job.cluster.root.rglob("*.safetensors") if path.is_file())
        job.damage_a_record()
        job.errors.arm(rng, sorted(str(path.relative_to(job.cluster.root)) for path in files) or ["base/"])
        found = job.outcome()
    finally:
        job.cluster.forget()
    if isinstance(found, TierCheckError):
        told = any(words in str(found) for words in ("cannot read", " to read ", "could not be asked"))
        told &= any(str(error()) in str(found) for error in ERRORS)
        assert isinstance(expected, TierCheckError) or (isinstance(found, RecoveryError) and told), found
        return "refused"
    assert found == expected, f"seed {seed}: it went on from version {found[0]}"
    return "recovered"


def test_errors_and_damage(tmp_path: Path) -> None:
    play_each(lambda seed: play(seed, tmp_path / str(seed)), SEEDS[::2])


def finds(root: Path, seeds: Iterable[int] = SEEDS) -> None:
    for seed in seeds:
        try:
            play(seed, root / str(seed))
        except AssertionError:
            return
    pytest.fail("no seed has shown the fault")


def test_it_finds_an_error_that_is_taken_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Copies, "note", lambda self, failed: self.quarantine(failed.source, failed.cause))
    finds(tmp_path)


def test_it_finds_records_without_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "digest_of", lambda key, body: bytes(records.DIGEST_NBYTES))
    finds(tmp_path, [30, 37, 51, 58, 59, 61, 78])  # of few flipped bits the rest is still a record


def test_it_finds_a_damaged_record_that_blocks_every_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read_all(tier: OpenTier, listed: dict[LineageKey, int]) -> tuple[list[LineageRecord], list[SetAside]]:
        return [await lineage_records.read_lineage(tier, key) for key in sorted(listed, reverse=True)], []

    monkeypatch.setattr(survey, "read_records", read_all)
    finds(tmp_path)
