"""The peer driver against a dictionary, in orders that Hypothesis chooses; its server runs in a thread. Its store can
be mapped, or it cannot."""

from __future__ import annotations

import asyncio
import secrets
import threading

from hypothesis import HealthCheck, settings

from tests.unmapped_driver import UnmappedDriver
from tiercheck.testing.stateful import DriverMachine
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.peer import PeerDriver, PeerServer


class ServerThread:
    """One server for all runs; each has a namespace of its own."""

    def __init__(self, store: type[MemoryDriver]) -> None:
        self.store = store
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server = asyncio.run_coroutine_threadsafe(self.start(), self.loop).result(10)

    async def start(self) -> PeerServer:
        async def open_namespace(name: str) -> TierDriver:
            driver = self.store()
            await driver.open()
            return driver

        server = PeerServer(open_namespace)
        await server.start()
        return server

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.close(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


class PeerMachine(DriverMachine):
    store = MemoryDriver

    def make_driver(self) -> TierDriver:
        if not hasattr(self, "thread"):
            self.name = secrets.token_hex(4)
            self.thread = ServerThread(self.store)
        # Small chunks, so that objects have several.
        return PeerDriver(self.name, self.thread.server.endpoint, chunk_bytes=64 << 10, credit_bytes=128 << 10)

    def remove_tier(self) -> None:
        self.thread.close()


class UnmappedMachine(PeerMachine):
    store = UnmappedDriver


FEW = settings(max_examples=15, stateful_step_count=30, suppress_health_check=list(HealthCheck))
TestPeer = PeerMachine.TestCase
TestPeer.settings = FEW
TestPeerOverUnmappedStore = UnmappedMachine.TestCase
TestPeerOverUnmappedStore.settings = FEW
