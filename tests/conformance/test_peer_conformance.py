"""The peer driver passes the kit, before a server whose memory can be mapped and before one whose cannot."""

from __future__ import annotations

import abc
import contextlib
import functools
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable

import pytest_asyncio

from tests.unmapped_driver import UnmappedDriver
from tiercheck.testing.conformance import TierDriverTests
from tiercheck.testing.driver_kit.base import TierKit
from tiercheck.testing.driver_kit.limits import LimitTests
from tiercheck.testing.driver_kit.writers import WriterTests
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.peer import PeerServer
from tiercheck.tiers.registry import make_driver
from tiercheck.tiers.shm.driver import ShmDriver, remove_namespace


class PeerKit(TierKit):
    bind = "tcp://127.0.0.1:0"
    store_bytes = 64 << 20

    @pytest_asyncio.fixture(autouse=True)
    async def server(self) -> AsyncIterator[None]:
        self.name = f"test-{secrets.token_hex(6)}"
        self.stores: dict[str, TierDriver] = {}
        self.clients = 0

        async def open_namespace(namespace: str) -> TierDriver:
            driver = self.make_store(namespace)
            await driver.open()
            self.stores[namespace] = driver
            return driver

        with tempfile.TemporaryDirectory(prefix="tc-") as folder:  # its path is short enough for a socket
            async with PeerServer(open_namespace, bind=self.bind.format(folder)) as self.running:
                yield
        self.remove_store()

    @abc.abstractmethod
    def make_store(self, namespace: str) -> TierDriver:
        """What the server opens under that name."""

    @abc.abstractmethod
    def remove_store(self) -> None:
        """Remove what was put there."""

    async def make_driver(self) -> TierDriver:
        return make_driver(f"peer://{self.name}?at={self.running.endpoint}&deadline=10")

    async def make_small_driver(self) -> TierDriver:
        self.store_bytes = self.small_nbytes - (1 << 20)
        return await self.make_driver()

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return make_driver(f"peer://{self.name}?at={self.running.endpoint}&deadline=10&connections=2")

    def client_factory(self, driver: TierDriver) -> Callable[[], TierDriver]:
        return functools.partial(make_driver, f"peer://{self.name}?at={self.running.endpoint}&deadline=10")

    async def raw_get(self, driver: TierDriver, key: str) -> bytes | None:
        return await self.content(self.stores[self.name], key)

    async def raw_put(self, driver: TierDriver, key: str, content: bytes) -> None:
        await self.stores[self.name].put(key, [content])

    def crash_before_publish(self, driver: TierDriver) -> contextlib.AbstractContextManager[object] | None:
        return None  # the server does both; tests/cluster kills it


class TestPeerOverSharedMemory(PeerKit, TierDriverTests):
    """As agents of one machine serve one another."""

    bind = "ipc://{}/peer.sock"

    def make_store(self, namespace: str) -> TierDriver:
        return ShmDriver(namespace, size=self.store_bytes)

    def remove_store(self) -> None:
        if self.stores:
            remove_namespace(self.name)


class TestPeerOverUnmappedStore(PeerKit, WriterTests, LimitTests):
    """Objects are buffered by the server, and read range by range: another way for their bytes, and for nothing else.
    tests/property/test_peer_stateful.py has such a server as well."""

    copies_here = 2  # the server's buffer, and its store's

    def make_store(self, namespace: str) -> TierDriver:
        return UnmappedDriver(namespace, size=self.store_bytes)

    def remove_store(self) -> None:
        MemoryDriver.forget(self.name)
