"""What other distributions add: drivers, policies, codecs, optimizers, each found under a name in an entry-point group.

What this package brings itself is registered the same way. Nothing is imported before a name is asked for.
"""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any, cast

from tiercheck.errors import ConfigurationError

__all__ = ["EntryPointGroup", "distribution_of", "install_command"]


@dataclass(frozen=True)
class EntryPointGroup:
    """The entry points of one kind."""

    group: str
    noun: str
    """What one of them is called in messages."""
    spelling: str = "{!r}"
    """How a name is written in messages."""

    def all(self) -> list[EntryPoint]:
        """By name, then by distribution. One that is found twice (an editable install and its source tree) is one."""
        return list(_all(self.group, tuple(map(_changed_at, sys.path))))

    def names(self) -> dict[str, str]:
        """Each registered name and the distribution that provides it, in order of the names."""
        return {each.name: distribution_of(each) for each in self.all()}

    def find(self, name: str, others: Collection[str] = ()) -> EntryPoint:
        """The one entry point of that name.

        Errors: ``ConfigurationError`` if no distribution provides it (similar names are suggested, also of
        ``others``), or if two do (both are named).
        """
        try:
            return _find(self, name, tuple(sys.path))
        except LookupError:
            raise self.unknown(name, others) from None

    def load(self, name: str) -> Any:
        """The object registered under ``name``.

        Errors: :meth:`find`'s; ``ConfigurationError`` if it cannot be imported (the message says what to install), or
        is not there.
        """
        entry = self.find(name)
        try:
            return entry.load()
        except ImportError as error:
            raise ConfigurationError(
                f"the {self.called(name)} cannot be loaded: {error}; install what it needs with: "
                f"{install_command(entry)}"
            ) from error
        except AttributeError as error:
            raise ConfigurationError(
                f"{distribution_of(entry)} registers {entry.value!r} for the {self.called(name)}, but there is no such "
                f"object; the package is broken or half upgraded"
            ) from error
        except Exception as error:  # whatever its modules do when they are imported
            raise ConfigurationError(
                f"the {self.called(name)} cannot be loaded: importing {entry.value!r} of {distribution_of(entry)} "
                f"raised {type(error).__name__}: {error}"
            ) from error

    def unknown(self, name: str, others: Iterable[str] = ()) -> ConfigurationError:
        """What to raise if nothing is registered under ``name``. ``others``: names that would be known besides."""
        known = sorted([*self.names(), *others])
        close = [self.spelling.format(each) for each in difflib.get_close_matches(name, known, 3)]
        hint = f"did you mean {' or '.join(close)}? Else " if close else ""
        return ConfigurationError(
            f"there is no {self.called(name)} (installed are: {', '.join(known) or 'none'}); {hint}install the package "
            f"that provides it (an entry point {name!r} in the group {self.group!r})"
        )

    def called(self, name: str) -> str:
        """``driver s3://``, or ``codec 'sparse'``."""
        return f"{self.noun} {self.spelling.format(name)}"


@functools.lru_cache(maxsize=32)  # a shard may name any number of codecs that are not installed
def _all(group: str, path: tuple[tuple[str, int | None], ...]) -> list[EntryPoint]:
    """``path``: as of :func:`_registered`."""
    found = {(each.name, distribution_of(each), each.value): each for each in _registered(path).select(group=group)}
    return [found[key] for key in sorted(found)]


@functools.lru_cache(maxsize=1)
def _registered(path: tuple[tuple[str, int | None], ...]) -> EntryPoints:
    """Of all groups at once: reading what is installed takes tens of milliseconds. ``path``: where distributions are
    looked for, and when each place changed."""
    del path
    return cast("EntryPoints", entry_points())  # Python 3.11 has a class of its own for all of them, with select()


def _changed_at(directory: str) -> tuple[str, int | None]:
    """Where a distribution is installed or removed, a directory of its own comes or goes."""
    try:
        return directory, Path(directory).stat().st_mtime_ns
    except OSError:
        return directory, None


@functools.lru_cache(maxsize=256)  # to read what every installed distribution registers takes milliseconds
def _find(group: EntryPointGroup, name: str, path: tuple[str, ...]) -> EntryPoint:
    """``path``: where distributions are looked for. A name that is not found is looked for again each time.

    Errors: ``ConfigurationError`` if it is registered twice; ``LookupError`` if it is not.
    """
    del path
    found = [each for each in group.all() if each.name == name]
    if len(found) == 1:
        return found[0]
    if found:
        owners = " and ".join(f"{distribution_of(each)} ({each.value})" for each in found)
        raise ConfigurationError(f"the {group.called(name)} is registered more than once: by {owners}; keep one")
    raise LookupError(name)


def distribution_of(entry: EntryPoint) -> str:
    return _name_of(entry.dist) if entry.dist is not None else "an unnamed distribution"


@functools.lru_cache(maxsize=64)  # the name stands in a text of kilobytes
def _name_of(distribution: Distribution) -> str:
    return distribution.name


def install_command(entry: EntryPoint) -> str:
    """Installs what the entry point needs: its distribution, with the extras that it names."""
    extras = f"[{','.join(entry.extras)}]" if entry.extras else ""
    return f"pip install '{distribution_of(entry)}{extras}'"
