"""Where a peer server listens without keys: a socket that no other user reaches."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.tiers.peer.test_driver import CHUNK, serving
from tiercheck.errors import ConfigurationError, Transient, Unauthorized
from tiercheck.tiers.peer import PeerKeys, PeerServer
from tiercheck.tiers.peer.address import parse_at, peer_user
from tiercheck.tiers.peer.server import server
from tiercheck.tiers.registry import make_driver

STRANGER = """
import os, sys, zmq
os.setuid(65534)
socket = zmq.Context().socket(zmq.DEALER)
socket.linger = 0
socket.connect(sys.argv[1])
socket.send(b"let me in")
socket.poll(500)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of this user alone, with a path that is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="tc-") as made:
        yield Path(made)


def test_addresses_are_read() -> None:
    for sound in ("h:1", "10.0.0.2:7070", "[::1]:7", "ipc:///run/x.sock"):
        assert parse_at(sound) == sound
    sockets = ("ipc://", "ipc://x", "ipc://@x", "ipc:///x/", "ipc:///" + "x" * 200)
    for odd in ("", "h", "h:0", "h:99999", "h:" * 9, *sockets):
        with pytest.raises(ValueError, match="no address"):
            parse_at(odd)


def test_the_user_at_the_other_end_is_read() -> None:
    assert peer_user("localhost:1000:100:4711") == 1000
    assert peer_user("a:b:1000:100:4711") == 1000
    for odd in ("", "localhost", "1000:100:4711", "localhost:x:100:4711", "localhost:-1:100:4711", "127.0.0.1"):
        assert peer_user(odd) is None


async def test_objects_go_through_a_socket_without_keys(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PeerKeys.generate(tmp_path / "keys")
    monkeypatch.setenv("TIERCHECK_KEYS", str(tmp_path / "keys"))  # for the network, not for this
    async with serving(bind=f"ipc://{folder}/p.sock") as running:
        assert running.endpoint == f"ipc://{folder}/p.sock"
        driver = make_driver(f"peer://n?at={running.endpoint}&deadline=10")
        assert make_driver(driver.url).url == driver.url
        async with driver:
            await driver.put("a", [bytes(9 * CHUNK)])
            assert await driver.get("a") == bytes(9 * CHUNK)
        assert running.statistics.clients <= 1
    async with serving(bind=f"ipc://{folder}/p.sock"), driver:
        pass  # also where one that was killed has left its socket


@pytest.mark.parametrize("option", ["keys=/k", "server_key=" + "ab" * 32])
def test_a_socket_takes_no_keys(option: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="proves the user by itself"):
        make_driver(f"peer://n?at=ipc:///run/x.sock&{option}")
    with pytest.raises(ConfigurationError, match="proves the user by itself"):
        PeerServer(lambda _: asyncio.sleep(0), bind="ipc:///x.sock", keys=PeerKeys.generate(tmp_path / "k"))  # type: ignore[arg-type]


async def test_a_directory_that_others_can_enter_is_refused(folder: Path) -> None:
    (folder / "open").mkdir()
    (folder / "open").chmod(0o711)
    (folder / "link").symlink_to(folder)
    for name, error in (("open", Unauthorized), ("link", Unauthorized), ("missing", Transient)):
        endpoint = f"ipc://{folder}/{name}/p.sock"
        with pytest.raises(ConfigurationError, match=str(folder / name)):
            PeerServer(lambda _: asyncio.sleep(0), bind=endpoint)  # type: ignore[arg-type]
        with pytest.raises(error, match=str(folder / name)):
            await make_driver(f"peer://n?at={endpoint}").open()


async def test_a_directory_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercheck.tiers.peer.address.os.geteuid", lambda: 4711)
    with pytest.raises(Unauthorized, match="this user's alone"):
        await make_driver(f"peer://n?at=ipc://{folder}/p.sock").open()


async def test_a_connection_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(bind=f"ipc://{folder}/p.sock") as running:
        monkeypatch.setattr(server, "peer_user", lambda _: os.geteuid() + 1)
        with pytest.raises(Unauthorized, match="serves another user"):
            await make_driver(f"peer://n?at={running.endpoint}&deadline=5").open()
        monkeypatch.setattr(server, "peer_user", lambda _: None)
        with pytest.raises(Unauthorized, match="serves another user"):
            await make_driver(f"peer://n?at={running.endpoint}&deadline=5").open()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_another_user_gets_nothing_even_where_the_directory_lets_him_pass(folder: Path) -> None:
    async with serving(bind=f"ipc://{folder}/p.sock") as running:
        folder.chmod(0o755)
        (folder / "p.sock").chmod(0o777)
        stranger = await asyncio.create_subprocess_exec(sys.executable, "-c", STRANGER, running.endpoint)
        until = time.monotonic() + 20
        while "another user" not in running.statistics.dropped:
            assert time.monotonic() < until, "the stranger was let in"
            await asyncio.sleep(0.01)
        stranger.kill()
        await stranger.wait()
        folder.chmod(0o700)
