"""One rank's dealings with the agent of its node, from the training thread: find it, meet the neighbours, register.

ZeroMQ is imported only if a job has an agent.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tiercheck.agent.client.endpoint import RankEndpoint
from tiercheck.errors import ConfigurationError, TierCheckError
from tiercheck.hierarchy import Hierarchy
from tiercheck.recovery.finding.node_memory import NodeMemory
from tiercheck.replication.job import ReplicationJob
from tiercheck.replication.mover import MoverHandle
from tiercheck.runtime.runtime import Scheduler
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.url import TierURL

if TYPE_CHECKING:
    from tiercheck.agent.client.client import AgentClient
    from tiercheck.agent.client.remote_mover import RemoteMover
    from tiercheck.agent.client.trainer_lock import TrainerLock

__all__ = ["AgentSession"]

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_TIER = "shm://"
LISTEN_EVERYWHERE = "tcp://0.0.0.0:0"
KEEP_S = 0.5
"""How often a rank that recovers looks whether the agent lives."""
KEEP_LOCK_S = 5.0
"""How often a rank that trains looks whether others still find its lock."""
LEFT_S_MIN = 0.1
READ_S_MAX = 30.0
"""How long a read from another node's memory may stand still."""
TOLD_S = 5.0
"""What a call may take beyond its own deadline, whose error says more."""


class AgentSession:
    """Made by :meth:`of`; :meth:`end` it."""

    def __init__(
        self,
        client: AgentClient,
        lock: TrainerLock,
        scheduler: Scheduler,
        deadline_s: float,
        environment: Mapping[str, str],
    ) -> None:
        self._client = client
        self._lock = lock
        self._scheduler = scheduler
        self._environment = environment
        self._deadline_s = deadline_s
        self._mover: RemoteMover | None = None
        self._registered = False
        self._keeping: concurrent.futures.Future[None] | None = scheduler.start(self._keep())

    @classmethod
    async def of(
        cls,
        hierarchy: Hierarchy,
        rank: int,
        scheduler: Scheduler,
        deadline_s: float,
        environment: Mapping[str, str],
    ) -> Self:
        """Find this node's agent, or start one, and have it move nothing of this rank until :meth:`register`. Until
        then an agent that dies is replaced: the neighbours look for it, too.

        ``TIERCHECK_AGENT_NODE`` is the agent's name; ``TIERCHECK_RUN_DIR`` where it and its trainers meet;
        ``TIERCHECK_KEYS`` the directory of keys without which an agent that is started serves this user on its own
        machine only, and ``TIERCHECK_BIND`` if it listens with them.
        Errors: ``ConfigurationError`` for a hierarchy that another process cannot work with; ``JobConflict`` if another
        process of this node holds the rank, whose mover then goes on; those of the agent's start; ``DeadlineExceeded``
        naming who has not answered.
        """
        check_shareable(hierarchy)
        try:
            from tiercheck.agent.client.client import ensure_agent
            from tiercheck.agent.client.start import START_S_MAX
            from tiercheck.agent.client.trainer_lock import TrainerLock
            from tiercheck.agent.protocol.rundir import RunDirectory, default_node
        except ImportError as error:
            raise ConfigurationError(f"the node agent needs {error.name}: pip install 'tiercheck[agent]'") from error
        keys = environment.get("TIERCHECK_KEYS")
        bind = environment.get("TIERCHECK_BIND") or (LISTEN_EVERYWHERE if keys else None)
        namespace = hierarchy.tiers[0].url
        node = default_node(environment)
        lock = TrainerLock(RunDirectory.of(node, environment), namespace, rank)

        async def found() -> AgentClient:
            began = asyncio.get_running_loop().time()
            start_s = min(START_S_MAX, deadline_s)
            client = await ensure_agent(
                node, keys=Path(keys) if keys else None, bind=bind, environment=environment, deadline_s=start_s
            )
            try:
                left_s = deadline_s - (asyncio.get_running_loop().time() - began)
                await client.pause(namespace, rank, deadline_s=max(LEFT_S_MIN, left_s))
            except BaseException:
                await client.close()
                raise
            return client

        try:
            within_s = deadline_s + TOLD_S
            client = await scheduler.call(found(), what="finding the node's agent", deadline_s=within_s)
            return cls(client, lock, scheduler, deadline_s, environment)
        except BaseException:
            lock.release()
            raise

    @property
    def lacks_to_fold(self) -> str:
        """As of :class:`tiercheck.agent.client.node_agent.NodeAgent`."""
        return self._client.hello.lacks_to_fold

    def endpoint(self, node: int) -> RankEndpoint:
        """What the other ranks need to know of this one's node, which is number ``node`` of its machine.

        Errors: ``ConfigurationError`` if the agent serves no neighbours.
        """
        hello = self._client.hello
        if hello.peer_endpoint is None:
            raise ConfigurationError(f"the agent of node {hello.node!r} serves no neighbours; its log says why")
        name = f"{socket.gethostname()}/{node}"
        return RankEndpoint.of(name, hello.peer_endpoint, hello.peer_server_key, self._environment)

    async def memories(self, hierarchy: Hierarchy, endpoint: RankEndpoint) -> Sequence[NodeMemory]:
        """As :meth:`tiercheck.agent.client.node_agent.NodeAgent.memories`."""
        from tiercheck.agent.client.memories import memories_of_node

        within_s = min(READ_S_MAX, self._deadline_s / 4)
        return await asyncio.to_thread(memories_of_node, hierarchy, self.node, endpoint, within_s)

    def mover(self, job: ReplicationJob, first: TierDriver) -> MoverHandle:
        """What stands for the mover here, and moves nothing before :meth:`register`."""
        from tiercheck.agent.client.remote_mover import RemoteMover

        self._mover = RemoteMover(self._client, first, job, deadline_s=self._deadline_s)
        return self._mover

    async def register(self) -> None:
        """Hand this rank's objects over to the agent, as :meth:`mover` was told."""
        assert self._mover is not None, "there is a mover to register for"
        await self._call(self._mover.register(self._deadline_s), "registering with the node's agent")
        self._lock.recovered()
        self._registered = True

    @property
    def node(self) -> str:
        """The agent's name."""
        return self._client.hello.node

    @property
    def pid(self) -> int:
        """The agent's process."""
        return self._client.hello.pid

    async def withdraw(self) -> None:
        """The job is done, and nothing is left to move."""
        if self._mover is not None:
            await self._call(self._mover.withdraw(self._deadline_s), "taking leave of the node's agent")

    async def end(self) -> None:
        """Give the connection back, and the rank. The agent goes on with what was registered. Idempotent."""
        self._stop_keeping()
        try:
            await self._call(self._client.close(), "leaving the node's agent")
        finally:
            self._lock.release()

    async def _keep(self) -> None:
        """Until cancelled: others find the lock, and while this rank recovers a dead agent is replaced, which finds so
        by the lock. Once it has registered, each look of the mover's keeps the agent alive."""
        told = ""
        while True:
            await asyncio.sleep(KEEP_LOCK_S if self._registered else KEEP_S)
            try:
                self._lock.keep()
            except (OSError, TierCheckError) as error:
                if str(error) != told:
                    told = str(error)
                    log.warning("other jobs may not see that this one uses its first tier: its lock: %s", error)
            if self._registered:
                continue
            try:
                await self._client.keep(self._deadline_s)
            except TierCheckError as error:
                log.warning("the node's agent has died, and there is no other yet: %s", error)

    def _stop_keeping(self) -> None:
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()

    async def _call(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        return await self._scheduler.call(coroutine, what=what, deadline_s=self._deadline_s + TOLD_S)


def check_shareable(hierarchy: Hierarchy) -> None:
    """Errors: ``ConfigurationError`` for tiers that live in this process only."""
    first = hierarchy.tiers[0]
    if not first.url.startswith(FIRST_TIER):
        raise ConfigurationError(
            f"the node's agent takes what was captured from the first tier, so that must be one which other processes "
            f"can open: shm://NAME, not {first.name}"
        )
    for tier in hierarchy.tiers:
        if TierURL.parse(tier.url).has_secret:
            raise ConfigurationError(
                f"the URL of the tier {tier.name} holds a secret, which the node's agent would have to keep: leave it "
                "to the environment or a configuration file of the store's client, or use "
                'CheckpointConfig(mover="trainer")'
            )
    wrapped = [tier.name for tier in hierarchy.tiers if tier.wrap is not None]
    if wrapped:
        raise ConfigurationError(
            f"the tier {wrapped[0]} has a wrapper, a Python function that the node's agent does not have: leave it "
            'out, or use CheckpointConfig(mover="trainer")'
        )
