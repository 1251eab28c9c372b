"""Objects in this node's shared memory: ``shm://name[?size=4GiB][&pool=1GiB][&mount=/dev/shm]``.

The namespace ``name`` is the directory ``/dev/shm/tiercheck-<uid>-<name>``, readable by its user alone. It
outlives every process and goes with the node's memory (or by :func:`remove_namespace`).
"""

from __future__ import annotations

import os
from pathlib import Path

from tiercheck.errors import CapacityExceeded, Closed
from tiercheck.tiers.driver import Reservation
from tiercheck.tiers.file_driver import FileDriver
from tiercheck.tiers.mapping import MappedSegment, MappingCache
from tiercheck.tiers.namespaces import (
    SHM,
    NamespaceInfo,
    hold_namespace,
    namespace_bytes,
    namespace_path,
    namespaces,
    release_namespace,
    remove_namespace,
)
from tiercheck.tiers.segments import SegmentDirectory
from tiercheck.tiers.url import TierURL, parse_size
from tiercheck.types import Capabilities, ObjectInfo, PutMode, Survives, Usage, bytes_text

__all__ = ["NamespaceInfo", "ShmDriver", "namespaces", "remove_namespace"]


class ShmDriver(FileDriver):
    """Shared memory as a tier: mappable, atomic among processes, and it survives any of them.

    ``size`` is checked when the tier is opened: a shared memory that is smaller is an error then, not a
    failed save later. Without it the limit is what is free, plus what the namespace holds already. While an
    object is being overwritten, both the old and the new one count. ``pool``
    bounds the memory kept for reuse (default: half of the limit); it is never in the way of an object.
    ``mount`` is another tmpfs, such as one with huge pages.
    """

    def __init__(self, name: str, *, size: int | None = None, pool: int | None = None, mount: Path = SHM) -> None:
        directory = SegmentDirectory(namespace_path(name, mount))
        capabilities = Capabilities(survives=Survives.PROCESS, mappable=True, conditional_put=True, parts_in_flight=2)
        where = {} if mount == SHM else {"mount": str(mount)}
        super().__init__(directory, TierURL("shm", name, where).text, capabilities)
        self.segments = directory
        self._size = size
        self._pool = pool
        self._alive_fd: int | None = None
        self._mappings = MappingCache()
        self._reservations: set[_ShmReservation] = set()

    @classmethod
    def from_url(cls, url: TierURL) -> ShmDriver:
        options = url.reader()
        size = options.take("size", parse_size, None)
        pool = options.take("pool", parse_size, None)
        mount = options.take("mount", Path, SHM)
        options.finish()
        return cls(url.location, size=size, pool=pool, mount=mount)

    def prepare(self) -> None:
        segments = self.segments
        self._alive_fd = hold_namespace(segments.root)
        held = namespace_bytes(segments.root)
        status = os.statvfs(segments.root)
        free = status.f_bavail * status.f_frsize
        if self._size is not None and self._size > free + held:
            mount = segments.root.parent
            raise CapacityExceeded(
                f"size={bytes_text(self._size)} does not fit into {mount}: {bytes_text(free)} are free and the tier "
                f"holds {bytes_text(held)}; "
                f"ask for a smaller size=, or enlarge it with 'mount -o remount,size=... {mount}' "
                f"(in a container: --shm-size, or an emptyDir with medium: Memory)"
            )
        segments.limit_bytes = free + held if self._size is None else self._size
        segments.pool_bytes = segments.limit_bytes // 2 if self._pool is None else self._pool
        segments.prepare()

    async def close(self) -> None:
        for reservation in list(self._reservations):
            await reservation.drop()
        await super().close()
        self._mappings.clear()
        if self._alive_fd is not None:
            release_namespace(self._alive_fd)
            self._alive_fd = None

    async def stat(self, key: str) -> ObjectInfo:
        # One lstat in memory: a thread would cost twenty times as much.
        self.directory.path_of(key)
        if not self.is_open:
            raise Closed("the driver is not open", tier=self.url, key=key)
        with self.mapped_errors(key):
            return self.directory.info(key)

    def measure(self) -> Usage:
        return Usage(self.segments.held_bytes(), self.segments.limit_bytes)

    async def reserve(self, key: str, nbytes: int) -> Reservation:
        self.directory.path_of(key)
        if nbytes < 0:
            raise ValueError(f"{nbytes} bytes cannot be reserved")
        segment = await self.run(
            lambda check: MappedSegment.create(self.segments, self._mappings, nbytes, check),
            key,
            undo=MappedSegment.give_back,
        )
        reservation = _ShmReservation(self, key, segment)
        self._reservations.add(reservation)
        return reservation

    def forget_reservation(self, reservation: _ShmReservation) -> None:
        self._reservations.discard(reservation)


class _ShmReservation(Reservation):
    def __init__(self, driver: ShmDriver, key: str, segment: MappedSegment) -> None:
        self.key = key
        self._driver = driver
        self._segment: MappedSegment | None = segment

    @property
    def buffer(self) -> memoryview:
        return self._live().view

    async def publish(self, nbytes: int | None = None, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        if not self._driver.is_open:
            raise Closed("the driver is not open", tier=self._driver.url, key=self.key)
        segment = self._live()
        wanted = segment.nbytes if nbytes is None else nbytes
        if not 0 <= wanted <= segment.nbytes:
            raise ValueError(f"{wanted} bytes cannot be published of {segment.nbytes} reserved for {self.key!r}")
        self._release()
        try:
            return await self._driver.run(lambda check: segment.publish(self.key, wanted, mode, check), self.key)
        finally:
            segment.give_back()

    async def drop(self) -> None:
        segment = self._segment
        if segment is not None:
            self._release()
            try:
                await self._driver.run(lambda _: segment.give_back(), self.key)
            finally:
                segment.give_back()  # does nothing, unless a cancellation came before the thread did

    def _release(self) -> None:
        self._segment = None
        self._driver.forget_reservation(self)

    def _live(self) -> MappedSegment:
        if self._segment is None:
            raise RuntimeError(f"the reservation for {self.key!r} is published or dropped already")
        return self._segment
