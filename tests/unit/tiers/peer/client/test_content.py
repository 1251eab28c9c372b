"""Memory that is about to be sent."""

from __future__ import annotations

import mmap
import platform
from pathlib import Path

import pytest

from tiercheck.tiers.peer.client.content import populate
from tiercheck.tiers.posix.direct import address_of

PAGES = 64
PAGE_TABLE = Path("/proc/self/pagemap")


def entered(address: int, pages: int) -> list[bool]:
    """Which pages are in this process's page table: the highest bit of each entry (proc_pid_pagemap(5))."""
    with PAGE_TABLE.open("rb", buffering=0) as table:
        table.seek(address // mmap.PAGESIZE * 8)
        entries = table.read(8 * pages)
    return [bool(entries[8 * page + 7] & 0x80) for page in range(pages)]


def test_pages_are_entered_before_they_are_sent(tmp_path: Path) -> None:
    major, minor = (int(part) for part in platform.release().split(".")[:2])
    if (major, minor) < (5, 14):
        pytest.skip("this kernel enters no pages ahead (MADV_POPULATE_READ, Linux 5.14)")
    file = tmp_path / "object"
    file.write_bytes(bytes(PAGES * mmap.PAGESIZE))
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapping,
        memoryview(mapping) as content,
    ):
        first = address_of(content)
        assert not any(entered(first, PAGES))
        with content[20 * mmap.PAGESIZE + 5 : 37 * mmap.PAGESIZE + 1] as part:
            populate(part)
        assert all(entered(first, PAGES)[20:38])  # the kernel adds neighbours as it likes
