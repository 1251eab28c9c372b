"""Disks that fail at one step of publishing a file."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from unittest import mock

__all__ = ["failing_directory_fsyncs"]


@contextlib.contextmanager
def failing_directory_fsyncs(number: int) -> Iterator[None]:
    """Files get to the disk and have their names; that the names do fails with the ``errno`` ``number``."""
    fsync = os.fsync

    def fails_on_directories(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(fd)

    with mock.patch.object(os, "fsync", fails_on_directories):
        yield
