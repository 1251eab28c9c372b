"""A real server passes the kit. An environment variable names it, and without the variable its tests are skipped.

``TIERCHECK_OBSTORE_AZ``: a container, as in ``az://container?account=NAME&endpoint=http://127.0.0.1:10000/NAME``.
Credentials come from the environment, as for the driver. Everything lies under prefixes of the tests' own.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
from collections.abc import AsyncIterator, Callable

import obstore
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings
from obstore.store import ObjectStore
from tiercheck_obstore.driver import ObstoreDriver

from tiercheck.errors import ConfigurationError, Unauthorized, Unsupported
from tiercheck.testing.conformance import TierDriverTests
from tiercheck.testing.scratch import remove_all
from tiercheck.testing.stateful import DriverMachine
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver
from tiercheck.types import PutMode

AZ = "TIERCHECK_OBSTORE_AZ"


def tier_url(variable: str, prefix: str, **options: str) -> str:
    """The URL of the variable, with ``prefix`` in its bucket and further options."""
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no server")
    location, _, query = os.environ[variable].partition("?")
    given = "&".join([*([query] if query else []), *(f"{name}={value}" for name, value in options.items())])
    return f"{location.rstrip('/')}/{prefix}" + (f"?{given}" if given else "")


async def remove(url: str) -> None:
    async with make_driver(url) as driver:
        await remove_all(driver, "")


class ServerTests(TierDriverTests):
    variable: str
    part: str
    overwrites = 12

    @pytest_asyncio.fixture(autouse=True)
    async def prefix(self) -> AsyncIterator[None]:
        self.tier_url = tier_url(self.variable, f"kit-{secrets.token_hex(6)}", part=self.part)
        yield
        await remove(self.tier_url)

    async def make_driver(self) -> TierDriver:
        return make_driver(self.tier_url)

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return make_driver(self.tier_url)

    def client_factory(self, driver: TierDriver) -> Callable[[], TierDriver]:
        return functools.partial(make_driver, self.tier_url)

    def raw_store(self) -> ObjectStore:
        driver = make_driver(self.tier_url)
        assert isinstance(driver, ObstoreDriver)
        return driver.connect()

    async def raw_get(self, driver: TierDriver, key: str) -> bytes | None:
        try:
            found = await obstore.get_async(self.raw_store(), key)
        except FileNotFoundError:
            return None
        return bytes(await found.bytes_async())

    async def raw_put(self, driver: TierDriver, key: str, content: bytes) -> None:
        await obstore.put_async(self.raw_store(), key, content)

    def crash_before_publish(self, driver: TierDriver) -> None:
        """The server writes and publishes in one step."""

    async def test_the_server_honours_conditions(self, driver: TierDriver) -> None:
        assert driver.capabilities.conditional_put
        assert driver.facts()["conditional puts"] == "CREATE and UPDATE were tried, and hold"

    async def test_a_repeat_that_is_refused_by_its_own_object_has_won(
        self, driver: TierDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first try was done; its answer was lost, and the client tried again."""
        put_async = obstore.put_async

        async def twice(*arguments: object, **options: object) -> object:
            await put_async(*arguments, **options)
            return await put_async(*arguments, **options)

        monkeypatch.setattr(obstore, "put_async", twice)
        created = await driver.put("a", [b"created"], mode=PutMode.CREATE)
        assert await driver.stat("a") == created
        updated = await driver.put("a", [b"updated"], mode=PutMode.UPDATE(created.etag))
        assert await driver.stat("a") == updated
        assert await self.content(driver, "a") == b"updated"

    async def test_the_probe_of_open_is_not_left_behind(self, driver: TierDriver) -> None:
        assert [page async for page in obstore.list(self.raw_store()) if page] == []

    async def test_a_large_put_that_is_cancelled_early_publishes_nothing(self, driver: TierDriver) -> None:
        putting = asyncio.create_task(driver.put("large", [bytes(driver.capabilities.part_bytes)] * 12))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        putting.cancel()
        await asyncio.wait({putting})
        assert putting.cancelled()
        assert await self.raw_get(driver, "large") is None

    async def test_a_large_object_is_not_put_under_a_condition(
        self, driver: TierDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tiercheck_obstore.driver.CONDITIONAL_BYTES_MAX", 1000)
        await driver.put("fits", [bytes(1000)], mode=PutMode.CREATE)
        with pytest.raises(Unsupported, match=r"at most 1000 B, not 1001"):
            await driver.put("a", [bytes(1001)], mode=PutMode.CREATE)


class TestAzure(ServerTests):
    variable = AZ
    part = "1MiB"
    large_nbytes = 5 << 19  # three parts, the last one short
    kill_nbytes = 4 << 20
    listed = 100  # a page has 5,000 names, more than any test puts

    async def test_wrong_credentials_are_unauthorized(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "bm90IHRoZSBrZXk=")
        with pytest.raises(Unauthorized) as caught:
            await make_driver(self.tier_url).open()
        assert "bm90IHRoZSBrZXk=" not in str(caught.value)

    async def test_a_container_that_is_not_there(self) -> None:
        container = os.environ[AZ].partition("://")[2].partition("?")[0].strip("/")
        url = self.tier_url.replace(f"//{container}/", "//no-such-container/")
        with pytest.raises(ConfigurationError, match=r"az://no-such-container/.* does not exist; create it"):
            await make_driver(url).open()


class ServerMachine(DriverMachine):
    variable: str

    def make_driver(self) -> TierDriver:
        self.tier_url = getattr(self, "tier_url", None) or tier_url(self.variable, f"machine-{secrets.token_hex(6)}")
        return make_driver(self.tier_url)

    def remove_tier(self) -> None:
        self.run(remove(self.tier_url))


class AzureMachine(ServerMachine):
    variable = AZ


FEW = settings(max_examples=6, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
TestAzureAgainstADictionary = AzureMachine.TestCase
TestAzureAgainstADictionary.settings = FEW
