"""How much memory a large put takes, in a process of its own; the payload itself is one small buffer, repeated.

What is counted is the growth of the process's own memory over what it had with the driver open, sampled from outside
through ``smaps``. Its own is all that is no file: private pages, and shared ones without a name (bounce buffers made
by mmap are such). Pages of files that are mapped are the tier, or the page cache, and are not counted.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote

from benchmarks.ceilings.child import Child
from benchmarks.figures import Figure, Measured, Settings, Unavailable
from benchmarks.machine import cpu_text
from benchmarks.pairs import Summary
from benchmarks.stores import running_seaweed
from benchmarks.tiers.peer import peer_url
from tiercheck.tiers.registry import make_driver
from tiercheck.tiers.shm.driver import remove_namespace
from tiercheck.types import bytes_text

__all__ = ["FIGURES", "budget_bytes"]

OVERHEAD_BYTES = 32 << 20
"""Beside the parts in flight: threads' stacks, a client library's state, the allocator's slack."""
PUT_S_MAX = 600.0
SAMPLE_S = 0.002
SAMPLE_REST = 4.0
"""Between two samples, as a multiple of what one takes."""
SPARE_BYTES = 1 << 30

Place = Callable[[Settings, int], AbstractAsyncContextManager[tuple[str, int | None]]]
"""Where the put goes: its URL, and the process id of the server, where that is watched and not the client."""


def budget_bytes(url: str) -> int:
    """What a put may take at most: each part in flight once, and the overhead."""
    capabilities = make_driver(url).capabilities
    return capabilities.part_bytes * capabilities.parts_in_flight + OVERHEAD_BYTES


@asynccontextmanager
async def shm(settings: Settings, nbytes: int) -> AsyncIterator[tuple[str, int | None]]:
    name = f"benchmark-{secrets.token_hex(6)}"
    try:
        yield f"shm://{name}?size={nbytes + (64 << 20)}", None
    finally:
        remove_namespace(name)


@asynccontextmanager
async def peer(settings: Settings, nbytes: int, *, server: bool) -> AsyncIterator[tuple[str, int | None]]:
    async with peer_url(nbytes + (64 << 20)) as (url, child):
        yield url, child.pid if server else None


@asynccontextmanager
async def s3(settings: Settings, nbytes: int) -> AsyncIterator[tuple[str, int | None]]:
    async with running_seaweed() as server:
        yield server.url(server.new_bucket()), None


@asynccontextmanager
async def files(settings: Settings, nbytes: int, *, scheme: str) -> AsyncIterator[tuple[str, int | None]]:
    root = settings.directory / f"peak-{secrets.token_hex(4)}"
    try:
        yield f"{scheme}://{quote(str(root))}", None
    finally:
        shutil.rmtree(root, ignore_errors=True)


async def measure(settings: Settings, *, place: Place, in_memory: bool) -> Measured:
    nbytes = fitting_bytes(settings, in_memory)
    async with place(settings, nbytes) as (url, server_pid):
        budget = budget_bytes(url)
        child = Child("benchmarks.one_put", url, str(nbytes))
        await asyncio.to_thread(child.start)
        try:
            growth = await asyncio.to_thread(watch_put, child, server_pid or child.pid)
        finally:
            await asyncio.to_thread(child.stop)
    ratio = growth / budget
    summary = Summary(growth, budget, ratio, (ratio, ratio), 1)
    wanted = settings.peak_bytes
    note = {} if nbytes == wanted else {"note": f"{bytes_text(wanted)} do not fit here; {bytes_text(nbytes)} were put"}
    return Measured(summary, "bytes", cpu_text(), nbytes, note)


def fitting_bytes(settings: Settings, in_memory: bool) -> int:
    """The size asked for, or less where there is no room. Errors: ``Unavailable`` for less than a sixteenth."""
    where = Path("/dev/shm") if in_memory else settings.directory
    status = os.statvfs(where)
    room = status.f_bavail * status.f_frsize - SPARE_BYTES
    if in_memory:
        room = min(room, available_bytes() - SPARE_BYTES)
    nbytes = settings.peak_bytes
    while nbytes > room:
        nbytes //= 2
    if nbytes < settings.peak_bytes // 16:
        raise Unavailable(f"{where} has no room for an object of {bytes_text(settings.peak_bytes)}")
    return nbytes


def available_bytes() -> int:
    return 1024 * field_of(Path("/proc/meminfo"), "MemAvailable")


def field_of(path: Path, name: str) -> int:
    """The number behind ``name:`` in a file of /proc."""
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise RuntimeError(f"{path} has no {name}")


def watch_put(child: Child, pid: int) -> int:
    """Let the child put; by how many bytes the own memory of ``pid`` grew at most."""
    before = highest = own_bytes(pid)
    child.tell("put")
    until = time.monotonic() + PUT_S_MAX
    pause_s = SAMPLE_S
    while not child.has_said_something(pause_s):
        begun = time.monotonic()
        highest = max(highest, own_bytes(pid))
        # The process cannot map memory while it is looked at: a large mapping takes long, and must not be in the way.
        pause_s = max(SAMPLE_S, SAMPLE_REST * (time.monotonic() - begun))
        if begun > until:
            raise RuntimeError(f"the put has not ended in {PUT_S_MAX:.0f} s")
    answer = child.read_line(PUT_S_MAX)
    if answer != "stored":
        raise RuntimeError(f"the put failed: {answer}")
    return max(highest, own_bytes(pid)) - before  # what is kept may have come after the last look


def own_bytes(pid: int) -> int:
    """Resident bytes of the process that belong to no file."""
    total = 0
    is_file = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *fields = line.split()
        if not name.endswith(":"):  # the head of a mapping: range, rights, offset, device, inode, path
            path = " ".join(fields[4:])
            is_file = path.startswith("/") and not path.startswith(("/dev/zero", "/memfd:"))
        elif name == ("Anonymous:" if is_file else "Rss:"):
            total += 1024 * int(fields[0])
    return total


def figure(name: str, place: Place, *, in_memory: bool = False) -> Figure[Settings]:
    meaning = "memory that one large put adds to the process, against parts in flight + 32 MiB"
    return Figure(f"{name}.peak_bytes", meaning, partial(measure, place=place, in_memory=in_memory), 1, at_most=True)


FIGURES = (
    figure("shm", shm, in_memory=True),
    figure("peer", partial(peer, server=False), in_memory=True),
    figure("peer_server", partial(peer, server=True), in_memory=True),
    figure("nvme", partial(files, scheme="nvme")),
    figure("lustre", partial(files, scheme="lustre")),
    figure("s3", s3),
)
