"""What a trainer holds of the agent of its node. An agent that has died is started again, and costs a pause."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

import zmq
from msgspec.structs import replace as changed

from tiercheck.agent.client.connection import AgentGone, Connection
from tiercheck.agent.client.start import START_S_MAX, start_detached, starting
from tiercheck.agent.protocol.messages import (
    HelloReply,
    Pause,
    RankReply,
    RegisterJob,
    Request,
    Status,
    StatusReply,
    Stop,
    StopReply,
    Withdraw,
)
from tiercheck.agent.protocol.rundir import RunDirectory
from tiercheck.agent.protocol.settings import AgentSettings
from tiercheck.errors import DeadlineExceeded, Transient
from tiercheck.folding.settings import given_by
from tiercheck.runtime.backoff import Backoff

__all__ = ["AgentClient", "connect_agent", "ensure_agent"]

log = logging.getLogger(__name__)

T = TypeVar("T")

REQUEST_S = 30.0
"""For what the agent answers from memory, or with a look into shared memory."""
PLATFORM_S = 20.0
"""How long a platform that runs the agent has to bring it back before a trainer starts one itself."""
LEFT_S_MIN = 0.1
"""What a request that is made again may take at least; 0 would mean something else."""
END_S_MAX = 45.0
"""How long an agent may take to end, beside bringing everything home: longer than it gives itself."""
AGAIN_S = 0.1
CONNECT = Backoff(0.05, 1.0)


class AgentClient:
    """A connection to one node's agent. All methods run on one event loop.

    Made by :func:`ensure_agent`, or by :func:`connect_agent` if none is to be started. Each request may find that
    the agent has died: then it is started again (only by a client of :func:`ensure_agent`) and asked again.
    """

    def __init__(
        self, run: RunDirectory, settings: AgentSettings | None, environment: Mapping[str, str] = os.environ
    ) -> None:
        """``settings``, ``environment``: of an agent that is started; ``None``: none is."""
        self._run = run
        self._settings = settings
        self._environment = environment
        self._connection: Connection | None = None
        self._hello: HelloReply | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    @property
    def hello(self) -> HelloReply:
        """Who the agent is: its process, peer endpoint and key, and status page. After a restart, the new one's."""
        assert self._hello is not None, "not connected"
        return self._hello

    async def request(self, request: Request, kind: type[T], *, again: bool = True) -> T:
        """The agent's reply. If the agent dies meanwhile it is started again, and asked again with what is left of
        the deadline (``again``). Errors: the request's own; ``DeadlineExceeded``; ``ConfigurationError``."""
        loop = asyncio.get_running_loop()
        until = loop.time() + (request.deadline_s or request.look_s)
        with self._speaking():
            while True:
                connection = await self._connected(max(LEFT_S_MIN, until - loop.time()))
                left_s = max(LEFT_S_MIN, until - loop.time()) if request.deadline_s else 0.0
                try:
                    return await connection.request(replace(request, deadline_s=left_s), kind)
                except AgentGone:
                    await self._disconnect(connection)
                    if not again or self._closed or loop.time() >= until:
                        raise

    async def tell(self, request: Request) -> None:
        """Send what wants no reply; if the agent is gone it is lost. Errors: ``Transient``."""
        if self._connection is not None:
            with self._speaking():
                await self._connection.tell(request)

    async def register(self, namespace: str, rank: int, generation: int, *, deadline_s: float = REQUEST_S) -> RankReply:
        """Have the replication job taken up that lies in the first tier ``namespace`` (its URL). Idempotent.

        Errors: ``NotFound``, ``ConfigurationError``, ``JobConflict``, ``TierError``, ``DeadlineExceeded``.
        """
        return await self.request(RegisterJob(deadline_s, namespace, rank, generation), RankReply)

    async def pause(self, namespace: str, rank: int, *, deadline_s: float = REQUEST_S) -> None:
        """Wait until nothing of this rank moves, which its trainer holds (:class:`TrainerLock`) and is about to
        recover. It stays so until that registers, or is gone.

        Errors: ``DeadlineExceeded`` naming the store that has not ended what it was asked for.
        """
        await self.request(Pause(deadline_s, namespace, rank), RankReply)

    async def keep(self, deadline_s: float = START_S_MAX) -> None:
        """See to it that an agent lives: one that has died is started again. Errors: as :meth:`connect`."""
        connection = self._connection
        if connection is not None and connection.lives:
            return
        if connection is not None:
            await self._disconnect(connection)
        await self.connect(deadline_s)

    async def withdraw(self, namespace: str, rank: int, generation: int, *, deadline_s: float = REQUEST_S) -> None:
        """Have the replication job forgotten: nothing of this rank is left to move. Idempotent.

        Errors: ``JobConflict`` if a newer generation is registered, which stays; ``TierError``; ``DeadlineExceeded``.
        """
        await self.request(Withdraw(deadline_s, namespace, rank, generation), RankReply)

    async def status(self, *, deadline_s: float = REQUEST_S) -> dict[str, Any]:
        """What the status page shows, as plain values."""
        reply = await self.request(Status(deadline_s), StatusReply)
        value: dict[str, Any] = json.loads(reply.json)
        return value

    async def stop(self, *, drain: bool = True, deadline_s: float | None = None) -> None:
        """End the agent, and wait until it has ended. ``drain``: first bring everything to its tiers.

        Errors: ``DeadlineExceeded`` if it still runs after ``deadline_s`` (``None``: what it may take by its own
        settings).
        """
        if deadline_s is None:
            deadline_s = END_S_MAX + (self.hello.drain_s if drain else 0.0)
        until = asyncio.get_running_loop().time() + deadline_s
        with suppress(AgentGone):
            await self.request(Stop(deadline_s, drain), StopReply, again=False)
        if not await self._agent_lives(False, until):
            raise DeadlineExceeded(f"the agent of node {self._run.node!r} still runs after {deadline_s:g} s")

    async def close(self) -> None:
        """Give the connection back; the agent goes on. Idempotent."""
        self._closed = True
        if self._connection is not None:
            await self._disconnect(self._connection)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self, deadline_s: float = START_S_MAX) -> None:
        """Errors: ``DeadlineExceeded``, ``ConfigurationError`` if no agent can be had; ``Transient`` if none runs
        and none is to be started."""
        with self._speaking():
            await self._connected(deadline_s)

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        """Local resource errors (such as too many open files) are transient."""
        try:
            yield
        except (OSError, zmq.ZMQError) as error:
            raise Transient(f"the agent of node {self._run.node!r} cannot be spoken to: {error}") from error

    async def _connected(self, deadline_s: float) -> Connection:
        if self._closed:
            raise Transient(f"the client of the agent of node {self._run.node!r} is closed")
        async with self._connecting:
            if self._connection is None:
                await self._connect(deadline_s)
            assert self._connection is not None
            return self._connection

    async def _connect(self, deadline_s: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline_s
        for failures in itertools.count(1):
            connection: Connection | None = None
            try:
                await self._have_agent(until)
                connection = Connection(self._run)
                hello = await connection.hello(max(LEFT_S_MIN, until - loop.time()))
            except BaseException as error:
                if connection is not None:
                    await connection.close()
                may_start = self._settings is not None or connection is not None
                if isinstance(error, AgentGone) and may_start and loop.time() < until:
                    await asyncio.sleep(CONNECT.pause_s(failures))  # it is still starting, or was killed meanwhile
                    continue
                raise
            if self._hello is not None and hello.incarnation != self._hello.incarnation:
                log.warning("the agent of node %s is another one now: process %d", self._run.node, hello.pid)
            self._connection, self._hello = connection, hello
            return

    async def _have_agent(self, until: float) -> None:
        """See to it that one runs."""
        loop = asyncio.get_running_loop()
        self._run.make()
        if self._run.agent_lives():
            return
        if self._settings is None:
            raise AgentGone(f"no agent of node {self._run.node!r} runs here; start one with: tiercheck agent")
        if self._hello is not None and not self._hello.detached:
            log.warning(
                "the agent of node %s has ended: what runs it has %g s to bring it back, then one is started here",
                self._run.node,
                PLATFORM_S,
            )
            await self._agent_lives(True, min(until, loop.time() + PLATFORM_S))
        async with starting(self._run, max(1.0, until - loop.time())):
            if not self._run.agent_lives():
                await start_detached(self._run, self._settings, self._environment, max(1.0, until - loop.time()))

    async def _agent_lives(self, wanted: bool, until: float) -> bool:
        """Wait until one runs, or none; whether it came to that in time. The lock tells, and has to be asked."""
        while self._run.agent_lives() != wanted:
            if asyncio.get_running_loop().time() > until:
                return False
            await asyncio.sleep(AGAIN_S)
        return True

    async def _disconnect(self, connection: Connection) -> None:
        if self._connection is connection:
            self._connection = None
        await connection.close()


async def ensure_agent(
    node: str,
    *,
    keys: Path | None = None,
    bind: str | None = None,
    memory_bytes: int | None = None,
    linger_s: float | None = None,
    abandon_s: float | None = None,
    environment: Mapping[str, str] = os.environ,
    deadline_s: float = START_S_MAX,
) -> AgentClient:
    """A client of the agent named ``node`` on this machine, which is started, detached, if none runs.
    ``environment`` says where its run directory is (``TIERCHECK_RUN_DIR``), and is that of an agent that is started.

    Of many processes that call this at once one starts it. What is given besides the name holds for an agent that is
    started; one that runs already keeps its own settings. Errors: ``ConfigurationError`` or ``DeadlineExceeded``, with
    the end of the agent's log, where it does not come up.
    """
    chosen = AgentSettings(
        node=node,
        detached=True,
        memory_bytes=memory_bytes,
        **given_by(environment),
    )
    if keys is not None:
        chosen = changed(chosen, keys=str(keys.absolute()))
    if bind is not None:
        chosen = changed(chosen, bind=bind)
    if linger_s is not None:
        chosen = changed(chosen, linger_s=linger_s)
    if abandon_s is not None:
        chosen = changed(chosen, abandon_s=abandon_s)
    return await _client(node, chosen, environment, deadline_s)


async def connect_agent(node: str, *, deadline_s: float = 10.0) -> AgentClient:
    """A client of an agent that runs. Errors: ``Transient`` if none does."""
    return await _client(node, None, os.environ, deadline_s)


async def _client(
    node: str, settings: AgentSettings | None, environment: Mapping[str, str], deadline_s: float
) -> AgentClient:
    client = AgentClient(RunDirectory.of(node, environment), settings, environment)
    try:
        await client.connect(deadline_s)
    except BaseException:
        await client.close()
        raise
    return client
