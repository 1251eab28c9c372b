"""The fsspec driver when real servers die, hang, fill up, or do not let it in."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock
from urllib.parse import quote

import pytest
from azure.storage.blob import BlobServiceClient

from tests.servers.azurite import Azurite
from tests.servers.process import free_port
from tests.servers.sshd import Sshd
from tiercheck.errors import CapacityExceeded, NotFound, TierError, Transient, Unauthorized, Unsupported
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.fsspec import renaming
from tiercheck.tiers.fsspec.backends import Backend
from tiercheck.tiers.fsspec.workers import Ticket
from tiercheck.tiers.registry import make_driver

pytestmark = pytest.mark.cluster

MIB = 1 << 20
WAIT_S_MAX = 30.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sshd]:
    with Sshd(tmp_path) as server:
        yield server


@pytest.fixture
def azure(tmp_path: Path) -> Iterator[Azurite]:
    with Azurite(tmp_path) as server:
        yield server


def sftp(server: Sshd, root: Path, options: str = "") -> TierDriver:
    return make_driver(f"fsspec+sftp://127.0.0.1{quote(str(root))}?{server.client_options}&{options}".rstrip("&"))


def abfs(server: Azurite, container: str, options: str = "") -> TierDriver:
    secret = quote(server.connection_string)
    return make_driver(f"fsspec+abfs://{container}/run?fs.connection_string={secret}&{options}".rstrip("&"))


def make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)


async def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.001)


# SFTP.


async def test_a_large_get_over_sftp_is_of_one_put_though_another_has_its_etag(
    server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that put one key at once may give it the same whole second."""
    path, other = tmp_path / "tier/a", tmp_path / "other"
    first, second = b"1" * (4 * MIB), b"2" * (4 * MIB)
    into = memoryview(bytearray(4 * MIB))
    open_readers: list[object] = []
    opening = threading.Lock()
    reader, check = Backend.reader, Ticket.check

    def replace_once() -> None:
        if path.read_bytes() == first:
            other.write_bytes(second)
            stamp_ns = path.stat().st_mtime_ns
            os.utime(other, ns=(stamp_ns, stamp_ns))
            other.rename(path)

    @contextmanager
    def replaced_before_the_second_opening(backend: Backend, key: str) -> Iterator[Callable[[int, int], bytes]]:
        with contextlib.ExitStack() as closing:
            with opening:
                if open_readers:
                    replace_once()
                fetch = closing.enter_context(reader(backend, key))
                open_readers.append(fetch)
            yield fetch

    def replaced_after_the_first_part(ticket: Ticket) -> None:
        check(ticket)
        if b"1" in bytes(into[::MIB]):
            replace_once()

    async with sftp(server, tmp_path / "tier", "part=1MiB&parts_in_flight=4") as driver:
        info = await driver.put("a", [first])
        monkeypatch.setattr(Backend, "reader", replaced_before_the_second_opening)
        monkeypatch.setattr(Ticket, "check", replaced_after_the_first_part)
        content = bytes(await driver.get("a", into=into))
        assert path.read_bytes() == second
        assert await driver.stat("a") == info
        assert content in (first, second)


async def test_an_sftp_server_killed_in_mid_put(server: Sshd, tmp_path: Path) -> None:
    root = tmp_path / "tier"
    temporaries = root / ".tiercheck/tmp"
    async with sftp(server, root, "part=1MiB&deadline=20") as driver:
        await driver.put("a", [b"old"])
        putting = asyncio.create_task(driver.put("a", [b"n" * (96 * MIB)]))
        await until(lambda: any(path.stat().st_size > 4 * MIB for path in temporaries.iterdir()))
        server.kill()
        with pytest.raises(Transient):
            await putting
        assert (root / "a").read_bytes() == b"old"
        with pytest.raises(Transient):
            await driver.get("a")

        server.start()
        # The same driver finds its way back, and everything is as it was.
        assert await driver.get("a") == b"old"
        assert [info.key async for info in driver.list()] == ["a"]
        await driver.put("a", [b"new"])
        assert (root / "a").read_bytes() == b"new"
        assert (await driver.usage()).used_bytes == 3
    assert len(list(temporaries.iterdir())) == 1, "the dead connection's debris"
    with mock.patch.object(renaming, "DEBRIS_AGE_S", -1):
        async with sftp(server, root):
            assert list(temporaries.iterdir()) == []


async def test_an_sftp_server_killed_at_many_moments(server: Sshd, tmp_path: Path) -> None:
    """Whatever a put had come to: the old object or the new one, whole, and listed once."""
    root = tmp_path / "tier"
    old, new = b"o" * MIB, b"n" * (2 * MIB)
    async with sftp(server, root, "part=256KiB&deadline=20") as driver:
        for moment in range(8):
            await driver.put("d/a", [old])
            putting = asyncio.create_task(driver.put("d/a", [new]))
            await asyncio.sleep(0.004 * moment)
            server.kill()
            result = (await asyncio.gather(putting, return_exceptions=True))[0]
            found = (root / "d/a").read_bytes()
            assert found in (old, new)
            if not isinstance(result, BaseException):
                assert found == new, "a put that returned did publish"
            else:
                assert isinstance(result, Transient)
            server.start()
            assert await driver.get("d/a") == found
            assert [info.key async for info in driver.list()] == ["d/a"]


async def test_an_sftp_server_that_hangs(server: Sshd, tmp_path: Path) -> None:
    async with sftp(server, tmp_path / "tier", "deadline=1&part=256KiB") as driver:
        await driver.put("a", [b"old"])
        server.signal(signal.SIGSTOP)
        try:
            start_s = time.monotonic()
            for call in (driver.get("a"), driver.put("a", [bytes(4 * MIB)]), driver.stat("a")):
                with pytest.raises(Transient):
                    await call
            assert time.monotonic() - start_s < 20
        finally:
            server.signal(signal.SIGCONT)

        async def settled() -> bytes:
            while True:
                try:
                    await driver.put("a", [b"newest"])
                    return bytes(await driver.get("a"))
                except Transient:
                    continue

        assert await asyncio.wait_for(settled(), WAIT_S_MAX) == b"newest"


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tiercheck", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_a_full_disk_behind_sftp(server: Sshd, tmp_path: Path) -> None:
    """The protocol's word for it is no more than "failure"."""
    with small_disk(tmp_path / "disk", 8 * MIB) as disk:
        async with sftp(server, disk / "tier", "part=1MiB") as driver:
            usage = await driver.usage()
            assert usage.limit_bytes is not None
            assert usage.limit_bytes <= 8 * MIB
            await driver.put("a", [b"o" * MIB])
            with pytest.raises(CapacityExceeded, match="full"):
                await driver.put("a", [b"n" * (12 * MIB)])
            assert await driver.get("a") == b"o" * MIB
            assert list((disk / "tier/.tiercheck/tmp").iterdir()) == []
            await driver.put("b", [b"n" * (4 * MIB)])


async def test_who_is_not_let_in_by_sshd(server: Sshd, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    make_key(stranger)
    options = server.client_options
    wrong_key = options.replace(f"{server.folder}/user_key", str(stranger))
    unknown_host = options.replace(f"{server.folder}/known_hosts", "/dev/null")
    nobody_there = options.replace(f"fs.port={server.port}", f"fs.port={free_port()}")
    for wrong, error in ((wrong_key, Unauthorized), (unknown_host, Unauthorized), (nobody_there, Transient)):
        driver = make_driver(f"fsspec+sftp://127.0.0.1{tmp_path}/tier?{wrong}&fs.agent_path=null&deadline=10")
        with pytest.raises(error) as caught:
            await driver.open()
        assert caught.value.tier == driver.url
    assert not (tmp_path / "tier").exists()


async def test_an_sftp_server_that_lets_nobody_write(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    with Sshd(tmp_path, sftp_options="-R") as server, pytest.raises(Unauthorized):
        await sftp(server, tmp_path / "tier").open()


async def test_an_sftp_server_without_atomic_rename_is_refused(tmp_path: Path) -> None:
    with Sshd(tmp_path, sftp_options="-P posix-rename") as server:
        with pytest.raises(Unsupported, match="atomically"):
            await sftp(server, tmp_path / "tier").open()
        assert not list((tmp_path / "tier").glob(".tiercheck/probe-*"))


async def test_what_sftp_turned_out_to_be(server: Sshd, tmp_path: Path) -> None:
    """Said as SFTP URLs are: the user and the port beside the host."""
    keys = f"fs.client_keys={tmp_path}/user_key&fs.known_hosts={tmp_path}/known_hosts&fs.config=null"
    where = f"{getpass.getuser()}@127.0.0.1:{server.port}{tmp_path}/tier"
    async with make_driver(f"fsspec+sftp://{where}?{keys}") as driver:
        await driver.put("a", [b"x"])
        assert (tmp_path / "tier/a").read_bytes() == b"x"
        facts = driver.facts()
        assert facts["reads"] == "by seeking in one open file, which stays as it was opened"
        assert facts["publishes"] == "by rename"
        assert facts["fsync"] == "yes"
        assert driver.capabilities.ranged_get


# Azure Blob Storage.


async def test_an_object_store_killed_in_mid_put(azure: Azurite, tmp_path: Path) -> None:
    container = f"c{secrets.token_hex(6)}"
    BlobServiceClient.from_connection_string(azure.connection_string).create_container(container)
    async with abfs(azure, container, "part=1MiB&deadline=3") as driver:
        await driver.put("a", [b"old"])
        written = tmp_path / "data"

        def written_bytes() -> int:
            return sum(path.stat().st_size for path in written.rglob("*") if path.is_file())

        # The emulator writes down what it knows only every few seconds; what it has not, its death undoes.
        await until(lambda: b'"run/a"' in (written / "__azurite_db_blob__.json").read_bytes())
        before_bytes = written_bytes()
        putting = asyncio.create_task(driver.put("a", [b"n" * (192 * MIB)]))
        await until(lambda: written_bytes() > before_bytes + 4 * MIB)
        azure.kill()
        with pytest.raises(Transient):
            await putting
        with pytest.raises(Transient):
            await driver.get("a")
        azure.start()
    # Another client, as after a restart: the client library goes on trying in the old one's threads for a minute.
    async with abfs(azure, container, "deadline=20") as driver:
        assert await driver.get("a") == b"old"
        assert [info.key async for info in driver.list()] == ["a"]
        await driver.put("b", [b"new"])
        assert await driver.get("b") == b"new"


async def test_who_is_not_let_in_by_an_object_store(azurite: Azurite) -> None:
    with pytest.raises(TierError, match="No such container"):
        await abfs(azurite, "missing").open()
    container = f"c{secrets.token_hex(6)}"
    BlobServiceClient.from_connection_string(azurite.connection_string).create_container(container)
    wrong = azurite.connection_string.replace("Eby8", "Eby9")
    driver = make_driver(f"fsspec+abfs://{container}/run?fs.connection_string={quote(wrong)}")
    assert "Eby9" not in driver.url
    with pytest.raises(Unauthorized) as caught:
        await driver.open()
    assert "Eby9" not in str(caught.value)


async def test_a_container_that_is_removed_is_no_empty_tier(azurite: Azurite) -> None:
    container = f"c{secrets.token_hex(6)}"
    service = BlobServiceClient.from_connection_string(azurite.connection_string)
    service.create_container(container)
    async with abfs(azurite, container) as driver:
        await driver.put("a", [b"x"])
        service.delete_container(container)
        with pytest.raises(NotFound):
            await driver.get("a")
        with pytest.raises(TierError):
            assert [info.key async for info in driver.list()] == []
        for nbytes in (1, 20 * MIB):
            with pytest.raises(TierError, match="removed while the tier was open") as caught:
                await driver.put("a", [bytes(nbytes)])
            assert not isinstance(caught.value, NotFound)
    with pytest.raises(TierError):
        await abfs(azurite, container).open_to_read()


async def test_what_an_object_store_turned_out_to_be(azurite: Azurite) -> None:
    container = f"c{secrets.token_hex(6)}"
    BlobServiceClient.from_connection_string(azurite.connection_string).create_container(container)
    async with abfs(azurite, container) as driver:
        facts = driver.facts()
        assert facts["reads"] == "by ranged requests"
        assert facts["publishes"] == "at close"
        assert facts["etags"].startswith("of etag")
