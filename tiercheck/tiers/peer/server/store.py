"""The drivers behind a peer server: one a namespace, opened when it is first asked for."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress

from tiercheck.errors import CapacityExceeded, Closed, TierError, Transient, Unauthorized
from tiercheck.keys import validate_key
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.peer.own_memory import is_own, name_of_own
from tiercheck.tiers.peer.server.effects import (
    DeleteObjects,
    DropMemory,
    Greet,
    ListObjects,
    Memory,
    OpenObject,
    PublishMemory,
    ReadChunk,
    ReserveMemory,
    StatObject,
    StoreWhole,
    Task,
    UsageOf,
)
from tiercheck.tiers.peer.server.limits import PeerLimits
from tiercheck.tiers.peer.server.reading import read
from tiercheck.types import ObjectInfo, PutMode, Usage, bytes_text, shown

__all__ = ["NamespaceStore", "OpenOwn", "check_namespace"]

LARGE_BYTES = 64 << 20
"""Of memory that takes a while to make."""
CHANGED = 64
REST = 9
"""So many times as long as a count took none is made, unless much has changed."""

OpenOwn = Callable[[str], AbstractAsyncContextManager[TierDriver]]


def check_namespace(name: str) -> str:
    """``name`` if it may be a client's namespace: one component of a key. ``ValueError`` otherwise."""
    if "/" in name:
        raise ValueError(f"the namespace {shown(name)} has a slash")
    return validate_key(name, bytes_max=255)


def keys_of(task: Task) -> tuple[str, ...]:
    """The keys that a client names by it."""
    match task:
        case StatObject(_, key) | StoreWhole(_, key) | ReserveMemory(_, key) | OpenObject(_, key):
            return (key,)
        case DeleteObjects(_, keys):
            return keys
    return ()


def namespace_of(task: Task) -> str:
    """The namespace that a client names by it; none of what was reserved before."""
    match task:
        case PublishMemory() | DropMemory():
            return ""
        case ReadChunk(source, _):
            return source.namespace
    return task.namespace


class BufferMemory:
    """Memory beside a driver that cannot hand out its own."""

    def __init__(self, store: NamespaceStore, driver: TierDriver, key: str, nbytes: int) -> None:
        self._store = store
        self._driver = driver
        self._key = key
        self._nbytes = nbytes
        self._map: mmap.mmap | None = mmap.mmap(-1, max(nbytes, 1))
        self.buffer = memoryview(self._map)[:nbytes]

    async def publish(self, nbytes: int | None = None, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        try:
            return await self._driver.put(self._key, [self.buffer[:nbytes]], mode=mode)
        finally:
            await self.drop()

    async def drop(self) -> None:
        if self._map is not None:
            self._map = None
            self.buffer = memoryview(b"")
            self._store.buffered_bytes -= self._nbytes


class _Tally:
    """How much there is at most: what was counted last, and all that came since.

    A count reads all objects there are, and so finds what was deleted or replaced. It is made only if the limit is
    reached: at once if more than one in :data:`CHANGED` objects may be gone, else for a tenth of the time at most.
    """

    def __init__(self, count: Callable[[], Awaitable[int]]) -> None:
        self.most = 0
        self._count = count
        self._added = 0
        self._changes = 0
        self._rests_until = 0.0

    def add(self, more: int) -> None:
        self.most += more
        self._added += more
        self.changed(1)

    def changed(self, objects: int) -> None:
        """So many may have been deleted, or replaced."""
        self._changes += objects

    async def fits(self, more: int, limit: int, objects: int) -> bool:
        """``objects``: so many are read for a count."""
        clock = asyncio.get_running_loop().time
        if self.most + more > limit:
            began = clock()
            if self._changes > objects // CHANGED or began >= self._rests_until:
                added, self._changes = self._added, 0
                counted = await self._count()
                self.most = counted + self._added - added
                self._rests_until = clock() + REST * (clock() - began)
        return self.most + more <= limit


async def count_objects(driver: TierDriver) -> int:
    return len([None async for _ in driver.list()])


class NamespaceStore:
    """Does the protocol's tasks, within ``limits``, for objects whose keys ``may_name`` allows."""

    def __init__(
        self,
        open_namespace: Callable[[str], Awaitable[TierDriver]],
        limits: PeerLimits,
        may_name: Callable[[str], bool] = lambda _: True,
        open_own: OpenOwn | None = None,
    ) -> None:
        """``open_own``: opens a part of the node's own memory, to be read."""
        self._open_namespace = open_namespace
        self._open_own = open_own
        self._limits = limits
        self._may_name = may_name
        self._drivers: dict[str, TierDriver] = {}
        self._opening = asyncio.Lock()
        self._reserving = asyncio.Lock()
        self._making = asyncio.Lock()
        self.buffered_bytes = 0
        self._used_bytes = _Tally(self._measure)
        self._objects = _Tally(self._count)

    async def close(self) -> None:
        """Close the drivers; the first error is raised once all of them were closed."""
        errors: list[BaseException] = []
        while self._drivers:
            _, driver = self._drivers.popitem()
            try:
                await driver.close()
            except Exception as error:  # noqa: BLE001  (raised below)
                errors.append(error)
        if errors:
            raise errors[0]

    async def do(self, task: Task) -> object:
        """The outcome of ``task``. Errors: ``Unauthorized`` for a key that no object may have here; the drivers'."""
        for key in keys_of(task):
            if not self._may_name(key):
                raise Unauthorized("no object of this name may lie in a neighbour's memory", key=key)
        try:
            return await (self._done_for_own(task) if is_own(namespace_of(task)) else self._done(task))
        except Closed as error:
            raise Transient("the namespace, which was empty, is being closed; try again") from error

    async def _done(self, task: Task) -> object:
        match task:
            case Greet(namespace):
                await self.driver(namespace)
                return None
            case StatObject(namespace, _) | ListObjects(namespace, _, _) | OpenObject(namespace, _, _, _):
                return await read(await self.driver(namespace), task)
            case ReadChunk(source, _):
                return await read(await self.driver(source.namespace), task)
            case DeleteObjects(namespace, keys):
                await (await self.driver(namespace)).delete(keys)
                self._objects.changed(len(keys))
                self._used_bytes.changed(len(keys))
                return None
            case UsageOf(namespace):
                return await self._usage(namespace)
            case StoreWhole(namespace, key, data, mode):
                driver = await self.driver(namespace)
                with memoryview(data) as view:
                    await self._make_room(view.nbytes, key)
                    return await driver.put(key, [view], mode=mode)
            case ReserveMemory():
                return await self._reserve(task)
            case PublishMemory(memory, mode):
                return await memory.publish(mode=mode)
            case DropMemory(memory):
                await memory.drop()
                return None

    async def _done_for_own(self, task: Task) -> object:
        """The node's own memory is opened for each task: nothing of it is held when its job removes it.

        Errors: ``Unauthorized`` for a client of another owner, and for what would change it.
        """
        namespace = namespace_of(task)
        if "/" in namespace or self._open_own is None:
            raise Unauthorized("this node's own memory is for clients of its own owner")
        async with self._open_own(name_of_own(namespace)) as driver:
            return None if isinstance(task, Greet) else await read(driver, task)

    async def driver(self, namespace: str) -> TierDriver:
        """The namespace's driver, open. Errors: ``CapacityExceeded`` for one namespace too many; the driver's."""
        found = self._drivers.get(namespace)
        if found is not None:
            return found
        check_namespace(namespace.rpartition("/")[2])
        async with self._opening:
            found = self._drivers.get(namespace)
            if found is None:
                if len(self._drivers) >= self._limits.namespaces and not await self._close_an_empty_one():
                    raise CapacityExceeded(
                        f"the server holds {len(self._drivers)} namespaces, as many as PeerLimits.namespaces allows"
                    )
                found = await self._open_namespace(namespace)
                try:
                    used_bytes, objects = (await found.usage()).used_bytes, await count_objects(found)
                except BaseException:
                    await found.close()
                    raise
                self._drivers[namespace] = found
                self._used_bytes.add(used_bytes)
                self._objects.add(objects)
        return found

    async def _close_an_empty_one(self) -> bool:
        """Whether there was a namespace with nothing in it."""
        for namespace, driver in list(self._drivers.items()):
            if (await driver.usage()).used_bytes or await count_objects(driver):
                continue
            # Nobody gets it from here on. Who has it already may have reserved memory of it just now.
            self._drivers.pop(namespace, None)
            try:
                stays = (await driver.usage()).used_bytes > 0
            except BaseException:
                self._drivers[namespace] = driver
                raise
            if not stays:
                await driver.close()
                return True
            self._drivers[namespace] = driver
        return False

    # Memory.

    async def _make_room(self, nbytes: int, key: str) -> None:
        """Errors: ``CapacityExceeded`` if ``nbytes`` more, or one object more, would be too many."""
        if not await self._objects.fits(1, self._limits.objects, self._objects.most):
            raise CapacityExceeded(
                f"the peer keeps {self._objects.most} objects, as many as PeerLimits.objects allows", key=key
            )
        limit_bytes = self._limits.memory_bytes
        if not await self._used_bytes.fits(nbytes, limit_bytes, self._objects.most):
            raise CapacityExceeded(
                f"{bytes_text(nbytes)} do not fit into the peer's memory: {bytes_text(self._used_bytes.most)} of "
                f"{bytes_text(limit_bytes)} (PeerLimits.memory_bytes) are in use; raise it or delete objects",
                key=key,
            )
        self._used_bytes.add(nbytes)
        self._objects.add(1)

    async def _measure(self) -> int:
        used = [(await driver.usage()).used_bytes for driver in list(self._drivers.values())]
        return self.buffered_bytes + sum(used)

    async def _count(self) -> int:
        return sum([await count_objects(driver) for driver in list(self._drivers.values())])

    async def _reserve(self, task: ReserveMemory) -> Memory:
        # Large ones are made one after the other, so that a thread of the driver is left for all else.
        async with self._making if task.nbytes >= LARGE_BYTES else nullcontext():
            if not task.is_wanted():
                raise Transient("nobody wants the memory any more", key=task.key)
            driver = await self.driver(task.namespace)
            memory = await self._made(driver, task.key, task.nbytes)
        if self._drivers.get(task.namespace) is driver:
            return memory
        with suppress(TierError):  # it was closed, and that has let go of all its memory
            await memory.drop()
        raise Closed("the namespace was closed")

    async def _made(self, driver: TierDriver, key: str, nbytes: int) -> Memory:
        if driver.capabilities.mappable:
            async with self._reserving:
                await self._make_room(nbytes, key)
            return await driver.reserve(key, nbytes)
        async with self._reserving:
            await self._make_room(nbytes, key)
            if self.buffered_bytes + nbytes > self._limits.buffer_bytes:
                raise CapacityExceeded(
                    f"{bytes_text(nbytes)} do not fit into the peer's buffer: {bytes_text(self.buffered_bytes)} of "
                    f"{bytes_text(self._limits.buffer_bytes)} (PeerLimits.buffer_bytes) are in use",
                    key=key,
                )
            try:
                memory = BufferMemory(self, driver, key, nbytes)
            except (OSError, OverflowError, MemoryError) as error:
                raise CapacityExceeded(f"the peer has no memory for {bytes_text(nbytes)}", key=key) from error
            self.buffered_bytes += nbytes
            return memory

    async def _usage(self, namespace: str) -> Usage:
        usage = await (await self.driver(namespace)).usage()
        room = max(0, self._limits.memory_bytes - await self._measure())
        if usage.limit_bytes is not None:
            room = min(room, max(0, usage.limit_bytes - usage.used_bytes))
        return Usage(usage.used_bytes, usage.used_bytes + room)
