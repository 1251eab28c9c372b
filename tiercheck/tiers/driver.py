"""The driver protocol: what a storage tier can be asked to do.

A driver moves bytes under keys. It never sees a tensor, a version or a rank. It is an async context
manager, made from a URL by :mod:`tiercheck.tiers.registry`. Capabilities are a value; no caller asks
``isinstance``. Foreign exceptions are mapped to :class:`tiercheck.errors.TierError` once, at the driver's
edge.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from tiercheck.errors import Unsupported
from tiercheck.types import ByteRange, Capabilities, Leftover, ObjectInfo, Payload, PutMode, Usage

__all__ = ["Reservation", "TierDriver"]


class Reservation(abc.ABC):
    """Writable memory inside a tier, not yet an object.

    Fill ``buffer``, then ``publish`` it or ``drop`` it, once. If its process ends before that (a crash, ``kill -9``),
    the reservation does not become an object. The next process that opens the tier reclaims its memory, if nobody has
    done so before.
    """

    key: str

    @property
    @abc.abstractmethod
    def buffer(self) -> memoryview:
        """The reserved bytes, and perhaps some more: writable, contiguous, format ``B``, page-aligned. Invalid once
        published or dropped. Memory that ``reserve_nowait`` reserved may be made when this is first asked for, which
        takes its time then. Errors, then: ``CapacityExceeded`` if somebody else has taken the room since."""

    @abc.abstractmethod
    async def publish(self, nbytes: int | None = None, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        """Make the first ``nbytes`` (default: as many as were asked for) the object's content, atomically.

        Atomicity, durability, idempotence, errors: as for :meth:`TierDriver.put`. If the mode's condition
        fails, nothing is published and the reservation is dropped.
        """

    def publish_nowait(self, nbytes: int | None = None, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo | None:
        """As :meth:`publish`, in the calling thread, which may be any thread. ``None``: that is not possible, and
        nothing has happened.

        See :meth:`TierDriver.reserve_nowait`. It is optional: this default returns ``None``.
        Errors: as for :meth:`publish`.
        """
        del nbytes, mode
        return None

    @abc.abstractmethod
    async def drop(self) -> None:
        """Free the memory. No object appears. Idempotent."""


class TierDriver(abc.ABC):
    """One storage tier.

    Open it with ``async with``; every call outside of that raises ``Closed``. All methods may be called concurrently
    from one event loop. Methods whose name ends in ``_nowait`` may meanwhile be called from any thread. Keys are
    checked by :func:`tiercheck.keys.validate_key`: a bad key raises ``ValueError``, and nothing is changed.
    """

    @property
    @abc.abstractmethod
    def url(self) -> str:
        """Where the tier is, for messages. It never holds a secret."""

    @property
    @abc.abstractmethod
    def capabilities(self) -> Capabilities:
        """What the driver can do. Constant while it is open."""

    def facts(self) -> Mapping[str, str]:
        """What the driver found out about its tier, for people: short names to short texts, no secrets.

        Such as ``{"io": "buffered (tmpfs has no O_DIRECT)"}``. Empty if there is nothing to say, and until the driver
        is first opened. One fact may come before that: ``trouble``, which says what keeps the driver from opening, or
        makes it try again. Does no I/O, and raises nothing. A wrapper returns the facts of the driver it wraps.
        """
        return {}

    def doubts(self) -> Sequence[str]:
        """What the driver, once open, sees that speaks against what its URL claims, each a phrase for people.

        Such as ``["it claims to survive a rack failure, but lies on ext4, a file system of this node alone"]``. Doubts
        are told to the user, and nothing is refused because of them. Does no I/O, and raises nothing. A wrapper returns
        the doubts of the driver it wraps.
        """
        return ()

    @abc.abstractmethod
    async def open(self) -> None:
        """Connect, check the tier's space and permissions, reclaim what dead processes left.

        Errors: ``Unauthorized``; ``CapacityExceeded`` if the tier is smaller than its URL asks for;
        ``Transient``. Idempotence: opening an open driver is a ``RuntimeError``.
        """

    async def open_to_read(self) -> None:
        """As :meth:`open`, for a caller that only reads: nothing is made, tried out or reclaimed, and no lock is taken.

        Calls that write are not made until the driver is closed. Capabilities may be fewer than after :meth:`open`. It
        is optional: this default calls :meth:`open`, which suits a driver whose :meth:`open` changes nothing.
        Errors: as for :meth:`open`; ``NotFound`` if the tier is not there.
        """
        await self.open()

    async def leftovers(self) -> Sequence[Leftover]:
        """What dead writers have left, and :meth:`open` would reclaim, as far as that can be told without disturbing
        anybody.

        Nothing is changed, also if the driver was opened to read. It is optional: this default knows of nothing.
        Idempotent. Errors: ``Transient``; ``Unauthorized``.
        """
        return ()

    async def reclaim(self) -> None:  # noqa: B027  (most have nothing left to do)
        """Remove what dead writers have left, if :meth:`open` does not do so each time. Idempotent. Errors:
        ``Transient``; ``Unauthorized``."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Release connections and mappings held by the driver. Idempotent. Objects stay as they are."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @abc.abstractmethod
    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        """Store the concatenation of ``payload`` under ``key``.

        Atomicity: all or nothing. A reader sees the whole previous object (or none), or the whole new one,
        whatever happens to the writer, ``kill -9`` included.
        Durability: on return the object outlives every failure in ``capabilities.survives``.
        Idempotence: ``OVERWRITE`` may be repeated. ``CREATE`` and ``UPDATE`` may not: a repeat after a lost
        answer raises as if another client had won.
        Cancellation: leaves the previous object or the new one, never a part, and no buffer in use.
        Buffers: read until return, never after, and never joined.
        Errors: ``AlreadyExists`` (``CREATE``), ``PreconditionFailed`` (``UPDATE``), ``Unsupported`` (a
        conditional mode without ``capabilities.conditional_put``), ``CapacityExceeded``, ``Transient``.
        Source: object_store's ``put_opts``, from which the three modes are taken.
        """

    @abc.abstractmethod
    async def get(
        self,
        key: str,
        *,
        range: ByteRange | None = None,
        into: memoryview | None = None,
    ) -> memoryview:
        """The object's bytes, or those of ``range``.

        With ``into`` (writable, format ``B``, at least as long as the result) the bytes are written there,
        and the filled part of it is returned. Without ``into`` a read-only buffer is returned. On a mappable
        tier this buffer is a mapping. As long as it is referenced, it shows the content that the call
        found, even if the object is overwritten or deleted meanwhile.

        Atomicity: the bytes are those of one put. Idempotent. Cancellation: ``into`` may be partly filled,
        and is not written to after the cancelled call has returned.
        Errors: ``NotFound``; ``ValueError`` for a range past the object's end or an ``into`` too small;
        ``Unsupported`` for a range without ``capabilities.ranged_get``; ``Transient``.
        """

    @abc.abstractmethod
    async def stat(self, key: str) -> ObjectInfo:
        """Size and etag of the object. Errors: ``NotFound``, ``Transient``. Idempotent."""

    @abc.abstractmethod
    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Objects whose key starts with ``prefix`` (a plain string prefix), in the byte order of their keys.

        Atomicity: an object that was there during the whole listing is reported once. An object that came or
        went during the listing may be reported or not. Reservations and half-written objects never appear.
        Errors: ``Transient``. Idempotent.
        """

    @abc.abstractmethod
    async def delete(self, keys: Iterable[str]) -> None:
        """Remove the objects. A missing object is no error.

        Atomicity: each object by itself. Idempotent. Cancellation: some are gone and some are not.
        Readers that hold a mapping keep it. Errors: ``Transient``, ``Unauthorized``.
        """

    @abc.abstractmethod
    async def usage(self) -> Usage:
        """Bytes held, reservations included, and the limit. Idempotent. Errors: ``Transient``."""

    async def reserve(self, key: str, nbytes: int) -> Reservation:
        """Writable memory inside the tier for an object of up to ``nbytes``, only if ``capabilities.mappable``.

        The memory is backed before the call returns, so that writing to it cannot fail.
        Atomicity: until ``publish`` nothing can be seen under ``key``. Cancellation: nothing stays reserved.
        Errors: ``Unsupported`` without ``capabilities.mappable``; ``CapacityExceeded``.
        """
        raise Unsupported("the tier hands out no memory (capabilities.mappable is false)", tier=self.url, key=key)

    def reserve_nowait(self, key: str, nbytes: int) -> Reservation | None:
        """As :meth:`reserve`, in the calling thread, which may be any thread. ``None``: that is not possible, and
        nothing has happened.

        This is for a thread that cannot await, such as training's. If memory is ready, waking the event loop's thread
        and waiting for it takes longer than handing the memory out. It is optional: this default returns ``None``.
        Errors: as for :meth:`reserve`.
        """
        del key, nbytes
        return None

    async def prepare_reservations(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Prepare memory for later reservations, so that :meth:`reserve` need not make it.

        ``sizes`` holds pairs: the bytes of a reservation, and how many of that size may be held at the same time.
        It is a hint: this default does nothing, and a mappable driver may prepare memory. Call it when nothing
        waits, because it takes time to fill memory.
        Idempotent: memory that is ready already is counted. Cancellation: some memory is ready and some is not;
        nothing is lost. No object is removed. Errors: ``CapacityExceeded``; ``ValueError`` for a negative number.
        """
        del sizes

    async def expect(self, nbytes: int) -> None:
        """Say how many bytes the tier usually holds, of all processes that use it.

        It is a hint: this default does nothing. A driver that keeps memory for reuse gives back what exceeds that,
        objects included, when it is not needed any more. More than that may be put all the same. The last call counts,
        whichever process makes it.
        Idempotent. Errors: ``ValueError`` for a negative number.
        """
        del nbytes
