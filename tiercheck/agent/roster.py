"""All nominations an agent has taken up, by first tier and rank."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import quote

from tiercheck import keys, objects
from tiercheck.agent.assignment import Assignment
from tiercheck.errors import CapacityExceeded, ConfigurationError, JobConflict, NotFound, TierCheckError, Transient
from tiercheck.keys import NominationKey
from tiercheck.nomination import Nomination
from tiercheck.tiers.namespaces import SHM, namespace_path, namespaces
from tiercheck.tiers.registry import make_driver
from tiercheck.types import Survives

__all__ = ["Roster"]

log = logging.getLogger(__name__)

ASSIGNMENTS_MAX = 4096
FORGET_S = 86400.0
MOUNTS = Path("/proc/self/mounts")

Place = tuple[str, int]
"""A first tier (its driver's URL, the same however the options were given) and a rank."""


class Roster:
    """The assignments of one agent. Errors of one never reach another."""

    def __init__(self, node: str, *, rest_s: float) -> None:
        self.node = node
        self.unreadable: dict[str, str] = {}
        """Where a nomination was found or looked for, and could not be taken up, and why."""
        self._rest_s = rest_s
        self._assignments: dict[Place, Assignment] = {}
        self._changing: dict[Place, asyncio.Lock] = {}

    def __iter__(self) -> Iterator[Assignment]:
        """By rank."""
        places = sorted(self._assignments, key=lambda place: (place[1], place[0]))
        return iter([self._assignments[place] for place in places])

    def __len__(self) -> int:
        return len(self._assignments)

    def get(self, namespace: str, rank: int) -> Assignment:
        """The assignment for a first tier's URL and a rank; its trainer is heard of thereby.

        Errors: ``NotFound``: this agent has taken up no such nomination.
        """
        assignment = self._assignments.get(place_of(namespace, rank))
        if assignment is None:
            raise NotFound(f"the agent of node {self.node!r} knows no nomination of rank {rank}", tier=namespace)
        assignment.heard()
        return assignment

    async def nominate(self, namespace: str, rank: int) -> Assignment:
        """Take up the nomination that lies in the first tier, instead of an older one. Ends a pause. Idempotent.

        Errors: ``NotFound`` without a record there; ``ConfigurationError`` for one that is meant for another agent or
        contradicts itself; ``JobConflict`` where a newer generation has been nominated already; ``TierError``.
        """
        place = place_of(namespace, rank)
        async with self._alone_with(place):
            nomination = await read_nomination(namespace, rank)
            if nomination.node != self.node:
                raise ConfigurationError(
                    f"the nomination of rank {rank} in {namespace} is for the agent {nomination.node!r}, not for "
                    f"{self.node!r}"
                )
            nomination.hierarchy.open()  # refuses what can never be opened, before anything is replaced
            return await self._take_up(place, nomination)

    async def withdraw(self, namespace: str, rank: int) -> None:
        """Forget the nomination and delete its record. Errors: ``TierError``."""
        place = place_of(namespace, rank)
        async with self._alone_with(place):
            async with make_driver(namespace) as first:
                await first.delete([str(NominationKey(rank))])
            await self._drop(place)

    async def take_up_all(self) -> None:
        """Look through this user's namespaces on this node for nominations to this agent: what a restart begins with.

        What cannot be read is in :attr:`unreadable` afterwards. What is known already is left as it is.
        """
        self.unreadable = {}
        for namespace in await asyncio.to_thread(nominating_namespaces):
            for rank in await self._ranks_in(namespace):
                with self._noting(f"{namespace} rank {rank}"):
                    nomination = await read_nomination(namespace, rank)
                    # By the URL that the nomination gives: it has the options that the trainer chose.
                    place = place_of(nomination.tiers[0][1], rank)
                    if nomination.node == self.node and place not in self._assignments:
                        await self._take_up(place, nomination)

    async def tidy(self) -> None:
        """Forget what nobody has needed for long: a trainer that comes back nominates again."""
        for place, assignment in list(self._assignments.items()):
            if not assignment.needed and assignment.silent_s > FORGET_S:
                async with self._alone_with(place):
                    if self._assignments.get(place) is assignment:
                        await self._drop(place)

    async def close(self) -> None:
        """Stop all movers and close their tiers."""
        await asyncio.gather(*(assignment.close() for assignment in self))
        self._assignments.clear()

    async def _ranks_in(self, namespace: str) -> list[int]:
        """The ranks that have nominated in this namespace, to whatever agent."""
        ranks: list[int] = []
        with self._noting(namespace):
            async with make_driver(namespace) as first:
                async for info in first.list("nominations/"):
                    key = keys.parse(info.key)
                    if isinstance(key, NominationKey):
                        ranks.append(key.rank)
        return ranks

    @contextlib.asynccontextmanager
    async def _alone_with(self, place: Place) -> AsyncIterator[None]:
        """Inside, nobody else changes what is assigned there."""
        lock = self._changing.setdefault(place, asyncio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked() and place not in self._assignments:
                self._changing.pop(place, None)

    @contextlib.contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """What goes wrong inside is logged and shown, and the others go on."""
        try:
            yield
        except TierCheckError as error:
            log.warning("%s: %s", what, error)
            self.unreadable[what] = str(error)

    async def _take_up(self, place: Place, nomination: Nomination) -> Assignment:
        known = self._assignments.get(place)
        if known is not None:
            if known.nomination.generation > nomination.generation:
                raise JobConflict(
                    f"generation {known.nomination.generation} of rank {nomination.rank} has been nominated already, "
                    f"and generation {nomination.generation} is older"
                )
            if known.nomination == nomination:
                known.heard()
                known.resume()
                return known
        elif len(self._assignments) >= ASSIGNMENTS_MAX:
            raise CapacityExceeded(f"the agent of node {self.node!r} moves for {ASSIGNMENTS_MAX} ranks already")
        await self._drop(place)
        assignment = self._assignments[place] = Assignment(nomination, rest_s=self._rest_s)
        assignment.start()
        log.info("rank %d of %s: generation %d taken up", nomination.rank, place[0], nomination.generation)
        return assignment

    async def _drop(self, place: Place) -> None:
        known = self._assignments.pop(place, None)
        if known is not None:
            await known.close()


def place_of(namespace: str, rank: int) -> Place:
    """Errors: ``ConfigurationError`` for a URL that cannot be."""
    return make_driver(namespace).url, rank


async def read_nomination(namespace: str, rank: int) -> Nomination:
    """The record in the first tier.

    Errors: ``NotFound``; ``ConfigurationError`` for one that cannot be, or a first tier that no other process can see;
    ``TierError``.
    """
    async with make_driver(namespace) as first:
        if first.capabilities.survives < Survives.PROCESS:
            raise ConfigurationError(
                f"the agent is a process of its own and sees nothing of {first.url}; begin the hierarchy with "
                "shm://NAME, or let the trainer move its objects itself"
            )
        value = objects.unpack(await first.get(str(NominationKey(rank))))
        url = first.url
    try:
        nomination = Nomination.from_object(value)
    except ValueError as error:
        raise ConfigurationError(f"the nomination of rank {rank} in {namespace} cannot be read: {error}") from error
    if nomination.rank != rank or make_driver(nomination.tiers[0][1]).url != url:
        raise ConfigurationError(
            f"the nomination of rank {rank} in {namespace} speaks of rank {nomination.rank} and of "
            f"{nomination.tiers[0][1]}"
        )
    return nomination


def nominating_namespaces() -> list[str]:
    """URLs of this user's shared-memory namespaces that hold nominations, on whatever tmpfs of this node."""
    urls: list[str] = []
    for mount in tmpfs_mounts():
        option = "" if mount == SHM else f"?mount={quote(str(mount))}"
        with contextlib.suppress(PermissionError, Transient):
            names = [found.name for found in namespaces(mount)]
            urls += [
                f"shm://{name}{option}" for name in names if (namespace_path(name, mount) / "nominations").is_dir()
            ]
    return urls


def tmpfs_mounts() -> list[Path]:
    """Where memory is mounted as a file system."""
    lines = [line.split() for line in MOUNTS.read_text().splitlines()]
    found = {Path(fields[1].encode().decode("unicode_escape")) for fields in lines if fields[2] in ("tmpfs", "ramfs")}
    return sorted(found | {SHM})
