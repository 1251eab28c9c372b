"""Directory tiers when the system refuses a call: whichever it is, no descriptor is left open."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tiercheck.errors import TierError
from tiercheck.tiers.posix.directories.local import ObjectDirectory
from tiercheck.tiers.posix.directories.remembering import RememberingDirectory
from tiercheck.tiers.posix.directories.shared import SharedDirectory
from tiercheck.tiers.posix.mounts import Traits
from tiercheck.tiers.posix.striping import Striper
from tiercheck.tiers.shm.pool import SPARE_BYTES_MIN
from tiercheck.tiers.shm.segments import SegmentDirectory
from tiercheck.types import PutMode

ON_NAMES = ("open", "stat", "link", "rename", "unlink", "mkdir", "rmdir", "scandir")
ON_FILES = ("fstat", "dup", "utime", "fsync", "fchmod", "ftruncate", "posix_fallocate", "pread", "pwrite", "writev")
PAYLOAD = [bytes(SPARE_BYTES_MIN)]


def open_descriptors(root: Path) -> set[str]:
    """What every open one is of, but for what threads that another test has left open beside ``root``."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            of = link.readlink()
            if of.is_relative_to(root) or not of.is_relative_to(root.parent):
                found.add(f"{link.name}: {of}")
    return found


@contextmanager
def refusing(nth: int) -> Iterator[Callable[[], bool]]:
    """The ``nth`` of these calls fails; what it gives tells whether there were so many."""
    counter = itertools.count()
    refused = False

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def maybe(*arguments: Any, **options: Any) -> Any:
            nonlocal refused
            if next(counter) == nth:
                refused = True
                raise OSError(5, f"{call.__name__} is refused")
            return call(*arguments, **options)

        return maybe

    with (
        mock.patch.multiple(os, **{name: wrapped(getattr(os, name)) for name in (*ON_NAMES, *ON_FILES)}),
        mock.patch.object(fcntl, "flock", wrapped(fcntl.flock)),
    ):
        yield lambda: refused


def no_check() -> None:
    pass


def put(directory: ObjectDirectory) -> None:
    for mode in (PutMode.OVERWRITE, PutMode.CREATE):
        with suppress(TierError):
            directory.store(f"a/{mode.kind}", PAYLOAD, mode, no_check)


def get(directory: ObjectDirectory) -> None:
    fd = directory.open_object("there")
    try:
        directory.unlock_object(fd)
    finally:
        os.close(fd)


OPERATIONS: dict[str, Callable[[ObjectDirectory], object]] = {
    "put": put,
    "get": get,
    "info": lambda directory: directory.info("there"),
    "list": lambda directory: list(directory.scan()),
    "delete": lambda directory: directory.remove("there"),
    "reclaim": lambda directory: directory.held_bytes(),
}


def directory_of(kind: type[ObjectDirectory], root: Path) -> ObjectDirectory:
    if issubclass(kind, SharedDirectory):
        return kind(root, Traits(True, True, True))
    if kind is SegmentDirectory:
        root.mkdir()
        segments = SegmentDirectory(root)
        segments.limit_bytes = segments.pool_bytes = 64 * SPARE_BYTES_MIN
        return segments
    return ObjectDirectory(root, durable=True)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", [ObjectDirectory, SharedDirectory, RememberingDirectory, SegmentDirectory])
def test_whichever_call_is_refused_no_descriptor_stays_open(
    tmp_path: Path, kind: type[ObjectDirectory], operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercheck.tiers.posix.beneath.has_openat2", lambda: False)  # it is no function of os
    directory = directory_of(kind, tmp_path / "tier")
    directory.prepare()
    for nth in range(1000):
        with suppress(TierError):
            directory.store("there", PAYLOAD, PutMode.OVERWRITE, no_check)
        before = open_descriptors(tmp_path)
        with refusing(nth) as refused, suppress(OSError, TierError):
            OPERATIONS[operation](directory)
        assert open_descriptors(tmp_path) == before, f"after call {nth}"
        if not refused():
            return
    pytest.fail("it never ends")


def test_a_striped_file_of_which_the_mode_cannot_be_set_leaves_nothing(tmp_path: Path) -> None:
    lfs = tmp_path / "lfs"
    lfs.write_text('#!/bin/sh\nfor path; do :; done\n: > "$path"\n')
    lfs.chmod(0o700)
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        before = open_descriptors(tmp_path)
        refused = mock.patch.object(os, "fchmod", side_effect=PermissionError(1, "not permitted"))
        with refused, pytest.raises(PermissionError):
            Striper(lfs, 1, 1 << 20).create(folder, tmp_path / "new", 1)
        assert open_descriptors(tmp_path) == before
        assert not (tmp_path / "new").exists()
    finally:
        os.close(folder)
