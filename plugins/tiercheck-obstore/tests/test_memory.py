"""obstore's memory store passes the kit: the driver's own code, without a server."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import obstore
import pytest
from hypothesis import HealthCheck, settings
from obstore.exceptions import AlreadyExistsError, PreconditionError
from tiercheck_obstore.driver import Settings
from tiercheck_obstore.stores import MemoryDriver
from tiercheck_obstore.tokens import TokenDriver

from tiercheck.errors import AlreadyExists, PreconditionFailed
from tiercheck.testing.conformance import TierDriverTests
from tiercheck.testing.stateful import DriverMachine
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver
from tiercheck.types import PutMode


class TestMemory(TierDriverTests):
    large_nbytes = 5 << 19  # three parts, the last one short

    @pytest.fixture(autouse=True)
    def name(self) -> Iterator[None]:
        self.store_name = secrets.token_hex(4)
        yield
        MemoryDriver.forget(self.store_name)

    async def make_driver(self) -> TierDriver:
        return make_driver(f"obstore+memory://{self.store_name}?part=1MiB")

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return await self.make_driver()

    async def raw_get(self, driver: TierDriver, key: str) -> bytes | None:
        try:
            found = await obstore.get_async(MemoryDriver._stores[self.store_name], key)
        except FileNotFoundError:
            return None
        return bytes(await found.bytes_async())

    async def raw_put(self, driver: TierDriver, key: str, content: bytes) -> None:
        await obstore.put_async(MemoryDriver._stores[self.store_name], key, content)

    def crash_before_publish(self, driver: TierDriver) -> None:
        """The store writes and publishes in one step."""


class TokenMemoryDriver(TokenDriver, MemoryDriver):
    """Each put has a token of its own in the object's metadata, as on Google's store."""


async def test_who_opens_to_read_writes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_driver(f"obstore+memory://{name}") as writing:
        await writing.put("a", [b"content"])
    for call in ("put_async", "delete_async"):
        monkeypatch.setattr(obstore, call, lambda *_, **__: pytest.fail("writes"))
    driver = make_driver(f"obstore+memory://{name}")
    await driver.open_to_read()
    assert bytes(await driver.get("a")) == b"content"
    await driver.close()


@pytest.fixture
def name() -> Iterator[str]:
    name = secrets.token_hex(4)
    yield name
    MemoryDriver.forget(name)


def refuse_after(monkeypatch: pytest.MonkeyPatch, error: Exception, *, stored: bool) -> None:
    """Conditional puts fail; what is ``stored`` has been done by a try whose answer was lost."""
    put_async = obstore.put_async

    async def put(store: object, key: str, content: bytes, **options: object) -> object:
        if options.get("mode", "overwrite") == "overwrite":
            return await put_async(store, key, content, **options)
        if stored:
            await put_async(store, key, content, **options)
        raise error

    monkeypatch.setattr(obstore, "put_async", put)


REFUSALS = [AlreadyExistsError("it is there"), PreconditionError("it has changed")]


@pytest.mark.parametrize("error", REFUSALS, ids=["exists", "precondition"])
async def test_a_repeat_that_is_refused_by_its_own_object_has_won(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with TokenMemoryDriver(name, Settings(conditional=True)) as driver:
        refuse_after(monkeypatch, error, stored=True)
        created = await driver.put("a", [b"created"], mode=PutMode.CREATE)
        assert await driver.stat("a") == created
        updated = await driver.put("a", [b"updated"], mode=PutMode.UPDATE(created.etag))
        assert await driver.stat("a") == updated
        assert bytes(await driver.get("a")) == b"updated"


@pytest.mark.parametrize("error", REFUSALS, ids=["exists", "precondition"])
async def test_one_that_is_refused_by_another_s_object_has_lost(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with TokenMemoryDriver(name, Settings(conditional=True)) as driver:
        refuse_after(monkeypatch, error, stored=False)
        with pytest.raises(AlreadyExists):
            await driver.put("a", [b"created"], mode=PutMode.CREATE)  # it came and went
        info = await driver.put("a", [b"another's"])
        with pytest.raises(AlreadyExists):
            await driver.put("a", [b"created"], mode=PutMode.CREATE)
        with pytest.raises(PreconditionFailed):
            await driver.put("a", [b"updated"], mode=PutMode.UPDATE(info.etag))
        assert bytes(await driver.get("a")) == b"another's"


class MemoryMachine(DriverMachine):
    def make_driver(self) -> TierDriver:
        self.name = getattr(self, "name", None) or secrets.token_hex(4)
        return make_driver(f"obstore+memory://{self.name}")

    def remove_tier(self) -> None:
        MemoryDriver.forget(self.name)


TestMemoryAgainstADictionary = MemoryMachine.TestCase
TestMemoryAgainstADictionary.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
