"""The agent itself: registry, router, peer server and status page under one roof."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Self

import msgspec
import zmq.asyncio

from tiercheck.agent.client.client import connect_agent
from tiercheck.agent.client.trainer_lock import trainers
from tiercheck.agent.jobs.registry import JobRegistry
from tiercheck.agent.protocol.messages import (
    PROTOCOLS,
    Agree,
    Cycle,
    Drain,
    Hello,
    HelloReply,
    JobRequest,
    Look,
    MakeRoom,
    Nudge,
    Pause,
    Rank,
    RankReply,
    RegisterJob,
    Request,
    RoomForBase,
    Status,
    StatusReply,
    Stop,
    StopReply,
    Withdraw,
)
from tiercheck.agent.protocol.rundir import RunDirectory, lock_file
from tiercheck.agent.protocol.settings import AgentSettings
from tiercheck.agent.server.neighbours import (
    MakePeerServer,
    PeerService,
    holds_shards,
    make_peer_server,
    namespace_opener,
    neighbours_namespaces,
    peer_snapshot,
)
from tiercheck.agent.server.ports import ports_to_keep
from tiercheck.agent.server.router import Router
from tiercheck.agent.status.http import HttpServer
from tiercheck.agent.status.metrics import metrics_text
from tiercheck.agent.status.page import render
from tiercheck.agent.status.snapshot import AgentSnapshot, private_bytes, rank_snapshot
from tiercheck.errors import ConfigurationError, JobConflict, NotFound, TierCheckError
from tiercheck.folding.launch import starts
from tiercheck.folding.owner import FoldProcess
from tiercheck.folding.settings import FoldSettings
from tiercheck.replication.mover import MoverStatus
from tiercheck.runtime.backoff import Backoff
from tiercheck.tiers.shm.namespaces import is_to_be_left, namespace_path, remove_one

__all__ = ["Agent"]

log = logging.getLogger(__name__)

LOCK_S_MAX = 10.0
LOCK_AGAIN_S = 0.05
TICK_S = 1.0
REPLACED_S = 20.0
"""So long trainers have time to start another agent for one whose files were removed."""
OVERDUE_S = 5.0
"""What the drain at the end may take beyond its deadline, for its errors to be told."""
RELIEVE_S_MAX = 45.0
PORT_S_MAX = 10.0
"""How long an agent waits for the port that it had before; its trainers wait for the agent meanwhile."""
PORT_AGAIN_S = 0.25
FREE_AGAIN = Backoff(60.0, 3600.0)
"""The pauses before memory that could not be removed is tried again."""
LOOK_AGAIN_S = 30.0
"""How often replication jobs that could not be read are tried again."""


class Agent:
    """One node's agent. ``async with`` starts it: it has taken up every replication job it found, and answers.

    Errors on entering: ``JobConflict`` if another agent of the name runs; ``ConfigurationError``.
    """

    def __init__(self, settings: AgentSettings, *, make_peer_server: MakePeerServer = make_peer_server) -> None:
        self.settings = settings
        self.run = RunDirectory.of(settings.node)
        folds = FoldSettings.of(
            settings.fold_threads, settings.fold_cpus, settings.fold_nice, allowed=os.sched_getaffinity(0)
        )
        self._folds_in = FoldProcess(starts(folds, os.environ))
        self.registry = JobRegistry(
            settings.node,
            folds_in=self._folds_in,
            rest_s=settings.linger_s,
            # A platform's agent stays anyway, and goes on trying.
            abandon_s=settings.abandon_s if settings.detached else math.inf,
        )
        self.ending = asyncio.Event()
        self.drain_first = True
        """Whether everything is to be brought to its tiers before the end."""
        self._make_peer_server = make_peer_server
        self._incarnation = secrets.token_hex(8)
        self._lock: int | None = None
        self._peer: PeerService | None = None
        self._peer_endpoint: str | None = None
        self._peer_server_key: str | None = None
        self._not_freed: dict[str, str] = {}
        """Memory for neighbours that could not be removed, and why."""
        self._free_at = -math.inf
        self._not_freed_times = 0
        self._lost_port: str | None = None
        """The port by which some neighbours know the peer server, which another process has taken."""
        self._context = zmq.asyncio.Context()
        self._router: Router | None = None
        self._http: HttpServer | None = None
        self._answering: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._started_at = self._needed_at = self._looked_at = _now()
        self._traffic: dict[str, int] = {}
        try:
            await self._take_lock()
            self._peer = await self._start_peer_server()
            self._http = HttpServer({"/": self._page, "/metrics": self._metrics, "/status.json": self._status_json})
            await self._http.start(self.settings.http_port)
            await self.registry.take_up_all()
            self._router = Router(self._context, self.run.address, self._handle)
            self._answering = asyncio.create_task(self._router.run())
            assert self._lock is not None
            self.run.say_who(self._lock, self._incarnation)
            self._write_info()
        except BaseException:
            await self.close()
            raise
        log.info("agent of node %s: process %d, %s", self.settings.node, os.getpid(), self._http.url)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def serve(self) -> None:
        """Until told to end, or, where a trainer started it, until nobody has needed it for a while.

        Errors: whatever has ended its answers to the trainers, or its peer server: an agent that lives and no longer
        answers would be waited for. ``ConfigurationError`` if its files were removed.
        """
        while not self.ending.is_set():
            self._check_answering()
            await self._check_files()
            unneeded_s = self.unneeded_s()
            if unneeded_s > min(self.settings.idle_s, self.settings.linger_s) and self._has_nothing():
                await self._free_neighbours_memory()
                if self.settings.detached:
                    log.info("there is nothing left to look after: it ends")
                    return
            if self.settings.detached and unneeded_s > self.settings.linger_s:
                log.info("nobody has needed this agent for %g s: it ends", self.settings.linger_s)
                return
            if any(is_to_be_left(namespace_path(name)) for name in neighbours_namespaces(self.settings.node)):
                await self._start_peer_server_again()
            await self.registry.tidy()
            self.registry.free_departed()
            if self.registry.unreadable and _now() - self._looked_at > LOOK_AGAIN_S:
                self._looked_at = _now()
                await self.registry.take_up_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self.ending.wait()
        if self.drain_first:
            await self.drain()

    async def _check_files(self) -> None:
        """If they were removed, trainers start another agent. If none does, there may be none, and what is left is
        brought where it belongs first."""
        assert self._lock is not None
        if self.run.is_found_by(self._lock):
            if not self.run.keep_beside():
                with suppress(OSError):  # then at the next look
                    self._write_info()  # the next agent of the node finds the port in it
        else:
            until = _now() + REPLACED_S
            while not self.run.agent_lives() and not self.ending.is_set() and _now() < until:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOCK_AGAIN_S):
                        await self.ending.wait()
            if not self.run.agent_lives():
                await self.drain()
            raise ConfigurationError(
                f"this agent's files were removed from {self.run.root}, so that no trainer finds it: it ends. If "
                "temporary files are tidied there, point TIERCHECK_RUN_DIR at another directory"
            )

    def _has_nothing(self) -> bool:
        """No replication job, no trainer that may come with one, nothing that a neighbour could read."""
        kept = any(map(holds_shards, neighbours_namespaces(self.settings.node)))
        return not len(self.registry) and not self.registry.unreadable and not trainers(self.run) and not kept

    async def _free_neighbours_memory(self) -> None:
        """Nothing in it can be read any more: else the memory would be kept for reuse."""
        names = neighbours_namespaces(self.settings.node)
        if not names or _now() < self._free_at:
            return
        if not await self._start_peer_server_again(without=names):
            self._not_freed_times = 0
            return
        # Each attempt ends its clients' connections.
        self._not_freed_times += 1
        self._free_at = _now() + FREE_AGAIN.pause_s(self._not_freed_times)

    async def _start_peer_server_again(self, without: Sequence[str] = ()) -> dict[str, str]:
        """Let go of all namespaces, for whoever removes them; its clients connect again. ``without`` these: returns
        which of them stay, and why."""
        stay: dict[str, str] = {}
        if self._peer is None:
            return stay
        peer, self._peer = self._peer, None
        await peer.close()
        for name in without:
            try:
                await asyncio.to_thread(remove_one, name)
            except TierCheckError as error:
                stay[name] = str(error)
        for name, reason in stay.items():
            told = self._not_freed.get(name) == reason
            log.log(logging.DEBUG if told else logging.WARNING, "the memory for neighbours %s stays: %s", name, reason)
        if without:
            self._not_freed = stay
        self._peer = await self._start_peer_server()
        self._needed_at = _now()
        return stay

    def _check_answering(self) -> None:
        """Errors: what has ended the answers to trainers or neighbours."""
        if self._answering is not None and self._answering.done():
            self._answering.result()
            raise RuntimeError("the agent no longer takes requests")
        if self._peer is not None:
            self._peer.check()

    def unneeded_s(self) -> float:
        """Seconds since a trainer was heard of, something was left to move, or a neighbour stored or fetched."""
        if self._peer_traffic():
            self._needed_at = _now()
        self._needed_at = max([self._needed_at, *(replicator.needed_at for replicator in self.registry)])
        return _now() - self._needed_at

    async def drain(self) -> None:
        """Bring everything captured to where it belongs, as far as ``drain_s`` reaches."""
        deadline_s = self.settings.drain_s
        moving = [replicator for replicator in self.registry if replicator.conflict is None]
        log.info("draining %d ranks, for %g s at most", len(moving), deadline_s)
        draining = {asyncio.ensure_future(each.drain(deadline_s, closing=True)): each for each in moving}
        if not draining:
            return
        try:
            # A call to a store that does not answer cannot be broken off, whatever the deadline.
            await asyncio.wait(draining, timeout=deadline_s + OVERDUE_S)
        finally:
            overdue = [each for each in draining if each.cancel()]
        # What is left stays in its first tier, and the next agent goes on with it.
        for each, replicator in draining.items():
            if each in overdue:
                log.warning("rank %d: a tier has not answered for %g s", replicator.job.rank, deadline_s)
            elif isinstance(error := each.exception(), TierCheckError):
                log.warning("rank %d: %s", replicator.job.rank, error)
            elif error is not None:
                raise error

    async def close(self) -> None:
        """End at once. Idempotent. Nothing that is published is lost: the next agent goes on with it."""
        if self._answering is not None:
            self._answering.cancel()
            await asyncio.wait([self._answering])
        if self._router is not None:
            await self._router.close()
        if self._http is not None:
            await self._http.close()
        await self._folds_in.will_end()
        await self.registry.close()
        await self._folds_in.close()
        if self._peer is not None:
            await self._peer.close()
        self._context.destroy(linger=0)
        self._answering = self._router = self._http = self._peer = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def hello(self) -> HelloReply:
        """What :class:`~tiercheck.agent.protocol.messages.Hello` is answered with."""
        return HelloReply(
            version=version("tiercheck"),
            pid=os.getpid(),
            node=self.settings.node,
            incarnation=self._incarnation,
            detached=self.settings.detached,
            http=self._http.url if self._http else "",
            peer_endpoint=self._peer_endpoint,
            peer_server_key=self._peer_server_key,
            drain_s=self.settings.drain_s,
            protocols=PROTOCOLS,
            lacks_to_fold="" if find_spec("torch") else "torch",
        )

    def snapshot(self) -> AgentSnapshot:
        """By what is known already: no tier is asked."""
        now = _now()
        return AgentSnapshot(
            node=self.settings.node,
            version=version("tiercheck"),
            pid=os.getpid(),
            http=self._http.url if self._http else "",
            detached=self.settings.detached,
            ending=self.ending.is_set(),
            uptime_s=now - self._started_at,
            resident_bytes=private_bytes(),
            dropped_messages=self._router.dropped if self._router else 0,
            ranks=tuple(rank_snapshot(replicator, now) for replicator in self.registry),
            unreadable=dict(self.registry.unreadable),
            peer=replace(peer_snapshot(self._peer), lost_port=self._lost_port) if self._peer else None,
        )

    # Requests

    async def _handle(self, request: Request) -> Any:
        if not isinstance(request, Status):
            self._needed_at = _now()
        match request:
            case Hello():
                return self.hello()
            case Status():
                return StatusReply((await self._status_json())[1])
            case Stop(drain=drain):
                self.drain_first = drain
                self.ending.set()
                return StopReply()
            case Rank():
                return await self._handle_rank(request)
        raise ConfigurationError(f"the agent cannot {type(request).__name__}")

    async def _handle_rank(self, request: Rank) -> RankReply:
        namespace, rank, deadline_s = request.namespace, request.rank, request.deadline_s
        generation = request.generation if isinstance(request, JobRequest) else None
        if isinstance(request, Withdraw):
            await self.registry.withdraw(namespace, rank, request.generation)
            return RankReply(MoverStatus())
        if isinstance(request, RegisterJob):
            replicator = await self.registry.register(namespace, rank, request.generation)
            return RankReply(replicator.status, _text(replicator.conflict))
        try:
            replicator = self.registry.get(namespace, rank, generation)
        except NotFound:
            if isinstance(request, Pause):
                return RankReply(MoverStatus())  # what is not known does not move
            raise
        result = False
        match request:
            case Nudge(hurry_s=hurry_s, due=due):
                replicator.nudge(hurry_s=hurry_s, due=due)
            case Pause():
                await replicator.pause(deadline_s)
            case Agree(mark=mark):
                await replicator.agree(deadline_s, mark)
            case RoomForBase(due=due, patiently=patiently):
                await replicator.room_for_base(deadline_s, due, patiently=patiently)
            case MakeRoom():
                result = await replicator.make_room(deadline_s)
            case Drain(closing=closing):
                await replicator.drain(deadline_s, closing=closing)
            case Cycle(closing=closing):
                result = await replicator.cycle(deadline_s, closing=closing)
            case Look():
                pass
        return RankReply(replicator.status, _text(replicator.conflict), result)

    # Views

    async def _page(self) -> tuple[str, str]:
        return "text/html; charset=utf-8", render(self.snapshot())

    async def _metrics(self) -> tuple[str, str]:
        return metrics_text(self.snapshot())

    async def _status_json(self) -> tuple[str, str]:
        return "application/json", msgspec.json.format(msgspec.json.encode(self.snapshot()), indent=1).decode()

    # Its start

    async def _take_lock(self) -> None:
        """Be the one agent of this name. A trainer that looks whether one lives may hold the lock for a moment."""
        if not self.settings.detached:
            await self._relieve()
        until = _now() + LOCK_S_MAX
        while (lock := lock_file(self.run.lock)) is None:
            if _now() > until:
                raise JobConflict(
                    f"an agent of node {self.settings.node!r} runs already ({self.run.process}); end it first, or give "
                    "this one another name (TIERCHECK_AGENT_NODE)"
                )
            await asyncio.sleep(LOCK_AGAIN_S)
        self._lock = lock
        os.ftruncate(lock, 0)
        self.run.say_who(lock, "")

    async def _relieve(self) -> None:
        """Where a trainer was first, and started one: the platform's takes over."""
        if not self.run.agent_lives():
            return
        try:
            async with await connect_agent(self.settings.node, deadline_s=LOCK_S_MAX) as other:
                if other.hello.detached:
                    log.info("taking over from process %d, which a trainer started", other.hello.pid)
                    await other.stop(drain=False, deadline_s=RELIEVE_S_MAX)
        except TierCheckError as error:
            log.warning("the agent that runs could not be relieved: %s", error)

    async def _start_peer_server(self) -> PeerService | None:
        """At the port it had before: the neighbours know it. If somebody else has taken that, at another one; the page
        says then that ranks which have attached before are cut off."""
        bind = self.settings.peer_bind
        if not bind:
            return None
        host, _, port = bind.rpartition(":")
        if port != "0":
            return await self._peer_server_at(bind)
        if before := self._port_before():
            until = _now() + PORT_S_MAX
            while True:
                try:
                    server = await self._peer_server_at(f"{host}:{before}")
                    self._lost_port = None
                    return server
                except (TierCheckError, OSError) as error:
                    if _now() > until:
                        log.error("ranks that know port %s cannot reach this agent: %s", before, error)
                        self._lost_port = before
                        break
                await asyncio.sleep(PORT_AGAIN_S)
        *ports, last = ports_to_keep()
        for chosen in ports:
            with suppress(ConfigurationError, OSError):
                return await self._peer_server_at(f"{host}:{chosen}")
        return await self._peer_server_at(f"{host}:{last}")

    async def _peer_server_at(self, bind: str) -> PeerService:
        server = self._make_peer_server(self.settings, namespace_opener(self.settings.node), bind)
        await server.start()
        self._peer_endpoint, self._peer_server_key = server.endpoint, server.server_key
        return server

    def _port_before(self) -> str | None:
        try:
            before = msgspec.json.decode(self.run.info.read_bytes(), type=HelloReply)
        except (FileNotFoundError, ValueError):
            return None
        port = (before.peer_endpoint or "").rpartition(":")[2]
        return port if port.isdigit() else None

    def _write_info(self) -> None:
        new = self.run.info.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(self.hello()))
        new.replace(self.run.info)

    def _peer_traffic(self) -> bool:
        """Whether neighbours have stored or fetched anything since the last look."""
        before, self._traffic = self._traffic, peer_snapshot(self._peer).counts if self._peer else {}
        return any(self._traffic.get(name, 0) != before.get(name, 0) for name in self._traffic)


def _text(error: TierCheckError | None) -> str | None:
    return None if error is None else str(error)


def _now() -> float:
    return asyncio.get_running_loop().time()
