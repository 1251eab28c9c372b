"""A trainer's end of the line to the agent of its node."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import TypeVar

import zmq
import zmq.asyncio

from tiercheck.agent.messages import REPLY_BYTES_MAX, Answer, Request, pack_request, parse_answer
from tiercheck.agent.rundir import RunDirectory
from tiercheck.errors import DeadlineExceeded, Transient

__all__ = ["AgentGone", "Connection"]

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 0.5
"""How often a request that waits looks whether the agent still lives."""
GRACE_S = 5.0
"""What an answer may take beyond all that the agent allows it: the agent stands back, and may be slow to say it."""


class AgentGone(Transient):
    """The agent has ended before it answered. Every request may be made again."""


class Connection:
    """Requests and their replies, over one socket. Any number of requests may wait at a time.

    The socket finds an agent that has taken another's place by itself. What was asked of the other is lost then, and
    what it said of itself no longer true: so a connection is one to the agent that it began with.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._incarnation = run.incarnation()
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, REPLY_BYTES_MAX)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.connect(run.address)
        self._receiving = asyncio.create_task(self._receive())

    async def request(self, request: Request, kind: type[T]) -> T:
        """The agent's reply, as ``kind``.

        Errors: the request's own; :class:`AgentGone`; ``DeadlineExceeded`` where the agent lives and says nothing.
        """
        self._check()
        identifier = next(self._ids)
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[identifier] = waiting
        try:
            await self._socket.send(pack_request(identifier, request))
            answer = await self._answer(waiting, request)
        finally:
            del self._waiting[identifier]
        try:
            return answer.read(kind)
        except ValueError as error:
            raise Transient(f"the agent of node {self._run.node!r} gave an answer of another kind: {error}") from error

    async def tell(self, request: Request) -> None:
        """Send without waiting for an answer; it is lost where the agent is gone."""
        await self._socket.send(pack_request(0, request))

    async def close(self) -> None:
        """Idempotent. Requests that wait end with :class:`AgentGone`."""
        self._receiving.cancel()
        await asyncio.wait([self._receiving])
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(AgentGone("the connection to the agent was closed"))
        self._context.destroy(linger=0)

    async def _answer(self, waiting: asyncio.Future[Answer], request: Request) -> Answer:
        loop = asyncio.get_running_loop()
        allowed_s = request.deadline_s + request.grace_s + GRACE_S
        until = loop.time() + allowed_s
        while not waiting.done():
            left_s = until - loop.time()
            if left_s <= 0:
                raise DeadlineExceeded(
                    f"the agent of node {self._run.node!r} lives, but did not answer {type(request).__name__} within "
                    f"{allowed_s:g} s; its log is {self._run.log}"
                )
            await asyncio.wait([waiting], timeout=min(LOOK_S, left_s))
            if not waiting.done():
                self._check()
        return waiting.result()

    def _check(self) -> None:
        """Errors: :class:`AgentGone` where this agent is no more, or another one is in its place."""
        if self._incarnation is None or self._run.incarnation() != self._incarnation:
            raise AgentGone(f"the agent of node {self._run.node!r} has ended before it answered")

    async def _receive(self) -> None:
        while True:
            frames: list[bytes] = await self._socket.recv_multipart()
            try:
                answer = parse_answer(frames[-1])
            except ValueError as error:
                log.warning("the agent sent what is no answer: %s", error)
                continue
            waiting = self._waiting.get(answer.id)
            # An answer nobody waits for any more came after its deadline.
            if waiting is not None and not waiting.done():
                with contextlib.suppress(asyncio.InvalidStateError):
                    waiting.set_result(answer)
