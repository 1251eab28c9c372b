"""Certifies any registered URL, without a line of code::

    pytest --pyargs tiercheck.testing.certify --tiercheck-url=mine:///an/empty/tier

The whole conformance kit and the stateful model run against the tier, which must be empty; whatever is put there is
deleted. It needs nothing but the URL, and this has a price: access "past the driver" is a second client of the same
driver, and no crash is staged between write and publish; a client in another process is killed at any moment instead. A
driver that garbles on the way in what it mends on the way out is not found this way. A test file with raw access is the
full proof: see docs/how-to/write-a-driver.md.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from tiercheck.errors import TierCheckError
from tiercheck.testing.conformance import TierDriverTests
from tiercheck.testing.scratch import remove_all
from tiercheck.testing.stateful import DriverMachine
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver
from tiercheck.types import Survives

__all__ = ["TestURL", "TestURLAgainstADictionary"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Refuse a run that cannot certify anything, before its first test."""
    if not metafunc.config.getoption("--tiercheck-url"):
        raise pytest.UsageError("say which tier to certify: --tiercheck-url=scheme://an/empty/tier")
    if hasattr(metafunc.config, "workerinput"):
        raise pytest.UsageError("the tests share one tier, so they run in one process: leave out -n")


@pytest.fixture(scope="module")
def url(request: pytest.FixtureRequest) -> str:
    """The URL, once it is known that its tier can be opened and is empty."""
    url = str(request.config.getoption("--tiercheck-url"))
    try:
        first = asyncio.run(first_key(url))
    except TierCheckError as error:
        pytest.exit(f"the tier cannot be certified: {error}", pytest.ExitCode.USAGE_ERROR)
    if first is not None:
        pytest.exit(
            f"the tier holds {first!r}; give an empty one, since certifying it deletes what it holds",
            pytest.ExitCode.USAGE_ERROR,
        )
    return url


async def first_key(url: str) -> str | None:
    async with make_driver(url) as driver:
        async for info in driver.list():
            return info.key
    return None


async def empty(url: str) -> None:
    async with make_driver(url) as driver:
        await remove_all(driver, "")


class TestURL(TierDriverTests):
    """The kit. Each test begins with an empty tier."""

    @pytest_asyncio.fixture(autouse=True, loop_scope="function")
    async def tier(self, url: str) -> AsyncIterator[None]:
        self.tier_url = url
        yield
        await empty(url)

    async def make_driver(self) -> TierDriver:
        return make_driver(self.tier_url)

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return make_driver(self.tier_url)

    async def raw_get(self, driver: TierDriver, key: str) -> bytes | None:
        async with await self.second_client(driver) as second:
            return await self.content(second, key)

    async def raw_put(self, driver: TierDriver, key: str, content: bytes) -> None:
        async with await self.second_client(driver) as second:
            await second.put(key, [content])

    def crash_before_publish(self, driver: TierDriver) -> None:
        """From outside nobody can reach in between."""

    def client_factory(self, driver: TierDriver) -> Callable[[], TierDriver] | None:
        if driver.capabilities.survives is Survives.NOTHING:
            return None  # the same URL is another tier there
        return functools.partial(make_driver, self.tier_url)


class UrlMachine(DriverMachine):
    tier_url = ""

    def make_driver(self) -> TierDriver:
        return make_driver(self.tier_url)

    def remove_tier(self) -> None:
        self.run(empty(self.tier_url))


@pytest.fixture(scope="module", autouse=True)
def machine_url(url: str) -> Iterator[None]:
    UrlMachine.tier_url = url
    yield
    UrlMachine.tier_url = ""


TestURLAgainstADictionary = UrlMachine.TestCase
TestURLAgainstADictionary.settings = settings(
    max_examples=20,
    stateful_step_count=30,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
