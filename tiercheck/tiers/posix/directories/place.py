"""The directory that a tier's objects are in: made where it is missing, and nobody else's."""

from __future__ import annotations

import errno
from pathlib import Path

from tiercheck.errors import TierError
from tiercheck.tiers.posix.beneath import Beneath, check_owners
from tiercheck.tiers.posix.directories.object_files import CONTROL, TEMPORARIES
from tiercheck.tiers.posix.files import fsync_directory, meaning_of

__all__ = ["make_place"]

IN_THE_WAY = {
    errno.ENOENT: (TierError, "make the directories above it, mount what is missing, or choose another path"),
    errno.EEXIST: (TierError, "a file is in the way: remove it, or choose another directory"),
    errno.ENOTDIR: (TierError, "a file is in the way: remove it, or choose another directory"),
}
"""What keeps a tier's directory from being made."""


def make_place(beneath: Beneath, *, durable: bool) -> list[Path]:
    """Make the root and the tier's own directories (0700); see that nobody else has them. Returns those that were
    missing, from the topmost down to the root.

    Errors: what the system says, with the path it is about; ``Unauthorized`` for directories that others may write.
    """
    try:
        made = make_directory(beneath.root)
        is_new = beneath.make(TEMPORARIES)
        with beneath.listed(TEMPORARIES):
            pass
    except OSError as error:
        kind, advice = IN_THE_WAY.get(error.errno or 0) or meaning_of(error)
        named = str(error.filename or "")
        at = named if named.startswith("/") else beneath.root / CONTROL
        raise kind(f"the directory {beneath.root} cannot be made: {error.strerror}: {at}; {advice}") from error
    if durable and is_new:
        beneath.sync_upwards(TEMPORARIES)
        for folder in reversed(made):
            fsync_directory(folder.parent)
    check_owners(beneath, CONTROL)
    return made


def make_directory(path: Path) -> list[Path]:
    """Make ``path`` and what is missing above it, all 0700; returns those made, topmost first."""
    missing = []
    folder = path
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    made = []
    for folder in reversed(missing):
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            if not folder.is_dir():
                raise
        else:
            made.append(folder)
    return made
