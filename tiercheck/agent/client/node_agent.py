"""The agent of a rank's node, as a job knows it: found when the job opens, and given back when it ends."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Protocol

from tiercheck.agent.client.endpoint import RankEndpoint
from tiercheck.hierarchy import Hierarchy
from tiercheck.recovery.finding.node_memory import NodeMemory
from tiercheck.replication.job import ReplicationJob
from tiercheck.replication.mover import MoverHandle
from tiercheck.runtime.runtime import Scheduler
from tiercheck.tiers.driver import TierDriver

__all__ = ["FindAgent", "NodeAgent"]


class NodeAgent(Protocol):
    """One rank's dealings with the agent of its node. Until :meth:`register` the agent moves nothing of the rank."""

    @property
    def node(self) -> str:
        """The agent's name."""
        ...

    @property
    def lacks_to_fold(self) -> str:
        """The package that folds need and that is not installed where the agent runs; empty: none."""
        ...

    def endpoint(self, node: int) -> RankEndpoint:
        """What the other ranks need to know of this one's node, which is number ``node`` of its machine.

        Errors: ``ConfigurationError`` if the agent serves no neighbours.
        """
        ...

    async def memories(self, hierarchy: Hierarchy, endpoint: RankEndpoint) -> Sequence[NodeMemory]:
        """What this node's memory holds of the job's ranks, captured here or kept for neighbours. ``hierarchy``: as the
        job was given it, with its fields: also what other nodes of this machine have captured. ``endpoint``: this
        rank's. On the event loop."""
        ...

    def mover(self, job: ReplicationJob, first: TierDriver) -> MoverHandle:
        """What stands for the mover here, and moves nothing before :meth:`register`."""
        ...

    async def register(self) -> None:
        """Hand this rank's objects over to the agent, as :meth:`mover` was told."""
        ...

    async def withdraw(self) -> None:
        """The job is done, and nothing is left to move."""
        ...

    async def end(self) -> None:
        """Give the connection back, and the rank. The agent goes on with what was registered. Idempotent."""
        ...


class FindAgent(Protocol):
    """Finds the agent of this node, or starts one: :meth:`tiercheck.agent.client.session.AgentSession.of`."""

    def __call__(
        self,
        hierarchy: Hierarchy,
        rank: int,
        scheduler: Scheduler,
        deadline_s: float,
        environment: Mapping[str, str],
    ) -> Awaitable[NodeAgent]: ...
