"""Two clients on two mounts of a GlusterFS: what one does the other sees, and what becomes of a put when the server,
the cable or the writer goes in the middle of it."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.servers.gluster import Gluster
from tiercheck.errors import NotFound, Transient
from tiercheck.tiers.posix.lustre import LustreDriver
from tiercheck.types import PutMode

pytestmark = pytest.mark.cluster

MIB = 1 << 20
ROOT = Path(__file__).parents[3]
VICTIM = [sys.executable, "-m", "tests.cluster.tiers.tier_victim"]


@pytest.fixture
def name(gluster: Gluster) -> Iterator[str]:
    name = f"run-{secrets.token_hex(4)}"
    yield name
    shutil.rmtree(gluster.mounts[0] / name)


@pytest.fixture
def clients(gluster: Gluster, name: str) -> tuple[LustreDriver, LustreDriver]:
    first, second = gluster.mounts
    return LustreDriver(first / name), LustreDriver(second / name)


def on_the_server(gluster: Gluster, name: str) -> dict[str, bytes]:
    """Everything that lies there, but for TierCheck's own directory."""
    root = gluster.brick / name
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and ".tiercheck" not in path.relative_to(root).parts
    }


async def test_facts(clients: tuple[LustreDriver, LustreDriver]) -> None:
    async with clients[0] as driver:
        facts = driver.facts()
        assert facts["file system"] == "fuse.glusterfs"
        assert facts["locks"] == "flock"
        assert facts["names"].startswith("remembered")
        assert driver.capabilities.conditional_put


async def test_what_one_does_the_other_sees_in_its_next_call(clients: tuple[LustreDriver, LustreDriver]) -> None:
    """Contents and sizes change, names go and come back, and so do directories; both have looked just before."""
    chance = random.Random(5)
    expected: dict[str, tuple[bytes, str]] = {}
    keys = ["v/a", "v/b", "v/w/c", "x/d"]
    async with clients[0], clients[1]:
        for step in range(120):
            writer, reader = chance.sample(clients, 2)
            key = chance.choice(keys)
            if chance.random() < 0.3:
                await writer.delete([key])
                expected.pop(key, None)
            else:
                content = b"%d" % step * chance.choice([1, 7, 40_000])
                expected[key] = (content, (await writer.put(key, [content])).etag)
            found = {info.key: info.etag async for info in reader.list()}
            assert found == {key: etag for key, (_, etag) in expected.items()}
            for key in keys:
                if key in expected:
                    assert (await reader.stat(key)).etag == expected[key][1]
                    assert bytes(await reader.get(key)) == expected[key][0]
                else:
                    with pytest.raises(NotFound):
                        await reader.get(key)


async def test_in_a_large_directory_too(
    clients: tuple[LustreDriver, LustreDriver],
    gluster: Gluster,
    name: str,
) -> None:
    """A mount may fetch the attributes of the first entries of a listing only."""
    async with clients[0] as first, clients[1] as second:
        await first.put("v/first", [b"x"])
        for number in range(1200):
            (gluster.mounts[0] / name / "v" / f"filler-{number:04d}").touch()
        last = list(os.scandir(gluster.mounts[1] / name / "v"))[-1].name
        for number in range(5):
            info = await first.put(f"v/{last}", [b"%d" % number])
            assert await second.stat(f"v/{last}") == info
            assert bytes(await second.get(f"v/{last}")) == b"%d" % number


@pytest.mark.parametrize("disaster", ["cable", "server"])
async def test_a_put_that_is_cut_off(
    clients: tuple[LustreDriver, LustreDriver],
    gluster: Gluster,
    name: str,
    disaster: str,
) -> None:
    """It fails as transient, shows nothing, and works once the file system is back."""
    strike, mend = (gluster.cut, gluster.heal) if disaster == "cable" else (gluster.kill, gluster.restart)
    pwritev, calls = os.pwritev, [0]

    def strike_at_third(fd: int, parts: list[memoryview], offset: int) -> int:
        calls[0] += 1
        if calls[0] == 3:
            strike()
        return pwritev(fd, parts, offset)

    old, new = b"o" * (2 * MIB), b"n" * (40 * MIB)
    first, second = clients
    async with first, second:
        await first.put("v/a", [old])
        before = on_the_server(gluster, name)
        try:
            with mock.patch.object(os, "pwritev", strike_at_third), pytest.raises(Transient) as caught:
                await first.put("v/a", [new])
            assert caught.value.key == "v/a"
            for call in (lambda: first.stat("v/a"), lambda: second.get("v/a"), lambda: second.put("v/b", [b"x"])):
                with pytest.raises(Transient):
                    await call()
            assert on_the_server(gluster, name) == before
        finally:
            mend()
        for client in clients:
            assert bytes(await client.get("v/a")) == old
            assert [info.key async for info in client.list()] == ["v/a"]
        await first.put("v/a", [new])
        assert bytes(await second.get("v/a")) == new
        await second.put("v/b", [b"x"], mode=PutMode.CREATE)
        left = list((gluster.brick / name / ".tiercheck" / "tmp").iterdir())
        assert left == [], "what could not be removed then went with the next put"


@pytest.mark.parametrize("step", ["fsync", "rename", "utime"])
async def test_the_cable_is_cut_just_before_a_step(
    clients: tuple[LustreDriver, LustreDriver],
    gluster: Gluster,
    name: str,
    step: str,
) -> None:
    """Before the file has its name the old object stays; afterwards it is the new one, whole."""
    real: Callable[..., object] = getattr(os, step)
    struck = [False]

    def strike(*arguments: object, **options: object) -> object:
        if not struck[0]:
            struck[0] = True
            gluster.cut()
        return real(*arguments, **options)

    first, second = clients
    async with first, second:
        await first.put("a", [b"old"])
        try:
            with mock.patch.object(os, step, strike), pytest.raises(Transient):
                await first.put("a", [b"new" * MIB])
        finally:
            gluster.heal()
        assert on_the_server(gluster, name) == {"a": b"old"}
        assert bytes(await second.get("a")) == b"old"
        await first.put("a", [b"newer"])
        assert bytes(await second.get("a")) == b"newer"


def test_a_writer_killed_before_every_call(gluster: Gluster, name: str) -> None:
    url = f"lustre://{gluster.mounts[0] / name}"
    done = subprocess.run([*VICTIM, "points", url], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50, "the writer makes more calls than this: were they not seen?"
