"""What a driver's author gives to the conformance kit, and what its tests share."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import pytest_asyncio

from tiercheck.errors import NotFound
from tiercheck.testing.plugin import CAPABILITY, DRIVER
from tiercheck.tiers.driver import TierDriver
from tiercheck.types import ObjectInfo, Survives

__all__ = ["TierKit", "record_driver"]


class TierKit(abc.ABC):
    """Give the five methods, ``client_factory`` if another process can open the tier, and ``make_small_driver``
    if one can be had that is soon full."""

    pytestmark = pytest.mark.asyncio(loop_scope="function")  # whatever the author configured
    tiercheck_kit = True
    """Marks the class for the plug-in's report."""

    large_nbytes = 3 << 20
    """An object of several parts, and of several system calls."""
    listed = 1100
    """How many objects are listed: more than a page of the tier's listing has (1,000 names in S3)."""
    overwrites = 30
    """Rounds of the tests that race a writer against readers."""
    races = 5
    """Rounds of the test in which many create one object."""
    race_s = 0.5
    """Seconds of each test that races another client."""
    kills = 3
    """How many other clients are killed."""
    kill_nbytes = 8 << 20
    """An object large enough to be killed in the middle of."""
    small_nbytes = 16 << 20
    """More than the tier of :meth:`make_small_driver` holds."""
    copies_here = 0
    """Copies of an object that the tier itself has in the test's process while one is put there: 1 at least for a tier
    that survives nothing, more for a server that the test runs in its own process."""

    _item: pytest.Item | None = None

    # What a subclass supplies.

    @abc.abstractmethod
    async def make_driver(self) -> TierDriver:
        """A driver, not open, on a tier of its own that is empty."""

    @abc.abstractmethod
    async def second_client(self, driver: TierDriver) -> TierDriver:
        """Another driver, not open, on the tier of ``driver``, as another process would have it."""

    @abc.abstractmethod
    async def raw_get(self, driver: TierDriver, key: str) -> bytes | None:
        """The object's bytes read past the driver; ``None`` if there is none."""

    @abc.abstractmethod
    async def raw_put(self, driver: TierDriver, key: str, content: bytes) -> None:
        """Put an object there past the driver."""

    @abc.abstractmethod
    def crash_before_publish(self, driver: TierDriver) -> AbstractContextManager[object] | None:
        """While it is entered, the driver dies (raises ``Killed``) with the bytes written but not yet published.

        ``None`` if writing and publishing are one step of the server's, so that there is no in-between.
        """

    def client_factory(self, driver: TierDriver) -> Callable[[], TierDriver] | None:
        """What another process calls to have a driver, not open, on the tier of ``driver``.

        It is found there by its name, so it is a function or a class of a module, or :func:`functools.partial` of one
        with texts, numbers, paths or ``None``: ``partial(make_driver, url)``. ``None`` only if no other process can
        open the tier, whose capabilities then say that it survives ``NOTHING``: then one process is all that is
        certified.
        """
        return None

    async def make_small_driver(self) -> TierDriver | None:
        """A driver, not open, on an empty tier of its own that has room for 1 MiB and less than ``small_nbytes``.

        ``None`` if no such tier can be had; then the report says that a full one is not shown.
        """
        return None

    # Fixtures and helpers.

    @pytest.fixture(autouse=True)
    def _noting(self, request: pytest.FixtureRequest) -> Iterator[None]:
        self._item = request.node
        yield
        self._item = None

    def note(self, name: str, value: str) -> None:
        """Tell the plug-in's report what this test did. Nothing if a test is called by hand."""
        if self._item is not None:
            self._item.user_properties.append((name, value))

    @pytest_asyncio.fixture(loop_scope="function")
    async def driver(self, request: pytest.FixtureRequest) -> AsyncIterator[TierDriver]:
        async with await self.make_driver() as driver:
            record_driver(request.node, driver)
            yield driver

    @staticmethod
    async def content(driver: TierDriver, key: str) -> bytes | None:
        try:
            with await driver.get(key) as found:
                return bytes(found)
        except NotFound:
            return None

    @staticmethod
    def as_listed(driver: TierDriver, info: ObjectInfo) -> ObjectInfo:
        """What a listing tells of the object."""
        return info if driver.capabilities.lists_etags else dataclasses.replace(info, etag="")

    @staticmethod
    async def keys(driver: TierDriver, prefix: str = "") -> list[str]:
        return [found.key async for found in driver.list(prefix)]


def record_driver(item: pytest.Item, driver: TierDriver) -> None:
    """Note for the plug-in's report which driver the test has, and what the driver claims."""
    item.user_properties.append((DRIVER, driver.url))
    claims = dataclasses.asdict(driver.capabilities)
    item.user_properties += [
        (f"{CAPABILITY}{flag}", value.name if isinstance(value, Survives) else str(value))
        for flag, value in claims.items()
    ]
