"""Huge pages of a tmpfs: 2 MiB at a time, allocated and cleared at several times the speed of 4 KiB.

A mount decides (``huge=``): ``always`` and ``within_size`` need nothing of us; with ``advise`` pages are huge if
a mapping that asks for it touches them first; ``never``, the default of ``/dev/shm``, has none.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

from tiercheck.tiers.posix.mounts import Mount
from tiercheck.tiers.shm.populate import populate_to_write

__all__ = ["back_with_huge_pages", "huge_pages_of", "pages_text"]


TOUCHED_AT_ONCE_BYTES = 2 << 20
"""Meanwhile nothing else in this process can be mapped or unmapped, as by training's first step."""


def huge_pages_of(mount: Mount) -> str:
    """The ``huge=`` of the mount; ``never`` if it is no tmpfs, or cannot be told."""
    options = dict(option.partition("=")[::2] for option in mount.options)
    return options.get("huge", "never") if mount.type == "tmpfs" else "never"


def pages_text(mount: Mount) -> str:
    """What to tell people about the pages of the mount."""
    huge = huge_pages_of(mount)
    if huge in ("always", "within_size"):
        return f"huge (mount: huge={huge})"
    if huge == "advise":
        return "huge (mount: huge=advise, advised)"
    if mount.type != "tmpfs":
        return "4 KiB"
    return f"4 KiB (huge ones are made about ten times as fast: mount -o remount,huge=within_size {mount.point})"


def back_with_huge_pages(fd: int, start: int, nbytes: int) -> None:
    """Touch ``[start, start + nbytes)`` of the file through a mapping that asks for huge pages.

    What it cannot do is left for others to allocate. Errors: ``OSError`` ``ENOSPC`` if the mount is full.
    """
    offset = start - start % mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(fd, start + nbytes - offset, offset=offset) as mapping:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return
        for at in range(0, len(mapping), TOUCHED_AT_ONCE_BYTES):
            failed = populate_to_write(address + at, min(TOUCHED_AT_ONCE_BYTES, len(mapping) - at))
            if failed in (errno.EFAULT, errno.ENOMEM):  # a write would raise SIGBUS here
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if failed:
                return
