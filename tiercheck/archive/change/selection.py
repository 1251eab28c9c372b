"""What is to be removed, chosen by name: a version, a generation, or a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tiercheck.archive.change.live import guarded
from tiercheck.archive.change.removal import Removal, in_order, without
from tiercheck.archive.inventory import Inventory
from tiercheck.archive.needs import commits_of
from tiercheck.errors import ConfigurationError
from tiercheck.keys import JobKey, Key, LineageKey, MarkerKey, ShardKey, Stream
from tiercheck.policy.recovery.lineage import Lineage

__all__ = ["of_generation", "of_job", "of_version"]

WHO = "rm"


def of_version(
    inventory: Inventory, version: int, *, generation: int | None = None, job_is_dead: bool = False
) -> Removal:
    """The base of this version, and the differentials and snapshots after it that lead nowhere without it.

    Errors: ``ConfigurationError`` if the version is no base, or a job that runs needs it.
    """
    refuse_away(inventory)
    bases = {
        key.generation
        for tier in inventory.tiers
        for key in tier.shards
        if key.stream is Stream.BASE and key.first == version
    }
    if generation is not None:
        bases &= {generation}
    if not bases:
        of = "" if generation is None else f" of generation {generation}"
        there = sorted({base for number, base in all_bases(inventory) if generation in (None, number)})
        raise ConfigurationError(
            f"there is no base {version}{of}; only a base can be removed, with what follows it: there are bases "
            f"{', '.join(map(str, there)) or '(none)'}"
        )
    if len(bases) > 1:
        numbers = " and ".join(map(str, sorted(bases)))
        raise ConfigurationError(f"generations {numbers} both have a base {version}: name one by generation")
    (owner,) = bases

    def is_base(key: Key) -> bool:
        shard = key.shard if isinstance(key, MarkerKey) else key
        base = owner, Stream.BASE, version
        return isinstance(shard, ShardKey) and (shard.generation, shard.stream, shard.first) == base

    gone = {tier.role.index: {key for key in tier.objects if is_base(key)} for tier in inventory.tiers}
    following = next(iter(sorted(b for g, b in all_bases(inventory) if g == owner and b > version)), None)
    left = without(inventory, gone)
    reached = set(left.readable_of(left.lineage(owner)))

    def hangs_on(key: ShardKey) -> bool:
        if key.generation != owner or key.first <= version or (following is not None and key.first > following):
            return False
        if key.stream is Stream.SNAPSHOT:
            return key.first == version + 1
        return key.stream is Stream.DIFFERENTIAL and reached.isdisjoint(key.versions)

    for tier in inventory.tiers:
        keys = gone[tier.role.index]
        keys |= {key for key in tier.shards if hangs_on(key)}
        keys |= commits_of(key for key in keys if isinstance(key, ShardKey)) & tier.commits
    return decided(inventory, gone, job_is_dead)


def of_generation(inventory: Inventory, generation: int, *, job_is_dead: bool = False) -> Removal:
    """All that the generation has captured, committed and reported. Its record stays: it is small, and tells what the
    others come from. So do its constants, to which bases of others may refer: what none refers to goes when the job's
    mover, or a pruning, next looks. Errors: ``ConfigurationError``."""

    def is_of_it(key: Key) -> bool:
        if isinstance(key, LineageKey | JobKey) or (isinstance(key, ShardKey) and key.stream is Stream.CONSTANT):
            return False
        return key.generation == generation

    return decided(inventory, chosen(inventory, is_of_it, f"generation {generation}"), job_is_dead)


def of_job(inventory: Inventory, *, job_is_dead: bool = False) -> Removal:
    """All of TierCheck's objects. Others are left alone. Errors: ``ConfigurationError``."""
    return decided(inventory, chosen(inventory, lambda key: True, "any job"), job_is_dead)


def chosen(inventory: Inventory, wanted: Callable[[Key], bool], what: str) -> dict[int, set[Key]]:
    refuse_away(inventory)
    gone = {tier.role.index: set(filter(wanted, tier.objects)) for tier in inventory.tiers}
    if not any(gone.values()):
        raise ConfigurationError(f"there is nothing of {what} in {', '.join(tier.url for tier in inventory.tiers)}")
    return gone


def refuse_away(inventory: Inventory) -> None:
    """Errors: ``ConfigurationError``."""
    if away := [tier for tier in inventory.tiers if tier.away is not None]:
        raise ConfigurationError(f"{away[0].url} cannot be asked what it holds ({away[0].away}): leave it out, or wait")


def decided(inventory: Inventory, gone: dict[int, set[Key]], job_is_dead: bool) -> Removal:
    """Errors: ``ConfigurationError`` if a job that runs needs some of it, and the user has not said that none does."""
    if not job_is_dead:
        lineage = not_keeping(inventory.lineage())
        if lineage.newest not in inventory.branches and any(gone.values()):
            raise ConfigurationError(
                "no record tells which generation is the newest here, so that nobody knows what a job may need: if the "
                "job is dead, say so (job_is_dead=True, or --job-is-dead)"
            )
        _, refused = guarded(inventory, gone, lineage, WHO)
        if refused:
            raise ConfigurationError(
                f"{refused[0]}: a store does not tell whether a job runs. If it is dead, and is not to go on from "
                "there, say so (job_is_dead=True, or --job-is-dead)"
            )
    return Removal(inventory, {index: in_order(keys) for index, keys in gone.items()})


def not_keeping(lineage: Lineage) -> Lineage:
    """The lineage without what a start has kept on purpose: the user now says that it may go."""
    if lineage.newest not in lineage.branches:
        return lineage
    branches = {**lineage.branches, lineage.newest: replace(lineage.branches[lineage.newest], kept=())}
    return replace(lineage, branches=branches)


def all_bases(inventory: Inventory) -> set[tuple[int, int]]:
    shards = (key for tier in inventory.tiers for key in tier.shards)
    return {(key.generation, key.first) for key in shards if key.stream is Stream.BASE}
