"""A directory that can be filled to the last byte: a file system of its own, where root may mount one."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["LimitedDirectory"]

FILLER = "filler"


class LimitedDirectory:
    """``kind``: ``tmpfs``, or ``ext4`` in an image on a loop device. Where it cannot be mounted, ``limited`` is false
    and ``why`` says so; then it is a plain directory that nothing fills."""

    def __init__(self, kind: str, nbytes: int) -> None:
        self._kind = kind
        self._nbytes = nbytes
        self._image: Path | None = None
        self.path = Path()
        self.limited = False
        self.why = ""

    def __enter__(self) -> Self:
        self.path = Path(tempfile.mkdtemp(prefix="tiercheck-soak-"))
        if os.geteuid() != 0:
            self.why = "only root may mount"
            return self
        try:
            self._mount()
        except (OSError, subprocess.CalledProcessError) as error:
            self.why = f"{self._kind} cannot be mounted: {getattr(error, 'stderr', '') or error}".strip()
        else:
            self.limited = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.limited:
            run("umount", str(self.path))
        if self._image is not None:
            self._image.unlink(missing_ok=True)
        shutil.rmtree(self.path)

    def fill(self, leave_bytes: int) -> None:
        """Take all room but ``leave_bytes``."""
        status = os.statvfs(self.path)
        nbytes = status.f_bfree * status.f_frsize - leave_bytes
        with (self.path / FILLER).open("wb") as file:
            if nbytes > 0:
                try:
                    os.posix_fallocate(file.fileno(), 0, nbytes)
                except OSError as error:
                    # Somebody was faster: then it is as full as it was to become.
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        """Give the room back. Idempotent."""
        (self.path / FILLER).unlink(missing_ok=True)

    def _mount(self) -> None:
        if self._kind == "tmpfs":
            run("mount", "-t", "tmpfs", "-o", f"size={self._nbytes},mode=0700", "tiercheck-soak", str(self.path))
            return
        descriptor, name = tempfile.mkstemp(prefix="tiercheck-soak-", suffix=".img")
        self._image = Path(name)
        os.truncate(descriptor, self._nbytes)
        os.close(descriptor)
        run(f"mkfs.{self._kind}", "-q", "-m", "0", str(self._image))
        run("mount", "-o", "loop", str(self._image), str(self.path))


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
