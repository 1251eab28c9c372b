"""One rank's dealings with the agent of its node, from the training thread: find it, meet the neighbours, nominate.

ZeroMQ is imported only where a job has an agent.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tiercheck.agent.introduction import Introduction
from tiercheck.background import BackgroundLoop
from tiercheck.errors import ConfigurationError
from tiercheck.hierarchy import Hierarchy
from tiercheck.mover import Moving
from tiercheck.nomination import Nomination
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.url import TierURL

if TYPE_CHECKING:
    from tiercheck.agent.client import AgentClient
    from tiercheck.agent.moving import AgentMover

__all__ = ["Enlistment"]

T = TypeVar("T")

FIRST_TIER = "shm://"
LISTEN_EVERYWHERE = "tcp://0.0.0.0:0"


class Enlistment:
    """Made by :meth:`of`; :meth:`end` it."""

    def __init__(self, client: AgentClient, namespace: str, rank: int, loop: BackgroundLoop, deadline_s: float) -> None:
        self._client = client
        self._namespace = namespace
        self._rank = rank
        self._loop = loop
        self._deadline_s = deadline_s
        self._mover: AgentMover | None = None

    @classmethod
    def of(cls, hierarchy: Hierarchy, rank: int, loop: BackgroundLoop, deadline_s: float) -> Self:
        """Find this node's agent, or start one, and have it move nothing of this rank until :meth:`nominate`.

        ``TIERCHECK_AGENT_NODE`` is the agent's name; ``TIERCHECK_KEYS`` the directory of keys without which an agent
        that is started serves this user on its own machine only, and ``TIERCHECK_BIND`` where it listens with them.
        Errors: ``ConfigurationError`` for a hierarchy that another process cannot work with; those of the agent's
        start.
        """
        check_shareable(hierarchy)
        try:
            from tiercheck.agent.client import ensure_agent
            from tiercheck.agent.rundir import default_node
        except ImportError as error:
            raise ConfigurationError(f"the node agent needs {error.name}: pip install 'tiercheck[agent]'") from error
        keys = os.environ.get("TIERCHECK_KEYS")
        bind = os.environ.get("TIERCHECK_BIND") or (LISTEN_EVERYWHERE if keys else None)
        starting = ensure_agent(default_node(), keys=Path(keys) if keys else None, bind=bind)
        client = loop.call(starting, what="finding the node's agent", deadline_s=deadline_s)
        enlistment = cls(client, hierarchy.tiers[0].url, rank, loop, deadline_s)
        enlistment._call(client.pause(enlistment._namespace, rank, pause_s=deadline_s), "pausing the node's agent")
        return enlistment

    def introduction(self, node: int) -> Introduction:
        """What the other ranks need to know of this one's node, which is number ``node`` of its machine.

        Errors: ``ConfigurationError`` where the agent serves no neighbours.
        """
        hello = self._client.hello
        if hello.peer_endpoint is None:
            raise ConfigurationError(f"the agent of node {hello.node!r} serves no neighbours; its log says why")
        return Introduction.of(f"{socket.gethostname()}/{node}", hello.peer_endpoint, hello.peer_server_key)

    def mover(self, nomination: Nomination, first: TierDriver) -> Moving:
        """What stands for the mover here, and moves nothing before :meth:`nominate`."""
        from tiercheck.agent.moving import AgentMover

        self._mover = AgentMover(self._client, first, nomination)
        return self._mover

    def nominate(self) -> None:
        """Hand this rank's objects over to the agent, as :meth:`mover` was told."""
        assert self._mover is not None, "there is a mover to nominate for"
        self._call(self._mover.nominate(), "nominating to the node's agent")

    @property
    def node(self) -> str:
        """The agent's name."""
        return self._client.hello.node

    def withdraw(self) -> None:
        """The job is done, and nothing is left to move."""
        if self._mover is not None:
            self._call(self._mover.withdraw(), "taking leave of the node's agent")

    def end(self) -> None:
        """Give the connection back. The agent goes on with what was nominated. Idempotent."""
        self._call(self._client.close(), "leaving the node's agent")

    def _call(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        return self._loop.call(coroutine, what=what, deadline_s=self._deadline_s)


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
