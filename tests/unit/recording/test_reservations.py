"""Training's own thread reserves and publishes where the first tier lets it, and awaits the tier where it does not.

The memory of the next version is reserved right after a record was published, and when it is needed where that failed.
"""

from __future__ import annotations

import itertools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.training import FULL, Training, memory, recovered
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import CapacityExceeded, FileSystemFull, SaveError, Transient
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.keys import ShardKey
from tiercheck.recording import base_copier, reservations
from tiercheck.recording.reservations import Reservations
from tiercheck.tiers.driver import Reservation, TierDriver
from tiercheck.tiers.memory import MemoryDriver, _MemoryReservation
from tiercheck.tiers.wrappers import MeteredDriver

VERSION_2 = "differential/000000000002"


class Sized:
    """Has a state of so many bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def state_dict(self) -> dict[str, bytes]:
        return {"content": bytes(self.nbytes)}

    def load_state_dict(self, state: dict[str, bytes]) -> None:
        self.nbytes = len(state["content"])


class Watched:
    """A memory tier whose calls can be seen, by method, with the thread and the key of each; and be made to fail."""

    def __init__(self, fails: Callable[[str, str], Exception | None] = lambda call, key: None) -> None:
        self.url = memory()
        self.seen: list[tuple[str, str, bool]] = []
        self._fails = fails
        self._training = threading.current_thread()

    @property
    def hierarchy(self) -> Hierarchy:
        return Hierarchy((Tier(self.url, wrap=self._watch),))

    def of(self, key: str) -> list[tuple[str, bool]]:
        """The calls for keys that hold ``key``, and whether training's thread made each."""
        return [(call, by_training) for call, of, by_training in self.seen if key in of]

    def _watch(self, driver: TierDriver) -> TierDriver:
        assert isinstance(driver, MemoryDriver)
        self._replace(driver, "reserve_nowait", lambda key, nbytes: key)
        return driver

    def _replace(self, of: Any, name: str, key_of: Callable[..., str]) -> None:
        original = getattr(of, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            key = key_of(*arguments, **options)
            self.seen.append((name, key, threading.current_thread() is self._training))
            if (error := self._fails(name, key)) is not None:
                raise error
            found = original(*arguments, **options)
            if isinstance(found, Reservation):
                self._replace(found, "publish_nowait", lambda *_, **__: key)
                self._replace(found, "drop", lambda: key)
            return found

        setattr(of, name, watched)


def failing(
    call: str, error: Exception, *, of: str = VERSION_2, times: int = 1
) -> Callable[[str, str], Exception | None]:
    """The first such calls of version 2 fail."""
    left = [error] * times
    return lambda called, key: left.pop() if left and called == call and of in key else None


def test_the_thread_that_trains_reserves_and_publishes() -> None:
    tier, training = Watched(), Training()
    with training.attach(tier.hierarchy) as checkpointer:
        for version in (1, 2, 3):
            training.step(version)
        assert tier.of(VERSION_2) == [("reserve_nowait", True), ("publish_nowait", True)]
        assert checkpointer.stats.differentials == 3
    assert recovered(tier.url) == (3, training.states[3])


def test_a_tier_that_has_nothing_at_once_is_awaited() -> None:
    url, training = memory(), Training()
    with training.attach(Hierarchy((Tier(url, wrap=MeteredDriver),))) as checkpointer:
        for version in (1, 2, 3):
            training.step(version)
        assert checkpointer.stats.differentials == 3
    assert recovered(url) == (3, training.states[3])


@pytest.mark.parametrize("times", [1, 2])
def test_where_there_is_no_room_the_step_makes_some(times: int) -> None:
    """It may be there by then (once), or the mover makes it (twice: ahead, and in the step)."""
    tier, training = Watched(failing("reserve_nowait", CapacityExceeded(FULL), times=times)), Training()
    with training.attach(tier.hierarchy) as checkpointer:
        for version in (1, 2, 3):
            training.step(version)
        assert tier.of(VERSION_2) == [*[("reserve_nowait", True)] * (times + 1), ("publish_nowait", True)]
        assert (checkpointer.stats.failed_saves, checkpointer.stats.differentials) == (0, 3)
    assert recovered(tier.url) == (3, training.states[3])


def test_each_version_s_memory_is_reserved_when_the_one_before_is_published() -> None:
    tier, training = Watched(), Training()
    with training.attach(tier.hierarchy):
        for version in (1, 2):
            training.step(version)
        calls = [(call, key.partition("differential/")[2][:12]) for call, key, _ in tier.seen if "differential" in key]
        one, two, three = (f"{version:012d}" for version in (1, 2, 3))
        assert calls == [
            ("reserve_nowait", one),
            ("publish_nowait", one),
            ("reserve_nowait", two),
            ("publish_nowait", two),
            ("reserve_nowait", three),
        ]
    assert tier.of("differential/000000000003")[1:] == [("drop", True)], "nobody needs it any more"


@pytest.mark.parametrize("times", [0, 1])
def test_what_was_reserved_goes_back_where_a_record_has_outgrown_it(times: int) -> None:
    """And where it cannot go back, it is not the version that suffers."""
    tier, training, beside = Watched(failing("drop", Transient("the tier is busy"), times=times)), Training(), Sized(0)
    with training.attach(tier.hierarchy, stateful={"table": beside}) as checkpointer:
        beside.nbytes = 1 << 16
        training.step(1)
        training.step(2)
        assert tier.of(VERSION_2) == [
            ("reserve_nowait", True),
            ("drop", True),
            ("reserve_nowait", True),
            ("publish_nowait", True),
        ]
        assert (checkpointer.stats.failed_saves, checkpointer.stats.differentials) == (0, 2)


def test_gradients_in_another_dtype_than_expected_are_recorded_in_longer_memory() -> None:
    tier, training = Watched(), Training()
    training.model = torch.nn.Sequential(torch.nn.Linear(4, 1 << 15), torch.nn.Linear(1 << 15, 1))
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2)
    narrow = {1, 2, 3, 6}
    training.says_end = False
    with training.attach(tier.hierarchy) as checkpointer:
        for version in range(1, 7):
            training.backward(version)
            if version in narrow:
                for each in training.model.parameters():
                    each.grad = each.grad.bfloat16().float()
            training.optimizer.step()
            checkpointer.end_iteration()
        assert (checkpointer.stats.failed_saves, checkpointer.stats.differentials) == (0, 6)
        stream = checkpointer._job.recorder._stream
        assert stream.nbytes_max < 3 * stream.trained_parameters + (1 << 18)
    calls = [call for call, _ in tier.of("differential/000000000004")]
    assert calls == ["reserve_nowait", "reserve_nowait", "drop", "publish_nowait"]
    assert len(tier.of("differential/000000000005")) == 2, "as much is reserved for the next one"
    state = training.parameters()
    after = Training()
    after.model = torch.nn.Sequential(torch.nn.Linear(4, 1 << 15), torch.nn.Linear(1 << 15, 1))
    after.optimizer = torch.optim.AdamW(after.model.parameters(), lr=1e-2)
    after.attach(Hierarchy.of(tier.url)).abort()
    assert after.parameters() == state


def test_after_a_large_record_less_is_reserved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: dict[str, int] = {}
    original = MemoryDriver.reserve_nowait

    def recording(driver: MemoryDriver, key: str, nbytes: int) -> Reservation | None:
        if "differential" in key:
            reserved[key.partition("differential/")[2][:12]] = nbytes
        return original(driver, key, nbytes)

    monkeypatch.setattr(MemoryDriver, "reserve_nowait", recording)
    training, beside = Training(), Sized(1 << 20)
    with training.attach(Hierarchy.of(memory()), stateful={"table": beside}) as checkpointer:
        training.step(1)
        beside.nbytes = 0
        for version in (2, 3):
            training.step(version)
        assert checkpointer.stats.differentials == 3
    one, two, three, four = (reserved[f"{version:012d}"] for version in (1, 2, 3, 4))
    assert min(one, two, three) > 2**20 > four, "the third was reserved before it was known"


def test_what_was_reserved_goes_back_where_a_base_finds_no_room() -> None:
    tier, training = Watched(failing("reserve_nowait", CapacityExceeded(FULL), of="base/000000000002")), Training()
    with training.attach(tier.hierarchy, base_every=2) as checkpointer:
        for version in (1, 2, 3):
            training.step(version)
        checkpointer.flush()
        assert (checkpointer.stats.failed_saves, checkpointer.stats.differentials, checkpointer.stats.bases) == (
            0,
            3,
            2,
        )
        ahead = [call for call, _ in tier.of("differential/000000000003")]
        assert ahead == ["reserve_nowait", "drop", "reserve_nowait", "publish_nowait"]
    assert recovered(tier.url) == (3, training.states[3])


@pytest.mark.parametrize(("call", "times"), [("reserve_nowait", 2), ("publish_nowait", 1)])
def test_what_fails_at_once_is_a_failed_save(call: str, times: int) -> None:
    tier, training = Watched(failing(call, Transient("the tier is busy"), times=times)), Training()
    with training.attach(tier.hierarchy, on_save_error="warn") as checkpointer:
        for version in (1, 2, 3):
            training.step(version)
        checkpointer.flush()
        assert checkpointer.stats.failed_saves == 1
    assert recovered(tier.url) == (3, training.states[3])
    tier, training = Watched(failing(call, Transient("the tier is busy"), times=times)), Training()
    with training.attach(tier.hierarchy, on_save_error="fail"):
        training.step(1)
        with pytest.raises(SaveError, match="the tier is busy"):
            training.step(2)


BUSY = "somebody else fills it"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others hold is asked for again at once."""
    for module in (reservations, base_copier):
        monkeypatch.setattr(module, "AGAIN_S", 0.001)


@pytest.mark.usefixtures("at_once")
def test_training_waits_for_room_that_others_hold() -> None:
    tier, training = Watched(failing("reserve_nowait", FileSystemFull(BUSY), times=9)), Training()
    with training.attach(tier.hierarchy, on_save_error="fail") as checkpointer:
        for version in (1, 2, 3):
            training.step(version)
        stats = checkpointer.stats
    assert len([call for call, _ in tier.of(VERSION_2) if call == "reserve_nowait"]) == 10
    assert (stats.failed_saves, stats.differentials) == (0, 3)
    assert stats.drain_stall_s > 0
    assert recovered(tier.url) == (3, training.states[3])


@pytest.mark.usefixtures("at_once")
def test_room_that_others_hold_is_waited_for_until_the_deadline() -> None:
    tier, training = Watched(failing("reserve_nowait", FileSystemFull(BUSY), times=10**6)), Training()
    with training.attach(tier.hierarchy, on_save_error="fail", deadline_s=1.0) as checkpointer:
        training.step(1)
        with pytest.raises(SaveError, match=BUSY):
            training.step(2)
        assert checkpointer.stats.drain_stall_s > 0
    assert len(tier.of(VERSION_2)) > 3


def test_training_that_goes_on_without_a_save_waits_for_nobody() -> None:
    tier, training = Watched(failing("reserve_nowait", FileSystemFull(BUSY), times=4)), Training()
    with training.attach(tier.hierarchy, on_save_error="warn") as checkpointer:
        for version in (1, 2, 3):
            training.step(version)
        assert checkpointer.stats.failed_saves == 1
    reserved = [call for call, _ in tier.of(VERSION_2) if call == "reserve_nowait"]
    assert len(reserved) == 3, "ahead, in the step, and once more where nothing could be deleted"
    assert recovered(tier.url) == (3, training.states[3])


class Occupied:
    """The memory of one object, which others hold for so many looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of: str, looks: int) -> None:
        self.looks, original = looks, _MemoryReservation.buffer.fget  # type: ignore[attr-defined]  # a property

        def buffer(reservation: Reservation) -> Any:
            if of in reservation.key and self.looks > 0:
                self.looks -= 1
                raise FileSystemFull(BUSY)
            return original(reservation)

        monkeypatch.setattr(_MemoryReservation, "buffer", property(buffer))


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("version", [0, 2])
def test_a_base_waits_for_memory_that_others_hold_when_it_is_made(
    monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    occupied = Occupied(monkeypatch, f"base/{version:012d}", 5)
    url, training = memory(), Training()
    with training.attach(Hierarchy.of(url), on_save_error="fail", base_every=2, bases="capture") as checkpointer:
        for each in (1, 2, 3):
            training.step(each)
        checkpointer.flush()
        assert (checkpointer.stats.failed_saves, checkpointer.stats.bases) == (0, 2)
    assert occupied.looks == 0
    assert recovered(url) == (3, training.states[3])


@pytest.mark.parametrize(("on_save_error", "looks"), [("warn", 1), ("fail", 10**6)])
def test_a_base_whose_memory_others_keep_is_a_failed_save(
    monkeypatch: pytest.MonkeyPatch, on_save_error: str, looks: int
) -> None:
    occupied = Occupied(monkeypatch, "base/000000000002", looks)
    url, training = memory(), Training()
    options: dict[str, Any] = {"base_every": 2, "bases": "capture", "on_save_error": on_save_error, "deadline_s": 1.0}
    with training.attach(Hierarchy.of(url), **options) as checkpointer:
        training.step(1)
        if on_save_error == "fail":
            with pytest.raises(SaveError, match=BUSY):
                for version in (2, 3):
                    training.step(version)
            occupied.looks = 0
        else:
            for version in (2, 3):
                training.step(version)
            assert (checkpointer.stats.failed_saves, occupied.looks) == (1, 0)
    assert recovered(url) == (checkpointer.version, training.states[checkpointer.version])


def waiting_for_memory(monkeypatch: pytest.MonkeyPatch, *, deadline_s: float) -> tuple[Checkpointer, Occupied]:
    """A job whose second base waits for memory that others hold, and go on to hold."""
    occupied = Occupied(monkeypatch, "base/000000000002", 10**6)
    training = Training()
    config: dict[str, Any] = {"base_every": 2, "bases": "capture", "on_save_error": "fail", "deadline_s": deadline_s}
    checkpointer = training.attach(Hierarchy.of(memory()), **config)
    for version in (1, 2):
        training.step(version)
    return checkpointer, occupied


def test_a_job_that_is_broken_off_waits_for_no_memory_that_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer, occupied = waiting_for_memory(monkeypatch, deadline_s=120.0)
    checkpointer.abort()
    newest = checkpointer._job.recorder._bases._copier._newest
    assert newest is not None
    assert newest.published.done()
    assert occupied.looks > 10**6 - 100


def test_a_base_that_nobody_waits_for_any_more_is_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt came while it was waited for, and training may change the state."""
    checkpointer, occupied = waiting_for_memory(monkeypatch, deadline_s=600.0)
    copier = checkpointer._job.recorder._bases._copier
    newest = copier._newest
    assert newest is not None
    copier.give_up()
    with pytest.raises(FileSystemFull):
        newest.published.result(60)
    looks = occupied.looks
    assert isinstance(newest.copied.exception(), FileSystemFull)
    checkpointer.abort()
    assert occupied.looks == looks


class FullTier:
    """A tier that has room after so many deletions; and who makes them."""

    def __init__(self, lacks: int, frees: list[bool]) -> None:
        self.lacks, self._frees = lacks, frees

    def reserve_nowait(self, key: str, nbytes: int) -> Any:
        if self.lacks > 0:
            raise CapacityExceeded(FULL)
        return types.SimpleNamespace(buffer=memoryview(bytearray(nbytes)))

    async def reserve(self, key: str, nbytes: int) -> Any:
        return self.reserve_nowait(key, nbytes)

    def reservations(self, seconds: Iterator[float]) -> Reservations:
        opened, scheduler = types.SimpleNamespace(driver=self), types.SimpleNamespace(time=lambda: next(seconds))
        config = CheckpointConfig(deadline_s=60.0)
        return Reservations(opened, scheduler, self.make_room, pytest.fail, config)  # type: ignore[arg-type]  # what is used

    async def make_room(self) -> bool:
        self.lacks -= 1
        return self._frees.pop(0)


@pytest.mark.parametrize(
    ("lacks", "frees", "there"),
    [
        (1, [True], True),
        (1, [False], True),  # somebody else has deleted something
        (3, [True, True, True], True),  # each too small
        (2, [False], False),
        (3, [True, False], False),
    ],
)
@pytest.mark.parametrize("on_loop", [False, True])
async def test_room_is_made_as_long_as_something_is_deleted(
    lacks: int, frees: list[bool], there: bool, on_loop: bool
) -> None:
    tier = FullTier(lacks, left := frees.copy())
    memory = tier.reservations(itertools.repeat(0.0))
    key = ShardKey.differential(1, 1, 1, 0)
    reserving = memory.reserve_on_loop(key, 10, tier.make_room) if on_loop else memory.reserve(key, 10)
    if there:
        assert (await reserving).buffer.nbytes == 10
    else:
        with pytest.raises(CapacityExceeded):
            await reserving
    assert left == []


async def test_room_is_made_until_the_deadline() -> None:
    tier = FullTier(100, [True] * 100)
    memory = tier.reservations(itertools.count(0.0, 10.0))
    with pytest.raises(CapacityExceeded):
        await memory.reserve(ShardKey.differential(1, 1, 1, 0), 10)
    assert tier.lacks == 100 - 6
