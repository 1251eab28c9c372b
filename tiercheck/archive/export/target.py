"""Where an export goes: it is made in a directory beside the target, and gets the target's name when it is whole.

A full disk, an error or an interruption leaves the target as it was. What a kill leaves is the work directory,
``.NAME.partial``, and in it, if the target was just being replaced, the old one; the next export to that target puts
that back, and clears the rest.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tiercheck.errors import ConfigurationError
from tiercheck.tiers.posix.files import fsync_directory, meaning_of, try_lock, unlock_and_close

__all__ = ["publish", "work_directory"]

REPLACED = "replaced"
"""The old target, while the new one takes its place."""

EXPORTED = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|\.metadata|__\d+_\d+\.distcp"
    r"|latest(_universal)?|global_step\d+"
)
"""What the directory of an export has in it."""


@contextmanager
def work_directory(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """An empty directory on the target's file system.

    Errors: ``ConfigurationError`` if the target is there already, the directory that it belongs in is not, or another
    export is on its way there; ``TierError`` for what the file system refuses.
    """
    check_free(target, overwrite=overwrite)
    if not target.parent.is_dir():
        raise ConfigurationError(f"there is no directory {target.parent} to export to: make it first")
    work = target.with_name(f".{target.name}.partial")
    with naming(target):
        try:
            work.mkdir(mode=0o700, exist_ok=True)
        except FileNotFoundError:
            raise ConfigurationError(f"{target.parent} takes no new directory: choose another place") from None
        fd = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not try_lock(fd):
                raise ConfigurationError(f"another export is writing to {target}: wait for it, or choose another name")
            put_back(work, target)
            clear(work)
            try:
                check_free(target, overwrite=overwrite)
                yield work
            finally:
                put_back(work, target)
                clear(work)
                with suppress(OSError):
                    work.rmdir()
        finally:
            unlock_and_close(fd)


@contextmanager
def naming(target: Path) -> Iterator[None]:
    """What the file system refuses, as the ``TierError`` that it means."""
    try:
        yield
    except OSError as error:
        meaning, advice = meaning_of(error)
        raise meaning(f"{target} cannot be written: {advice}: {error.strerror or error}") from error


def publish(made: Path, target: Path, *, overwrite: bool) -> None:
    """Give what was made in the work directory the target's name. Errors: as :func:`work_directory`."""
    sync_all(made)
    check_free(target, overwrite=overwrite)
    if os.path.lexists(target) and (made.is_dir() or (target.is_dir() and not target.is_symlink())):
        target.rename(made.with_name(REPLACED))  # a directory takes the place of nothing
    made.replace(target)
    fsync_directory(target.parent)


def put_back(work: Path, target: Path) -> None:
    """Give the old target its name again, if no new one has come in its place."""
    if os.path.lexists(work / REPLACED) and not os.path.lexists(target):
        (work / REPLACED).rename(target)


def check_free(target: Path, *, overwrite: bool) -> None:
    if not overwrite and os.path.lexists(target):
        raise ConfigurationError(f"{target} is there already: choose another name, or say --overwrite to replace it")
    if target.is_dir() and not target.is_symlink():
        names = sorted(path.name for path in target.iterdir())
        steps = [name for name in names if name.startswith("global_step")]
        others = [name for name in names if not EXPORTED.fullmatch(name)] + steps[1:]
        if others:
            raise ConfigurationError(
                f"{target} holds something else than an export ({others[0]}), which --overwrite would delete: choose "
                "another name, or remove it yourself"
            )


def sync_all(made: Path) -> None:
    """Every file and directory of it."""
    for path in sorted(made.rglob("*")) if made.is_dir() else [made]:
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    if made.is_dir():
        fsync_directory(made)


def clear(work: Path) -> None:
    for path in work.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
