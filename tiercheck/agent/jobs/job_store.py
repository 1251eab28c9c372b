"""Replication jobs in the first tier: a trainer writes its record, the agent reads it, an older trainer never harms it.

A generation is registered while its lineage record lies in the first tier. So of two generations the newer one counts,
until somebody removes it to begin again before it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tiercheck.errors import (
    AlreadyExists,
    ConfigurationError,
    Corruption,
    JobConflict,
    NotFound,
    PreconditionFailed,
    Transient,
)
from tiercheck.keys import JobKey, LineageKey
from tiercheck.replication.job import ReplicationJob
from tiercheck.replication.objects.records import read_record, seal
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver
from tiercheck.tiers.url import TierURL, parse_size
from tiercheck.types import PutMode, Survives

__all__ = ["as_agent_opens", "check_newest", "first_tier", "read_job", "remove_job", "write_job"]

WRITES_MAX = 16
"""How often a record that somebody else changes meanwhile is looked at again."""


def as_agent_opens(url: str) -> str:
    """The first tier's URL without what holds for its trainer alone.

    ``size`` is checked at each opening, against memory that is free then: by the time an agent comes back, neighbours
    may have taken it, and what was captured must be moved all the same. ``pin`` insists on a GPU. What the tier keeps
    for reuse stays as the trainer bounds it. And what was removed stays removed: there is nothing to move from it.
    """
    whole = TierURL.parse(url)
    if whole.scheme != "shm":
        return url
    options = {name: value for name, value in whole.options.items() if name not in ("size", "pin")}
    options["make"] = "no"
    if "size" in whole.options:
        try:
            options.setdefault("pool", str(parse_size(whole.options["size"]) // 2))
        except ValueError as error:
            raise ConfigurationError(f"the option 'size' of {whole.text} cannot be used: {error}") from None
    return TierURL(whole.scheme, whole.location, options).text


@asynccontextmanager
async def first_tier(namespace: str) -> AsyncIterator[TierDriver]:
    """The first tier of that URL, open. Errors: ``ConfigurationError`` if no other process can see it;
    ``NotFound`` if it is no more."""
    async with make_driver(as_agent_opens(namespace)) as first:
        if first.capabilities.survives < Survives.PROCESS:
            raise ConfigurationError(
                f"the agent is a process of its own and sees nothing of {first.url}; begin the hierarchy with "
                "shm://NAME, or let the trainer move its objects itself"
            )
        yield first


async def read_job(first: TierDriver, rank: int) -> ReplicationJob:
    """Errors: ``NotFound``; ``ConfigurationError`` for a record of another rank or tier; ``Corruption``;
    ``TierError``."""
    job = await read_record(first, JobKey(rank), ReplicationJob)
    if job.rank != rank or make_driver(job.namespace).url != first.url:
        raise ConfigurationError(
            f"the replication job of rank {rank} in {first.url} speaks of rank {job.rank} and of {job.namespace}"
        )
    return job


async def write_job(first: TierDriver, job: ReplicationJob) -> None:
    """Instead of an older generation's, and of what cannot be read. ``first`` takes conditional puts.

    Errors: ``JobConflict`` if a newer generation is registered, whose record stays; ``TierError``.
    """
    key = JobKey(job.rank)
    content = seal(key, job)
    for _ in range(WRITES_MAX):
        mode = PutMode.CREATE
        try:
            etag = (await first.stat(str(key))).etag
            found = await registered(first, job.rank)
            if found is not None:
                await check_newest(first, found, job)
            mode = PutMode.UPDATE(etag)
        except NotFound:
            pass  # it is created
        try:
            await first.put(str(key), [content], mode=mode)
            return
        except (AlreadyExists, PreconditionFailed):
            continue
    raise Transient("the replication job is changed by others all the time", tier=first.url, key=str(key))


async def remove_job(first: TierDriver, rank: int, generation: int) -> None:
    """Of that generation; another's stays. Idempotent. Errors: ``JobConflict`` for a newer one; ``TierError``."""
    try:
        found = await registered(first, rank)
    except NotFound:
        return
    if found is None:
        return  # what it says nobody knows
    if found.generation > generation:
        raise superseded(first, rank, found.generation, generation)
    if found.generation == generation:
        # A trainer that puts a newer record just now finds it missing, and puts it again (RemoteMover.register).
        await first.delete([str(JobKey(rank))])


async def check_newest(first: TierDriver, known: ReplicationJob, new: ReplicationJob) -> None:
    """Errors: ``JobConflict`` if ``new`` cannot take the place of ``known``."""
    if known.generation > new.generation and await has(first, LineageKey(known.generation)):
        raise superseded(first, new.rank, known.generation, new.generation)
    if known.generation < new.generation and not await has(first, LineageKey(new.generation)):
        raise JobConflict(
            f"generation {new.generation} was removed from {first.url}, and generation {known.generation} of rank "
            f"{new.rank} is registered there; this one stops saving"
        )


def superseded(first: TierDriver, rank: int, newer: int, older: int) -> JobConflict:
    return JobConflict(
        f"generation {newer} of rank {rank} has been registered already in {first.url}, and generation {older}, which "
        "is older, stops saving. Two jobs must not share a hierarchy: end one of them, or give it a name of its own"
    )


async def registered(first: TierDriver, rank: int) -> ReplicationJob | None:
    """``None`` for a record that cannot be read. Errors: ``NotFound``; ``TierError``."""
    try:
        return await read_job(first, rank)
    except (ConfigurationError, Corruption):
        return None


async def has(first: TierDriver, key: LineageKey) -> bool:
    try:
        await first.stat(str(key))
    except NotFound:
        return False
    return True
