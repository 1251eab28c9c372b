"""The blocking side of the fsspec driver: one connected file system, with its traps disarmed.

A :class:`Backend` holds what all file systems share. How an object is published is what tells them apart:

- :class:`ClosingBackend`: an object appears, whole, when its file is closed, as on the object stores;
- :class:`tiercheck.tiers.fsspec.renaming.RenamingBackend`: a temporary file is moved onto the key;
- :class:`MemoryBackend`: an object is a value in a dictionary.

Every method blocks, may be called from any thread, and raises whatever the file system raises.
"""

from __future__ import annotations

import abc
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from enum import Enum
from typing import Any

from tiercheck.errors import Transient, Unsupported
from tiercheck.keys import validate_key
from tiercheck.tiers.fsspec.workers import Ticket
from tiercheck.types import ByteRange, ObjectInfo

__all__ = ["CONTROL", "Backend", "ClosingBackend", "MemoryBackend", "Parts", "Reading", "opened"]

CONTROL = ".tiercheck"
"""The directory, beside the objects, that is TierCheck's own; no key may begin with it."""
ETAG_FIELDS = (
    "etag", "ETag", "e_tag", "generation", "version_id", "VersionId", "last_modified", "LastModified", "updated",
    "mtime", "modified", "created", "ino", "size",
)  # fmt: skip
"""What tells one put of a key from the next, in the words of the various file systems; a probe chooses among them."""
SETTLE_TRIES = 8
"""How often something is tried again that another client's change has just foiled."""

Info = dict[str, Any]
Parts = Iterator[bytes]
"""An object's content, in the order of its bytes, cut into pieces of at most a part's length."""
Fetch = Callable[[int, int], bytes]
"""``(start, stop)`` to those bytes."""


class Reading(Enum):
    """How a range of an object is read."""

    RANGES = "by ranged requests"
    SEEKING = "by seeking in an open file"
    STEADY = "by seeking in one open file, which stays as it was opened"
    WHOLE = "only as a whole"


class Backend(abc.ABC):
    """One file system, connected. ``fs`` is the fsspec object and ``root`` the path that all keys lie under.

    ``place``: the tier's URL. ``deadline_s``: how long the file system may be silent.
    """

    flat = False
    """Keys are plain strings: no directories to make, to walk, or to prune."""
    publishes = ""
    """How, in a few words for people."""
    ways_of_reading: tuple[Reading, ...] = (Reading.RANGES, Reading.SEEKING)
    """Those that may be used, the best first; as a whole is left if none of them works."""

    def __init__(self, fs: Any, root: str, *, place: str, part_bytes: int, deadline_s: float) -> None:
        self.fs = fs
        self.root = root.rstrip("/")
        self.place = place
        self.part_bytes = part_bytes
        self.deadline_s = deadline_s
        self.reading = Reading.RANGES
        self.etag_fields: tuple[str, ...] = ETAG_FIELDS

    # What a kind of file system says of itself.

    @abc.abstractmethod
    def prepare(self) -> None:
        """See that the tier's place is there, and make it if that is usual. Errors: ``FileNotFoundError``."""

    @abc.abstractmethod
    def publish(self, key: str, parts: Parts, nbytes: int, ticket: Ticket) -> None:
        """Make ``parts`` the content of ``key``, all or nothing."""

    def free_bytes(self) -> int | None:
        """Bytes still to be had, or ``None`` if the file system does not say."""
        return None

    def facts(self) -> dict[str, str]:
        """What people should know of this file system."""
        return {}

    def remove_directory(self, path: str) -> None:
        """Remove a directory that is empty, and raise if it is not."""
        self.fs.rmdir(path)

    def is_alive(self) -> bool:
        """Whether the connection can still be used, as far as the client knows."""
        return True

    def close(self) -> None:  # noqa: B027  (most hold none)
        """Let go of the connection."""

    # What is the same everywhere.

    def path_of(self, key: str) -> str:
        return f"{self.root}/{key}"

    def info(self, key: str) -> ObjectInfo:
        """Size and etag. Errors: ``FileNotFoundError``, also for a directory."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.info(self.path_of(key))
        except NotADirectoryError as error:
            raise FileNotFoundError(str(error)) from None
        if found["type"] != "file":
            raise FileNotFoundError(f"{self.path_of(key)} is a {found['type']}")
        return self.info_of(key, found)

    def info_of(self, key: str, found: Info) -> ObjectInfo:
        words = [text_of(found[name]) for name in self.etag_fields if found.get(name) is not None]
        return ObjectInfo(key, int(found["size"]), "-".join(words) or "none")

    def read(self, key: str, range: ByteRange | None) -> bytes:
        """The object, or a range of it, at once: the bytes of one put. Less than asked for if it ends before."""
        if range is not None:
            with self.reader(key) as fetch:
                return fetch(range.start, range.stop)
        try:
            return bytes(self.fs.cat_file(self.path_of(key)))
        except NotADirectoryError as error:
            raise FileNotFoundError(str(error)) from None

    @contextmanager
    def reader(self, key: str) -> Iterator[Fetch]:
        """A function that reads a range of the object. A server may answer with less than asked for at its end."""
        path = self.path_of(key)
        if self.reading in (Reading.SEEKING, Reading.STEADY):
            with opened(self.fs, path, "rb") as file:
                yield lambda start, stop: read_at(file, start, stop)
            return

        def fetch(start: int, stop: int) -> bytes:
            if start == stop:
                return b""  # an empty range is no range to the object stores
            if self.reading is Reading.WHOLE:
                return bytes(self.fs.cat_file(path)[start:stop])
            return bytes(self.fs.cat_file(path, start=start, end=stop))

        yield fetch

    def remove(self, key: str) -> None:
        """Remove the object and the directories it leaves empty; a missing one is no error."""
        path = self.path_of(key)
        try:
            self.fs.rm_file(path)
        except (FileNotFoundError, KeyError):
            return
        except Exception:
            # A directory of that name, or an object above it, is something else than the object.
            if self._type_of(path) in (None, "directory"):
                return
            raise
        if not self.flat:
            self._prune(key)

    def scan(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with ``prefix``, in the byte order of their keys.

        Files that no key could name belong to somebody else and are left out.
        """
        parent, slash, start = prefix.rpartition("/")
        if slash and not is_key(parent):
            return
        found = self._find(prefix) if self.flat else self._walk(parent + slash, start)
        for key, info in found:
            if is_key(key) and key.partition("/")[0] != CONTROL:
                yield self.info_of(key, info)

    def _find(self, prefix: str) -> Iterator[tuple[str, Info]]:
        # From the root by a prefix: asked for a "directory", some find an object of that name and nothing below it.
        self.fs.invalidate_cache()
        found: dict[str, Info] = self.fs.find(self.root, detail=True, **({"prefix": prefix} if prefix else {}))
        above = self.root.lstrip("/") + "/"
        keyed = ((path.lstrip("/").removeprefix(above), info) for path, info in found.items())
        files = [(key, info) for key, info in keyed if key.startswith(prefix) and info["type"] == "file"]
        yield from sorted(files, key=lambda pair: os.fsencode(pair[0]))

    def _walk(self, above: str, start: str) -> Iterator[tuple[str, Info]]:
        """Depth first, a directory at a time; a directory sorts as its name with the slash: the order of keys."""
        found = []
        for info in self._entries(above):
            name = str(info["name"]).rstrip("/").rpartition("/")[2]
            is_directory = info["type"] == "directory"
            if name.startswith(start) and (is_directory or info["type"] == "file"):
                found.append((os.fsencode(name) + (b"/" if is_directory else b""), name, is_directory, info))
        for _, name, is_directory, info in sorted(found, key=lambda entry: entry[0]):
            if not is_directory:
                yield above + name, info
            elif above or name != CONTROL:
                yield from self._walk(f"{above}{name}/", "")

    def _entries(self, above: str) -> list[Info]:
        """What the directory holds; nothing if there is no such directory."""
        path = self.path_of(above).rstrip("/")
        for _ in range(SETTLE_TRIES):
            self.fs.invalidate_cache()
            try:
                found: list[Info] = self.fs.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                # Some fail so when a file of the directory goes while they list it.
                if self._type_of(path) in (None, "file"):
                    return []
            else:
                return [info for info in found if str(info["name"]).rstrip("/") != path]
        raise Transient(f"the directory {path} changes faster than it can be listed")

    def listed_info(self, key: str) -> Info:
        """The object's entry in a listing, as the file system gives it. Errors: ``Unsupported`` if it has none."""
        if self.flat:
            found = dict(self._find(key))
        else:
            above = key.rpartition("/")[0]
            found = {f"{above}/{str(info['name']).rpartition('/')[2]}": info for info in self._entries(above)}
        if key not in found:
            raise Unsupported("an object that was put is not listed")
        return found[key]

    def _type_of(self, path: str) -> str | None:
        """``file``, ``directory`` or the like; ``None`` if there is nothing.

        Not by fsspec's ``exists`` and ``isdir``: they take every failure, such as a server that is down, for a no.
        """
        self.fs.invalidate_cache()
        try:
            return str(self.fs.info(path)["type"])
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _prune(self, key: str) -> None:
        folder = key.rpartition("/")[0]
        with suppress(Exception):  # not empty, or gone already
            while folder:
                self.remove_directory(self.path_of(folder))
                folder = folder.rpartition("/")[0]


class ClosingBackend(Backend):
    """Publishes at close: what was written before that is nothing yet.

    Objects of one part go in one request; larger ones are streamed through a file, part by part. The file is never
    a context manager's, nor left to the garbage collector: both close it, and so would publish half an object.
    """

    flat = True
    publishes = "at close"

    def prepare(self) -> None:
        container = self.root.partition("/")[0]
        self.fs.invalidate_cache()
        if self.fs.info(container)["type"] != "directory":
            raise FileNotFoundError(f"there is no container or bucket {container!r}")

    def _find(self, prefix: str) -> Iterator[tuple[str, Info]]:
        """Errors: ``FileNotFoundError`` without a container: some clients list nothing then."""
        empty = True
        for found in super()._find(prefix):
            empty = False
            yield found
        if empty:
            self.prepare()

    def publish(self, key: str, parts: Parts, nbytes: int, ticket: Ticket) -> None:
        path = self.path_of(key)
        if nbytes <= self.part_bytes:
            content = b"".join(parts)
            ticket.check()
            self.fs.pipe_file(path, content)
            return
        file = self.fs.open(path, "wb", block_size=self.part_bytes)
        try:
            for part in parts:
                file.write(part)
            ticket.check()
            file.close()
        except BaseException:
            defuse(file)
            raise


class MemoryBackend(Backend):
    """fsspec's ``memory://``: a dictionary, and for looking at it also directories."""

    flat = True
    publishes = "in memory"
    _lock = threading.Lock()

    def prepare(self) -> None:
        """A dictionary is always there."""

    def publish(self, key: str, parts: Parts, nbytes: int, ticket: Ticket) -> None:
        # One value: a file opened for writing shows up empty at once.
        content, path = b"".join(parts), self.path_of(key)
        with self._lock:
            if self.fs.isdir(path):
                raise IsADirectoryError(path)
            ticket.check()
            self.fs.pipe_file(path, content)


def defuse(file: Any) -> None:
    """Give up a half-written file, so that nothing that happens to it later publishes it."""
    # Set before anything else: closing, also by the garbage collector, writes the rest and publishes.
    file.closed = True
    discard = getattr(file, "discard", None)
    if discard is not None:
        with suppress(Exception):  # what the server keeps of it expires there
            discard()


@contextmanager
def opened(fs: Any, path: str, mode: str) -> Iterator[Any]:
    """An open file, closed at the end: once. If that fails the garbage collector would try again, in whatever thread
    it happens to run, and some wait for a server that is gone without end."""
    file = fs.open(path, mode)
    try:
        with file:
            yield file
    except BaseException:
        for name in ("closed", "_closed"):
            with suppress(AttributeError):
                setattr(file, name, True)
        raise


def read_at(file: Any, start: int, stop: int) -> bytes:
    file.seek(start)
    pieces = []
    while start < stop:
        piece = file.read(stop - start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def is_key(text: str) -> bool:
    try:
        validate_key(text)
    except ValueError:
        return False
    return True


def text_of(value: object) -> str:
    """A field of an info as a word of an etag."""
    if isinstance(value, datetime):
        value = value.timestamp()
    return f"{value:.6f}" if isinstance(value, float) else str(value).strip('"')


def token() -> str:
    """A name that nobody else uses."""
    return secrets.token_hex(8)
