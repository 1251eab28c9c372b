"""A recovery beside its ceiling, on a small scale and in this process."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.recover import job
from benchmarks.recover.command import figure_of, medians
from benchmarks.recover.job import Order, recover, save
from tiercheck.tiers.shm.namespaces import remove_namespace


@pytest.fixture
def order(tmp_path: Path) -> Iterator[Order]:
    name = f"benchmark-recover-{uuid.uuid4().hex}"
    yield Order((f"shm://{name}",), 2 * 64**2 * job.STATE_BYTES, 64, 0, 2, str(tmp_path))
    remove_namespace(name)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], dict[str, object]]:
    def last() -> dict[str, object]:
        found: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return found

    return last


def test_what_is_restored_is_what_was_saved_and_the_parts_are_timed(
    order: Order, said: Callable[[], dict[str, object]]
) -> None:
    save(order)
    digest = said()["digest"]
    for first in (False, True):
        recover(replace(order, ceiling_first=first))
        found = said()
        assert found["digest"] == digest
        assert isinstance(found["recovery_s"], float) and isinstance(found["ceiling_s"], float)
        assert isinstance(found["phases"], dict)
        assert {"find", "read and verify", "verify", "copy", "load"} <= found["phases"].keys()


def test_a_recovery_from_memory_may_take_longer_and_one_from_a_disk_no_less_of_its_rate() -> None:
    memory, disk = figure_of("shm", 500_000_000, 0), figure_of("nvme", 2_000_000_000, 0)
    assert (memory.name, memory.met(1.4), memory.met(1.6)) == ("recover.shm.500MB/memcpy+xxh3", True, False)
    assert (disk.name, disk.met(0.9), disk.met(0.7)) == ("recover.nvme.2000MB/raw_direct", True, False)
    assert figure_of("shm", 500_000_000, 4).goal is None


def test_a_part_that_some_recoveries_lack_counts_as_none() -> None:
    assert medians([{"find": 1.0}, {"find": 3.0, "copy": 2.0}, {"find": 2.0}]) == {"find": 2.0, "copy": 0.0}
