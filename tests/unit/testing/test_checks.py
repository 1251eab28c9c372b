"""A place of one's own in a tier, and what a driver says of itself."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable
from typing import Any, ClassVar

import pytest

from tests.unit.diagnostics.test_doctor import examine
from tiercheck.diagnostics import doctor
from tiercheck.errors import ConfigurationError, TierError, Transient, Unauthorized
from tiercheck.testing import checks
from tiercheck.testing.describe import Option, describe
from tiercheck.testing.scratch import PAGE, Scratch, emptied, opened, remove_all, scratch
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.shm.driver import ShmDriver
from tiercheck.tiers.shm.namespaces import namespaces, remove_namespace
from tiercheck.tiers.url import TierURL
from tiercheck.types import Capabilities, ObjectInfo, Survives


@pytest.fixture
def name() -> str:
    return f"test-{secrets.token_hex(6)}"


def here(driver: TierDriver) -> Scratch:
    return Scratch(driver, "here/", TierURL.parse(driver.url), driver)


async def test_scratch_is_removed_and_nothing_else(name: str) -> None:
    async with MemoryDriver(name) as driver:
        await driver.put("tiercheck-bench-elsewhere/a", [b"kept"])
        with pytest.raises(RuntimeError, match="mine"):
            async with scratch(f"memory://{name}", "bench") as place:
                for n in range(3):
                    await place.driver.put(place.key(f"deep/er/{n}"), [b"x"])
                assert place.prefix.startswith("tiercheck-bench-")
                raise RuntimeError("mine")
        assert [info.key async for info in driver.list()] == ["tiercheck-bench-elsewhere/a"]
    MemoryDriver.forget(name)


async def test_two_scratches_do_not_meet(name: str) -> None:
    async with scratch(f"memory://{name}", "x") as one, scratch(f"memory://{name}", "x") as two:
        assert one.prefix != two.prefix
    MemoryDriver.forget(name)


async def test_scratch_is_removed_when_its_task_is_cancelled(name: str) -> None:
    began = asyncio.Event()

    async def work() -> None:
        async with scratch(f"memory://{name}", "x") as place:
            await place.driver.put(place.key("a"), [b"x"])
            began.set()
            await asyncio.Event().wait()

    working = asyncio.create_task(work())
    await began.wait()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    async with MemoryDriver(name) as driver:
        assert [info.key async for info in driver.list()] == []
    MemoryDriver.forget(name)


class Unsteady(MemoryDriver):
    """Cannot delete at first."""

    errors: ClassVar[list[TierError]] = []

    async def delete(self, keys: Iterable[str]) -> None:
        if self.errors:
            raise self.errors.pop()
        await super().delete(keys)


async def test_what_cannot_be_removed_at_once_is_removed_later(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unsteady, "errors", [Transient("once"), Transient("twice")])
    async with opened(Unsteady(name)) as driver, emptied(here(driver)) as place:
        await place.driver.put(place.key("a"), [b"x"])
    async with MemoryDriver(name) as driver:
        assert [info.key async for info in driver.list()] == []
    MemoryDriver.forget(name)


async def test_what_is_left_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unsteady, "errors", [Unauthorized("no")])
    with pytest.raises(TierError, match=r"delete what is left under here/: no"):
        async with opened(Unsteady(name)) as driver, emptied(here(driver)) as place:
            await place.driver.put(place.key("a"), [b"x"])
    MemoryDriver.forget(name)


async def test_a_diagnosis_outlives_what_it_leaves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unsteady, "errors", [])
    monkeypatch.setattr("tiercheck.testing.scratch.make_driver", lambda url: Unsteady(name))

    async def then_fails(*arguments: Any) -> Any:
        found = await diagnose(*arguments)
        Unsteady.errors.append(Unauthorized("no"))
        return found

    diagnose = doctor.diagnose
    monkeypatch.setattr(doctor, "diagnose", then_fails)
    found = await doctor.examine(f"memory://{name}", measure_s=0)
    assert found.checks and all(each.passed for each in found.checks)
    assert "delete what is left under tiercheck-doctor-" in found.problems[-1].what
    MemoryDriver.forget(name)


async def test_more_than_a_page_is_removed(name: str) -> None:
    async with opened(MemoryDriver(name)) as driver, emptied(here(driver)) as place:
        for n in range(PAGE + 1):
            await place.driver.put(place.key(str(n)), [b""])
        await remove_all(place.driver, place.prefix)
        assert [info async for info in place.driver.list()] == []
    MemoryDriver.forget(name)


async def test_a_base_that_a_job_put_meanwhile_stays(name: str) -> None:
    """The job opens a namespace that the scratch has made, puts its only base there and dies."""
    try:
        async with scratch(f"shm://{name}?size=64MiB", "x") as place:
            await place.driver.put(place.key("a"), [bytes(1 << 20)])
            async with ShmDriver(name, size=64 << 20) as job:
                await job.put("g000001/base", [b"precious"])
        async with ShmDriver(name, size=64 << 20) as job:
            assert [info.key async for info in job.list()] == ["g000001/base"]
            assert bytes(await job.get("g000001/base")) == b"precious"
    finally:
        remove_namespace(name)


async def test_a_jobs_shared_memory_is_not_filled(name: str) -> None:
    """What a job may keep there in all is its own: a save that finds it full ends the training."""
    try:
        async with ShmDriver(name, size=1 << 20) as job:
            await job.put("g000001/base", [bytes(900_000)])
            before = await job.usage()
            async with scratch(f"shm://{name}", "x") as place:
                await place.driver.put(place.key("a"), [bytes(8 << 20)])
                assert await job.usage() == before
                assert (await place.tier.usage()).used_bytes == before.used_bytes
                assert place.url.text != job.url
        assert not [info.name for info in namespaces() if info.name.startswith("tiercheck-x-")]
    finally:
        remove_namespace(name)


async def test_a_namespace_that_a_job_has_open_stays_although_it_is_empty(name: str) -> None:
    job = ShmDriver(name, size=64 << 20)
    try:
        async with scratch(f"shm://{name}?size=64MiB", "x"):
            await job.open()
        assert name in {info.name for info in namespaces()}
        await job.put("a", [b"x"])
    finally:
        await job.close()
        remove_namespace(name)


@pytest.mark.parametrize("call", ["open", "list", "close"])
async def test_a_tier_that_does_not_answer_is_given_up(name: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class SilentDriver(MemoryDriver):
        async def open(self) -> None:
            await self.silent("open")
            await super().open()

        async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
            await self.silent("list")
            async for info in super().list(prefix):
                yield info

        async def close(self) -> None:
            await super().close()
            await self.silent("close")

        async def silent(self, where: str) -> None:
            if where == call:
                await asyncio.Event().wait()

    for deadline in ("OPEN_S", "REMOVAL_S", "CLOSE_S"):
        monkeypatch.setattr(f"tiercheck.testing.scratch.{deadline}", 0.05)
    with pytest.raises(Transient, match=r"(opening it|removing what lies under here/|closing it) took over"):
        driver = SilentDriver(name)
        async with opened(driver), emptied(here(driver)) as place:
            await place.driver.put(place.key("a"), [b"x"])
    MemoryDriver.forget(name)


async def test_an_unusable_url_opens_nothing() -> None:
    with pytest.raises(ConfigurationError):
        async with scratch("shm://", "x"):
            pytest.fail("it was opened")
    assert not (await examine("shm://")).healthy


class Documented(MemoryDriver):
    """``doc://place[?colour=red][&size=1GiB]``: a driver with options. It is for this test.

    - ``colour``: what it looks like,
      from all sides.
    - ``strict``: whether unusual things are refused.
    """

    @classmethod
    def from_url(cls, url: TierURL) -> Documented:
        options = url.reader()
        options.take("colour", str, "blue")
        options.take("strict", Survives.parse, Survives.NODE)
        options.finish()
        return cls(url.location)


class Demanding(MemoryDriver):
    """Wants more than the form says: ``demanding://[place]``, such as ``demanding://here``.

    It is not at ``elsewhere://``.
    """

    @classmethod
    def from_url(cls, url: TierURL) -> Demanding:
        options = url.reader()
        options.take("seen", int, 3)
        if not url.location:
            raise ConfigurationError("a place is needed")
        return cls(url.location)


def test_a_driver_is_described_by_its_docstring_and_its_reading_of_a_url() -> None:
    found = describe(Documented.from_url)
    assert found.summary == "a driver with options"
    assert found.url_form == "doc://place[?colour=red][&size=1GiB]"
    assert found.options == (
        Option("colour", "blue", "what it looks like, from all sides."),
        Option("strict", "node", "whether unusual things are refused."),
    )
    assert found.capabilities == Capabilities(Survives.NOTHING, mappable=True, conditional_put=True)
    assert found.options_table().splitlines()[2] == "| `colour` | `blue` | what it looks like, from all sides. |"
    assert "| `survives` | `NOTHING` |" in found.capabilities_table()


def test_a_driver_that_needs_more_than_its_form_is_described_as_far_as_it_goes() -> None:
    found = describe(Demanding.from_url)
    assert (found.summary, found.url_form) == ("Wants more than the form says", "demanding://[place]")
    assert [option.name for option in found.options] == ["seen"]
    assert found.capabilities is None
    with pytest.raises(ValueError, match="demanding"):
        found.capabilities_table()


class HangingDriver(MemoryDriver):
    """Answers no listing."""

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        await asyncio.Event().wait()
        async for each in super().list(prefix):
            yield each


class ImpatientDriver(MemoryDriver):
    """Has a deadline of its own, and lets it through."""

    async def stat(self, key: str) -> ObjectInfo:
        raise TimeoutError("mine")


async def test_after_one_check_that_is_not_done_in_time_the_others_have_less(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checks, "LATE_S", 0.01)
    monkeypatch.setattr(checks, "CHECKS", [each for each in checks.CHECKS if each[0] in ("keys", "listing")] * 2)
    async with HangingDriver(name) as driver:
        found = await checks.check_tier(here(driver), MemoryDriver(name), check_s=0.1)
    MemoryDriver.forget(name)
    assert [(each.name, each.passed, each.late, each.message) for each in found if not each.passed] == [
        ("listing", False, True, "not done within 0.1 s"),
        ("listing", False, True, "not done within 0.01 s"),
    ]
    assert len(found) == 4
    assert [each.getMessage() for each in caplog.records] == [
        f"memory://{name}: listing: not done within 0.1 s; the checks that follow have 0.01 s each"
    ]


async def test_a_deadline_of_the_driver_s_is_not_the_check_s(name: str) -> None:
    async with ImpatientDriver(name) as driver:
        found = await checks.check_tier(here(driver), MemoryDriver(name))
    MemoryDriver.forget(name)
    (check,) = [each for each in found if each.name == "round trip"]
    assert (check.late, check.message) == (False, "a foreign TimeoutError reached the caller: mine")
