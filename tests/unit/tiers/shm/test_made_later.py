"""Much memory that training's thread reserves is made when it is used, by whoever uses it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.shared_memory import root_of
from tests.training import Training
from tiercheck.errors import CapacityExceeded
from tiercheck.hierarchy import Hierarchy
from tiercheck.tiers.shm import mapping
from tiercheck.tiers.shm.driver import ShmDriver
from tiercheck.types import ByteRange

MIB = 1 << 20
LONG = 4 * MIB


class Made:
    """The memory that was made so far, and by which threads. ``full``: how many more calls find none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = 0
        self.strikes: Callable[[threading.Thread, int], bool] = lambda thread, nbytes: True
        self.calls: list[tuple[threading.Thread, int]] = []
        self._allocate = os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", self._made)
        monkeypatch.setattr(mapping, "MADE_LATER_BYTES_MIN", LONG)

    def _made(self, fd: int, start: int, nbytes: int) -> None:
        if self.full and self.strikes(threading.current_thread(), nbytes):
            self.full -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        self.calls.append((threading.current_thread(), nbytes))
        self._allocate(fd, start, nbytes)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.calls)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(monkeypatch)


def files(name: str) -> list[Path]:
    return [path for folder in ("pool", "tmp") for path in (root_of(name) / ".tiercheck" / folder).iterdir()]


@pytest.mark.parametrize("look", [True, False], ids=["looked at", "published as it is"])
async def test_it_counts_at_once_and_is_made_when_it_is_used(name: str, made: Made, look: bool) -> None:
    async with ShmDriver(name, size=8 * MIB) as driver:
        reservation = driver.reserve_nowait("a", LONG)
        assert made.nbytes == 0
        with pytest.raises(CapacityExceeded):
            driver.reserve_nowait("b", 6 * MIB)
        if look:
            reservation.buffer[-4:] = b"here"
            assert made.nbytes == LONG
        assert (await reservation.publish()).nbytes == LONG
        assert made.nbytes == LONG, "once"
        assert bytes(await driver.get("a", range=ByteRange(LONG - 4, LONG))) == (b"here" if look else bytes(4))


async def test_what_is_short_or_may_wait_is_made_at_once(name: str, made: Made) -> None:
    async with ShmDriver(name, size=64 * MIB) as driver:
        driver.reserve_nowait("a", LONG - 1)
        assert made.nbytes == LONG - 1
        await driver.reserve("b", LONG)
        assert made.nbytes == 2 * LONG - 1


async def test_what_was_ready_goes_back_as_it_is(name: str, made: Made) -> None:
    async with ShmDriver(name, size=64 * MIB) as driver:
        await driver.prepare_reservations([(LONG, 1)])
        await driver.reserve_nowait("a", LONG).drop()
        assert [path.stat().st_blocks * 512 for path in files(name)] == [LONG]
        driver.reserve_nowait("a", LONG).buffer[:4] = b"used"
        assert made.nbytes == LONG


@pytest.mark.parametrize("used", [True, False])
async def test_what_nobody_used_leaves_no_file_that_looks_ready(name: str, made: Made, used: bool) -> None:
    async with ShmDriver(name, size=64 * MIB) as driver:
        reservation = driver.reserve_nowait("a", LONG)
        if used:
            reservation.buffer[:4] = b"used"
        await reservation.drop()
        assert (await driver.usage()).used_bytes == 0
        assert [path.stat().st_blocks * 512 for path in files(name)] == ([LONG] if used else [])
        await driver.prepare_reservations([(LONG, 2)])
        assert made.nbytes == 2 * LONG


@pytest.mark.parametrize(
    "use", [lambda each: each.buffer, lambda each: each.publish_nowait()], ids=["buffer", "publish"]
)
async def test_room_that_somebody_else_has_taken_since(name: str, made: Made, use: Callable[[object], object]) -> None:
    async with ShmDriver(name, size=64 * MIB) as driver:
        reservation = driver.reserve_nowait("a", LONG)
        made.full = 1
        with pytest.raises(CapacityExceeded, match="somebody else fills it"):
            use(reservation)
        await reservation.drop()
        assert (files(name), (await driver.usage()).used_bytes) == ([], 0)
        again = driver.reserve_nowait("a", LONG)
        again.buffer[:4] = b"room"
        await again.publish()


def large() -> Training:
    """Its bases take five MiB, once it has moments, and a record two."""
    training = Training()
    training.model = torch.nn.Sequential(torch.nn.Linear(4, 1 << 16), torch.nn.Linear(1 << 16, 1))
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2)
    return training


@pytest.fixture
def unprepared(monkeypatch: pytest.MonkeyPatch) -> None:
    async def prepare(self: ShmDriver, sizes: object) -> None:
        """As if it took forever."""

    monkeypatch.setattr(ShmDriver, "prepare_reservations", prepare)


@pytest.mark.usefixtures("unprepared")
def test_training_does_not_make_the_memory_of_a_base(name: str, made: Made) -> None:
    training, tiers = large(), Hierarchy.of(f"shm://{name}?size=64MiB")
    with training.attach(tiers, base_every=1, bases="capture"):
        for version in (1, 2):
            training.step(version)
    here = threading.current_thread()
    assert max(nbytes for thread, nbytes in made.calls if thread is here) < LONG, "records"
    assert max(nbytes for thread, nbytes in made.calls if thread is not here) > LONG, "a base"
    assert recovered(tiers) == (2, training.states[2])


@pytest.mark.usefixtures("unprepared")
def test_a_base_that_finds_no_memory_is_no_version_and_the_next_one_is(name: str, made: Made) -> None:
    training, tiers = large(), Hierarchy.of(f"shm://{name}?size=64MiB")
    here = threading.current_thread()
    made.strikes = lambda thread, nbytes: thread is not here and nbytes > LONG
    made.full = 1
    with training.attach(tiers, base_every=2, bases="capture", on_save_error="warn") as checkpointer:
        for version in (1, 2, 3):
            training.step(version)
        assert made.full == 0
        assert checkpointer.stats.failed_saves == 1
        training.step(4)
        checkpointer.flush()
        assert (checkpointer.stats.failed_saves, checkpointer.stats.bases) == (1, 3), "the opening one, 3, and 4"
    assert recovered(tiers) == (4, training.states[4])


@pytest.mark.usefixtures("unprepared")
@pytest.mark.parametrize("times", [1, 2], ids=["found at the step", "found when the mover has looked"])
def test_a_record_that_finds_no_memory_looks_for_it_as_ever(
    name: str, made: Made, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    monkeypatch.setattr(mapping, "MADE_LATER_BYTES_MIN", MIB)
    training, tiers = large(), Hierarchy.of(f"shm://{name}?size=64MiB")
    here = threading.current_thread()
    with training.attach(tiers) as checkpointer:
        training.step(1)
        # The memory of version 2 is reserved already. What fails is that of 3, ahead, and then at the step.
        made.strikes = lambda thread, nbytes: thread is here and nbytes > MIB
        made.full = times
        for version in (2, 3):
            training.step(version)
        assert (made.full, checkpointer.stats.failed_saves, checkpointer.stats.differentials) == (0, 0, 3)
    assert recovered(tiers) == (3, training.states[3])


def recovered(tiers: Hierarchy) -> tuple[int, bytes]:
    after = large()
    checkpointer = after.attach(tiers)
    checkpointer.abort()
    return checkpointer.version, after.parameters()
