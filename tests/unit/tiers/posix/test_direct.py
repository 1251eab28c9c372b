"""Direct transfers: what arrives is what was sent, however memory, file and blocks lie to each other."""

from __future__ import annotations

import errno
import mmap
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercheck.errors import CapacityExceeded, ConfigurationError, Corruption, Transient, Unsupported
from tiercheck.tiers.posix import direct, transfer
from tiercheck.tiers.posix.direct import ALIGNMENT, AlignedBuffers, address_of, copy_bytes, direct_obstacle, is_cached
from tiercheck.tiers.posix.nvme import NvmeDriver
from tiercheck.tiers.posix.transfer import Blocks
from tiercheck.tiers.registry import make_driver
from tiercheck.types import ByteRange

PAGE = mmap.PAGESIZE
BLOCK = 4 * ALIGNMENT
CONTENT = random.Random(7).randbytes(1 << 20)


def unharmed() -> None:
    """The check of a caller who does not give up."""


def open_empty(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory on a disk with O_DIRECT."""
    path = tmp_path_factory.mktemp("direct")
    fd = open_empty(path / "probe")
    obstacle = direct_obstacle(fd)
    os.close(fd)
    if obstacle is not None:
        pytest.skip(f"the temporary directory has {obstacle}")
    return path


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BLOCKS_BYTES_MIN", 1)


# A piece of a payload: its length, and how far from a page's beginning it lies in memory.
lengths = st.one_of(
    st.sampled_from([ALIGNMENT, BLOCK, 3 * BLOCK]), st.integers(0, 3), st.integers(ALIGNMENT - 2, BLOCK + 2)
)
pieces = st.lists(st.tuples(lengths, st.sampled_from([0, 0, 0, 1, 512])), max_size=8)


@settings(max_examples=120)
@given(pieces=pieces, seed=st.integers(0, 255), is_direct=st.booleans())
def test_any_payload_arrives(disk: Path, pieces: list[tuple[int, int]], seed: int, is_direct: bool) -> None:
    payload, expected = [], b""
    for nbytes, shift in pieces:
        memory = mmap.mmap(-1, nbytes + shift + 1)
        content = CONTENT[seed * 100 + len(expected) :][:nbytes]
        memory[shift : shift + nbytes] = content
        payload.append(memoryview(memory)[shift : shift + nbytes])
        expected += content
    blocks = Blocks(block_bytes=BLOCK, depth=3, direct=is_direct)
    fd = open_empty(disk / "payload")
    try:
        with mock.patch.object(transfer, "BLOCKS_BYTES_MIN", 1):
            blocks.write(fd, payload, len(expected), unharmed)
        assert (disk / "payload").read_bytes() == expected
    finally:
        os.close(fd)
        blocks.close()


@settings(max_examples=120)
@given(
    start=st.integers(0, 2 * BLOCK),
    nbytes=st.integers(1, 4 * BLOCK),
    shift=st.sampled_from([0, 0, 1, 17, 512]),
    cached=st.booleans(),
    is_direct=st.booleans(),
)
def test_any_range_comes_back(disk: Path, start: int, nbytes: int, shift: int, cached: bool, is_direct: bool) -> None:
    path = disk / "range"
    path.write_bytes(CONTENT[: 6 * BLOCK])
    fd = os.open(path, os.O_RDONLY)
    blocks = Blocks(block_bytes=BLOCK, depth=3, direct=is_direct)
    memory = memoryview(mmap.mmap(-1, nbytes + shift + 2 * PAGE))
    # Where memory and file are aligned alike, the blocks in the middle are read without a copy.
    begin = shift + start % ALIGNMENT
    try:
        if not cached:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        with mock.patch.object(transfer, "BLOCKS_BYTES_MIN", 1):
            blocks.read(fd, start, memory[begin : begin + nbytes], unharmed)
        assert memory[begin : begin + nbytes] == CONTENT[start : start + nbytes]
        assert not any(memory[:begin])
        assert not any(memory[begin + nbytes :])
    finally:
        os.close(fd)
        blocks.close()


@pytest.mark.usefixtures("small_blocks")
def test_aligned_memory_is_written_and_read_without_a_copy(disk: Path) -> None:
    memory = mmap.mmap(-1, 4 * BLOCK)
    memory[:] = CONTENT[: 4 * BLOCK]
    blocks = Blocks(block_bytes=BLOCK, depth=2, direct=True)
    with mock.patch.object(AlignedBuffers, "borrowed", side_effect=AssertionError("copied")):
        fd = open_empty(disk / "aligned")
        blocks.write(fd, [memoryview(memory)[:BLOCK], memoryview(memory)[BLOCK:-5]], 4 * BLOCK - 5, unharmed)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        memory[:] = bytes(4 * BLOCK)
        blocks.read(fd, 0, memoryview(memory)[:-5], unharmed)
        os.close(fd)
    blocks.close()
    assert memory[:] == CONTENT[: 4 * BLOCK - 5] + bytes(5)


def test_the_page_cache_is_looked_at_before_the_disk_is(disk: Path) -> None:
    fd = open_empty(disk / "cached")
    os.write(fd, CONTENT)
    os.fsync(fd)
    assert is_cached(fd, 0, len(CONTENT))
    for _ in range(1000):  # on a busy machine the kernel may still be at the pages
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if not is_cached(fd, 0, len(CONTENT)):
            break
    assert not is_cached(fd, 0, len(CONTENT))
    os.pread(fd, 1, len(CONTENT) // 2)
    assert not is_cached(fd, 0, len(CONTENT)), "a part of it is not all of it"
    os.close(fd)


@pytest.mark.usefixtures("small_blocks")
def test_a_short_direct_write_or_read_is_finished(disk: Path) -> None:
    pwritev, preadv = os.pwritev, os.preadv

    def short_write(fd: int, parts: list[memoryview], offset: int) -> int:
        return pwritev(fd, [parts[0][:ALIGNMENT]], offset)

    def short_read(fd: int, parts: list[memoryview], offset: int, flags: int = 0) -> int:
        return preadv(fd, [parts[0][:ALIGNMENT]], offset, flags)

    into = memoryview(mmap.mmap(-1, 3 * BLOCK + PAGE))
    for shift in (0, 1):
        blocks = Blocks(block_bytes=BLOCK, depth=2, direct=True)
        fd = open_empty(disk / "short")
        with mock.patch.object(os, "pwritev", short_write), mock.patch.object(os, "preadv", short_read):
            blocks.write(fd, [CONTENT[: 3 * BLOCK - 7]], 3 * BLOCK - 7, unharmed)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            blocks.read(fd, 0, into[shift : shift + 3 * BLOCK - 7], unharmed)
        os.close(fd)
        blocks.close()
        assert into[shift : shift + 3 * BLOCK - 7] == CONTENT[: 3 * BLOCK - 7]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("failing", range(6))
def test_whichever_block_fails_all_threads_have_stopped(disk: Path, failing: int) -> None:
    """The error is the call's, every other block is done or never begun, and the memory is the caller's again."""
    pwritev = os.pwritev
    busy = [0]

    def fail_at(fd: int, parts: list[memoryview], offset: int) -> int:
        busy[0] += 1
        try:
            if offset == failing * BLOCK:
                raise OSError(errno.EIO, "broken")
            return pwritev(fd, parts, offset)
        finally:
            busy[0] -= 1

    blocks = Blocks(block_bytes=BLOCK, depth=4, direct=True)
    memory = mmap.mmap(-1, 6 * BLOCK)
    fd = open_empty(disk / "failing")
    with mock.patch.object(os, "pwritev", fail_at), pytest.raises(OSError, match="broken"):
        blocks.write(fd, [memory], len(memory), unharmed)
    assert busy == [0]
    memory.close()  # BufferError, were there still a view of it
    os.close(fd)
    blocks.close()


@pytest.mark.usefixtures("small_blocks")
def test_a_check_that_raises_stops_every_thread(disk: Path) -> None:
    class GivenUp(Exception):
        pass

    left = [3]

    def check() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise GivenUp

    blocks = Blocks(block_bytes=BLOCK, depth=2, direct=True)
    fd = open_empty(disk / "given up")
    with pytest.raises(GivenUp):
        blocks.write(fd, [CONTENT], len(CONTENT), check)
    assert left[0] >= -2, "each thread asks once more at most"
    with pytest.raises(GivenUp):
        blocks.read(fd, 0, memoryview(bytearray(len(CONTENT))), check)
    os.close(fd)
    blocks.close()


def test_addresses_of_read_only_memory() -> None:
    content = b"0123456789"
    view = memoryview(content)
    assert address_of(view[3:]) - address_of(view) == 3
    memory = mmap.mmap(-1, PAGE)
    assert address_of(memoryview(memory)) % PAGE == 0
    address_of(memoryview(memory).toreadonly())
    memory.close()  # no buffer is kept
    with pytest.raises(BufferError):
        address_of(view[::2])


@pytest.mark.parametrize("nbytes", [0, 1, direct.FREE_COPY_BYTES_MIN - 1, direct.FREE_COPY_BYTES_MIN, 300_001])
def test_copies(nbytes: int) -> None:
    into = bytearray(b"." * (nbytes + 2))
    copy_bytes(memoryview(into)[1:-1], memoryview(CONTENT)[7 : 7 + nbytes])
    assert into == b"." + CONTENT[7 : 7 + nbytes] + b"."
    into.append(0)  # no buffer is kept
    for target, source in ((memoryview(into), memoryview(CONTENT)), (memoryview(CONTENT), memoryview(CONTENT))):
        with pytest.raises(ValueError, match="cannot be copied"):
            copy_bytes(target, source)


def test_bounce_buffers_are_aligned_and_reused() -> None:
    buffers = AlignedBuffers(BLOCK)
    with buffers.borrowed() as first, buffers.borrowed() as second:
        addresses = {address_of(first), address_of(second)}
        assert len(addresses) == 2
        assert all(address % ALIGNMENT == 0 for address in addresses)
    with buffers.borrowed() as third:
        assert address_of(third) in addresses
    buffers.clear()


class TestDriver:
    async def test_facts_say_what_was_chosen(self, disk: Path) -> None:
        driver = make_driver(f"nvme://{disk}/facts?block=1MiB&depth=3")
        assert driver.facts() == {}
        async with driver:
            assert driver.facts()["io"] == "direct 1 MiB x 3"
            assert driver.facts()["file system"]
        async with make_driver(f"nvme://{disk}/facts?io=buffered") as driver:
            assert driver.facts()["io"] == "buffered (as the URL asks)"

    async def test_a_file_system_without_it(self, disk: Path) -> None:
        refused = OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        with mock.patch.object(direct, "reopen_direct", side_effect=refused):
            async with make_driver(f"nvme://{disk}/without") as driver:
                assert "has no O_DIRECT" in driver.facts()["io"]
                await driver.put("a", [CONTENT, CONTENT])
                assert bytes(await driver.get("a")) == CONTENT * 2
            with pytest.raises(Unsupported, match=r"io=direct cannot be had here: .* has no O_DIRECT"):
                await make_driver(f"nvme://{disk}/without?io=direct").open()
        assert not list((disk / "without" / ".tiercheck" / "tmp").iterdir())

    async def test_shared_memory_has_none(self) -> None:
        import tempfile

        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            async with make_driver(f"nvme://{folder}") as driver:
                assert driver.facts()["io"] == "buffered (tmpfs has no O_DIRECT: it is memory)"

    @pytest.mark.parametrize(
        "option", ["io=fast", "depth=0", "depth=65", "depth=x", "block=1", "block=5000", "block=1GiB"]
    )
    def test_options_that_cannot_be(self, option: str) -> None:
        with pytest.raises(ConfigurationError, match=option.split("=")[0]):
            make_driver(f"nvme:///mnt/a?{option}")

    async def test_a_cut_object_is_corrupt(self, disk: Path) -> None:
        async with make_driver(f"nvme://{disk}/cut?block=64KiB&depth=2") as driver:
            await driver.put("a", [CONTENT, CONTENT])
            into = memoryview(bytearray(2 << 20))
            preadv = os.preadv

            def cut(fd: int, parts: list[memoryview], offset: int, flags: int = 0) -> int:
                os.truncate(disk / "cut" / "a", 1 << 20)
                return preadv(fd, parts, offset, flags)

            with mock.patch.object(os, "preadv", cut), pytest.raises(Corruption, match="ends at byte"):
                await driver.get("a", into=into)

    async def test_an_error_in_a_helper_is_mapped(self, disk: Path) -> None:
        async with make_driver(f"nvme://{disk}/mapped?block=64KiB&depth=4") as driver:
            await driver.put("a", [b"old"])
            with (
                mock.patch.object(os, "pwritev", side_effect=OSError(errno.EIO, "broken")),
                pytest.raises(Transient, match="broken") as caught,
            ):
                await driver.put("a", [CONTENT, CONTENT])
            assert caught.value.key == "a"
            assert bytes(await driver.get("a")) == b"old"
            assert not list((disk / "mapped" / ".tiercheck" / "tmp").iterdir())

    async def test_ranges_into_memory_of_any_alignment(self, disk: Path) -> None:
        async with make_driver(f"nvme://{disk}/ranges?block=256KiB&depth=3") as driver:
            await driver.put("a", [CONTENT[1:], CONTENT[:7], CONTENT])
            whole = CONTENT[1:] + CONTENT[:7] + CONTENT
            into = memoryview(bytearray(3 << 20))
            for start, stop, at in [(0, 2097158, 0), (1, 2097158, 3), (4096, 2 << 20, 100), (777, 1 << 20, 9)]:
                found = await driver.get("a", range=ByteRange(start, stop), into=into[at:])
                assert found == whole[start:stop]


@pytest.fixture(params=["ext4", "xfs"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of some megabytes in an image file."""
    image, where = tmp_path / "image", tmp_path / "mounted"
    where.mkdir()
    with image.open("wb") as file:
        file.truncate((64 if request.param == "ext4" else 320) << 20)
    # Nothing kept back for root, who these tests run as.
    options = ["-m", "0"] if request.param == "ext4" else []
    commands = [
        [f"mkfs.{request.param}", "-q", *options, str(image)],
        ["mount", "-o", "loop", str(image), str(where)],
    ]
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            pytest.skip(f"{' '.join(command)}: {error}")
    yield where
    subprocess.run(["umount", where], check=True)


async def test_a_disk_that_fills_up_says_so_before_it_writes(small_disk: Path) -> None:
    url = f"nvme://{small_disk}/tier?io=direct&block=1MiB&depth=4"
    async with make_driver(url) as driver:
        old = CONTENT * 4
        await driver.put("a", [old])
        free = (await driver.usage()).free_bytes
        assert free is not None
        too_many = free // len(CONTENT) + 1
        with mock.patch.object(os, "pwritev", side_effect=AssertionError("written to a full disk")):
            for key in ("a", "new"):
                with pytest.raises(CapacityExceeded, match="full"):
                    await driver.put(key, [CONTENT] * too_many)
        assert bytes(await driver.get("a")) == old
        assert [info.key async for info in driver.list()] == ["a"]
        usage = await driver.usage()
        assert usage.used_bytes == len(old)
        assert usage.free_bytes is not None
        assert usage.free_bytes > free - len(CONTENT), "the room is free again"
        assert not list((small_disk / "tier" / ".tiercheck" / "tmp").iterdir())
        await driver.put("a", [CONTENT] * 8)
        assert bytes(await driver.get("a")) == CONTENT * 8


async def test_a_disk_that_fills_up_in_the_middle(small_disk: Path) -> None:
    """Where nothing can be allocated beforehand."""
    with mock.patch.object(transfer, "preallocate"):
        async with make_driver(f"nvme://{small_disk}/tier?io=direct&block=1MiB&depth=4") as driver:
            await driver.put("a", [CONTENT * 4])
            free = (await driver.usage()).free_bytes
            assert free is not None
            with pytest.raises(CapacityExceeded, match="full"):
                await driver.put("a", [CONTENT] * (free // len(CONTENT) + 2))
            assert bytes(await driver.get("a")) == CONTENT * 4
            assert not list((small_disk / "tier" / ".tiercheck" / "tmp").iterdir())


async def test_nvme_driver_defaults(disk: Path) -> None:
    async with NvmeDriver(disk / "defaults") as driver:
        assert driver.facts()["io"] == "direct 4 MiB x 4"
