"""Objects in a dictionary of this process: the simplest driver, and the oracle of the others' tests.

Each ``memory://`` is a store of its own. All ``memory://name`` of one name in one process share a store, so that
a test can have a second client, or a restart, within one process.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import threading
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from tiercheck.errors import AlreadyExists, CapacityExceeded, Closed, NotFound, PreconditionFailed
from tiercheck.keys import validate_key
from tiercheck.tiers.driver import Reservation, TierDriver
from tiercheck.tiers.url import TierURL, size_from
from tiercheck.types import ByteRange, Capabilities, ObjectInfo, Payload, PutMode, Survives, Usage

__all__ = ["MemoryDriver", "MemoryStore", "StoredObject"]

CAPABILITIES = Capabilities(survives=Survives.NOTHING, mappable=True, conditional_put=True)


@dataclass(frozen=True)
class StoredObject:
    content: memoryview
    etag: str


class MemoryStore:
    """The store that drivers of one name share. Thread-safe: each step holds the lock, and no step waits inside it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, StoredObject] = {}
        self.reserved_bytes = 0
        self._etags = itertools.count(1)

    def publish(
        self, key: str, content: memoryview, mode: PutMode, *, tier: str, reserved_bytes: int = 0
    ) -> ObjectInfo:
        """Make ``content`` the object, if the mode's condition holds. Nobody writes to ``content`` any more.

        ``reserved_bytes``: the bytes that were reserved for it. They are released, whether the call succeeds or not.
        """
        with self.lock:
            self.reserved_bytes -= reserved_bytes
            current = self.objects.get(key)
            if mode.kind == "create" and current is not None:
                raise AlreadyExists("there is an object under this key already", tier=tier, key=key)
            if mode.kind == "update" and (current is None or current.etag != mode.etag):
                found = "there is none" if current is None else f"it is {current.etag!r}"
                raise PreconditionFailed(f"the etag should be {mode.etag!r}, but {found}", tier=tier, key=key)
            new = StoredObject(content.toreadonly(), str(next(self._etags)))
            self.objects[key] = new
            return ObjectInfo(key, new.content.nbytes, new.etag)

    def reserve(self, nbytes: int, limit_bytes: int | None, *, tier: str, key: str) -> None:
        with self.lock:
            used = self.used_bytes()
            if limit_bytes is not None and used + nbytes > limit_bytes:
                raise CapacityExceeded(
                    f"{nbytes} bytes do not fit: {used} of {limit_bytes} are in use; raise size= or delete objects",
                    tier=tier,
                    key=key,
                )
            self.reserved_bytes += nbytes

    def release(self, nbytes: int) -> None:
        with self.lock:
            self.reserved_bytes -= nbytes

    def used_bytes(self) -> int:
        return sum(item.content.nbytes for item in self.objects.values()) + self.reserved_bytes


_named: dict[str, MemoryStore] = {}


class MemoryDriver(TierDriver):
    """``memory://[name][?size=2GiB]``. Survives nothing; mappable; conditional puts are atomic in the process.

    Each call yields to the event loop once, so that callers interleave as they do on a real tier.
    """

    def __init__(self, name: str = "", *, size: int | None = None) -> None:
        self._name = name
        self._limit_bytes = size
        self.store = _named.setdefault(name, MemoryStore()) if name else MemoryStore()
        self._open = False
        self._reservations: set[_MemoryReservation] = set()

    @classmethod
    def from_url(cls, url: TierURL) -> MemoryDriver:
        options = url.reader()
        size = options.take("size", size_from(1), None)
        options.finish()
        return cls(url.location, size=size)

    @staticmethod
    def forget(name: str) -> None:
        """Drop the store of ``memory://name``; drivers that are open keep what they have. Idempotent."""
        _named.pop(name, None)

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    async def open(self) -> None:
        if self._open:
            raise RuntimeError(f"{self.url} is open already")
        self._open = True

    async def close(self) -> None:
        for reservation in list(self._reservations):
            reservation.release()
        self._open = False

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        await self._enter(key)
        nbytes = sum(memoryview(buffer).nbytes for buffer in payload)
        self.store.reserve(nbytes, self._limit_bytes, tier=self.url, key=key)
        try:
            content = bytearray(nbytes)
            at = 0
            for buffer in payload:
                with memoryview(buffer) as view:
                    content[at : at + view.nbytes] = view
                    at += view.nbytes
            return self.store.publish(key, memoryview(content), mode, tier=self.url)
        finally:
            self.store.release(nbytes)

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        await self._enter(key)
        content = self._find(key).content
        wanted = ByteRange(0, content.nbytes) if range is None else range
        if wanted.stop > content.nbytes:
            raise ValueError(f"{wanted} reaches past the end of {key!r}, which has {content.nbytes} bytes")
        found = content[wanted.start : wanted.stop]
        if into is None:
            return found
        if into.nbytes < found.nbytes:
            raise ValueError(f"into has {into.nbytes} bytes; {key!r} needs {found.nbytes}")
        into[: found.nbytes] = found
        return into[: found.nbytes]

    async def stat(self, key: str) -> ObjectInfo:
        await self._enter(key)
        found = self._find(key)
        return ObjectInfo(key, found.content.nbytes, found.etag)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        await self._enter()
        with self.store.lock:
            found = [(key, item) for key, item in self.store.objects.items() if key.startswith(prefix)]
        for key, item in sorted(found, key=lambda pair: pair[0].encode()):
            yield ObjectInfo(key, item.content.nbytes, item.etag)

    async def delete(self, keys: Iterable[str]) -> None:
        checked = [validate_key(key) for key in keys]
        await self._enter()
        with self.store.lock:
            for key in checked:
                self.store.objects.pop(key, None)

    async def usage(self) -> Usage:
        await self._enter()
        with self.store.lock:
            return Usage(self.store.used_bytes(), self._limit_bytes)

    async def reserve(self, key: str, nbytes: int) -> Reservation:
        await self._enter(key)
        return self.reserve_nowait(key, nbytes)

    def reserve_nowait(self, key: str, nbytes: int) -> Reservation:
        validate_key(key)
        self.check_open(key)
        if nbytes < 0:
            raise ValueError(f"{nbytes} bytes cannot be reserved")
        self.store.reserve(nbytes, self._limit_bytes, tier=self.url, key=key)
        reservation = _MemoryReservation(self, key, nbytes)
        self._reservations.add(reservation)
        return reservation

    async def _enter(self, key: str | None = None) -> None:
        if key is not None:
            validate_key(key)
        self.check_open(key)
        await asyncio.sleep(0)

    def check_open(self, key: str | None = None) -> None:
        if not self._open:
            raise Closed("the driver is not open", tier=self.url, key=key)

    def _find(self, key: str) -> StoredObject:
        with self.store.lock:
            found = self.store.objects.get(key)
        if found is None:
            raise NotFound("there is no object under this key", tier=self.url, key=key)
        return found

    def forget_reservation(self, reservation: _MemoryReservation) -> None:
        self._reservations.discard(reservation)


class _MemoryReservation(Reservation):
    def __init__(self, driver: MemoryDriver, key: str, nbytes: int) -> None:
        self.key = key
        self._driver = driver
        self._nbytes = nbytes
        # An anonymous mapping is page-aligned, as the protocol promises, and cannot be empty.
        self._buffer: memoryview | None = memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]

    @property
    def buffer(self) -> memoryview:
        return self._live()

    async def publish(self, nbytes: int | None = None, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        self._wanted(nbytes)
        await asyncio.sleep(0)
        return self.publish_nowait(nbytes, mode=mode)

    def publish_nowait(self, nbytes: int | None = None, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        content = self._wanted(nbytes)
        self._buffer = None
        self._driver.forget_reservation(self)
        return self._driver.store.publish(self.key, content, mode, tier=self._driver.url, reserved_bytes=self._nbytes)

    async def drop(self) -> None:
        self.release()

    def release(self) -> None:
        if self._buffer is not None:
            self._buffer = None
            self._driver.store.release(self._nbytes)
            self._driver.forget_reservation(self)

    def _wanted(self, nbytes: int | None) -> memoryview:
        self._driver.check_open(self.key)
        wanted = self._nbytes if nbytes is None else nbytes
        if not 0 <= wanted <= self._nbytes:
            raise ValueError(f"{wanted} bytes cannot be published of {self._nbytes} reserved for {self.key!r}")
        return self._live()[:wanted]

    def _live(self) -> memoryview:
        if self._buffer is None:
            raise RuntimeError(f"the reservation for {self.key!r} is published or dropped already")
        return self._buffer
