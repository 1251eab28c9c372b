"""A driver with no atomicity at all: it writes in place, and looks before it writes, without a lock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from tiercheck import errors
from tiercheck.keys import validate_key
from tiercheck.tiers.driver import TierDriver
from tiercheck.types import ByteRange, Capabilities, ObjectInfo, Payload, PutMode, Survives, Usage


class NaiveDriver(TierDriver):
    """Awaits nothing between a look and a write, so that clients on one event loop never come in between."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open = False

    @property
    def url(self) -> str:
        return f"naive://{self.root}"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(survives=Survives.PROCESS, conditional_put=True)

    async def open(self) -> None:
        if self._open:
            raise RuntimeError(f"{self.url} is open already")
        self.root.mkdir(parents=True, exist_ok=True)
        self._open = True

    async def close(self) -> None:
        self._open = False

    def path(self, key: str) -> Path:
        if not self._open:
            raise errors.Closed("the driver is not open", tier=self.url, key=key)
        return self.root / validate_key(key)

    def info(self, key: str) -> ObjectInfo:
        path = self.path(key)
        if not path.is_file():
            raise errors.NotFound("there is no object under this key", tier=self.url, key=key)
        status = path.stat()
        return ObjectInfo(key, status.st_size, f"{status.st_mtime_ns}-{status.st_ino}")

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        path = self.path(key)
        if mode.kind == "create" and path.exists():
            raise errors.AlreadyExists("there is an object under this key already", tier=self.url, key=key)
        if mode.kind == "update" and (not path.exists() or self.info(key).etag != mode.etag):
            raise errors.PreconditionFailed(f"the etag should be {mode.etag!r}", tier=self.url, key=key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for buffer in payload:
                file.write(buffer)
        return self.info(key)

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        self.info(key)
        content = self.path(key).read_bytes()
        wanted = ByteRange(0, len(content)) if range is None else range
        if wanted.stop > len(content):
            raise ValueError(f"{wanted} reaches past the end of {key!r}")
        content = content[wanted.start : wanted.stop]
        if into is None:
            return memoryview(content)
        if into.nbytes < len(content):
            raise ValueError(f"into has {into.nbytes} bytes; {key!r} needs {len(content)}")
        into[: len(content)] = content
        return into[: len(content)]

    async def stat(self, key: str) -> ObjectInfo:
        return self.info(key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        self.path("any")
        keys = [str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()]
        for key in sorted(keys, key=str.encode):
            if key.startswith(prefix):
                yield self.info(key)

    async def delete(self, keys: Iterable[str]) -> None:
        for path in [self.path(key) for key in keys]:
            if path.is_file():
                path.unlink()

    async def usage(self) -> Usage:
        self.path("any")
        return Usage(sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file()), None)
