"""Opening a generation where puts know no conditions: of two jobs at most one may win, whatever comes first."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import nullcontext
from dataclasses import replace

import pytest

from tests.simulation import virtual_time
from tiercheck.errors import JobConflict, Transient, Unsupported
from tiercheck.hierarchy import Hierarchy, OpenHierarchy, Tier
from tiercheck.keys import ClaimKey, LineageKey
from tiercheck.policy.recovery.lineage import Branch, Lineage
from tiercheck.replication.objects.generation import open_generation, record_generation
from tiercheck.replication.objects.lineage_records import listed_lineage, read_branches
from tiercheck.testing.faults import FaultPlan, FaultyDriver
from tiercheck.tiers.driver import TierDriver
from tiercheck.types import ByteRange, Capabilities, ObjectInfo, Payload, PutMode, Survives

STEPS = 4
"""A claimant's operations: put the claim, list, put the record (or withdraw the claim), list again."""


class Turns:
    """Lets one job's operations through one at a time."""

    def __init__(self) -> None:
        self._granted = asyncio.Semaphore(0)
        self._finished = asyncio.Event()

    async def __aenter__(self) -> None:
        await self._granted.acquire()

    async def __aexit__(self, *error: object) -> None:
        self._finished.set()

    async def grant(self, job: asyncio.Task[bool]) -> None:
        """Let one operation of ``job`` run to its end; a job that is over needs none."""
        self._finished.clear()
        self._granted.release()
        finished = asyncio.create_task(self._finished.wait())
        await asyncio.wait({finished, job}, return_when=asyncio.FIRST_COMPLETED)
        finished.cancel()


class Unconditional(FaultyDriver):
    """A shared store that knows no conditional puts, whose every operation waits for its turn."""

    def __init__(self, inner: TierDriver, turns: Turns | None = None) -> None:
        super().__init__(inner, FaultPlan())
        self._turns = turns or nullcontext()

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, conditional_put=False, survives=Survives.RACK)

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        if mode.conditional:
            raise Unsupported("no conditional puts here", tier=self.url, key=key)
        async with self._turns:
            return await super().put(key, payload)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        async with self._turns:
            found = [info async for info in super().list(prefix)]
        for info in found:
            yield info

    async def delete(self, keys: Iterable[str]) -> None:
        async with self._turns:
            await super().delete(keys)


def branch(token: str, generation: int = 1) -> Branch:
    return Branch(generation, 0, 0, 1, token * 16)


def tiers(store: str, turns: Turns | None = None) -> OpenHierarchy:
    return Hierarchy.of(Tier(f"memory://{store}", wrap=lambda driver: Unconditional(driver, turns))).open()


async def claimants(schedule: tuple[int, ...]) -> list[bool]:
    """Two jobs ask for generation 1; ``schedule`` says whose operation comes next. Returns who won."""
    store = uuid.uuid4().hex
    turns = [Turns(), Turns()]

    async def ask(job: int) -> bool:
        async with tiers(store, turns[job]) as hierarchy:
            try:
                await open_generation(hierarchy, branch("ab"[job]))
            except JobConflict:
                return False
            return True

    tasks = [asyncio.create_task(ask(job)) for job in range(2)]
    for job in schedule:
        await turns[job].grant(tasks[job])
    return list(await asyncio.gather(*tasks))


async def test_two_claimants_never_both_win() -> None:
    for schedule in sorted(set(itertools.permutations([0] * STEPS + [1] * STEPS))):
        won = await claimants(schedule)
        assert sum(won) <= 1, schedule
        if schedule[:STEPS] in ((0, 0, 0), (1, 1, 1)):
            assert won[schedule[0]], f"{schedule}: who was done before the other began has won"


async def test_all_ranks_of_a_job_share_a_claim() -> None:
    store = uuid.uuid4().hex
    for _ in range(3):
        async with tiers(store) as hierarchy:
            await open_generation(hierarchy, branch("a"))
            held = [info.key async for info in hierarchy.first.driver.list()]
    assert held == [str(LineageKey(1)), str(ClaimKey(1, "a" * 16))]


async def test_what_a_crashed_claimant_left_is_passed_over() -> None:
    store = uuid.uuid4().hex
    stale = ClaimKey(1, "c" * 16)
    async with tiers(store) as hierarchy:
        await hierarchy.first.driver.put(str(stale), [b"claim"])
        with pytest.raises(JobConflict):
            await open_generation(hierarchy, branch("a"))
        assert [info.key async for info in hierarchy.first.driver.list()] == [str(stale)]
        again = Branch(2, 0, 0, 1, "b" * 16)
        await open_generation(hierarchy, again)
        assert str(LineageKey(2)) in [info.key async for info in hierarchy.first.driver.list()]


@pytest.mark.parametrize("later", [True, False])
async def test_generations_that_opened_while_a_tier_was_away_are_recorded_there_with_the_next(later: bool) -> None:
    """Else a recovery from that tier alone would find no way back to what was committed before."""
    first, away, newest = (Branch(number, number - 1, number, 1, str(number) * 16) for number in (1, 2, 3))
    async with Hierarchy.of(f"memory://{uuid.uuid4().hex}").open() as hierarchy:
        await open_generation(hierarchy, first)
        if later:
            await record_generation(hierarchy.first, newest, Lineage.of([first, away, newest]), 0, hierarchy.first)
        else:
            await open_generation(hierarchy, newest, past=[first, away])
        assert (await read_branches(hierarchy.first))[0] == [first, away, newest]


@pytest.mark.parametrize("conditional", [True, False])
async def test_a_number_whose_record_was_deleted_is_nobody_elses(conditional: bool) -> None:
    """A job that looked around long ago must not open a generation behind the newest one."""
    store = uuid.uuid4().hex
    opened = Hierarchy.of(f"memory://{store}").open() if conditional else tiers(store)
    async with opened as hierarchy:
        await open_generation(hierarchy, branch("a", 1))
        await open_generation(hierarchy, branch("a", 2), past=[branch("a", 1)])
        await hierarchy.first.driver.delete([str(LineageKey(1)), str(ClaimKey(1, "a" * 16))])
        with pytest.raises(JobConflict, match="another job opened generation 2"):
            await open_generation(hierarchy, branch("b", 1))
        assert (await read_branches(hierarchy.first))[0] == [branch("a", 1), branch("a", 2)]
        assert await listed_lineage(hierarchy.first) == {
            LineageKey(2): len(await hierarchy.first.driver.get(str(LineageKey(2))))
        }


async def test_of_a_thousand_generations_one_record_is_read() -> None:
    gets: list[str] = []

    class Counted(FaultyDriver):
        async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
            gets.append(key)
            return await super().get(key, range=range, into=into)

    tier = Tier(f"memory://{uuid.uuid4().hex}", wrap=lambda driver: Counted(driver, FaultPlan()))
    past = [Branch(number, number - 1, number, 1, f"{number:016x}") for number in range(1, 1001)]
    async with Hierarchy.of(tier).open() as hierarchy:
        for each in (*past[:5], past[-1]):
            await open_generation(hierarchy, each, past=past)
        gets.clear()
        assert (await read_branches(hierarchy.first))[0] == past
        assert gets == [str(LineageKey(1000))]
        damaged = bytearray(await hierarchy.first.driver.get(str(LineageKey(1000))))
        damaged[-1] ^= 1
        await hierarchy.first.driver.put(str(LineageKey(1000)), [damaged])
        branches, (set_aside,) = await read_branches(hierarchy.first)
        assert set_aside.key == str(LineageKey(1000))
        assert branches == past[:5], "the record before tells what it knew"


class Silent(FaultyDriver):
    """A store behind a network that takes no record, and does not say so."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, survives=Survives.RACK)

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


@pytest.mark.parametrize("may_wait", [True, False])
def test_a_tier_that_does_not_answer_is_left_for_later_or_named_in_time(may_wait: bool) -> None:
    async def open_before_silent_tiers() -> None:
        urls = [f"memory://{uuid.uuid4().hex}" for _ in range(3)]
        silent = [Tier(url, wrap=lambda driver: Silent(driver, FaultPlan())) for url in urls[1:]]
        async with Hierarchy.of(urls[0], *silent).open() as hierarchy:
            opening = open_generation(hierarchy, branch("a"), may_wait=may_wait, deadline_s=1.0)
            if may_wait:
                later = (await opening).later
                assert asyncio.get_running_loop().time() < 1.0
                assert set(later) == {tier.name for tier in hierarchy.tiers[1:]}
                assert all("it has not answered within" in error for error in later.values())
                assert (await read_branches(hierarchy.first))[0] == [branch("a")]
            else:
                with pytest.raises(Transient, match="it has not answered within 1 s"):
                    await opening
                assert asyncio.get_running_loop().time() == 1.0

    virtual_time.run(open_before_silent_tiers())
