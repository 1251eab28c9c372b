"""Objects as rows of a SQLite database: ``sqlite:///mnt/ssd/run.db[?survives=rack][&wait=10]``."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tiercheck import errors
from tiercheck.keys import validate_key
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import TierURL, seconds_from
from tiercheck.types import ByteRange, Capabilities, ObjectInfo, Payload, PutMode, Survives, Usage

T = TypeVar("T")

PAGE = 500
KINDS: dict[int, type[errors.TierError]] = {
    sqlite3.SQLITE_BUSY: errors.Transient,
    sqlite3.SQLITE_IOERR: errors.Transient,
    sqlite3.SQLITE_FULL: errors.CapacityExceeded,
    sqlite3.SQLITE_TOOBIG: errors.CapacityExceeded,
    sqlite3.SQLITE_CORRUPT: errors.Corruption,
    sqlite3.SQLITE_NOTADB: errors.Corruption,
    sqlite3.SQLITE_READONLY: errors.Unauthorized,
    sqlite3.SQLITE_CANTOPEN: errors.Unauthorized,
}


class SqliteDriver(TierDriver):
    """One file, one table. A put is a transaction, so it is atomic and, once committed, durable.

    - ``survives``: the widest failure after which somebody can still read the file.
    - ``wait``: seconds to wait while another process writes.
    """

    def __init__(self, path: Path, *, survives: Survives = Survives.PROCESS, wait_s: float = 60) -> None:
        self._path = path
        self._survives = survives
        self._wait_s = wait_s
        self._connection: sqlite3.Connection | None = None

    @classmethod
    def from_url(cls, url: TierURL) -> SqliteDriver:
        options = url.reader()
        survives = options.take("survives", Survives.parse, Survives.PROCESS)
        wait_s = options.take("wait", seconds_from(0), 60.0)
        options.finish()  # an option that nobody took is an error
        return cls(Path(url.location), survives=survives, wait_s=wait_s)

    @property
    def url(self) -> str:
        return f"sqlite://{self._path}"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(survives=self._survives, conditional_put=True)

    def facts(self) -> Mapping[str, str]:
        return {"sqlite": sqlite3.sqlite_version}

    async def open(self) -> None:
        if self._connection is not None:
            raise RuntimeError(f"{self.url} is open already")
        worker = ThreadPoolExecutor(1, thread_name_prefix="sqlite-tier")
        connecting = worker.submit(self._connect)  # it may wait for another process: not on the event loop
        try:
            self._connection = await self._end_of(connecting)
        except BaseException:
            if connecting.done() and not connecting.cancelled() and connecting.exception() is None:
                connecting.result().close()
            worker.shutdown()
            raise
        self._worker = worker

    async def open_to_read(self) -> None:
        """A file that is not there is not made: a command that lists must not answer a mistyped path with an empty
        tier."""
        if not await asyncio.to_thread(os.path.exists, self._path):
            raise errors.NotFound("there is no such file", tier=self.url)
        await self.open()

    def _connect(self) -> sqlite3.Connection:
        with self._mapped(None):
            # Others may not read it; what SQLite makes beside it has the same mode.
            with contextlib.suppress(OSError):  # SQLite fails at it too, and says how
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            # One thread uses the connection, and BEGIN and COMMIT are written out below.
            connection = sqlite3.connect(
                self._path, timeout=self._wait_s, isolation_level=None, check_same_thread=False
            )
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")  # a commit is on the disk when it returns
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS object"
                    " (id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE NOT NULL, content BLOB NOT NULL)"
                )
            except BaseException:
                connection.close()
                raise
        return connection

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._worker.shutdown(wait=True)
            connection.close()

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        # Views of our own, released at the end: the thread lets go of its work a moment after it is done.
        views = [memoryview(buffer) for buffer in payload]
        nbytes = sum(view.nbytes for view in views)

        def write(connection: sqlite3.Connection) -> ObjectInfo:
            row = connection.execute("SELECT id FROM object WHERE key = ?", (key,)).fetchone()
            if mode.kind == "create" and row is not None:
                raise errors.AlreadyExists("there is an object under this key already", tier=self.url, key=key)
            if mode.kind == "update" and (row is None or str(row[0]) != mode.etag):
                raise errors.PreconditionFailed(f"the etag should be {mode.etag!r}", tier=self.url, key=key)
            sql = "INSERT OR REPLACE INTO object (key, content) VALUES (?, zeroblob(?))"
            number = connection.execute(sql, (key, nbytes)).lastrowid
            assert number is not None
            with connection.blobopen("object", "content", number) as blob:
                for view in views:  # one by one: the payload is never joined
                    blob.write(view)
            return ObjectInfo(key, nbytes, str(number))  # AUTOINCREMENT: no etag ever returns

        try:
            return await self._run(write, key, begin="BEGIN IMMEDIATE")
        finally:
            for view in views:
                view.release()

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        room = None if into is None else into.nbytes

        def read(connection: sqlite3.Connection) -> bytes:
            number, nbytes = self._row(connection, key)
            wanted = ByteRange(0, nbytes) if range is None else range
            if wanted.stop > nbytes:
                raise ValueError(f"{wanted} reaches past the end of {key!r}, which has {nbytes} bytes")
            if room is not None and room < len(wanted):
                raise ValueError(f"into has {room} bytes; {key!r} needs {len(wanted)}")
            with connection.blobopen("object", "content", number, readonly=True) as blob:
                blob.seek(wanted.start)
                return blob.read(len(wanted))

        content = await self._run(read, key)
        if into is None:
            return memoryview(content)
        into[: len(content)] = content
        return into[: len(content)]

    async def stat(self, key: str) -> ObjectInfo:
        def look(connection: sqlite3.Connection) -> ObjectInfo:
            number, nbytes = self._row(connection, key)
            return ObjectInfo(key, nbytes, str(number))

        return await self._run(look, key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        def rows_after(connection: sqlite3.Connection, values: tuple[str, str]) -> Sequence[tuple[str, int, int]]:
            # SQLite compares text as its UTF-8 bytes, which is the order that the contract asks for.
            sql = "SELECT key, length(content), id FROM object WHERE key >= ? AND key > ? ORDER BY key LIMIT ?"
            return connection.execute(sql, (*values, PAGE)).fetchall()

        last = ""
        while True:
            page = await self._run(functools.partial(rows_after, values=(prefix, last)))
            for key, nbytes, number in page:
                if not key.startswith(prefix):
                    return
                yield ObjectInfo(key, nbytes, str(number))
            if len(page) < PAGE:
                return
            last = page[-1][0]

    async def delete(self, keys: Iterable[str]) -> None:
        rows = [(validate_key(key),) for key in keys]

        def remove(connection: sqlite3.Connection) -> None:
            # Returns nothing: a cursor must not leave the connection's thread, not even to be collected.
            connection.executemany("DELETE FROM object WHERE key = ?", rows)

        await self._run(remove, begin="BEGIN IMMEDIATE")

    async def usage(self) -> Usage:
        sql = "SELECT coalesce(sum(length(content)), 0) FROM object"
        (used_bytes,) = await self._run(lambda connection: connection.execute(sql).fetchone())
        return Usage(used_bytes, None)

    def _row(self, connection: sqlite3.Connection, key: str) -> tuple[int, int]:
        row = connection.execute("SELECT id, length(content) FROM object WHERE key = ?", (key,)).fetchone()
        if row is None:
            raise errors.NotFound("there is no object under this key", tier=self.url, key=key)
        return row[0], row[1]

    async def _run(self, work: Callable[[sqlite3.Connection], T], key: str | None = None, *, begin: str = "BEGIN") -> T:
        """``work`` in a transaction on the driver's thread."""
        if key is not None:
            validate_key(key)
        connection = self._connection
        if connection is None:
            raise errors.Closed("the driver is not open", tier=self.url, key=key)
        return await self._end_of(self._worker.submit(self._transact, connection, work, key, begin))

    async def _end_of(self, running: Future[T]) -> T:
        """What the thread's work returns. It is over when this returns, even by cancellation."""
        ended = asyncio.wrap_future(running)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            # The thread may be using the caller's buffers: take the work back, or wait for its end.
            running.cancel()
            while not ended.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([ended])
            raise

    def _transact(
        self, connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], T], key: str | None, begin: str
    ) -> T:
        with self._mapped(key):
            connection.execute(begin)
            try:
                result = work(connection)
                self.commit(connection)
            except BaseException:
                connection.rollback()
                raise
            return result

    def commit(self, connection: sqlite3.Connection) -> None:
        """Publish: before this nobody sees the put, after it everybody does."""
        connection.commit()

    @contextlib.contextmanager
    def _mapped(self, key: str | None) -> Iterator[None]:
        """Foreign exceptions become TierCheck's once, here at the edge."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            raise KINDS.get(code, errors.TierError)(str(error), tier=self.url, key=key) from error
