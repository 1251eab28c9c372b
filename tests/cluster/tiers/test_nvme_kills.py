"""``kill -9`` before every system call of a direct write: the object is the old one or the new one, whole.

Run as a module, with a URL, it is the one who kills: it forks a writer again and again and lets it die before its
first, second, third... call, until one lives. After each death the tier is opened anew and checked.
"""

import asyncio
import functools
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.dying import lives_through
from tiercheck.tiers.posix import transfer
from tiercheck.tiers.registry import make_driver

ROOT = Path(__file__).parents[3]
NBYTES = (1 << 20) + 12_345
BLOCK = 256 << 10


def content(seed: int) -> bytes:
    return bytes([seed]) * NBYTES


async def write_round(url: str, seed: int, arm: Callable[[], None] = lambda: None) -> None:
    """One object from aligned memory, and one from memory that is not."""
    memory = mmap.mmap(-1, NBYTES + 1)
    memory[1:] = content(seed)
    async with make_driver(url) as driver:
        arm()
        await driver.put("v/unaligned", [memoryview(memory)[1:]])
        memory[:NBYTES] = content(seed)
        await driver.put("v/aligned", [memoryview(memory)[:NBYTES]])


def die_before_call(number: int) -> None:
    """SIGKILL to this process before its ``number``-th call of note, in whichever thread."""
    left, guard = [number], threading.Lock()

    def watch(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: object, **options: object) -> object:
            with guard:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        setattr(owner, name, call)

    for owner, names in (
        (os, ("pwritev", "writev", "fsync", "utime", "open", "close", "rename", "unlink", "mkdir")),
        (transfer, ("preallocate", "reopen_direct")),
    ):
        for name in names:
            watch(owner, name)


async def check(url: str, seeds: tuple[int, ...]) -> None:
    async with make_driver(url) as driver:
        assert driver.facts()["io"] == "direct 256 KiB x 3"
        infos = [info async for info in driver.list()]
        assert [info.key for info in infos] == ["v/aligned", "v/unaligned"]
        into = memoryview(mmap.mmap(-1, NBYTES))
        for info in infos:
            found = bytes(await driver.get(info.key, into=into))
            assert found in [content(seed) for seed in seeds], f"{info.key} is neither old nor new"
            assert found == bytes(await driver.get(info.key))
        assert (await driver.usage()).used_bytes == 2 * NBYTES, "what the dead left is gone"


def kill_before_every_call(url: str) -> int:
    asyncio.run(write_round(url, 1))
    number = 0
    while True:
        if lives_through(functools.partial(write_round, url, 2, functools.partial(die_before_call, number))):
            asyncio.run(check(url, (2,)))
            return number
        asyncio.run(check(url, (1, 2)))
        asyncio.run(write_round(url, 1))
        number += 1


@pytest.mark.cluster
def test_killed_before_every_call_of_a_direct_write(tmp_path: Path) -> None:
    url = f"nvme://{tmp_path}/tier?io=direct&block=256KiB&depth=3"
    try:
        asyncio.run(write_round(url, 1))
    except Exception as error:
        pytest.skip(f"the temporary directory takes no direct writes: {error}")
    command = [sys.executable, "-m", "tests.cluster.tiers.test_nvme_kills", url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 2 * (NBYTES // BLOCK) + 10, "each block is a call: were they not seen?"


if __name__ == "__main__":
    print(kill_before_every_call(sys.argv[1]))
