"""Pruning: what a retention policy does not keep goes, by the rules of the mover.

The mover's own retention (:mod:`tiercheck.policy.watermark`) says for each rank what the policy lets go, and the
mover's guard refuses what would break an invariant. So a job that runs meanwhile loses nothing that a recovery to its
newest versions needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from tiercheck.archive.change.live import guarded, observations
from tiercheck.archive.change.removal import Removal, in_order, without
from tiercheck.archive.inventory import Inventory
from tiercheck.archive.shards import verify_shard
from tiercheck.archive.tiers import within
from tiercheck.errors import ConfigurationError, RecoveryError, TierError
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.keys import Key
from tiercheck.policy.compose.retention import AnyKeep, Committed, Keep, KeepEvery, KeepLast, RetentionPolicy
from tiercheck.policy.recovery.lineage import Lineage
from tiercheck.policy.recovery.spans import spans_text
from tiercheck.policy.watermark import Retention
from tiercheck.recovery.finding import refusals
from tiercheck.recovery.reading.patience import time_to_read

__all__ = ["prune", "retention_of", "verify_kept"]

WHO = "prune"
OBJECTS_AT_ONCE = 4
ROUNDS_MAX = 8


@dataclass(frozen=True)
class KeepVersions(RetentionPolicy):
    """These versions stay."""

    versions: frozenset[int]

    def keep(self, seen: Committed) -> Keep:
        return Keep(self.versions)


def retention_of(last: int, every: int, versions: Collection[int]) -> RetentionPolicy:
    """What one of them keeps stays; 0 and an empty collection say nothing. Errors: ``ConfigurationError``."""
    policies: list[RetentionPolicy] = []
    if last:
        policies.append(KeepLast(last))
    if every:
        policies.append(KeepEvery(every))
    if versions:
        policies.append(KeepVersions(frozenset(versions)))
    if not policies:
        raise ConfigurationError(
            "nothing says what to keep: give keep_last, keep_every or keep_versions (--keep-last, --keep-every, "
            "--keep-versions)"
        )
    return policies[0] if len(policies) == 1 else AnyKeep(tuple(policies))


def prune(inventory: Inventory, policy: RetentionPolicy, versions: Collection[int] = ()) -> Removal:
    """``versions``: that the user has named; they are readable now and afterwards.

    Errors: ``ConfigurationError`` for one that cannot be read, and if nothing lies there; ``RecoveryError`` for what
    lies there in a state that a recovery refuses.
    """
    if any(tier.away is not None for tier in inventory.tiers):
        raise RecoveryError(f"a tier cannot be asked what it holds: {inventory.problems[0]}")
    if not any(tier.objects for tier in inventory.tiers):
        places = ", ".join(tier.url for tier in inventory.tiers)
        raise ConfigurationError(f"there is nothing to prune: no job has an object in {places}; check the URL")
    if inventory.branches:
        refusals.check(inventory.past)
    if missing := sorted(set(versions) - set(inventory.readable)):
        raise ConfigurationError(
            f"version {missing[0]} is to be kept, and cannot be read; there are {spans_text(inventory.spans)}"
        )
    gone: dict[int, set[Key]] = {tier.role.index: set() for tier in inventory.tiers}
    refused: dict[str, None] = {}
    # What goes may let go of something else, such as the marker of a base.
    for _ in range(ROUNDS_MAX):
        more, reasons = let_go(without(inventory, gone), inventory.lineage(), Retention(policy))
        refused |= dict.fromkeys(reasons)
        for index, keys in more.items():
            gone[index] |= keys
        if not any(more.values()):
            break
    removal = Removal(inventory, {index: in_order(keys) for index, keys in gone.items()}, tuple(refused))
    check(removal, versions)
    return removal


def let_go(inventory: Inventory, lineage: Lineage, retention: Retention) -> tuple[dict[int, set[Key]], list[str]]:
    """What the mover of some rank would delete, by tier index; and what is refused, and why."""
    gone: dict[int, dict[Key, None]] = {tier.role.index: {} for tier in inventory.tiers}
    refused: list[str] = []
    for seen in observations(inventory, lineage):
        for index, keys in retention.reclaimable(seen).items():
            if index:  # 0 stands for the job's first tier
                gone[index - 1] |= dict.fromkeys(keys)
        refused += map(str, retention.refusals(seen))
    allowed, more = guarded(inventory, gone, lineage, WHO)
    return {index: set(keys) for index, keys in allowed.items()}, [*refused, *more]


def check(removal: Removal, versions: Collection[int]) -> None:
    """By another rule than the one that decided: the newest version, and those that were named, can still be read.
    Errors: ``RecoveryError``."""
    before, after = removal.inventory.readable, removal.after.readable
    kept = {*versions, *([max(before)] if before else [])}
    if lost := sorted(kept - set(after)):
        raise RecoveryError(f"nothing is pruned: version {lost[0]} could not be read any more, and is to stay")


async def verify_kept(hierarchy: OpenHierarchy, removal: Removal, versions: Collection[int], deadline_s: float) -> None:
    """Read every byte of what leads to the newest version, and to those that were named, when the rest is gone: what
    stays is whole. ``deadline_s``: how long a tier may keep silent. Errors: ``RecoveryError`` naming what is not."""
    after = removal.after
    if not removal.objects or not after.readable:
        return
    plans = [plan for version in {*versions, max(after.readable)} for plan in after.at(version).plans]
    sources = iter(dict.fromkeys(source for plan in plans for source in plan.sources))

    async def take() -> None:
        for source in sources:
            tier, nbytes = hierarchy.tiers[source.tier], after.nbytes(source)
            work, what = verify_shard(tier, source.key, nbytes), f"{source.key} was not read"
            try:
                await within(tier, deadline_s + time_to_read(nbytes), work, what)
            except TierError as error:
                raise RecoveryError(
                    f"nothing is pruned: what stays is not whole: {error}. 'tiercheck verify' says what can be read"
                ) from error

    outcomes = await asyncio.gather(*(take() for _ in range(OBJECTS_AT_ONCE)), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
