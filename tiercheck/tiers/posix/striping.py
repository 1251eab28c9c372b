"""Over how many of a Lustre file system's servers a file is spread: ``lfs setstripe``.

A file's layout is chosen when it is created, and never changes. Many ranks write at the same time, each its own
file, so that a few stripes a file use all the servers; only what is very large is spread over all of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tiercheck.tiers.posix.files import closed_on_error, unlink_quietly
from tiercheck.tiers.url import parse_size
from tiercheck.types import bytes_text

__all__ = ["ALL", "Striper", "StripingFailed", "parse_stripe_count", "parse_stripe_size", "stripes_for"]

ALL = -1
"""As many stripes as the file system has targets."""
STRIPES_MAX = 2000
"""Lustre's own limit."""
STRIPE_UNIT = 64 << 10
STRIPE_BYTES_MAX = (4 << 30) - STRIPE_UNIT
COMMAND_S_MAX = 10.0
_MIB = 1 << 20
_STEPS = ((256 * _MIB, 1), (1024 * _MIB, 2), (4096 * _MIB, 4), (16384 * _MIB, 8), (65536 * _MIB, 16))


def stripes_for(nbytes: int) -> int:
    """Stripes for an object of ``nbytes``.

    1 up to 256 MiB, 2 up to 1 GiB, 4 up to 4 GiB, 8 up to 16 GiB, 16 up to 64 GiB, and :data:`ALL` above that.
    """
    return next((stripes for limit, stripes in _STEPS if nbytes <= limit), ALL)


class StripingFailed(Exception):
    """``lfs`` refused, or did not answer; the text says why, in one line."""


@dataclass(frozen=True)
class Striper:
    """Gives new files their layout.

    ``count``: stripes of every object; ``None`` lets :func:`stripes_for` choose by size. ``size``: bytes of a stripe.
    """

    lfs: Path
    count: int | None
    size: int

    @staticmethod
    def find() -> Path | None:
        """The ``lfs`` program, if there is one."""
        found = shutil.which("lfs")
        return None if found is None else Path(found)

    @property
    def default_count(self) -> int:
        """Stripes of a file whose layout is its directory's default."""
        return 1 if self.count is None else self.count

    def count_for(self, nbytes: int) -> int:
        return stripes_for(nbytes) if self.count is None else self.count

    def create(self, folder: int, path: Path, nbytes: int) -> int:
        """Make the file ``path`` (0600), which must not exist, with the layout for ``nbytes``; open it in ``folder``.

        ``lfs`` takes a path, and may be led elsewhere on its way: what it made counts only in the open directory.
        Errors: :class:`StripingFailed`, ``OSError``; then no file is left.
        """
        try:
            self._run("--stripe-count", str(self.count_for(nbytes)), "--stripe-size", str(self.size), str(path))
            fd = os.open(path.name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
            with closed_on_error(fd):
                os.fchmod(fd, 0o600)
        except FileNotFoundError:
            raise StripingFailed(f"{self.lfs} reported success, but made no file") from None
        except BaseException:
            unlink_quietly(path.name, folder)
            raise
        return fd

    def set_default(self, folder: Path) -> None:
        """Give files that are made in or below ``folder`` :attr:`default_count` stripes, unless told otherwise.

        Errors: :class:`StripingFailed`.
        """
        self._run("--stripe-count", str(self.default_count), "--stripe-size", str(self.size), str(folder))

    def __str__(self) -> str:
        count = {None: "stripes by size", ALL: "all stripes", 1: "1 stripe"}.get(self.count, f"{self.count} stripes")
        return f"{count} of {bytes_text(self.size).replace('.0', '')}"

    def _run(self, *arguments: str) -> None:
        command = [str(self.lfs), "setstripe", *arguments]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_S_MAX)
        except subprocess.TimeoutExpired:
            raise StripingFailed(f"{self.lfs} setstripe did not end within {COMMAND_S_MAX:.0f} s") from None
        except OSError as error:
            raise StripingFailed(f"{self.lfs} cannot be run: {error.strerror}") from None
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise StripingFailed(f"{self.lfs} setstripe failed with {done.returncode}: {lines[-1]}")


def parse_stripe_count(text: str) -> int:
    """``all`` or ``-1``, or a number from 1 to 2000; ``ValueError`` otherwise."""
    if text in ("all", "-1"):
        return ALL
    if not text.isdecimal() or not 1 <= int(text) <= STRIPES_MAX:
        raise ValueError(f"{text!r} is neither 'all' nor a number from 1 to {STRIPES_MAX}")
    return int(text)


def parse_stripe_size(text: str) -> int:
    """A size that is a multiple of 64 KiB, below 4 GiB; ``ValueError`` otherwise."""
    nbytes = parse_size(text)
    if not STRIPE_UNIT <= nbytes <= STRIPE_BYTES_MAX or nbytes % STRIPE_UNIT:
        raise ValueError(f"{text!r} is no multiple of 64 KiB below 4 GiB")
    return nbytes
