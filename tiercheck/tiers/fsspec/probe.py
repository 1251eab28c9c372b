"""What a file system really does, found out by trying: at every open, on objects of the probe's own."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from tiercheck.errors import Unsupported
from tiercheck.tiers.fsspec.backends import (
    CONTROL,
    ETAG_FIELDS,
    Backend,
    ClosingBackend,
    Reading,
    defuse,
    text_of,
    token,
)
from tiercheck.tiers.fsspec.workers import Ticket
from tiercheck.types import ObjectInfo

__all__ = ["probe", "probe_reading"]

CONTENT = bytes(range(256)) * 16
RANGE = (1000, 1017)
TRIED_NBYTES = range(64, 1 << 20)
"""An object that is read to find out how: long enough to tell ranges apart, and short."""


def probe(backend: Backend, ticket: Ticket) -> dict[str, str]:
    """Try the file system, set the backend to what was found, and say it for people. Leaves nothing behind.

    Errors: ``Unsupported`` if the file system does not publish whole objects as its kind is said to.
    """
    key = f"{CONTROL}/probe-{token()}"
    try:
        first = _put(backend, key, CONTENT, ticket)
        if first.nbytes != len(CONTENT):
            raise Unsupported(f"an object of {len(CONTENT)} bytes came out with {first.nbytes}")
        _choose_etag_fields(backend, key)
        _choose_reading(backend, key, CONTENT, RANGE)
        etags = [backend.info(key).etag]
        etags += [_put(backend, key, content, ticket).etag for content in (CONTENT[::-1], CONTENT)]
        # Twice, since the clock that an etag may be made of may just have moved on.
        if etags[0] == etags[1] or etags[1] == etags[2]:
            _read_as_if_etags_told_nothing(backend)
        unique = len(set(etags)) == len(etags)
        if _put(backend, key, CONTENT + b"!", ticket).nbytes != len(CONTENT) + 1:
            raise Unsupported("an object that was put again kept its first content")
        backend.remove(key)
        if _exists(backend, key):
            raise Unsupported("an object that was removed is still there")
        if isinstance(backend, ClosingBackend):
            _check_nothing_shows_before_close(backend, key)
    finally:
        with suppress(Exception):  # the failure that is being raised is the one to tell
            backend.remove(key)
    return {
        "reads": backend.reading.value,
        "etags": "of " + ", ".join(backend.etag_fields)
        + ("" if unique else "; the same content put twice at once has the same etag"),
        "publishes": backend.publishes,
    }  # fmt: skip


def probe_reading(backend: Backend) -> dict[str, str]:
    """How ranges are read, tried on an object that is there; without one, or if nothing works, objects are read whole.
    Nothing is written."""
    backend.reading = Reading.WHOLE
    for info in backend.scan(""):
        if info.nbytes not in TRIED_NBYTES:
            continue
        with backend.reader(info.key) as fetch:
            content = fetch(0, info.nbytes)
        start = info.nbytes // 2 | 1
        stop = start + RANGE[1] - RANGE[0]
        if content[start:stop] not in (content[: stop - start], b""):  # else a range that is ignored looks right
            _choose_reading(backend, info.key, content, (start, stop))
            break
    return {"reads": backend.reading.value}


def _put(backend: Backend, key: str, content: bytes, ticket: Ticket) -> ObjectInfo:
    def parts() -> Iterator[bytes]:
        yield content

    backend.publish(key, parts(), len(content), ticket)
    return backend.info(key)


def _choose_etag_fields(backend: Backend, key: str) -> None:
    """Those on which an object's own info and its entry in a listing agree."""
    alone: dict[str, Any] = backend.fs.info(backend.path_of(key))
    listed = backend.listed_info(key)
    backend.etag_fields = tuple(
        name
        for name in ETAG_FIELDS
        if alone.get(name) is not None
        and listed.get(name) is not None
        and text_of(alone[name]) == text_of(listed[name])
    )
    if not backend.etag_fields:
        raise Unsupported("the file system gives objects nothing to tell one put of a key from the next")


def _choose_reading(backend: Backend, key: str, content: bytes, part: tuple[int, int]) -> None:
    """The first way of reading that returns the range asked for, and not some other one, nor the whole object."""
    start, stop = part
    for reading in backend.ways_of_reading:
        backend.reading = reading
        # Whatever an unusable way raises, the next one is tried; a broken connection will fail that as well.
        with suppress(Exception), backend.reader(key) as fetch:
            if fetch(start, stop) == content[start:stop] and fetch(0, len(content)) == content:
                return
    backend.reading = Reading.WHOLE
    with backend.reader(key) as fetch:
        if fetch(0, len(content)) != content:
            raise Unsupported("an object did not come back as it was put")


def _read_as_if_etags_told_nothing(backend: Backend) -> None:
    """Two puts of other bytes have the same etag: parts that are read one by one may be of both, unnoticed."""
    if backend.reading is not Reading.STEADY:
        backend.reading = Reading.WHOLE


def _check_nothing_shows_before_close(backend: ClosingBackend, key: str) -> None:
    """A file that is open for writing, and one that was given up, are no objects."""
    file = backend.fs.open(backend.path_of(key), "wb", block_size=backend.part_bytes)
    try:
        file.write(CONTENT)
        shown = _exists(backend, key)
    finally:
        defuse(file)
    del file
    gc.collect(0)
    if shown or _exists(backend, key):
        raise Unsupported(
            "the file system shows an object before its file is closed, so a reader may see half of one; "
            "if its mv replaces a file atomically, say publish=rename"
        )


def _exists(backend: Backend, key: str) -> bool:
    try:
        backend.info(key)
    except FileNotFoundError:
        return False
    return True
