"""A rank's mover as its trainer sees it, where the mover runs in the node agent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from tiercheck.agent.client.client import AgentClient
from tiercheck.agent.jobs.job_store import write_job
from tiercheck.agent.protocol.messages import (
    Agree,
    Cycle,
    Drain,
    JobRequest,
    Look,
    MakeRoom,
    Nudge,
    RankReply,
    RoomForBase,
)
from tiercheck.errors import JobConflict, NotFound, TierCheckError
from tiercheck.replication.handle import AGENT, HURRY_S_MAX, MoverStatus
from tiercheck.replication.job import ReplicationJob
from tiercheck.tiers.driver import TierDriver

__all__ = ["RemoteMover"]

log = logging.getLogger(__name__)

REFRESH_S = 1.0
LOOK_S = 30.0
CYCLE_S = 600.0
REGISTRATIONS_MAX = 4


class RemoteMover:
    """The mover handle of a trainer whose :class:`tiercheck.replication.mover.Mover` runs in the node's agent. All
    methods run on one event loop.

    :meth:`register` first; then :meth:`run` is its life, as it is the mover's.
    """

    def __init__(
        self, client: AgentClient, first: TierDriver, job: ReplicationJob, *, deadline_s: float = CYCLE_S
    ) -> None:
        """``deadline_s``: what a call that names no deadline may take."""
        self.job = job
        self._deadline_s = deadline_s
        self._client = client
        self._first = first
        self._status = MoverStatus()
        self._conflict: JobConflict | None = None
        self._nudged = asyncio.Event()
        self._hurry_s = 0.0
        """Of the nudges that the agent was not told of yet, the longest."""
        self._due: Sequence[int] = ()
        """The bases that were left to it last."""
        self._told = True
        """The agent was told of them."""
        self._left: Sequence[int] = ()
        """Those of them that training counts on: an agent that is started anew must hear of them."""
        self._withdrawn = False
        self._registering = asyncio.Lock()
        """Held while an agent that knows nothing of the job is told of it."""

    @property
    def status(self) -> MoverStatus:
        """What the agent last said: with each reply, and about once a second while :meth:`run` runs."""
        return self._status

    @property
    def conflict(self) -> JobConflict | None:
        """Why the mover has stopped for good: a newer generation has opened."""
        return self._conflict

    async def register(self, deadline_s: float | None = None) -> None:
        """Write the replication job down in the first tier and have the agent take it up. Idempotent.

        Errors: ``ConfigurationError`` for a hierarchy that the agent cannot open; ``JobConflict`` if a newer
        generation is registered, whose record stays; ``TierError``; ``DeadlineExceeded``.
        """
        deadline_s = min(LOOK_S, self._deadline_s) if deadline_s is None else deadline_s
        for tries_left in reversed(range(REGISTRATIONS_MAX)):
            await write_job(self._first, self.job)
            try:
                self._take(await self._client.register(*self._who, deadline_s=deadline_s))
                return
            except NotFound:
                # An older generation took its leave just then, and this record for its own.
                if not tries_left:
                    raise

    async def withdraw(self, deadline_s: float = LOOK_S) -> None:
        """Nothing is left to move: the agent forgets the replication job, and :meth:`run` ends. Idempotent.

        Errors: ``JobConflict`` if a newer generation is registered, which stays; ``TierError``;
        ``DeadlineExceeded``.
        """
        self._withdrawn = True  # from here on a look that finds the job unknown does not register it again
        async with self._registering:
            await self._client.withdraw(*self._who, deadline_s=deadline_s)

    def nudge(self, *, hurry_s: float = 0.0) -> None:
        """As :class:`tiercheck.replication.mover.MoverHandle` has it. The agent is told soon."""
        self._hurry_s = max(self._hurry_s, min(hurry_s, HURRY_S_MAX))
        self._nudged.set()

    def leave(self, due: Sequence[int]) -> None:
        """As :class:`tiercheck.replication.mover.MoverHandle` has it. If the agent does not hear of it, it does with
        the next ones."""
        self._due, self._told, self._left = due, False, due
        self._nudged.set()

    async def run(self) -> None:
        """Keep :attr:`status` fresh and the agent alive until cancelled or withdrawn, or until a newer generation
        opens."""
        while self._conflict is None and not self._withdrawn:
            try:
                await self._ask(Look(min(LOOK_S, self._deadline_s), *self._who))
                if await self._nudged_within(REFRESH_S) or not self._told:
                    hurry_s, self._hurry_s = self._hurry_s, 0.0
                    due = () if self._told else tuple(self._due)
                    self._told = True
                    await self._client.tell(Nudge(0.0, *self._who, hurry_s, due))
            except JobConflict as conflict:
                self._conflict = conflict
            except TierCheckError as error:
                if self._withdrawn:
                    return  # the agent has forgotten the job, as it was told
                level = logging.WARNING if AGENT not in self._status.errors else logging.DEBUG
                log.log(level, "the agent cannot be reached: %s; trying again", error)
                errors = {**self._status.errors, AGENT: str(error)}
                # What it said last of whom it waits for may be long over.
                self._status = replace(self._status, idle=False, held_up_by="", errors=errors)
                await asyncio.sleep(REFRESH_S)
        if self._conflict is not None:
            log.error("%s", self._conflict)

    async def cycle(self, *, closing: bool = False) -> bool:
        """As :meth:`tiercheck.replication.mover.Mover.cycle`. Errors: also ``DeadlineExceeded``."""
        return (await self._ask(Cycle(self._deadline_s, *self._who, closing))).result

    async def make_room(self) -> bool:
        """As :meth:`tiercheck.replication.mover.Mover.make_room`. Errors: also ``DeadlineExceeded``."""
        return (await self._ask(MakeRoom(self._deadline_s, *self._who))).result

    async def agree(self, mark: int) -> None:
        """As :class:`tiercheck.replication.mover.MoverHandle` has it."""
        await self._ask(Agree(min(LOOK_S, self._deadline_s), *self._who, mark))

    async def room_for_base(self, deadline_s: float, due: Sequence[int] = (), *, patiently: bool = False) -> None:
        """As :meth:`tiercheck.replication.mover.Mover.room_for_base`."""
        if due:
            self._due, self._told = due, True
        await self._ask(RoomForBase(deadline_s, *self._who, tuple(due), patiently))
        if due and self._status.folds_to >= max(due):
            self._left = due

    async def drain(self, deadline_s: float, *, closing: bool) -> None:
        """As :meth:`tiercheck.replication.mover.Mover.drain`."""
        if self._due and max(self._due) > self._status.folds_to:  # nobody has heard yet whether they are folded
            await self.room_for_base(deadline_s, self._due)
        await self._ask(Drain(deadline_s, *self._who, closing))

    @property
    def _who(self) -> tuple[str, int, int]:
        return self.job.namespace, self.job.rank, self.job.generation

    async def _ask(self, request: JobRequest) -> RankReply:
        if self._conflict is not None:
            raise self._conflict
        try:
            reply = await self._asked(request)
        except JobConflict as conflict:
            self._conflict = conflict
            raise
        self._take(reply)
        return reply

    async def _asked(self, request: JobRequest) -> RankReply:
        try:
            return await self._client.request(request, RankReply)
        except NotFound as unknown:
            if unknown.key is not None:
                raise  # of an object, not of the replication job
            async with self._registering:
                if self._withdrawn:
                    raise
                # An agent that was started anew, and did not find it by itself.
                await self.register()
        return await self._client.request(request, RankReply)

    def _take(self, reply: RankReply) -> None:
        self._status = reply.status
        if self._left and self._status.folds and self._status.folds_to < max(self._left):
            self._due, self._told = self._left, False
        if reply.conflict is not None and self._conflict is None:
            self._conflict = JobConflict(reply.conflict)

    async def _nudged_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._nudged.wait()
        except TimeoutError:
            return False
        self._nudged.clear()
        return True
