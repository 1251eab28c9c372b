"""All replication jobs an agent has taken up, by first tier and rank."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import lru_cache, partial
from urllib.parse import quote

from tiercheck import keys
from tiercheck.agent.client.trainer_lock import trainer_of
from tiercheck.agent.jobs.departed import LOOK_AGAIN, LOOK_S_MAX, free_memory, is_past
from tiercheck.agent.jobs.job_store import check_newest, first_tier, read_job, remove_job
from tiercheck.agent.jobs.leaving import free_copies
from tiercheck.agent.jobs.replicator import RankReplicator
from tiercheck.agent.protocol.rundir import RunDirectory
from tiercheck.errors import CapacityExceeded, ConfigurationError, JobConflict, NotFound, TierCheckError
from tiercheck.folding.owner import FoldProcess
from tiercheck.keys import REPLICATION, JobKey
from tiercheck.replication.job import ReplicationJob
from tiercheck.tiers.registry import make_driver
from tiercheck.tiers.shm.found import own_namespaces
from tiercheck.tiers.shm.namespaces import SHM

__all__ = ["JobRegistry"]

log = logging.getLogger(__name__)

REPLICATORS_MAX = 4096
FORGET_S = 86400.0
LOOKS_MAX = 150
"""After so many looks, in about a day, a job that has ended is not looked after any more."""

ReplicatorKey = tuple[str, int]
"""A first tier (its driver's URL, the same however the options were given) and a rank."""


class JobRegistry:
    """The replicators of one agent. Errors of one never reach another."""

    def __init__(self, node: str, *, folds_in: FoldProcess, rest_s: float, abandon_s: float = math.inf) -> None:
        """``folds_in``, ``rest_s`` and ``abandon_s``: as for :class:`RankReplicator`."""
        self.node = node
        self.unreadable: dict[str, str] = {}
        """Where a replication job was found or looked for, and could not be taken up, and why."""
        self._folds_in = folds_in
        self._rest_s = rest_s
        self._abandon_s = abandon_s
        self._replicators: dict[ReplicatorKey, RankReplicator] = {}
        self._changing: dict[ReplicatorKey, asyncio.Lock] = {}
        self._withdrawn: dict[ReplicatorKey, ReplicationJob] = {}
        self._forgotten: set[ReplicatorKey] = set()
        """Those of them that did not take their leave: they are looked for as long as their memory is there."""
        """Those that have ended and left what they captured."""
        self._looks: dict[ReplicatorKey, tuple[float, int]] = {}
        """Of those whose trainers are gone: when it is looked again whether they are past, and how often it was."""
        self._looking: asyncio.Task[None] | None = None

    def __iter__(self) -> Iterator[RankReplicator]:
        """By rank."""
        ordered = sorted(self._replicators, key=lambda key: (key[1], key[0]))
        return iter([self._replicators[key] for key in ordered])

    def __len__(self) -> int:
        return len(self._replicators)

    def get(self, namespace: str, rank: int, generation: int | None = None) -> RankReplicator:
        """The replicator for a first tier's URL and a rank; its trainer is heard of thereby. ``generation``: of whoever
        asks; ``None`` before it has one.

        Errors: ``NotFound``: this agent has taken up no such replication job. ``JobConflict``: it has, of a newer one.
        """
        replicator = self._replicators.get(replicator_key(namespace, rank))
        if replicator is None or (generation is not None and generation > replicator.job.generation):
            what = "" if generation is None else f", generation {generation}"
            raise NotFound(
                f"the agent of node {self.node!r} knows no replication job of rank {rank}{what}", tier=namespace
            )
        if generation is not None:
            self._check_not_older(replicator, generation)
        replicator.heard()
        return replicator

    async def register(self, namespace: str, rank: int, generation: int) -> RankReplicator:
        """Take up the replication job that lies in the first tier, instead of an older one. Ends a pause. Idempotent.

        Errors: ``NotFound`` without a record of that generation there; ``ConfigurationError`` for one that is meant
        for another agent or contradicts itself; ``JobConflict`` if a newer generation is registered; ``TierError``.
        """
        key = replicator_key(namespace, rank)
        async with self._alone_with(key), first_tier(namespace) as first:
            job = await read_job(first, rank)
            if job.generation < generation:
                raise NotFound(f"only generation {job.generation} of rank {rank} is registered", tier=namespace)
            if job.generation > generation:
                raise JobConflict(
                    f"generation {job.generation} of rank {rank} is registered in {namespace}, and generation "
                    f"{generation} is older; this one stops saving"
                )
            if job.node != self.node:
                raise ConfigurationError(
                    f"the replication job of rank {rank} in {namespace} is for the agent {job.node!r}, not for "
                    f"{self.node!r}"
                )
            job.hierarchy.open()  # refuses what can never be opened, before anything is replaced
            job.policies()  # and policies that are not installed where the agent runs
            if (known := self._replicators.get(key)) is not None:
                await check_newest(first, known.job, job)
            replicator = await self._take_up(key, job)
            replicator.resume()
            return replicator

    async def withdraw(self, namespace: str, rank: int, generation: int) -> None:
        """Forget the replication job of that generation, and delete its record.

        Errors: ``JobConflict`` if a newer one is registered, which stays; ``TierError``.
        """
        key = replicator_key(namespace, rank)
        async with self._alone_with(key):
            known = self._replicators.get(key)
            if known is not None:
                self._check_not_older(known, generation)
            with contextlib.suppress(NotFound):  # its memory was removed, and the record with it
                async with first_tier(namespace) as first:
                    await remove_job(first, rank, generation)
            if known is not None and known.job.generation == generation:
                await self._drop(key)
                if len(self._withdrawn) < REPLICATORS_MAX:
                    self._withdrawn[key] = known.job
                await free_copies(known.job)

    async def take_up_all(self) -> None:
        """Take up the replication jobs for this agent in this user's namespaces on this node. A restart begins with it.

        What cannot be read is in :attr:`unreadable` afterwards. What is known already is left as it is.
        """
        self.unreadable = {}
        for namespace in await asyncio.to_thread(namespaces_with_jobs):
            for rank in await self._ranks_in(namespace):
                with self._noting(f"{namespace} rank {rank}"):
                    async with first_tier(namespace) as first:
                        job = await read_job(first, rank)
                    # By the URL that the replication job gives: it has the options that the trainer chose.
                    key = replicator_key(job.namespace, rank)
                    if job.node == self.node and key not in self._replicators:
                        await self._take_up(key, job)

    async def tidy(self) -> None:
        """Forget what nobody has needed for long, and what has lost its memory: a trainer that comes back registers
        again."""
        for key, replicator in list(self._replicators.items()):
            if replicator.gone or (not replicator.needed and replicator.silent_s > FORGET_S):
                async with self._alone_with(key):
                    if self._replicators.get(key) is replicator:
                        if replicator.left:  # the job may go on elsewhere yet, however long it has waited
                            self._withdrawn[key] = replicator.job
                            self._forgotten.add(key)
                        await self._drop(key)

    def free_departed(self) -> None:
        """Begin to free what ranks have left that are no more, or run elsewhere. Nobody waits for it."""
        if self._looking is None or self._looking.done():
            left = {key: each.job for key, each in self._replicators.items() if each.left} | self._withdrawn
            self._looks = {key: self._looks.get(key, (0.0, 0)) for key in left}
            due = {key: left[key] for key, (at, _) in self._looks.items() if at <= _now()}
            if due:
                self._looking = asyncio.create_task(self._free(due), name="departed ranks")

    async def _free(self, due: Mapping[ReplicatorKey, ReplicationJob]) -> None:
        for key, job in due.items():
            where = f"rank {key[1]} of {key[0]}"
            try:
                async with asyncio.timeout(LOOK_S_MAX):
                    past = await is_past(job)
                if past and await self._forget(key, job):
                    log.info("%s: a newer generation has settled; what generation %d left goes", where, job.generation)
                    await free_copies(job)
            except (TierCheckError, TimeoutError) as error:
                log.info("%s: what it left in memory stays for now: %s", where, error)
            except Exception:
                # A driver's bug is this rank's trouble alone: the other ranks are looked at all the same.
                log.exception(
                    "%s: an unexpected error. What it left in memory stays for now. If this goes on, report the error, "
                    "and free the memory by `tiercheck gc` on this node once the job has ended",
                    where,
                )
            finally:
                looked = self._looks[key][1] + 1
                self._looks[key] = _now() + LOOK_AGAIN.pause_s(looked), looked
                if looked >= LOOKS_MAX and key not in self._forgotten:
                    self._withdrawn.pop(key, None)

    async def _forget(self, key: ReplicatorKey, job: ReplicationJob) -> bool:
        """Free its memory, unless its trainer has come back. Returns whether it is forgotten. Errors: ``TierError``."""
        async with self._alone_with(key):
            known = self._replicators.get(key)
            if known is None:
                if self._withdrawn.get(key) != job or trainer_of(RunDirectory.of(self.node), *key) is not None:
                    return False
            elif known.job != job or not known.left:
                return False
            await self._drop(key)
            self._withdrawn[key] = job  # until it is freed
            await free_memory(job)
            del self._withdrawn[key]
            self._forgotten.discard(key)
            return True

    async def close(self) -> None:
        """Stop all movers and close their tiers."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        await asyncio.gather(*(replicator.close() for replicator in self))
        self._replicators.clear()

    def _check_not_older(self, replicator: RankReplicator, generation: int) -> None:
        newest = replicator.job
        if generation < newest.generation:
            raise JobConflict(
                f"the agent of node {self.node!r} has taken up generation {newest.generation} of rank {newest.rank}, "
                f"while generation {generation} is still running; this one stops saving. Two jobs must not share a "
                "hierarchy: end one of them, or give it a name of its own"
            )

    async def _ranks_in(self, namespace: str) -> list[int]:
        """The ranks that have registered in this namespace, to whatever agent."""
        ranks: list[int] = []
        with self._noting(namespace):
            async with first_tier(namespace) as first:
                async for info in first.list(REPLICATION):
                    key = keys.parse(info.key)
                    if isinstance(key, JobKey):
                        ranks.append(key.rank)
        return ranks

    @contextlib.asynccontextmanager
    async def _alone_with(self, key: ReplicatorKey) -> AsyncIterator[None]:
        """Inside, nobody else changes what is assigned there."""
        lock = self._changing.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked() and key not in self._replicators:
                self._changing.pop(key, None)

    @contextlib.contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """What goes wrong inside is logged and shown, and the others go on. What vanishes meanwhile is no error."""
        try:
            yield
        except NotFound as error:
            log.info("%s: %s", what, error)
        except TierCheckError as error:
            log.warning("%s: %s", what, error)
            self.unreadable[what] = str(error)
        except Exception as error:
            # Whatever one record makes a driver do: it keeps no other rank from its mover.
            log.exception("%s cannot be taken up", what)
            self.unreadable[what] = f"{type(error).__name__}: {error}"

    async def _take_up(self, key: ReplicatorKey, job: ReplicationJob) -> RankReplicator:
        known = self._replicators.get(key)
        if known is not None and known.job == job and not known.gone:
            known.heard()
            return known
        if known is None and len(self._replicators) >= REPLICATORS_MAX:
            raise CapacityExceeded(f"the agent of node {self.node!r} moves for {REPLICATORS_MAX} ranks already")
        await self._drop(key)
        self._withdrawn.pop(key, None)
        self._forgotten.discard(key)
        replicator = self._replicators[key] = RankReplicator(
            job,
            folds_in=self._folds_in,
            rest_s=self._rest_s,
            abandon_s=self._abandon_s,
            trainer=partial(trainer_of, RunDirectory.of(self.node), *key),
        )
        replicator.start()
        log.info("rank %d of %s: generation %d taken up", job.rank, key[0], job.generation)
        return replicator

    async def _drop(self, key: ReplicatorKey) -> None:
        known = self._replicators.pop(key, None)
        if known is not None:
            await known.close()


def _now() -> float:
    return asyncio.get_running_loop().time()


def replicator_key(namespace: str, rank: int) -> ReplicatorKey:
    """Errors: ``ConfigurationError`` for a URL that cannot be."""
    return driver_url(namespace), rank


@lru_cache(REPLICATORS_MAX)
def driver_url(namespace: str) -> str:
    """Each request of a trainer asks for it, and a driver takes a third of what the request does."""
    return make_driver(namespace).url


def namespaces_with_jobs() -> list[str]:
    """URLs of the namespaces of this user's jobs that hold replication jobs, on whatever tmpfs of this node.

    What a peer server keeps is none of them: there a neighbour could register.
    """
    urls: list[str] = []
    for name, root in own_namespaces():
        if (root / REPLICATION).is_dir():
            urls.append(f"shm://{name}" + ("" if root.parent == SHM else f"?mount={quote(str(root.parent))}"))
    return urls
