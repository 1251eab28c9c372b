"""Objects in this node's shared memory: ``shm://name[?size=4GiB][&pool=1GiB][&mount=/dev/shm]...``.

The namespace ``name`` is the directory ``/dev/shm/tiercheck-<uid>-<name>``, readable by its user alone. It
outlives every process and goes with the node's memory (or by :func:`remove_namespace`).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from tiercheck.errors import CapacityExceeded, Closed, ConfigurationError, NotFound
from tiercheck.runtime.waiting import together
from tiercheck.tiers.driver import Reservation
from tiercheck.tiers.in_flight_calls import InFlightCalls
from tiercheck.tiers.posix.file_driver import FileDriver
from tiercheck.tiers.posix.mounts import mount_of
from tiercheck.tiers.shm.hugepages import huge_pages_of, pages_text
from tiercheck.tiers.shm.mapping import MappedSegment, MappedSegments
from tiercheck.tiers.shm.namespaces import (
    SHM,
    NamespaceInfo,
    NamespaceKind,
    check_private,
    hold_namespace,
    namespace_bytes,
    namespace_path,
    namespaces,
    release_namespace,
    remove_namespace,
)
from tiercheck.tiers.shm.numa import Locality
from tiercheck.tiers.shm.pinning import PIN_MODES, CudaPinning
from tiercheck.tiers.shm.segments import SegmentDirectory
from tiercheck.tiers.url import TierURL, number_from, parse_size, parse_yes, size_from
from tiercheck.types import ByteRange, Capabilities, ObjectInfo, Payload, PutMode, Survives, Usage, bytes_text

__all__ = ["NamespaceInfo", "NamespaceKind", "ShmDriver", "namespaces", "remove_namespace"]

log = logging.getLogger(__name__)

NUMA_MODES = ("auto", "off")
THREADS_MAX = 64


def _choice(option: str, value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise ConfigurationError(f"shm:// knows {option}={f', {option}='.join(choices)}; not {option}={value}")
    return value


class ShmDriver(FileDriver):
    """Shared memory as a tier: mappable, atomic among processes, and it survives any of them.

    ``size`` is checked when the tier is opened: a shared memory that is smaller is an error then, not a
    failed save later (a warning, if the tier holds objects already: a recovery may need them). Without it the
    limit is what is free, plus what the namespace holds already. A limit that is less than ``size``, or that there was
    no ``size`` for, grows if others free memory. While an object is being overwritten, both the old and the new one
    count. ``pool`` bounds the memory kept for reuse (default: all of ``size``, without it half of the
    limit); it is never in the way of an object, and what is more than :meth:`expect` says is given back. ``mount`` is
    another tmpfs, such as one with huge pages. ``threads`` copy a large put (default: one).

    ``pin``: whether memory that :meth:`prepare_reservations` makes ready, and what is reserved afterwards, is
    page-locked for a GPU's copies: ``auto`` (if there is one), ``on`` (an error if there is none) or ``off``. ``numa``:
    ``auto`` takes memory from the node of that GPU, or of the CPUs that the process is bound to; or ``off``.

    ``make=no``: opening makes no namespace, and is ``NotFound`` if there is none.
    """

    maps = True
    may_hang = False

    def __init__(
        self,
        name: str,
        *,
        size: int | None = None,
        pool: int | None = None,
        mount: Path = SHM,
        threads: int = 1,
        pin: str = "auto",
        numa: str = "auto",
        kind: NamespaceKind = NamespaceKind.OWN,
        make: bool = True,
    ) -> None:
        """``kind``: a peer server's namespaces are of another kind than a job's, and no URL opens them."""
        directory = SegmentDirectory(namespace_path(name, mount))
        capabilities = Capabilities(survives=Survives.PROCESS, mappable=True, conditional_put=True, parts_in_flight=2)
        where = {} if mount == SHM else {"mount": str(mount)}
        super().__init__(directory, TierURL("shm", name, where).text, capabilities)
        self.segments = directory
        self._size = size
        self._pool = pool
        self._kind = kind
        self._make = make
        self._alive_fd: int | None = None
        self._pinning = CudaPinning(_choice("pin", pin, PIN_MODES))
        self.locality = Locality(_choice("numa", numa, NUMA_MODES))
        if not 1 <= threads <= THREADS_MAX:
            raise ConfigurationError(f"shm:// copies with 1 to {THREADS_MAX} threads, not {threads}")
        self._mapped = MappedSegments(directory, pinning=self._pinning, locality=self.locality, copy_threads=threads)
        self._reservations: set[_ShmReservation] = set()
        self.in_flight = InFlightCalls()
        """Of threads that are not the driver's own: :meth:`close` waits for them."""
        self._facts: dict[str, str] = {}

    @classmethod
    def from_url(cls, url: TierURL) -> ShmDriver:
        options = url.reader()
        size = options.take("size", size_from(1), None)
        pool = options.take("pool", parse_size, None)
        mount = options.take("mount", Path, SHM)
        threads = options.take("threads", number_from(1, THREADS_MAX), 1)
        pin = options.take("pin", str, "auto")
        numa = options.take("numa", str, "auto")
        make = options.take("make", parse_yes, True)
        options.finish()
        return cls(url.location, size=size, pool=pool, mount=mount, threads=threads, pin=pin, numa=numa, make=make)

    def facts(self) -> Mapping[str, str]:
        if not self._facts:
            return {}
        kept, pinned = self._mapped.cache.counts()
        pins = f"{pinned} of the segments that are mapped" if pinned else self._pinning.obstacle or "nothing yet"
        return {**self._facts, "mapped": f"{kept} segments", "pinned": pins, "numa": self.locality.text}

    def prepare(self) -> None:
        segments = self.segments
        self._pinning.check()
        self._alive_fd = hold_namespace(segments.root, self._kind, make=self._make)
        held = namespace_bytes(segments.root)
        status = os.statvfs(segments.root)
        free = status.f_bavail * status.f_frsize
        segments.size = self._size
        segments.limit_bytes = free + held if self._size is None else self._size
        if segments.limit_bytes > free + held:
            short = (
                f"size={bytes_text(segments.limit_bytes)} does not fit into {segments.root.parent}: {bytes_text(free)} "
                f"are free and the tier holds {bytes_text(held)}; ask for a smaller size=, or enlarge it with "
                f"'mount -o remount,size=... {segments.root.parent}' (in a container: --shm-size, or an emptyDir with "
                "medium: Memory)"
            )
            if next(segments.scan(locked=True), None) is None:
                raise CapacityExceeded(short)
            # What others have put beside it since must not keep a job from its own objects.
            log.warning("%s: %s; it is opened with what there is", self.url, short)
            segments.limit_bytes = free + held
        # What was asked for by size= is this tier's; what merely is free is for others, too.
        default = segments.limit_bytes if self._size is not None else segments.limit_bytes // 2
        segments.pool_bytes = default if self._pool is None else self._pool
        segments.prepare()
        mount = mount_of(segments.root)
        segments.advise_huge_pages = huge_pages_of(mount) == "advise"
        self.in_flight.admit()
        self._facts = {"pages": pages_text(mount), "pool": f"{bytes_text(segments.pool_bytes)} at most"}

    def prepare_to_read(self) -> None:
        """The namespace is not marked as in use: it may be removed meanwhile. What was read stays as it was."""
        root = self.segments.root
        try:
            check_private(root)
        except FileNotFoundError:
            raise NotFound(f"this node has no such shared memory ({root}); 'tiercheck gc' lists what it has") from None
        super().prepare_to_read()
        self.in_flight.admit()

    async def close(self) -> None:
        await asyncio.to_thread(self.in_flight.refuse)
        for reservation in list(self._reservations):
            await reservation.drop()
        await super().close()
        for reservation in list(self._reservations):  # that a thread has made meanwhile
            reservation.let_go()
        self._mapped.close()
        self._pinning.close()
        fd, self._alive_fd = self._alive_fd, None
        try:
            self.segments.close()
        finally:
            if fd is not None:
                release_namespace(fd)

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        self.directory.check_key(key)
        return await self.run(lambda check: self._mapped.store(key, payload, mode, check), key)

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        if into is not None:
            return await super().get(key, range=range, into=into)
        # Mapping takes a few system calls: a thread would cost five times as much.
        self.directory.check_key(key)
        if not self.is_open:
            raise Closed("the driver is not open", tier=self.url, key=key)
        with self.mapped_errors(key):
            return self.fetch(key, range, lambda: None)

    async def stat(self, key: str) -> ObjectInfo:
        # One lstat in memory: a thread would cost twenty times as much.
        self.directory.check_key(key)
        if not self.is_open:
            raise Closed("the driver is not open", tier=self.url, key=key)
        with self.mapped_errors(key):
            return self.directory.info(key)

    def map_object(self, fd: int, nbytes: int) -> memoryview:
        return self._mapped.map_to_read(fd, nbytes) or super().map_object(fd, nbytes)

    def measure(self) -> Usage:
        return Usage(self.segments.held_bytes(), self.segments.limit_bytes)

    async def reserve(self, key: str, nbytes: int) -> Reservation:
        self._check_reservation(key, nbytes)
        segment = await self.run(lambda check: self._mapped.reserve(nbytes, check), key, undo=MappedSegment.give_back)
        if not self.is_open:
            segment.give_back()
            raise Closed("the driver was closed", tier=self.url, key=key)
        return self._reservation(key, segment)

    def reserve_nowait(self, key: str, nbytes: int) -> Reservation:
        self._check_reservation(key, nbytes)
        with self.mapped_errors(key), self.in_flight, self.locality.applied():
            return self._reservation(key, self._mapped.reserve(nbytes, lambda: None, may_be_later=True))

    async def prepare_reservations(self, sizes: Sequence[tuple[int, int]]) -> None:
        for nbytes, count in sizes:
            if nbytes < 0 or count < 0:
                raise ValueError(f"{count} reservations of {nbytes} bytes cannot be prepared")
        before = self._mapped.made.copy()
        lacking = await self.run(lambda _: self._mapped.lacking(sizes))
        enough = before + Counter(lacking)
        queue = iter(lacking)

        async def prepare() -> None:
            # One after the other: each can be reserved at once, and the process can end before all of them are ready.
            # What reservations have had to make meanwhile, they will return.
            for nbytes in queue:
                if self._mapped.made[nbytes] < enough[nbytes]:
                    await self.run(partial(self._mapped.prepare, nbytes))

        await together(prepare() for _ in range(self._mapped.prepared_at_once))
        ready = ", ".join(f"{count} x {bytes_text(nbytes)}" for nbytes, count in sizes if nbytes and count)
        self._facts["pool"] = f"{ready or 'nothing'} made ready; {bytes_text(self.segments.pool_bytes)} at most"

    async def expect(self, nbytes: int) -> None:
        if nbytes < 0:
            raise ValueError(f"a tier does not hold {nbytes} bytes")
        await self.run(lambda _: self.segments.expect(nbytes + self._mapped.beyond(nbytes)))

    def _check_reservation(self, key: str, nbytes: int) -> None:
        self.directory.check_key(key)
        if nbytes < 0:
            raise ValueError(f"{nbytes} bytes cannot be reserved")

    def _reservation(self, key: str, segment: MappedSegment) -> _ShmReservation:
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
        with self._driver.mapped_errors(self.key), self._driver.in_flight:  # it may be made here: closing waits for it
            return self._live().view

    async def publish(self, nbytes: int | None = None, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        segment, wanted = self._taken(nbytes)
        try:
            return await self._driver.run(lambda check: segment.publish(self.key, wanted, mode, check), self.key)
        finally:
            segment.give_back()

    def publish_nowait(self, nbytes: int | None = None, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        driver = self._driver
        with driver.mapped_errors(self.key), driver.in_flight, driver.locality.applied():
            segment, wanted = self._taken(nbytes)
            try:
                return segment.publish(self.key, wanted, mode, lambda: None)
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

    def let_go(self) -> None:
        """As :meth:`drop`, of a driver whose threads have ended."""
        if (segment := self._segment) is not None:
            self._release()
            segment.give_back()

    def _taken(self, nbytes: int | None) -> tuple[MappedSegment, int]:
        """The segment, which is nobody else's from here on, and how much of it is to be published."""
        if not self._driver.is_open:
            raise Closed("the driver is not open", tier=self._driver.url, key=self.key)
        segment = self._live()
        wanted = segment.nbytes if nbytes is None else nbytes
        if not 0 <= wanted <= segment.room:
            raise ValueError(f"{wanted} bytes cannot be published of {segment.room} reserved for {self.key!r}")
        self._release()
        return segment, wanted

    def _release(self) -> None:
        self._segment = None
        self._driver.forget_reservation(self)

    def _live(self) -> MappedSegment:
        if self._segment is None:
            raise RuntimeError(f"the reservation for {self.key!r} is published or dropped already")
        return self._segment
