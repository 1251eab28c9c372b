"""What a client reads of a namespace: the same of what a node keeps for its neighbours and of its own memory."""

from __future__ import annotations

from tiercheck.errors import NotFound, Transient, Unauthorized
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.peer.messages import HEAD_BYTES_MAX, PAGE_MAX, Page
from tiercheck.tiers.peer.server.effects import ListObjects, OpenObject, ReadableObject, ReadChunk, StatObject, Task
from tiercheck.types import ByteRange, ObjectInfo

__all__ = ["read"]

OPEN_ATTEMPTS_MAX = 100
PAGE_BYTES_MAX = HEAD_BYTES_MAX // 2


async def read(driver: TierDriver, task: Task) -> object:
    """The outcome of a task that reads. Errors: ``Unauthorized`` for any other; the driver's."""
    match task:
        case StatObject(_, key):
            return await driver.stat(key)
        case ListObjects():
            return await list_objects(driver, task)
        case OpenObject():
            return await open_object(driver, task)
        case ReadChunk(source, wanted):
            return await read_chunk(driver, source, wanted)
    raise Unauthorized(f"a node's own memory is only read by others: {type(task).__name__} is refused")


async def list_objects(driver: TierDriver, task: ListObjects) -> Page:
    after = task.after.encode()
    entries: list[tuple[str, int, str]] = []
    nbytes = 0
    async for info in driver.list(task.prefix):
        encoded = info.key.encode()
        if encoded <= after:
            continue
        nbytes += len(encoded) + len(info.etag) + 32
        if entries and (nbytes > PAGE_BYTES_MAX or len(entries) >= PAGE_MAX):
            return Page(tuple(entries), True)
        entries.append((info.key, info.nbytes, info.etag))
    return Page(tuple(entries), False)


async def open_object(driver: TierDriver, task: OpenObject) -> ReadableObject:
    for _ in range(OPEN_ATTEMPTS_MAX):
        if not driver.capabilities.mappable:
            source = await open_unmapped(driver, task)
            if source is not None:
                return source
            continue
        info = await driver.stat(task.key)
        content = await driver.get(task.key, range=task.wanted)
        # The content's own etag matters only to a reader that has to come back for more of it.
        if content.nbytes <= task.whole_bytes or await is_still(driver, info):
            start = 0 if task.wanted is None else task.wanted.start
            wanted = ByteRange(start, start + content.nbytes)
            return ReadableObject(task.namespace, task.key, wanted, info.etag, content)
    raise Transient("the object is replaced faster than it can be opened; try again", key=task.key)


async def open_unmapped(driver: TierDriver, task: OpenObject) -> ReadableObject | None:
    """``None`` if the object was replaced meanwhile by one that is no longer what was prepared for."""
    info = await driver.stat(task.key)
    wanted = ByteRange(0, info.nbytes) if task.wanted is None else task.wanted
    if wanted.stop > info.nbytes:
        raise ValueError(f"{wanted} reaches past the end of {task.key!r}, which has {info.nbytes} bytes")
    content = None
    if len(wanted) <= task.whole_bytes:
        try:
            content = await driver.get(task.key, range=task.wanted)
        except ValueError:
            if await is_still(driver, info):
                raise
            return None
        if content.nbytes != len(wanted):
            return None
    return ReadableObject(task.namespace, task.key, wanted, info.etag, content, copied=content is not None)


async def read_chunk(driver: TierDriver, source: ReadableObject, wanted: ByteRange) -> memoryview:
    replaced = NotFound("the object was replaced while it was read", key=source.key)
    try:
        content = await driver.get(source.key, range=wanted)
    except ValueError as error:  # past the end of a shorter one
        if (await driver.stat(source.key)).etag != source.etag:
            raise replaced from error
        raise
    if (await driver.stat(source.key)).etag != source.etag:
        raise replaced
    return content


async def is_still(driver: TierDriver, info: ObjectInfo) -> bool:
    try:
        return await driver.stat(info.key) == info
    except NotFound:
        return False
