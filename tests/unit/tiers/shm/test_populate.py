"""Page tables are filled ahead, and what is in them already is left alone."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from tiercheck.tiers.posix.direct import address_of
from tiercheck.tiers.shm import populate
from tiercheck.tiers.shm.populate import populate_to_read

PAGES = 64


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The addresses and lengths that the kernel was asked to enter."""
    asked: list[tuple[int, int]] = []
    real = populate._madvise

    def recording(address: int, nbytes: int, advice: int) -> int:
        asked.append((address, nbytes))
        return int(real(address, nbytes, advice))

    monkeypatch.setattr(populate, "_madvise", recording)
    return asked


@pytest.fixture
def view() -> memoryview:
    """Shared memory that is backed, as a segment is."""
    fd = os.memfd_create("test")
    try:
        os.posix_fallocate(fd, 0, PAGES * mmap.PAGESIZE)
        return memoryview(mmap.mmap(fd, PAGES * mmap.PAGESIZE))
    finally:
        os.close(fd)


def resident_pages(address: int) -> int:
    """Of the mapping at ``address``, those in this process's page table (RSS as /proc/self/smaps has it)."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(f"{address:x}-"))
    rss = next(line for line in lines if line.startswith("Rss:"))
    return int(rss.split()[1]) * 1024 // mmap.PAGESIZE


def test_what_is_not_entered_is(view: memoryview, asked: list[tuple[int, int]]) -> None:
    address = address_of(view)
    assert resident_pages(address) == 0
    populate_to_read(address + 5, 3 * mmap.PAGESIZE)
    assert asked == [(address, 5 + 3 * mmap.PAGESIZE)]
    assert resident_pages(address) >= 4


@pytest.mark.parametrize(
    ("touched", "times"), [([0], 1), ([0, PAGES - 1], 1), ([0, PAGES // 2], 1), ([0, PAGES // 2, PAGES - 1], 0)]
)
def test_its_ends_and_its_middle_tell(
    view: memoryview, asked: list[tuple[int, int]], touched: list[int], times: int
) -> None:
    for page in touched:
        view[page * mmap.PAGESIZE] = 1  # a fault of a write enters one page
    populate_to_read(address_of(view), view.nbytes)
    assert len(asked) == times


@pytest.mark.parametrize("call", ["open", "pread"])
def test_where_nobody_may_look_everything_is(
    view: memoryview, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    view[0] = view[len(view) // 2] = view[-1] = 1

    def refused(*arguments: object) -> int:
        raise PermissionError

    monkeypatch.setattr(populate.os, call, refused)
    populate_to_read(address_of(view), view.nbytes)
    assert len(asked) == 1
