"""A place of one's own in a tier that may hold a job's checkpoints: a prefix nobody else uses, removed at the end."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tiercheck.errors import NotFound, Transient
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.namespaces import SHM, namespaces, remove_namespace
from tiercheck.tiers.registry import TierURL, make_driver

__all__ = ["Scratch", "remove_all", "scratch"]

REMOVAL_S = 60.0
PAGE = 1000


@dataclass(frozen=True)
class Scratch:
    """An open driver, and the prefix (it ends in ``/``) under which everything may be done."""

    driver: TierDriver
    prefix: str

    def key(self, name: str) -> str:
        return self.prefix + name


@asynccontextmanager
async def scratch(url: str, purpose: str) -> AsyncIterator[Scratch]:
    """Open the tier and go to work under ``tiercheck-PURPOSE-<16 hex digits>/``, which is removed at the end.

    What the tier holds is neither read nor changed, nor even listed. A shared-memory namespace that was not there
    before goes again, with the memory that it keeps for reuse; a directory that opening made stays, empty. What a kill
    leaves behind lies under that prefix.

    Errors: the registry's and the driver's own, of opening and of deleting; ``TimeoutError`` where the removal
    takes over a minute.
    """
    with new_namespace_removed(TierURL.parse(url)):
        async with opened(make_driver(url), purpose) as place:
            yield place


@asynccontextmanager
async def opened(driver: TierDriver, purpose: str) -> AsyncIterator[Scratch]:
    async with driver:
        place = Scratch(driver, f"tiercheck-{purpose}-{secrets.token_hex(8)}/")
        try:
            yield place
        finally:
            # Also when this task is being cancelled: the tier is as it was before anybody hears of it.
            await asyncio.shield(asyncio.wait_for(remove_all(driver, place.prefix), REMOVAL_S))


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
    """Where opening ``url`` makes a shared-memory namespace, remove it at the end: it would keep memory from others.

    Where another process has come to use it meanwhile, it stays.
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
            with suppress(NotFound, Transient):  # removed, or in use, by another process
                remove_namespace(url.location, mount)
