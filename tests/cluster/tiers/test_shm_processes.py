"""Several processes in one namespace: killed while they make memory ready, side by side, and reading."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tiercheck.errors import CapacityExceeded, FileSystemFull
from tiercheck.tiers.shm.driver import ShmDriver, namespaces

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[3]
VICTIM = [sys.executable, "-m", "tests.cluster.tiers.shm_victim"]
MIB = 1 << 20


def test_killed_before_every_call_while_memory_is_made_ready(name: str) -> None:
    command = [*VICTIM, "points", f"shm://{name}?size=16MiB"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20, "the process makes more calls than this: were they not seen?"


def test_ranks_side_by_side(name: str) -> None:
    """Each has memory of its own ready, and gets it back although all of it goes through one pool."""
    ranks = [
        subprocess.Popen(
            [*VICTIM, "rank", f"shm://{name}?size=64MiB", str(number)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        ready = []
        for rank in ranks:
            assert rank.stdout is not None
            ready.append(set(json.loads(rank.stdout.readline())))
        assert [len(inodes) for inodes in ready] == [3, 3]
        assert ready[0].isdisjoint(ready[1])
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
        for rank in ranks:
            out, _ = rank.communicate(timeout=60)
            assert rank.returncode == 0
            assert json.loads(out) >= 2
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert next(found for found in namespaces() if found.name == name).used_bytes < 16 * MIB


async def run(*command: object) -> tuple[int, str]:
    """The exit status and the messages of a command."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command), cwd=ROOT, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        _, messages = await process.communicate()
    return process.returncode or 0, messages.decode()


async def test_a_reader_in_another_process_cannot_write(name: str) -> None:
    async with ShmDriver(name, size=16 * MIB) as driver:
        reservation = await driver.reserve("sealed", MIB)
        reservation.buffer[:] = b"s" * MIB
        await reservation.publish()
        status, messages = await run(*VICTIM, "reader", f"shm://{name}?size=16MiB", "sealed")
        assert status == 0, messages
        assert bytes(await driver.get("sealed")) == b"s" * MIB


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[Path]:
    """A tmpfs of 24 MiB."""
    status, messages = await run("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", tmp_path)
    if status:
        pytest.skip(f"cannot mount a tmpfs: {messages.strip()}")
    try:
        yield tmp_path
    finally:
        assert await run("umount", "-l", tmp_path) == (0, "")


async def test_memory_that_another_process_fills_is_an_error_and_no_sigbus(small: Path) -> None:
    """The real thing: a small tmpfs, and a writer beside us that takes what is left of it."""
    async with ShmDriver("full", size=20 * MIB, mount=small) as driver:
        await driver.prepare_reservations([(4 * MIB, 2)])
        held = await driver.reserve("a", 4 * MIB)
        await run("dd", "if=/dev/zero", f"of={small}/others", "bs=1M")
        held.buffer[:] = b"x" * (4 * MIB)  # is ours, whatever others do
        second = await driver.reserve("b", 4 * MIB)
        second.buffer[:] = b"y" * (4 * MIB)
        with pytest.raises(CapacityExceeded, match="somebody else fills it"):
            await driver.reserve("c", MIB)
        with pytest.raises(CapacityExceeded, match="somebody else fills it"):
            await driver.prepare_reservations([(MIB, 2)])
        await held.publish()
        await second.publish(3 * MIB)
        assert bytes(await driver.get("a")) == b"x" * (4 * MIB)
        assert bytes(await driver.get("b")) == b"y" * (3 * MIB)
        await driver.put("c", [b"z" * (MIB // 2)])  # in what the second one has left


@pytest.mark.parametrize("size", [None, 20 * MIB])
async def test_what_others_held_when_the_tier_was_opened_can_be_had_when_they_have_freed_it(
    small: Path, size: int | None
) -> None:
    async with ShmDriver("full", size=size, mount=small) as driver:
        await driver.put("a", [bytes(MIB)])
    others = small / "others"
    others.write_bytes(bytes(18 * MIB))
    async with ShmDriver("full", size=size, mount=small) as driver:
        with pytest.raises(FileSystemFull, match=r"others hold \d+ of the shared memory.*remount"):
            await driver.put("b", [bytes(10 * MIB)])
        others.write_bytes(bytes(8 * MIB))
        await driver.put("b", [bytes(10 * MIB)])
        others.unlink()
        if size is None:
            await driver.put("c", [bytes(11 * MIB)])
        else:
            with pytest.raises(CapacityExceeded, match="of 20971520 are in use; give the tier a larger size="):
                await driver.put("c", [bytes(11 * MIB)])
