"""A place of one's own in a tier that may hold a job's checkpoints: a prefix nobody else uses, removed at the end."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tiercheck.errors import TierError, Transient
from tiercheck.runtime.waiting import abandonable, settled
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.posix.directories.object_files import CONTROL
from tiercheck.tiers.posix.files import try_lock
from tiercheck.tiers.registry import TierURL, make_driver
from tiercheck.tiers.shm.namespaces import SHM, namespace_path, namespaces, open_alive

__all__ = ["Scratch", "remove_all", "scratch", "within"]

log = logging.getLogger(__name__)

OPEN_S = 60.0
CLOSE_S = 60.0
REMOVAL_S = 60.0
AGAIN_S = 0.1
PAGE = 1000


@dataclass(frozen=True)
class Scratch:
    """An open driver, and the prefix (it ends in ``/``) under which everything may be done."""

    driver: TierDriver
    prefix: str
    url: TierURL
    """The driver's."""
    tier: TierDriver
    """That of the tier that was asked for, open."""

    def key(self, name: str) -> str:
        return self.prefix + name


@asynccontextmanager
async def scratch(url: str, purpose: str) -> AsyncIterator[Scratch]:
    """Open the tier and go to work under ``tiercheck-PURPOSE-<16 hex digits>/``, which is removed at the end.

    No object that the tier holds is read or changed. Opening does what it does for a job: what dead writers left is
    reclaimed, old uploads among it. In shared memory the place is a namespace of its own, since what a job's may hold
    in all (``size=``) is the job's. A shared-memory namespace that was not there before goes again, with the memory
    that it keeps for reuse, unless somebody has put an object there meanwhile; a directory that opening made stays,
    empty. What a kill leaves behind lies under that prefix, or in that namespace, which ``tiercheck gc`` removes.

    Errors: the registry's and the driver's own, of opening and of deleting; ``Transient`` if opening, the removal
    or closing takes over a minute.
    """
    parsed, name = TierURL.parse(url), f"tiercheck-{purpose}-{secrets.token_hex(8)}"
    with new_namespace_removed(parsed):
        async with opened(make_driver(parsed)) as tier:
            apart = beside(parsed, name)
            if apart is parsed:
                async with emptied(Scratch(tier, f"{name}/", parsed, tier)) as place:
                    yield place
                return
            with new_namespace_removed(apart):
                async with opened(make_driver(apart)) as own, emptied(Scratch(own, f"{name}/", apart, tier)) as place:
                    yield place


def beside(url: TierURL, name: str) -> TierURL:
    """Of shared memory the namespace ``name``, next to that of ``url``; else ``url``."""
    if url.scheme != "shm":
        return url
    options = {option: value for option, value in url.options.items() if option not in ("size", "make")}
    return TierURL(url.scheme, name, MappingProxyType(options))


@asynccontextmanager
async def opened(driver: TierDriver) -> AsyncIterator[TierDriver]:
    async with within(OPEN_S, driver, "opening it"):
        await abandonable(driver.open())
    try:
        yield driver
    finally:
        async with within(CLOSE_S, driver, "closing it"):
            await abandonable(driver.close())


@asynccontextmanager
async def emptied(place: Scratch) -> AsyncIterator[Scratch]:
    try:
        yield place
    finally:
        # Also when this task is being cancelled: the tier is as it was before anybody hears of it.
        await settled(removed(place))


async def removed(place: Scratch) -> None:
    """Errors: ``TierError`` that names the prefix, under which objects may be left."""
    async with within(REMOVAL_S, place.driver, f"removing what lies under {place.prefix}"):
        while True:
            try:
                return await remove_all(place.driver, place.prefix)
            except Transient as error:
                log.debug("removing what lies under %s: %s", place.prefix, error)
            except TierError as error:
                what = f"delete what is left under {place.prefix}: {error.message}"
                raise TierError(what, tier=place.driver.url) from error
            await asyncio.sleep(AGAIN_S)


@asynccontextmanager
async def within(seconds: float, driver: TierDriver, what: str) -> AsyncIterator[None]:
    """A deadline for calls of the driver. Errors: ``Transient``."""
    try:
        async with asyncio.timeout(seconds) as deadline:
            yield
    except TimeoutError:
        if not deadline.expired():
            raise  # the driver's own
        message = f"{what} took over {seconds:.0f} s; look at the tier, and at the network to it"
        raise Transient(message, tier=driver.url) from None


async def remove_all(driver: TierDriver, prefix: str) -> None:
    """Delete every object under ``prefix``, a page at a time."""
    while True:
        found: list[str] = []
        async for info in driver.list(prefix):
            found.append(info.key)
            if len(found) == PAGE:
                break
        await driver.delete(found)
        if len(found) < PAGE:
            return


@contextmanager
def new_namespace_removed(url: TierURL) -> Iterator[None]:
    """If opening ``url`` makes a shared-memory namespace, remove it at the end: it would keep memory from others.

    If another process uses it meanwhile, or has put an object there and is gone, it stays.
    """
    if url.scheme != "shm":
        yield
        return
    mount = Path(url.options.get("mount", SHM))
    before = {info.name for info in namespaces(mount)}
    try:
        yield
    finally:
        if url.location not in before and url.location in {info.name for info in namespaces(mount)}:
            with suppress(FileNotFoundError):  # another process has removed it
                remove_if_empty(namespace_path(url.location, mount))


def remove_if_empty(root: Path) -> None:
    """Remove a namespace that nobody has open and that holds no object; what it keeps for reuse is none."""
    fd = open_alive(root)
    try:
        if try_lock(fd) and not any(holds_objects(root)):
            shutil.rmtree(root)
    finally:
        os.close(fd)


def holds_objects(root: Path) -> Iterator[bool]:
    for folder, folders, names in os.walk(root):
        if Path(folder) == root and CONTROL in folders:
            folders.remove(CONTROL)
        yield bool(names)
