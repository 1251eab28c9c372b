"""What dead processes have left: in tiers, and in this node's shared memory.

Nothing of a live process is ever touched. In a tier, a driver knows what it would reclaim when it opens: files that
their writers have let go of, uploads that nobody adds to. In shared memory, whoever has a namespace open holds its
lock. A namespace that nobody holds may still be what a job that has failed comes back for: it must not have changed for
a while.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from tiercheck.archive.tiers import open_tier
from tiercheck.errors import NotFound, TierError
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.runtime.front import ThreadScheduler, run
from tiercheck.tiers.shm.namespaces import SHM, NamespaceKind, changed_s, namespace_path, namespaces, remove_unheld
from tiercheck.tiers.url import TierURL
from tiercheck.tiers.wrappers.read_only import ReadOnlyDriver
from tiercheck.types import Leftover

__all__ = ["FoundLeftover", "collect"]

UNCHANGED_S = 24 * 3600.0
IN_USE = "a process has it open"


@dataclass(frozen=True)
class FoundLeftover:
    """Something that a dead process has left, or a namespace that a process may still want."""

    where: str
    """The tier's URL, without secrets."""
    left: Leftover
    stays: str | None = None
    """Why it is left alone."""
    removed: bool = False


def collect(
    *urls: str, older_than_s: float = UNCHANGED_S, dry_run: bool = False, deadline_s: float = 60.0, mount: Path = SHM
) -> tuple[FoundLeftover, ...]:
    """Remove what dead processes have left in these tiers; without a URL, in this node's shared memory.

    ``older_than_s``: a namespace that changed later stays. Errors: ``ConfigurationError`` for a URL that is none;
    ``TierError`` naming the tier.
    """
    if not urls:
        return of_node(older_than_s, dry_run=dry_run, mount=mount)
    scheduler = ThreadScheduler()
    try:
        found: list[FoundLeftover] = []
        for url in urls:
            what = f"looking for leftovers in {TierURL.parse(url)}"
            work = of_tier(url, deadline_s, dry_run=dry_run)
            found += run(scheduler.call(work, what=what, deadline_s=4 * deadline_s))
        return tuple(found)
    finally:
        run(scheduler.close())


async def of_tier(url: str, deadline_s: float, *, dry_run: bool) -> list[FoundLeftover]:
    left = await leftovers_in(Tier(url, wrap=ReadOnlyDriver), deadline_s)
    if dry_run:
        return left
    still = {each.left.name for each in await leftovers_in(Tier(url), deadline_s, reclaims=True)}
    return [replace(each, removed=each.left.name not in still) for each in left]


async def leftovers_in(tier: Tier, deadline_s: float, *, reclaims: bool = False) -> list[FoundLeftover]:
    """``reclaims``: those that are left when what can be reclaimed was."""
    (opened,) = Hierarchy.of(tier).open().tiers
    await open_tier(opened, deadline_s)
    try:
        if reclaims:
            await opened.driver.reclaim()
        return [FoundLeftover(opened.driver.url, each) for each in await opened.driver.leftovers()]
    finally:
        await opened.driver.close()


def of_node(older_than_s: float, *, dry_run: bool, mount: Path) -> tuple[FoundLeftover, ...]:
    found: list[FoundLeftover] = []
    for each in namespaces(mount):
        age_s = max(0.0, time.time() - changed_s(namespace_path(each.name, mount)))
        what = "copies kept for neighbours" if each.kind is NamespaceKind.NEIGHBOURS else "memory of a job"
        left = Leftover(what, each.name, each.used_bytes, age_s)
        stays = IN_USE if each.in_use else None
        if stays is None and age_s < older_than_s:
            stays = f"changed in the last {older_than_s / 3600:g} h: a job may come back for it"
        removed = False
        if stays is None and not dry_run:
            removed, stays = taken_away(each.name, older_than_s, mount)
        found.append(FoundLeftover(f"shm://{each.name}", left, stays, removed))
    return tuple(found)


def taken_away(name: str, older_than_s: float, mount: Path) -> tuple[bool, str | None]:
    """Whether the namespace is gone; if not, why."""
    try:
        return (True, None) if remove_unheld(name, older_than_s, mount) else (False, "a process has opened it just now")
    except NotFound:
        return True, None
    except TierError as error:
        return False, str(error)
