"""Segments written through this process's memory: reservations, large puts, and memory made ready for both.

A reservation is as large as its object may become, and most objects stay smaller. Cutting the file would give
pages away that the next reservation must get afresh. So a reservation is two files in one region: the *head*, as
long as objects of this kind have lately been, which becomes the object; and behind it the *tail*, which returns
to the pool untouched, unless the object is longer than expected: then what lies in it is copied to the head.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace

from tiercheck.errors import CapacityExceeded, ConfigurationError
from tiercheck.runtime.priority import standing_back
from tiercheck.tiers.posix.direct import address_of
from tiercheck.tiers.posix.directories.object_files import payload_bytes
from tiercheck.tiers.posix.files import write_buffers
from tiercheck.tiers.shm.mapped_region import MappedRegion, MappedRegionCache
from tiercheck.tiers.shm.numa import Locality
from tiercheck.tiers.shm.pinning import CudaPinning
from tiercheck.tiers.shm.pool import NOBODY, SPARE_BYTES_MIN, Selection, this_process, whole_pages
from tiercheck.tiers.shm.segments import Segment, SegmentDirectory, at_once
from tiercheck.tiers.threads import Threads
from tiercheck.types import ObjectInfo, Payload, PutMode

__all__ = ["MappedSegment", "MappedSegments"]

log = logging.getLogger(__name__)

Check = Callable[[], None]

KEPT_WINDOWS_MAX = 512
MARGIN_BYTES_MIN = 64 << 10
MARGIN_SHARE = 64
PREPARED_AT_ONCE_MAX = 4
MADE_LATER_BYTES_MIN = 64 << 20
"""To make less takes a thread 20 ms or so."""
EXPECTATIONS_MAX = 64
COPIED_AT_ONCE_BYTES = 8 << 20
"""By each of several threads."""
COPIED_ALONE_BYTES = 256 << 20
"""By one thread. The C library copies what is this large several pages at a time, a tenth faster; a cancellation is
noticed within 30 ms."""


class MappedSegments:
    """The segments of ``directory`` that this process maps, ``copy_threads`` of which copy a large put.

    Memory beside the tier's: none of its own. The regions that are kept map files that the tier counts.
    """

    def __init__(
        self, directory: SegmentDirectory, *, pinning: CudaPinning, locality: Locality, copy_threads: int
    ) -> None:
        self.directory = directory
        self.cache = MappedRegionCache(KEPT_WINDOWS_MAX)
        self.pinning = pinning
        self.locality = locality
        self._copiers = Threads(copy_threads, "tiercheck copy")
        self._lock = threading.Lock()
        self._expected: dict[int, int] = {}  # bytes of a reservation -> bytes of the object that it last became
        self.made: Counter[int] = Counter()
        """By the bytes of a reservation, how often memory was made for one, when it was asked for or ahead."""
        self._pins = False
        """Whether memory is made ready; from then on it is pinned, that which is made later too, when it is used."""
        self._selection = Selection(known=self.cache, fixed=self.cache.pinned)

    def close(self) -> None:
        """Unmap what is kept."""
        self._copiers.close()
        self.cache.clear()

    def reserve(self, nbytes: int, check: Check, *, may_be_later: bool = False) -> MappedSegment:
        """Memory of ``nbytes`` or more, backed and mapped. ``may_be_later``: if that takes long, it is backed when its
        view is first asked for; it counts from now on. Errors: ``CapacityExceeded``."""
        self.locality.apply()
        unmade: list[Callable[[], None]] = []
        backing = unmade.append if may_be_later and nbytes >= MADE_LATER_BYTES_MIN else at_once
        pins = self._for_gpu(nbytes)
        if pins:  # what is pinned is not cut: it may be somewhat longer
            least, most = nbytes, nbytes + 2 * margin(nbytes)
        else:
            least, most = self._head_bytes(nbytes), nbytes
        head = self.directory.take(
            least, most, check, self._selection, new_bytes=self._head_bytes(nbytes), backing=backing
        )
        tail: Segment | None = None
        try:
            missing = nbytes - head.nbytes
            if missing >= SPARE_BYTES_MIN:
                tail = self.directory.take(
                    missing, 2 * missing, check, Selection(fixed=self.cache.pinned), backing=backing
                )
            elif missing > 0:
                head = self.directory.extend(head, nbytes, check)
            region: MappedRegion | None = None
            if nbytes:  # nothing cannot be mapped
                region = self._region(head, max(nbytes, head.nbytes))
                if tail is not None:
                    region.show_behind(tail.fd, whole_pages(missing))
            if 2 * head.recycled_bytes < nbytes:
                with self._lock:
                    self.made[nbytes] += 1
            return MappedSegment(self, head, tail, region, nbytes, pins=pins, unmade=unmade)
        except BaseException:
            with contextlib.ExitStack() as undo:
                for segment in filter(None, (head, tail)):
                    undo.callback(self.directory.discard, segment.temporary)
            raise

    def store(self, key: str, payload: Payload, mode: PutMode, check: Check) -> ObjectInfo:
        """Put: as :meth:`ObjectDirectory.store`, at the speed of memory if pages are recycled."""
        nbytes = payload_bytes(payload)
        if nbytes < SPARE_BYTES_MIN:
            return self.directory.store(key, payload, mode, check)
        self.locality.apply()
        # What another process keeps ready, and may have pinned, is for its reservations: a put would bring it back as
        # nobody's, cut to another length.
        segment = self.directory.take(nbytes, nbytes, check, replace(self._selection, owned=False))
        region: MappedRegion | None = None
        try:
            if 2 * segment.recycled_bytes >= nbytes:
                region = self._region(segment, nbytes)
                region.populate(check)
                self._copy(payload, region.address, check)
            else:
                write_buffers(segment.fd, payload, check)  # fresh pages: mapping them would only add to the cost
            check()
            return self.directory.publish(segment.temporary, key, mode)
        finally:
            if region is not None:
                self.cache.keep(region, segment.fd)
            self.directory.discard(segment.temporary)

    def map_to_read(self, fd: int, nbytes: int) -> memoryview | None:
        """An open object of ``nbytes``, read-only, if this process has written it: it is mapped still, to the last
        page. The open file, and its lock, are held as long as a view is left.

        ``None`` for anybody else's object, and for memory that is pinned: that must be unpinned when the driver is
        closed, whoever still reads.
        """
        region = self.cache.find(fd)
        if region is None or region.is_pinned or region.shown_bytes < nbytes:
            return None
        return region.lend_to_read(nbytes, os.dup(fd))

    def lacking(self, sizes: Sequence[tuple[int, int]]) -> list[int]:
        """The bytes of the segments that :meth:`prepare` must make, in the order of ``sizes``: what this process keeps
        ready already counts. Small ones are not worth keeping. Errors: ``CapacityExceeded`` if not all fit."""
        wanted = [(nbytes, count) for nbytes, count in sizes if nbytes >= SPARE_BYTES_MIN]
        self.directory.check_room_for_spares(sum(nbytes * count for nbytes, count in wanted))
        if wanted and self.pinning.available():
            self._pins = True
            self.locality.near_device(self.pinning.pci_bus_id())
        mapped = self._ready
        ready = {nbytes: self.directory.count_spares(self._head_bytes(nbytes), mapped) for nbytes, _ in wanted}
        lacking: list[int] = []
        for nbytes, count in wanted:
            used = min(count, ready[nbytes])
            ready[nbytes] -= used
            lacking += [nbytes] * (count - used)
        return lacking

    def beyond(self, nbytes: int) -> int:
        """About how much longer the memory of objects of so many bytes may be altogether."""
        return margin(nbytes) if self.pinning.available() else 0

    @property
    def prepared_at_once(self) -> int:
        """So many threads may :meth:`prepare`. One, beside training on the same processors. Training on a GPU leaves
        most of them alone, and fills memory faster than one thread makes it ready."""
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
        processors = len(os.sched_getaffinity(0)) // max(1, int(ranks) if ranks.isdigit() else 1)
        return max(1, min(PREPARED_AT_ONCE_MAX, processors // 4)) if self._pins else 1

    def prepare(self, nbytes: int, check: Check) -> None:
        """Put one more segment into the pool that costs nothing to reserve: backed, mapped, and pinned if there is a
        GPU. What dead processes left is used. Training comes first. Errors: ``CapacityExceeded``."""
        self.locality.apply()
        segment, region = self._prepared(nbytes, check)
        with self._lock:
            self.made[nbytes] += 1
        try:
            os.utime(segment.fd)  # the pool gives up the oldest first
            self.cache.keep(region, segment.fd)
        finally:
            self.directory.discard(segment.temporary, owner=this_process())

    def pin(self, region: MappedRegion) -> None:
        """What the region shows, if it can be; unless it is already."""
        if not region.is_pinned:
            unpin = self.pinning.pin(region.address, region.shown_bytes)
            if unpin is not None:
                region.pinned(unpin)

    def learn(self, reserved_bytes: int, nbytes: int) -> None:
        """A reservation became an object of ``nbytes``."""
        with self._lock:
            self._expected.pop(reserved_bytes, None)
            self._expected[reserved_bytes] = nbytes
            if len(self._expected) > EXPECTATIONS_MAX:
                del self._expected[next(iter(self._expected))]

    # Details.

    @property
    def _ready(self) -> Container[int]:
        """The inodes of segments that cost nothing to reserve."""
        return self.cache.pinned if self.pinning.available() else self.cache

    def _head_bytes(self, nbytes: int) -> int:
        """The head's bytes: all, if the rest is not worth a file, or must be pinned as one piece."""
        if self._for_gpu(nbytes):
            return nbytes + margin(nbytes)
        head_bytes = whole_pages(self._expected.get(nbytes, nbytes))
        return nbytes if nbytes - head_bytes < SPARE_BYTES_MIN else head_bytes

    def _for_gpu(self, nbytes: int) -> bool:
        """Whether memory for so much is to be pinned."""
        return self._pins and nbytes >= SPARE_BYTES_MIN and self.pinning.available()

    def _prepared(self, nbytes: int, check: Check) -> tuple[Segment, MappedRegion]:
        head_bytes = self._head_bytes(nbytes)
        others = replace(self._selection, owned=False, ready=self._ready)
        segment = self.directory.take(
            head_bytes, head_bytes, check, others, empties_pool=False, backing=self._stand_back
        )
        try:
            region = self._region(segment, max(nbytes, head_bytes))

            def make_ready() -> None:
                region.populate(check)
                self.pin(region)

            self._stand_back(make_ready)
        except BaseException:
            self.directory.discard(segment.temporary)
            raise
        return segment, region

    def _stand_back(self, work: Callable[[], None]) -> None:
        """For what takes long, and holds no lock that others wait for."""

        def located() -> None:
            self.locality.apply()
            work()

        standing_back(located, "tiercheck prepare")

    def _region(self, segment: Segment, room: int) -> MappedRegion:
        """A region that shows the segment: the one it had here, if any."""
        kept = self.cache.take(segment.inode)
        shown_bytes = whole_pages(segment.nbytes)
        if kept is None or kept.region.room < room:
            region = MappedRegion(2 * whole_pages(room))  # addresses cost nothing; the file may be longer next time
        else:
            region = kept.region
            undisturbed = segment.mtime_ns == kept.mtime_ns
            region.cut(segment.recycled_bytes if undisturbed else 0)
            if not undisturbed or region.shown_bytes != shown_bytes:
                region.unpin()  # it is not the same pages any more
        region.show(segment.fd, shown_bytes)
        return region

    def _copy(self, payload: Payload, address: int, check: Check) -> None:
        """Copy the buffers to ``address``, one after the other; no view of them outlives the call."""

        def copy(piece: tuple[int, int, int]) -> None:
            check()
            ctypes.memmove(*piece)

        views = [memoryview(buffer) for buffer in payload if len(buffer)]
        try:
            at_once = COPIED_ALONE_BYTES if self._copiers.count == 1 else COPIED_AT_ONCE_BYTES
            self._copiers.share(list(_pieces(views, address, at_once)), copy)
        finally:
            for view in views:
                view.release()


def margin(nbytes: int) -> int:
    """By how much memory that is pinned is longer than what was asked for, in whole pages: it is used again for what is
    somewhat longer, such as a record whose host state has grown."""
    return whole_pages(max(MARGIN_BYTES_MIN, nbytes // MARGIN_SHARE))


class MappedSegment:
    """Memory for an object of up to ``nbytes``, or as much longer as the memory is."""

    def __init__(
        self,
        segments: MappedSegments,
        head: Segment,
        tail: Segment | None,
        region: MappedRegion | None,
        nbytes: int,
        *,
        pins: bool,
        unmade: list[Callable[[], None]],
    ) -> None:
        """``unmade``: calls that make what is not backed yet."""
        self.nbytes = nbytes
        """That were asked for."""
        self._pins = pins
        self._unmade = unmade
        self.room = max(nbytes, head.nbytes)
        self._view = memoryview(bytearray()) if region is None else region.lend(self.room)
        self._segments = segments
        self._directory = segments.directory
        self._head: Segment | None = head
        self._tail = tail
        self._region = region
        self._lock = threading.Lock()

    @property
    def view(self) -> memoryview:
        """That memory. It is made, and the page table gets it, when this is first asked for: of a base, in the thread
        that copies it. For a GPU it is pinned then if :meth:`MappedSegments.prepare` has not come to it: to pin it
        takes less time than to copy to it once by way of other memory. Errors: ``CapacityExceeded``."""
        self._make()
        if self._region is not None:
            self._region.populate(lambda: None)
            if self._pins:
                try:
                    self._segments.pin(self._region)
                except ConfigurationError as error:  # of pin=on: a step must not fail for it
                    log.error("%s; copies to it go by way of other memory", error)
        return self._view

    def publish(self, key: str, nbytes: int, mode: PutMode, check: Check) -> ObjectInfo:
        """Make the first ``nbytes`` the object, once. :meth:`give_back` must follow, whether it raises or not."""
        with self._lock:
            if self._head is None:
                raise RuntimeError(f"the segment for {key!r} was given back before it could be published")
            self._make()  # if nobody has asked for the view
            self._segments.learn(self.nbytes, nbytes)
            if self._region is not None and self._region.is_pinned:
                info = self._publish_pinned(key, nbytes, mode, check)
                if info is not None:
                    return info
            head = self._head
            if nbytes > head.nbytes:
                head = self._head = self._lengthened(head, nbytes, check)
            alone = self._release_view()
            try:
                check()
                if self._region is not None:
                    self._region.cut(nbytes)
                return self._directory.publish_beginning(head, nbytes, key, mode)
            finally:
                self._close(alone)

    def give_back(self) -> None:
        """Unmap and close; a segment that was not published goes to the pool. Idempotent."""
        with self._lock:
            if self._head is not None:
                self._close(self._release_view())

    def _make(self) -> None:
        while self._unmade:
            with self._segments.locality.applied():
                self._unmade[0]()
            del self._unmade[0]

    def _publish_pinned(self, key: str, nbytes: int, mode: PutMode, check: Check) -> ObjectInfo | None:
        """Publish a copy if cutting the file would take pages away that are pinned.

        The GPU would go on writing to them, and nobody would see what it wrote; and pinning takes longer than
        copying. ``None`` if the segment itself is to be published.
        """
        assert self._head is not None
        if whole_pages(nbytes) == whole_pages(self._head.nbytes):
            return None
        try:
            with self._view[:nbytes] as content:
                info = self._segments.store(key, [content], mode, check)
        except CapacityExceeded:
            assert self._region is not None
            self._region.unpin()  # no room for both
            return None
        self._close(self._release_view())
        return info

    def _lengthened(self, head: Segment, nbytes: int, check: Check) -> Segment:
        """The head with what lies in the tail copied to it."""
        longer = self._directory.extend(head, nbytes, check)
        at = head.nbytes
        while at < nbytes:
            check()
            with self._view[at : min(nbytes, at + COPIED_AT_ONCE_BYTES)] as part:
                at += os.pwrite(head.fd, part, at)
        return longer

    def _release_view(self) -> bool:
        """Whether nobody else has the memory: no slice of the view, no array made of it."""
        try:
            self._view.release()
        except BufferError:
            return False
        return self._region is None or not self._region.is_lent

    def _close(self, alone: bool) -> None:
        head, tail, region = self._head, self._tail, self._region
        self._head = self._tail = self._region = None
        assert head is not None
        if self._unmade:  # nobody has seen it, and no page of it need be there
            self._unmade.clear()
            for segment in filter(None, (head, tail)):
                self._directory.destroy(segment)
            return
        if region is not None and alone:
            region.hide_behind()
            if region.shown_bytes >= SPARE_BYTES_MIN:
                self._segments.cache.keep(region, head.fd)
        try:
            if tail is not None:
                self._directory.discard(tail.temporary, mapped=not alone)
        finally:
            self._directory.discard(head.temporary, mapped=not alone, owner=this_process() if alone else NOBODY)


def _pieces(views: Sequence[memoryview], address: int, at_once: int) -> Iterator[tuple[int, int, int]]:
    """Where to, where from, how many bytes: ``at_once`` at most."""
    for view in views:
        source = address_of(view)
        for at in range(0, view.nbytes, at_once):
            yield address + at, source + at, min(at_once, view.nbytes - at)
        address += view.nbytes
