"""Copies wait for their turn, in virtual time."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pytest

from tests.moving import FIRST, base, record, running
from tests.simulation import virtual_time
from tiercheck.errors import Transient
from tiercheck.format import container
from tiercheck.format.container import ShardMetadata, TensorEntry
from tiercheck.hierarchy import Hierarchy, OpenTier, Tier
from tiercheck.keys import ShardKey, Stream, parse
from tiercheck.policy.observation import Contents, Observation, Role
from tiercheck.policy.placement import Placement
from tiercheck.policy.policies import BytesPerSecond, Copying, PacingPolicy, Spread, Unpaced
from tiercheck.policy.watermark import Retention
from tiercheck.replication.handle import HURRY_S_MAX
from tiercheck.replication.mover import Mover
from tiercheck.replication.pacing import PART_S_MAX, Pacer
from tiercheck.replication.refusals import Refusals
from tiercheck.runtime.turns import next_part
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.wrappers.base import Call, Operation, WrappingDriver
from tiercheck.types import Capabilities, Survives

T = TypeVar("T")

ROLES = (Role(0, "first", Survives.NOTHING), Role(1, "second", Survives.NOTHING))


def tier() -> OpenTier:
    return Hierarchy.of("memory://first", "memory://second").open().tiers[1]


def began(
    policy: PacingPolicy, sizes: list[int], refusals: Refusals | None = None, sending_s: float = 0.0
) -> list[float]:
    """When each copy of so many bytes began."""

    async def copy() -> list[float]:
        nothing = Observation(ROLES, (Contents(), Contents()), 0, 1, 1, FIRST)
        pacer, target, found = Pacer(policy, refusals or Refusals(), Placement(), lambda: nothing), tier(), []
        for nbytes in sizes:
            async with pacer.copying(target, base(0), nbytes):
                found.append(asyncio.get_running_loop().time())
                await asyncio.sleep(sending_s)
        return found

    return virtual_time.run(copy())


def test_a_copy_begins_when_those_before_it_are_paid_for() -> None:
    assert began(BytesPerSecond("memory-2", 100), [500, 100, 0, 100]) == [0, 5, 6, 6]
    assert began(BytesPerSecond("another", 100), [500, 100]) == [0, 0]
    assert began(Unpaced(), [500, 100]) == [0, 0]


def test_time_that_a_copy_takes_counts() -> None:
    assert began(BytesPerSecond("memory-2", 100), [500, 500, 500], sending_s=4) == [0, 5, 10]
    assert began(BytesPerSecond("memory-2", 100), [500, 500, 500], sending_s=9) == [0, 9, 18]


@dataclass(frozen=True)
class Stopping(PacingPolicy):
    """Would have nothing copied for ever."""

    def bytes_per_s(self, seen: Copying) -> float | None:
        return 0.0 if seen.nbytes > 100 else 100.0


def test_a_pace_that_stops_copies_is_refused_told_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    assert began(Stopping(), [500, 500, 50, 100], refusals) == [0, 0, 0, 0.5]
    assert refusals.count == 1
    assert refusals.text == "", "it is no trouble any more"
    told = [each.message for each in caplog.records if "Stopping() is refused: at 0.0 bytes per second" in each.message]
    assert len(told) == 1


BASE_NBYTES, PART, VERSION_S, INTERVAL = 100_000, 1000, 1.0, 20


@dataclass
class Slow(WrappingDriver):
    """Takes so many bytes a second, in parts, several objects side by side."""

    inner: MemoryDriver
    bytes_per_s: float
    part: int = PART
    """Bytes of a part; 0: it never asks, and an object is one part."""
    parts: list[tuple[float, int]] = field(default_factory=list)
    """Of bases: when each part went, and how long it is."""
    came: dict[ShardKey, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.inner)

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, survives=Survives.RACK, mappable=False)

    async def around(self, call: Call, work: Callable[[], Awaitable[T]]) -> T:
        key, clock = parse(call.key or ""), asyncio.get_running_loop().time
        if call.operation is Operation.PUT and isinstance(key, ShardKey):
            for start in range(0, call.sent_bytes, self.part or call.sent_bytes):
                part = min(self.part or call.sent_bytes, call.sent_bytes - start)
                if self.part:
                    await next_part(part)
                if key.stream is Stream.BASE and key.first:
                    self.parts.append((clock(), part))
                await asyncio.sleep(part / self.bytes_per_s)
        result = await work()
        if call.operation is Operation.PUT and isinstance(key, ShardKey):
            self.came[key] = clock()
        return result

    def most(self, seconds: float) -> int:
        """The most bytes of bases that went in so many seconds."""
        return max(sum(n for at, n in self.parts if start <= at < start + seconds) for start, _ in self.parts)


def stored(key: ShardKey) -> list[bytes | bytearray | memoryview]:
    nbytes = BASE_NBYTES if key.stream is Stream.BASE else 100
    entry = TensorEntry(f"{key.first}/x", "U8", (nbytes,), bytes(nbytes))
    return list(container.payload(ShardMetadata.of(key, 1, ""), [entry]))


def trained(
    policy: PacingPolicy,
    bytes_per_s: float,
    versions: int,
    then: Callable[[Mover], Awaitable[object]] | None = None,
    part: int = PART,
) -> Slow:
    """A job of a second a version, and a base each 20 of them; both tiers in memory, the second one slow."""

    async def train() -> Slow:
        durable = Slow(MemoryDriver(uuid.uuid4().hex), bytes_per_s, part)
        last = Tier(f"memory://{uuid.uuid4().hex}", wrap=lambda _: durable)
        async with Hierarchy.of(f"memory://{uuid.uuid4().hex}", last).open() as tiers:
            placement = Placement(5, interval=INTERVAL)
            mover = Mover(
                tiers,
                rank=0,
                world_size=1,
                generation=1,
                placement=placement,
                retention=Retention(placement=placement),
                lineage=FIRST,
                pacing=policy,
            )
            put = tiers.first.driver.put
            await put(str(base(0)), stored(base(0)))
            async with running(mover):
                for version in range(1, versions + 1):
                    await asyncio.sleep(VERSION_S)
                    await put(str(record(version)), stored(record(version)))
                    if version % INTERVAL == 0:
                        await put(str(base(version)), stored(base(version)))
                    mover.nudge()
                if then is not None:
                    await then(mover)
        return durable

    return virtual_time.run(train())


def test_pacing_off_a_base_goes_as_fast_as_the_tier_takes_it() -> None:
    slow = trained(Unpaced(), 50_000, 45)
    assert slow.came[base(20)] == pytest.approx(22, abs=0.5)
    assert slow.most(1.0) >= 45_000


def test_a_base_that_is_spread_makes_no_burst_and_is_there_before_the_next_one_is_due() -> None:
    slow = trained(Spread(), 50_000, 65)
    for version in (20, 40):
        assert version + 10 < slow.came[base(version)] < version + 17
    assert slow.most(1.0) <= 1.5 * BASE_NBYTES / 15


async def nudged(mover: Mover) -> None:
    """As training that waits before a tier lags too far, or for room for one more differential."""
    while mover.status.undrained_bases:
        mover.nudge(hurry_s=2.0)
        await asyncio.sleep(0.5)


@pytest.mark.parametrize(
    "wait",
    [lambda mover: mover.drain(100, closing=True), lambda mover: mover.cycle(), nudged],
    ids=["a flush", "a cycle", "nudges"],
)
def test_who_waits_for_the_tiers_is_not_kept_by_the_pace(wait: Callable[[Mover], Awaitable[object]]) -> None:
    slow = trained(Spread(), 50_000, 22, wait)
    assert slow.came[base(20)] < 22 + PART_S_MAX + BASE_NBYTES / 50_000 + 0.5


@pytest.mark.parametrize("part", [0, BASE_NBYTES // 2], ids=["whole", "in large parts"])
def test_what_went_in_one_piece_is_owed_until_somebody_waits(part: int) -> None:
    """A base of a driver that sends it whole owes hours by this cap. Nobody who waits for the next base pays them."""
    slow = trained(Spread(chunk=10), 50_000, 42, lambda mover: mover.drain(10, closing=True), part)
    assert slow.came[base(40)] < 42 + BASE_NBYTES / 50_000 + 0.5


@dataclass(frozen=True)
class UntilAwaited(PacingPolicy):
    """Ten bytes a second, unless somebody waits."""

    def bytes_per_s(self, seen: Copying) -> float | None:
        return None if seen.awaited else 10.0


@pytest.mark.parametrize(
    ("policy", "begins"), [(UntilAwaited(), 1.0), (BytesPerSecond("memory-2", 10), 50.0)], ids=["asks", "does not ask"]
)
@pytest.mark.parametrize("by_nudge", [False, True])
def test_who_begins_to_wait_ends_a_pause_if_the_policy_says_so(
    policy: PacingPolicy, begins: float, by_nudge: bool
) -> None:
    """At once, and not at the next look."""

    async def send() -> float:
        nothing = Observation(ROLES, (Contents(), Contents()), 0, 1, 1, FIRST)
        pacer, target = Pacer(policy, Refusals(), Placement(), lambda: nothing), tier()
        clock = asyncio.get_running_loop().time
        async with pacer.copying(target, base(0), 500):
            pass

        async def copy() -> float:
            async with pacer.copying(target, base(1), 0):
                return clock()

        copying = asyncio.create_task(copy())
        await asyncio.sleep(1)
        if by_nudge:
            pacer.hurry(5)
            return await copying
        async with pacer.hurrying():
            return await copying

    assert virtual_time.run(send()) == begins


def test_a_hurry_ends_by_itself() -> None:
    """Whoever waited may be dead."""

    async def send() -> list[float]:
        nothing = Observation(ROLES, (Contents(), Contents()), 0, 1, 1, FIRST)
        pacer, target = Pacer(UntilAwaited(), Refusals(), Placement(), lambda: nothing), tier()
        clock, found = asyncio.get_running_loop().time, list[float]()
        pacer.hurry(1e9)
        for sending_s in (0.0, HURRY_S_MAX, 0.0):
            async with pacer.copying(target, base(1), 500):
                found.append(clock())
                await asyncio.sleep(sending_s)
        return found

    assert virtual_time.run(send()) == [0, 0, HURRY_S_MAX]


def test_a_base_that_is_late_waits_for_nothing_that_is_owed() -> None:
    """Neither for long: that it is late is seen when the next one comes."""
    slow = trained(Spread(chunk=10), 50_000, 65, part=0)
    assert slow.came[base(20)] == pytest.approx(40 + BASE_NBYTES / 50_000, abs=PART_S_MAX + 0.5)


def test_differentials_that_are_not_paced_forgive_a_base_nothing() -> None:
    slow = trained(Spread(chunk=4000), 50_000, 45, part=0)
    assert slow.came[base(20)] == pytest.approx(25 + BASE_NBYTES / 50_000, abs=1.0), "the one before takes 25 s"


def test_a_turn_that_is_broken_off_counts_nothing() -> None:
    async def send() -> float:
        nothing = Observation(ROLES, (Contents(), Contents()), 0, 1, 1, FIRST)
        pacer = Pacer(BytesPerSecond("memory-2", 10), Refusals(), Placement(), lambda: nothing)
        target = tier()

        async def parts() -> None:
            async with pacer.copying(target, base(0), 300):
                await next_part(100)
                await next_part(200)

        sending = asyncio.create_task(parts())
        await asyncio.sleep(1)
        sending.cancel()
        await asyncio.wait([sending])
        async with pacer.copying(target, base(1), 0):
            return asyncio.get_running_loop().time()

    assert virtual_time.run(send()) == 10


def test_what_exceeds_the_cap_spills_over_and_is_caught_up() -> None:
    slow = trained(Spread(chunk=4000), 50_000, 65)
    before = [(at, nbytes) for at, nbytes in slow.parts if at < 39]
    assert max(sum(n for at, n in before if start <= at < start + 1) for start, _ in before) <= 4000 + PART
    assert 40 <= slow.came[base(20)] <= 42, "the next one is due, and it is held back no more"
    assert slow.came[base(40)] < 62


@pytest.mark.parametrize("policy", [Unpaced(), Spread()])
def test_differentials_pass_a_base_that_is_on_its_way(policy: PacingPolicy) -> None:
    """Between its parts, of which one may be under way: 12 s long the tier takes the base alone."""
    slow = trained(policy, 8000, 47)
    assert slow.came[base(20)] > 30
    batches = {key.last: at - key.last for key, at in slow.came.items() if key.stream is Stream.DIFFERENTIAL}
    assert sorted(batches) == list(range(5, 46, 5))
    assert max(batches.values()) < 1.0


def test_no_part_waits_for_long() -> None:
    """Its store would take the sender for dead. What is owed then stays owed, and the next object pays it."""

    async def send() -> list[float]:
        nothing = Observation(ROLES, (Contents(), Contents()), 0, 1, 1, FIRST)
        pacer = Pacer(BytesPerSecond("memory-2", 10), Refusals(), Placement(), lambda: nothing)
        target, found = tier(), []
        for version in (0, 1):
            async with pacer.copying(target, base(version), 300):
                for _ in range(3):
                    await next_part(100)
                    found.append(asyncio.get_running_loop().time())
        return found

    assert virtual_time.run(send()) == [0, PART_S_MAX, 2 * PART_S_MAX, 30, 30 + PART_S_MAX, 30 + 2 * PART_S_MAX]


def test_a_differential_whose_copy_fails_is_paid_for() -> None:
    """Else a tier that fails would be sent the same bytes again and again, as fast as they go."""

    async def send() -> float:
        nothing = Observation(ROLES, (Contents(), Contents()), 0, 1, 1, FIRST)
        pacer, target = Pacer(BytesPerSecond("memory-2", 10), Refusals(), Placement(), lambda: nothing), tier()
        with pytest.raises(Transient):
            async with pacer.copying(target, record(1), 300):
                raise Transient("the tier is away", tier=target.name)
        async with pacer.copying(target, record(1), 0):
            return asyncio.get_running_loop().time()

    assert virtual_time.run(send()) == 30
