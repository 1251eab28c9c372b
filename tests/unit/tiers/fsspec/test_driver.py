"""The fsspec driver: its URL, what it refuses, the traps of fsspec it steps around, and what it leaves behind."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import gc
import io
import os
import shutil
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from tiercheck.errors import (
    CapacityExceeded,
    ConfigurationError,
    NotFound,
    TierError,
    Transient,
    Unauthorized,
    Unsupported,
)
from tiercheck.tiers.fsspec import renaming
from tiercheck.tiers.fsspec.backends import opened
from tiercheck.tiers.fsspec.driver import FsspecDriver
from tiercheck.tiers.fsspec.errors import map_foreign_errors, meaning_of
from tiercheck.tiers.fsspec.renaming import Stamps
from tiercheck.tiers.registry import make_driver
from tiercheck.tiers.wrappers import ReadOnlyDriver
from tiercheck.types import ByteRange, PutMode, Survives

MIB = 1 << 20

# File systems of the tests' own.


class StoreFile(AbstractBufferedFile):
    """Publishes at close, as the object stores' files do: also when the garbage collector closes it."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.fs.before_upload(self.path)
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.objects[self.path] = (b"".join(self.parts), next(self.fs.counter))
        return True


class StoreFileSystem(AbstractFileSystem):
    """An object store in a dictionary, with the traps of the real ones."""

    protocol = "teststore"
    objects: dict[str, tuple[bytes, int]] = {}  # noqa: RUF012  (shared, as a server's objects are)
    counter = iter(range(10**9))
    hang: threading.Event | None = None
    hanging = threading.Event()
    """Set once an upload hangs."""
    fail_after: int | None = None

    def __init__(self, *args: Any, flavour: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.flavour = flavour
        self.uploads = 0

    def before_upload(self, path: str) -> None:
        self.uploads += 1
        if type(self).fail_after is not None and self.uploads > type(self).fail_after:
            raise ConnectionResetError(errno.ECONNRESET, "the server hung up")
        if type(self).hang is not None and "probe" not in path:
            type(self).hanging.set()
            type(self).hang.wait(30)

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **kwargs: Any) -> StoreFile:
        if self.flavour == "shows early":
            self.objects[path] = (b"", next(self.counter))
        return StoreFile(self, path, mode, block_size=block_size or 5 * MIB)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if path in self.objects:
            content, etag = self.objects[path]
            if "coarse" in self.flavour:
                # A clock of whole seconds, of which the second begins between the first two puts.
                etag = int(etag > 0) if "moves on" in self.flavour else 0
            return {"name": path, "type": "file", "size": len(content), "etag": f'"{etag}"'}
        if path == "bucket" or any(other.startswith(path + "/") for other in self.objects):
            return {"name": path, "type": "directory", "size": 0}
        raise FileNotFoundError(path)

    def find(self, path: str, *args: Any, detail: bool = False, prefix: str = "", **kwargs: Any) -> Any:
        found = {name: self.info(name) for name in sorted(self.objects) if name.startswith(f"{path}/{prefix}")}
        return found if detail else list(found)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        if path not in self.objects:
            raise FileNotFoundError(path)
        if start == end and start is not None:
            raise ValueError("an empty range")
        return self.objects[path][0] if self.flavour == "ignores ranges" else self.objects[path][0][start:end]

    def rm_file(self, path: str) -> None:
        if self.objects.pop(path, None) is None:
            raise FileNotFoundError(path)


class MovingFileSystem(LocalFileSystem):
    protocol = "testmoving"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """Older releases of fsspec know no protocol but their own, and would take it for a relative path."""
        return super()._strip_protocol(path.removeprefix(f"{cls.protocol}://") if isinstance(path, str) else path)


class CopyingFileSystem(MovingFileSystem):
    """Its ``mv`` is fsspec's default."""

    protocol = "testcopying"
    mv = AbstractFileSystem.mv


@pytest.fixture(autouse=True)
def file_systems() -> Iterator[None]:
    for kind in (StoreFileSystem, MovingFileSystem, CopyingFileSystem):
        fsspec.register_implementation(kind.protocol, kind, clobber=True)
    yield
    StoreFileSystem.objects.clear()
    StoreFileSystem.hang = StoreFileSystem.fail_after = None
    StoreFileSystem.hanging.clear()


def moving(root: Path) -> str:
    """The URL of a tier that publishes by the ``mv`` of a file system that is not known here."""
    return f"fsspec+testmoving://{root}?publish=rename"


# The URL.


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("fsspec+nothing://x", "knows no file system nothing"),
        ("fsspec://x", "say which file system"),
        ("fsspec+sftp://host/x?surives=node", "did you mean 'survives'"),
        ("fsspec+sftp://host/x?publish=perhaps", "either close or rename"),
        ("fsspec+sftp://host/x?part=0", "no size from 1 B"),
        ("fsspec+sftp://host/x?deadline=inf", "no number of seconds"),
        ("fsspec+memory://x?survives=process", "cannot survive"),
        ("fsspec+file:///mnt/x", "write nvme:///path, or lustre:///path if several nodes mount it"),
        ("fsspec+local:///mnt/x?publish=rename", "write nvme:///path"),
        ("fsspec+sftp://host", "names no directory"),
        ("fsspec+http://host/x", "read-only"),
        ("fsspec+ftp://host/x", "say publish=close"),
    ],
)
def test_a_url_that_cannot_be_is_refused(url: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make_driver(url)


def test_options_are_converted_and_secrets_hidden() -> None:
    driver = make_driver(
        "fsspec+sftp://me:hunter1@x/y?fs.auto_mkdir=true&fs.retries=3&fs.hosts=[1,2]&fs.name=plain&fs.password=0123"
        "&fs.connection_string=AccountKey=hunter2&fs.key=hunter3&fs.token=hunter4&fs.none=null&survives=rack&part=1MiB"
    )
    assert isinstance(driver, FsspecDriver)
    assert driver._options == {
        "auto_mkdir": True, "retries": 3, "hosts": [1, 2], "name": "plain", "password": "0123",
        "connection_string": "AccountKey=hunter2", "key": "hunter3", "token": "hunter4", "none": None,
    }  # fmt: skip
    assert "hunter" not in driver.url
    assert "0123" not in driver.url
    assert "fs.auto_mkdir=True" in driver.url
    assert "fs.retries=***" in driver.url  # not known to be public
    assert driver.capabilities.survives is Survives.RACK
    assert driver.capabilities.part_bytes == MIB


@pytest.mark.parametrize(
    ("url", "survives"),
    [
        ("fsspec+memory://x", Survives.NOTHING),
        ("fsspec+sftp://h/x", Survives.NODE),
        ("fsspec+abfs://c/x", Survives.NODE),
    ],
)
def test_what_is_not_said_is_not_promised(url: str, survives: Survives) -> None:
    driver = make_driver(url)
    assert driver.capabilities.survives is survives
    assert not driver.capabilities.conditional_put
    assert driver.facts() == {}


async def test_an_option_that_the_file_system_does_not_take_is_named() -> None:
    class Strict(MemoryFileSystem):
        protocol = "teststrict"

        def __init__(self, *, use_listings_cache: bool) -> None:
            super().__init__()

    fsspec.register_implementation("teststrict", Strict, clobber=True)
    driver = make_driver("fsspec+teststrict://x?publish=close&fs.colour=blue")
    with pytest.raises(ConfigurationError, match="colour"):
        await driver.open()


# Ways to publish.


def store(options: str = "") -> FsspecDriver:
    driver = make_driver(f"fsspec+teststore://bucket/run?publish=close&part=1MiB&{options}".rstrip("&"))
    assert isinstance(driver, FsspecDriver)
    return driver


async def test_a_file_system_of_the_users_own_that_publishes_at_close() -> None:
    async with store() as driver:
        assert driver.facts()["publishes"] == "at close"
        content = os.urandom(5 * MIB + 7)
        info = await driver.put("a/b", [content[:10], content[10:]])
        assert await driver.get("a/b") == content
        assert await driver.get("a/b", range=ByteRange(MIB - 1, 3 * MIB + 1)) == content[MIB - 1 : 3 * MIB + 1]
        assert [found async for found in driver.list("a")] == [info]
        with pytest.raises(Unsupported):
            await driver.put("a/b", [b""], mode=PutMode.CREATE)
        await driver.delete(["a/b"])
    assert StoreFileSystem.objects == {}


async def test_one_that_shows_half_an_object_is_refused() -> None:
    driver = store("fs.flavour=shows early")
    with pytest.raises(Unsupported, match="before its file is closed"):
        await driver.open()


async def test_ranges_that_are_ignored_are_found_out() -> None:
    async with store("fs.flavour=ignores ranges") as driver:
        assert driver.facts()["reads"] != "by ranged requests"
        await driver.put("a", [b"0123456789"])
        if driver.capabilities.ranged_get:
            assert await driver.get("a", range=ByteRange(3, 5)) == b"34"
        else:
            with pytest.raises(Unsupported):
                await driver.get("a", range=ByteRange(3, 5))
        assert await driver.get("a") == b"0123456789"


@pytest.mark.parametrize("flavour", ["coarse etags", "coarse etags, and the clock moves on"])
async def test_large_objects_are_read_whole_where_etags_do_not_tell_puts_apart(
    flavour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else parts of two puts would be returned as one object."""
    monkeypatch.setattr(StoreFileSystem, "counter", iter(range(10**9)))
    async with store(f"fs.flavour={flavour}") as driver:
        assert not driver.capabilities.ranged_get
        assert driver.facts()["reads"] == "only as a whole"
        first, second = b"1" * (3 * MIB), b"2" * (3 * MIB)
        await driver.put("a", [first])
        cat_file = StoreFileSystem.cat_file

        def replaced_meanwhile(fs: StoreFileSystem, path: str, *arguments: Any, **options: Any) -> bytes:
            content = cat_file(fs, path, *arguments, **options)
            fs.objects[path] = (second, fs.objects[path][1])
            return content

        with mock.patch.object(StoreFileSystem, "cat_file", replaced_meanwhile):
            assert bytes(await driver.get("a")) in (first, second)


async def test_a_put_that_broke_is_not_published_by_the_garbage_collector() -> None:
    async with store() as driver:
        await driver.put("a", [b"old"])
        StoreFileSystem.fail_after = 2
        with pytest.raises(Transient, match="hung up"):
            await driver.put("a", [bytes(8 * MIB)])
        StoreFileSystem.fail_after = None
        gc.collect()
        assert await driver.get("a") == b"old"


async def test_a_move_of_the_users_own_publishes(tmp_path: Path) -> None:
    async with make_driver(f"fsspec+testmoving://{tmp_path}/tier?publish=rename&fs.auto_mkdir=true") as driver:
        assert driver.facts()["publishes"] == "by rename"
        await driver.put("a/b", [b"one"])
        await driver.put("a/b", [b"another"])
        assert (tmp_path / "tier/a/b").read_bytes() == b"another"
        assert list((tmp_path / "tier/.tiercheck/tmp").iterdir()) == []


async def test_a_move_that_copies_is_refused(tmp_path: Path) -> None:
    driver = make_driver(f"fsspec+testcopying://{tmp_path}/tier?publish=rename")
    with pytest.raises(Unsupported, match="no mv of its own"):
        await driver.open()


async def test_a_key_that_azure_would_misread_is_refused() -> None:
    driver = make_driver("fsspec+abfs://container/run")
    for call in (driver.put("a?versionid=1", [b"x"]), driver.get("a?versionid=1"), driver.delete(["a?versionid=1"])):
        with pytest.raises(Unsupported, match="versionid"):
            await call


# What is left behind, and what is not.


async def test_debris_of_dead_writers_goes_at_open_once_it_is_old(tmp_path: Path) -> None:
    url = moving(tmp_path)
    async with make_driver(url) as driver:
        await driver.put("a", [b"x"])
    debris = tmp_path / ".tiercheck/tmp/0123"
    debris.write_bytes(b"half")
    async with make_driver(url) as driver:
        assert debris.exists(), "its writer may be alive"
        assert (await driver.usage()).used_bytes == 1
    old_s = time.time() - renaming.DEBRIS_AGE_S - 10
    os.utime(debris, (old_s, old_s))
    async with make_driver(url) as driver:
        assert not debris.exists()
        assert [info.key async for info in driver.list()] == ["a"]


async def test_a_put_that_fails_leaves_no_temporary_file(tmp_path: Path) -> None:
    async with make_driver(moving(tmp_path)) as driver:
        full = OSError(errno.ENOSPC, "No space left on device")
        failing = mock.patch.object(renaming.MovingBackend, "replace", side_effect=full)
        with failing, pytest.raises(CapacityExceeded, match="full"):
            await driver.put("a", [b"x"])
        assert list((tmp_path / ".tiercheck/tmp").iterdir()) == []
        with pytest.raises(NotFound):
            await driver.stat("a")


async def test_a_move_whose_outcome_is_not_known_is_not_told_as_a_full_disk(tmp_path: Path) -> None:
    def moved(backend: renaming.MovingBackend, source: str, path: str) -> None:
        Path(source).replace(path)
        raise TimeoutError("no answer")

    async with make_driver(moving(tmp_path)) as driver:
        with (
            mock.patch.object(renaming.MovingBackend, "replace", moved),
            mock.patch.object(renaming.MovingBackend, "free_bytes", return_value=0),
            pytest.raises(Transient, match="no answer"),
        ):
            await driver.put("a", [b"new"])
        assert bytes(await driver.get("a")) == b"new"


async def test_a_put_that_cannot_be_looked_at_is_not_told_as_refused() -> None:
    async with store() as driver:
        refused = mock.patch.object(StoreFileSystem, "info", side_effect=PermissionError(errno.EACCES, "expired"))
        with refused, pytest.raises(Transient, match="was put, but cannot be looked at"):
            await driver.put("a", [b"new"])
        assert bytes(await driver.get("a")) == b"new"


async def test_a_delete_that_failed_is_not_told_as_done() -> None:
    """fsspec's own ``exists`` says no where the server is down."""
    async with store() as driver:
        await driver.put("a", [b"x"])
        gone = ConnectionError(errno.ECONNREFUSED, "Connection refused")
        with (
            mock.patch.multiple(StoreFileSystem, rm_file=mock.Mock(side_effect=gone), info=mock.Mock(side_effect=gone)),
            pytest.raises(Transient, match="Connection refused"),
        ):
            await driver.delete(["a"])
        assert bytes(await driver.get("a")) == b"x"
        with mock.patch.object(StoreFileSystem, "rm_file", side_effect=OSError(errno.EIO, "no such thing")):
            await driver.delete(["missing"])
            with pytest.raises(Transient, match="no such thing"):
                await driver.delete(["a"])


async def test_a_listing_that_failed_is_not_told_as_empty(tmp_path: Path) -> None:
    async with make_driver(moving(tmp_path)) as driver:
        await driver.put("a/b", [b"x"])
        gone = ConnectionError(errno.ECONNREFUSED, "Connection refused")
        with (
            mock.patch.multiple(
                LocalFileSystem,
                ls=mock.Mock(side_effect=FileNotFoundError("a file went meanwhile")),
                info=mock.Mock(side_effect=gone),
                isdir=AbstractFileSystem.isdir,
            ),
            pytest.raises(Transient, match="Connection refused"),
        ):
            [info async for info in driver.list()]


async def test_files_that_no_key_names_are_left_alone(tmp_path: Path) -> None:
    async with make_driver(moving(tmp_path)) as driver:
        (tmp_path / "back\\slash").write_bytes(b"x")
        (tmp_path / "link").symlink_to("/etc/hostname")
        assert [info.key async for info in driver.list()] == []
        with pytest.raises(ValueError, match="own directory"):
            await driver.put(".tiercheck/tmp/x", [b""])


async def test_a_directory_that_vanished_is_named(tmp_path: Path) -> None:
    async with make_driver(moving(tmp_path / "tier")) as driver:
        shutil.rmtree(tmp_path / "tier")
        with pytest.raises(TierError, match="removed while the tier was open") as caught:
            await driver.put("a", [b"x"])
        assert not isinstance(caught.value, NotFound)


async def test_a_large_put_and_get_take_bounded_memory(tmp_path: Path) -> None:
    part_bytes, nbytes = MIB, 96 * MIB
    async with make_driver(moving(tmp_path) + "&part=1MiB") as driver:
        content, into = bytearray(nbytes), bytearray(nbytes)
        tracemalloc.start()
        await driver.put("a", [memoryview(content)[:5], memoryview(content)[5:]])
        await driver.get("a", into=memoryview(into))
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 6 * part_bytes


async def test_a_large_put_to_a_store_takes_bounded_memory() -> None:
    async with store() as driver:
        content = bytes(48 * MIB)
        tracemalloc.start()
        nowhere = mock.patch.object(StoreFile, "_upload_chunk", lambda self, final=False: True)
        with nowhere, pytest.raises(Transient):  # nothing arrives, so nothing is there
            await driver.put("a", [content])
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 6 * MIB


# A file system that hangs.


async def test_a_put_that_hangs_ends_at_the_deadline_and_is_not_overtaken() -> None:
    driver = store("deadline=0.3")
    driver._protocol = dataclasses.replace(driver._protocol, threads=4)
    async with driver:
        await driver.put("a", [b"old"])
        StoreFileSystem.hang = released = threading.Event()
        buffer = bytearray(b"n" * 4 * MIB)
        start_s = time.monotonic()
        with pytest.raises(Transient, match="no progress"):
            await driver.put("a", [buffer])
        assert time.monotonic() - start_s < 5
        buffer.append(0)  # BufferError, were it in use
        StoreFileSystem.hang = None
        with pytest.raises(Transient, match="hangs in the file system"):
            await driver.put("a", [b"later"])
        assert await driver.get("a") == b"old", "reading goes on"
        await driver.put("b", [b"others too"])
        released.set()
        for _ in range(50):
            try:
                await driver.put("a", [b"later"])
            except Transient:
                continue
            break
        gc.collect()
        assert await driver.get("a") == b"later"


async def test_a_cancelled_put_that_hangs_is_left_alone() -> None:
    async with store("deadline=0.3") as driver:
        await driver.put("a", [b"old"])
        StoreFileSystem.hang = released = threading.Event()
        StoreFileSystem.hanging.clear()
        putting = asyncio.create_task(driver.put("a", [bytes(4 * MIB)]))
        assert await asyncio.to_thread(StoreFileSystem.hanging.wait, 10)
        putting.cancel()
        await asyncio.wait({putting}, timeout=5)
        assert putting.cancelled()
        released.set()
        gc.collect()
        assert await driver.get("a") == b"old"


async def test_calls_that_hang_use_up_the_threads_and_say_so() -> None:
    async with store("deadline=0.2") as driver:
        StoreFileSystem.hang = released = threading.Event()
        with pytest.raises(Transient, match="no progress"):
            await driver.put("a", [bytes(4 * MIB)])
        with pytest.raises(Transient, match="all 1 calls"):
            await driver.get("b")
        released.set()


async def test_closing_does_not_wait_for_ever() -> None:
    driver = store("deadline=0.2")
    await driver.open()
    StoreFileSystem.hang = released = threading.Event()
    putting = asyncio.create_task(driver.put("a", [bytes(4 * MIB)]))
    assert await asyncio.to_thread(StoreFileSystem.hanging.wait, 10)
    start_s = time.monotonic()
    await driver.close()
    assert time.monotonic() - start_s < 5
    released.set()
    with pytest.raises(Transient):
        await putting


# Stamps.


def test_a_stamp_never_repeats_and_stays_near_the_time() -> None:
    stamps = Stamps()
    assert [stamps.next("a", 100, None) for _ in range(3)] == [100, 101, 102]
    assert stamps.next("b", 100, None) == 100, "other paths do not push it on"
    assert stamps.next("a", 200, 102) == 200
    assert stamps.next("a", 200, 500) == 501, "later than what another client has put there"
    for n in range(5000):
        stamps.next(f"k{n}", 1000 + n, None)
    assert len(stamps._last) < 3000, "what lies in the past is forgotten"


# What foreign exceptions mean.


def azure_error(status: int) -> Exception:
    error = type("HttpResponseError", (Exception,), {})("no")
    error.status_code = status  # type: ignore[attr-defined]
    return error


def boto_error(status: int) -> Exception:
    error = type("ClientError", (Exception,), {})("no")
    error.response = {"ResponseMetadata": {"HTTPStatusCode": status}}  # type: ignore[attr-defined]
    return error


def named(name: str, base: type[Exception] = Exception) -> Exception:
    return type(name, (base,), {})("no")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("x"), NotFound),
        (PermissionError("x"), Unauthorized),
        (OSError(errno.ENOSPC, "x"), CapacityExceeded),
        (OSError(errno.EDQUOT, "x"), CapacityExceeded),
        (OSError(errno.EROFS, "x"), Unauthorized),
        (OSError(errno.EIO, "x"), Transient),
        (ConnectionResetError("x"), Transient),
        (TimeoutError(), Transient),
        (NotImplementedError("x"), Unsupported),
        (IsADirectoryError("x"), Unsupported),
        (azure_error(403), Unauthorized),
        (azure_error(404), NotFound),
        (azure_error(412), Transient),
        (azure_error(429), Transient),
        (azure_error(503), Transient),
        (azure_error(507), CapacityExceeded),
        (boto_error(401), Unauthorized),
        (boto_error(500), Transient),
        (named("SFTPConnectionLost"), Transient),
        (named("SFTPQuotaExceeded"), CapacityExceeded),
        (named("MyOwnTimeout", TimeoutError), Transient),
        (named("NobodyKnowsThis"), TierError),
        (ValueError("Can't create any SFTP connections!"), Transient),
        (ValueError("x"), TierError),
        (KeyError("x"), TierError),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else repr(value)[:40],
)
def test_a_foreign_exception_is_mapped(error: Exception, kind: type[TierError]) -> None:
    with pytest.raises(TierError) as caught, map_foreign_errors("tier://x", "k"):
        raise error
    assert type(caught.value) is kind
    assert (caught.value.tier, caught.value.key) == ("tier://x", "k")
    assert caught.value.__cause__ is error


def test_an_exception_that_hides_another_is_seen_through() -> None:
    try:
        try:
            raise azure_error(403)
        except Exception as error:
            raise RuntimeError("Failed to upload block") from error
    except RuntimeError as error:
        meaning = meaning_of(error)
    assert meaning is not None
    assert meaning[0] is Unauthorized


@pytest.mark.parametrize("failing", ["read", "close"])
def test_a_file_whose_server_is_gone_is_closed_once(failing: str) -> None:
    """The garbage collector would close it again, in whatever thread, and may wait there without end."""
    closed = 0

    class Gone(io.RawIOBase):
        _closed = False

        @property
        def closed(self) -> bool:  # type: ignore[override]
            return self._closed

        def readinto(self, buffer: object) -> int:
            raise ConnectionResetError("the server is gone")

        def close(self) -> None:
            nonlocal closed
            if not self._closed:
                closed += 1
                raise ConnectionResetError("the server is gone")

    class FileSystem:
        def open(self, path: str, mode: str) -> Gone:
            return Gone()

    with pytest.raises(ConnectionResetError), opened(FileSystem(), "a", "rb") as file:
        if failing == "read":
            file.read(1)
    del file
    gc.collect()
    assert closed == 1


# Reading what is there.


@pytest.mark.parametrize(("flavour", "ranged"), [("", True), ("ignores ranges", False)])
async def test_a_tier_that_is_opened_to_read_is_left_as_it_is(flavour: str, ranged: bool) -> None:
    content = bytes(range(256)) * 8
    async with store() as writer:
        await writer.put("a/b", [content])
    before = dict(StoreFileSystem.objects)
    async with ReadOnlyDriver(store(f"fs.flavour={flavour}")) as reader:
        assert [info.key async for info in reader.list()] == ["a/b"]
        assert reader.capabilities.ranged_get is ranged
        if ranged:
            assert bytes(await reader.get("a/b", range=ByteRange(5, 9))) == content[5:9]
        assert bytes(await reader.get("a/b")) == content
    assert StoreFileSystem.objects == before


async def test_a_place_with_nothing_in_it_is_read_whole() -> None:
    async with ReadOnlyDriver(store()) as reader:
        assert [info async for info in reader.list()] == []
        assert not reader.capabilities.ranged_get
    assert StoreFileSystem.objects == {}
