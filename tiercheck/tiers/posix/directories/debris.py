"""Files of dead writers, told without being touched."""

from __future__ import annotations

import os
import stat
import time

from tiercheck.tiers.posix.beneath import Beneath
from tiercheck.tiers.posix.directories.object_files import DEBRIS_AGE_S, FOREIGN_DEBRIS_AGE_S
from tiercheck.tiers.posix.files import try_lock, unlock
from tiercheck.types import Leftover

__all__ = ["leftover"]

WHAT = "temporary file"


def leftover(beneath: Beneath, path: str, *, lock_reaches: bool) -> Leftover | None:
    """The temporary file ``path`` if its writer is dead. ``lock_reaches``: a writer's lock on it would be seen here;
    otherwise only its age tells. Its lock is tried shared, for a moment, and not before its writer must have it."""
    try:
        fd = beneath.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None  # published, or given up
    try:
        status = os.fstat(fd)
        age_s = time.time() - max(status.st_mtime, status.st_ctime)
        if not stat.S_ISREG(status.st_mode) or age_s <= (DEBRIS_AGE_S if lock_reaches else FOREIGN_DEBRIS_AGE_S):
            return None
        if lock_reaches:
            if not try_lock(fd, shared=True):
                return None
            unlock(fd)
        return Leftover(WHAT, path, status.st_size, age_s)
    finally:
        os.close(fd)
