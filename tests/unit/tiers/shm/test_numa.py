"""Which NUMA node, which pages: what the system says is read right, and what was decided takes effect."""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiercheck.errors import CapacityExceeded, ConfigurationError
from tiercheck.tiers.posix.mounts import mount_of
from tiercheck.tiers.registry import make_driver
from tiercheck.tiers.shm import numa
from tiercheck.tiers.shm.driver import ShmDriver
from tiercheck.tiers.shm.hugepages import back_with_huge_pages, huge_pages_of, pages_text

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes of four CPUs and one of memory alone; a GPU on each of the first two, and one that does not say."""
    nodes, devices = tmp_path / "node", tmp_path / "devices"
    for node, cpus in ((0, "0-1,4-5\n"), (1, "2-3,6-7\n"), (2, "\n")):
        (nodes / f"node{node}").mkdir(parents=True)
        (nodes / f"node{node}" / "cpulist").write_text(cpus)
    (nodes / "has_memory").write_text("0-2\n")
    for bus_id, node in (("0000:01:00.0", "0"), ("0000:81:00.0", "1"), ("0000:c1:00.0", "-1")):
        (devices / bus_id).mkdir(parents=True)
        (devices / bus_id / "numa_node").write_text(f"{node}\n")
    monkeypatch.setattr(numa, "NODES", nodes)
    monkeypatch.setattr(numa, "DEVICES", devices)
    return nodes


def test_nodes_are_read(machine: Path) -> None:
    assert numa.numa_nodes() == {0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}, 2: frozenset()}
    (machine / "has_memory").write_text("0\n")
    assert numa.numa_nodes() == {0: {0, 1, 4, 5}}
    (machine / "has_memory").write_text("what?\n")
    assert numa.numa_nodes() == {}
    (machine / "has_memory").unlink()
    assert numa.numa_nodes() == {}


def test_this_machines_nodes_are_read() -> None:
    nodes = numa.numa_nodes()
    if nodes:
        assert frozenset(os.sched_getaffinity(0)) & frozenset().union(*nodes.values())


@pytest.mark.parametrize(
    ("cpus", "node"), [({0}, 0), ({0, 5}, 0), ({3, 7}, 1), ({1, 2}, None), (set(range(8)), None), ({99}, None)]
)
def test_the_node_of_the_cpus(machine: Path, cpus: set[int], node: int | None) -> None:
    assert numa.node_of_cpus(frozenset(cpus), numa.numa_nodes()) == node
    assert numa.node_of_cpus(frozenset(cpus), {0: frozenset(range(8))}) is None, "with one node nothing is decided"


@pytest.mark.parametrize(
    ("bus_id", "node"),
    [("0000:01:00.0", 0), ("0000:81:00.0", 1), ("0000:c1:00.0", None), ("0000:ff:00.0", None), (None, None)],
)
def test_the_node_of_the_device(machine: Path, bus_id: str | None, node: int | None) -> None:
    assert numa.node_of_device(bus_id, numa.numa_nodes()) == node
    assert numa.node_of_device(bus_id, {0: frozenset(range(8))}) is None


def test_what_people_are_told(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2, 6})
    assert numa.Locality("off").text == "off"
    locality = numa.Locality("auto")
    assert (locality.node, locality.text) == (1, "node 1 (this process's CPUs)")
    locality.near_device("0000:c1:00.0")
    assert locality.node == 1
    locality.near_device("0000:01:00.0")
    assert (locality.node, locality.text) == (0, "node 0 (the GPU's)")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2, 4})
    assert numa.Locality("auto").text == "any node (this process runs on several)"
    (machine / "has_memory").write_text("0\n")
    assert numa.Locality("auto").text == "one node"


def test_each_thread_is_told_once(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(numa, "prefer_node", told.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2, 6})
    locality = numa.Locality("auto")
    locality.apply()
    locality.apply()
    assert told == [1]
    locality.near_device("0000:01:00.0")
    locality.apply()
    assert told == [1, 0]
    numa.Locality("off").apply()
    assert told == [1, 0]


def test_a_refusal_is_told(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2, 6})
    monkeypatch.setattr(numa, "prefer_node", lambda node: "Function not implemented")
    locality = numa.Locality("auto")
    locality.apply()
    assert locality.text == "any node (set_mempolicy: Function not implemented)"


def test_the_policy_takes_effect() -> None:
    """In a process of its own, since it stays: the kernel's own account of a fresh mapping says ``prefer``."""
    if platform.machine() not in numa.SET_MEMPOLICY or not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel has no NUMA policies to read back")
    code = (
        "import mmap; from tiercheck.tiers.shm import numa; assert numa.prefer_node(0) is None; "
        "m = mmap.mmap(-1, 1 << 20); m[:] = bytes(1 << 20); print(open('/proc/self/numa_maps').read()); "
        "print('refusals', numa.prefer_node(1000), numa.prefer_node(5000))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "prefer" in done.stdout
    assert "refusals Invalid argument no such node: 5000" in done.stdout


def test_a_thread_that_only_visits_has_its_own_policy_back() -> None:
    if platform.machine() not in numa.SET_MEMPOLICY or numa.memory_policy() is None:
        pytest.skip("this kernel has no NUMA policies")

    def policy() -> tuple[int, list[int]]:
        found = numa.memory_policy()
        assert found is not None
        return found[0], list(found[1])

    locality = numa.Locality("off")
    before = policy()
    with locality.applied():
        assert policy() == before, "there is nothing to prefer"
    locality.node = 0
    for _ in range(2):
        with pytest.raises(KeyError), locality.applied():
            assert policy()[0] == numa.MPOL_PREFERRED
            raise KeyError
        assert policy() == before


@pytest.mark.parametrize("text", ["0-x", "a", "1-2-3"])
def test_a_list_that_is_none(text: str) -> None:
    with pytest.raises(ValueError):
        numa.parse_list(text)


@pytest.mark.parametrize("option", ["numa=yes", "pin=yes", "threads=0", "threads=65", "threads=two"])
def test_options_that_are_none(name: str, option: str) -> None:
    with pytest.raises(ConfigurationError, match=option.partition("=")[0]):
        make_driver(f"shm://{name}?{option}")


async def test_options(name: str) -> None:
    async with make_driver(f"shm://{name}?size=64MiB&threads=2&pin=auto&numa=auto") as driver:
        content = os.urandom(20 * MIB + 13)
        for n in range(3):  # the first time in fresh memory, and then by two threads
            await driver.put("a", [content[:n], content[n : 9 * MIB], b"", content[9 * MIB :]])
            assert await driver.get("a") == content
            await driver.delete(["a"])


async def test_a_large_put_needs_no_memory_of_its_own(name: str) -> None:
    """Fresh or recycled, by one thread or several: nothing is joined, nothing is copied twice."""
    content = bytes(32 * MIB)
    async with ShmDriver(name, size=256 * MIB, threads=3) as driver:
        for n in range(4):
            tracemalloc.start()
            await driver.put("a", [content, memoryview(content)[: MIB + n]])
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 256 << 10
            assert (await driver.stat("a")).nbytes == 33 * MIB + n


@pytest.mark.parametrize("threads", [1, 3])
async def test_a_put_that_is_cancelled_while_it_copies_lets_go_of_its_buffers(name: str, threads: int) -> None:
    content = bytearray(os.urandom(48 * MIB))
    async with ShmDriver(name, size=256 * MIB, threads=threads) as driver:
        await driver.put("a", [content])
        await driver.put("a", [content])
        cancelled = 0
        for turns in (1, 2, 4, 8, 16, 64):
            putting = asyncio.create_task(driver.put("b", [content]))
            for _ in range(turns):
                await asyncio.sleep(0)
            putting.cancel()
            await asyncio.wait({putting})
            content.append(0)  # refused while somebody has the buffer
            content.pop()
            if putting.cancelled():
                cancelled += 1
                assert [info.key async for info in driver.list()] in (["a"], ["a", "b"])
        assert cancelled
        assert await driver.get("a") == content


@pytest.fixture(params=["always", "within_size", "advise", "never"])
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A tmpfs with this ``huge=``, where this user and this kernel may mount one."""
    mount = tmp_path / "a mount"
    mount.mkdir()
    options = f"size=64m,huge={request.param}"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", mount], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    try:
        yield request.param, mount
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def mapped_huge_bytes(path: Path) -> int:
    """Of this process's mappings of ``path``, as the kernel counts them."""
    found, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split(None, 5)
        if "-" in fields[0]:
            found = line.endswith(str(path))
        elif found and fields[0] in ("ShmemPmdMapped:", "FilePmdMapped:"):
            total += int(fields[1]) * 1024
    return total


async def test_pages_are_huge_where_the_mount_has_them(mounted: tuple[str, Path]) -> None:
    huge, mount = mounted
    assert huge_pages_of(mount_of(mount / "not" / "there")) == huge
    async with ShmDriver("huge", size=48 * MIB, mount=mount) as driver:
        assert driver.facts()["pages"] == pages_text(mount_of(mount))
        advice = f"mount -o remount,huge=within_size {mount})"
        assert pages_text(mount_of(mount)).endswith(advice) is (huge == "never")
        await driver.prepare_reservations([(8 * MIB, 2)])
        reservation = await driver.reserve("a", 8 * MIB)
        path = next((driver.segments.root / ".tiercheck/tmp").iterdir())
        assert mapped_huge_bytes(path) == (0 if huge == "never" else 8 * MIB)
        content = os.urandom(8 * MIB)
        reservation.buffer[:] = content
        await reservation.publish(7 * MIB - 3)
        assert await driver.get("a") == content[: 7 * MIB - 3]


async def test_a_full_mount_is_no_sigbus(mounted: tuple[str, Path]) -> None:
    """With ``advise`` memory is allocated by touching it."""
    _, mount = mounted
    async with ShmDriver("huge", size=60 * MIB, mount=mount) as driver:
        (mount / "others").write_bytes(bytes(40 * MIB))
        with pytest.raises(CapacityExceeded, match="somebody else fills it"):
            await driver.prepare_reservations([(8 * MIB, 3)])
        with pytest.raises(CapacityExceeded, match="somebody else fills it"):
            await driver.reserve("a", 40 * MIB)
        with pytest.raises(CapacityExceeded, match="somebody else fills it"):
            await driver.put("a", [bytes(40 * MIB)])
        assert (await driver.usage()).used_bytes == 0
        assert list((driver.segments.root / ".tiercheck/tmp").iterdir()) == []
        await driver.put("a", [bytes(8 * MIB)])


def test_a_mount_that_is_no_tmpfs() -> None:
    assert huge_pages_of(mount_of(Path("/proc"))) == "never"
    assert pages_text(mount_of(Path("/proc"))) == "4 KiB", "nothing can be done about it"


def test_backing_that_cannot_be_done_here_is_left_to_others(tmp_path: Path) -> None:
    """A file of a file system without huge pages."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(fd, MIB)
        back_with_huge_pages(fd, 5000, MIB - 5000)
    finally:
        os.close(fd)
