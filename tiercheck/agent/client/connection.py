"""A trainer's end of the line to the agent of its node."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from dataclasses import replace
from typing import TypeVar

import zmq
import zmq.asyncio

from tiercheck.agent.protocol.messages import (
    PROTOCOLS,
    REPLY_BYTES_MAX,
    Answer,
    Hello,
    HelloReply,
    Request,
    pack_request,
    parse_answer,
)
from tiercheck.agent.protocol.rundir import RunDirectory
from tiercheck.errors import DeadlineExceeded, Transient

__all__ = ["AgentGone", "Connection"]

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 0.5
"""How often a request that waits looks whether the agent still lives."""
ANSWER_S_MIN, ANSWER_S_MAX = 0.5, 5.0
ANSWER_SHARE = 0.1
"""Of a request's deadline, what is kept for its answer (half of it at most): the agent is told of the rest, since its
own error says more than that it is late; it stands back, and may be slow to say it."""


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
        self._protocol = PROTOCOLS.oldest

    async def hello(self, deadline_s: float) -> HelloReply:
        """Who the agent is. Both sides speak the newest protocol in common from then on.

        Errors: as :meth:`request`; ``ConfigurationError`` if there is none.
        """
        reply = await self.request(Hello(deadline_s, PROTOCOLS), HelloReply)
        self._protocol = PROTOCOLS.common(reply.protocols)
        return reply

    async def request(self, request: Request, kind: type[T]) -> T:
        """The agent's reply, as ``kind``; within the request's deadline (one of 0: what a look may take).

        Errors: the request's own; :class:`AgentGone`; ``DeadlineExceeded`` if the agent lives and says nothing, naming
        its process.
        """
        self._check()
        identifier = next(self._ids)
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[identifier] = waiting
        try:
            await self._socket.send(pack_request(identifier, as_told(request), self._protocol))
            answer = await self._answer(waiting, request)
        finally:
            del self._waiting[identifier]
        try:
            return answer.read(kind)
        except ValueError as error:
            raise Transient(f"the agent of node {self._run.node!r} gave an answer of another kind: {error}") from error

    @property
    def lives(self) -> bool:
        """Whether this agent is still there."""
        return self._incarnation is not None and self._run.incarnation() == self._incarnation

    async def tell(self, request: Request) -> None:
        """Send without waiting for an answer; it is lost where the agent is gone."""
        await self._socket.send(pack_request(0, request, self._protocol))

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
        allowed_s = answer_s_max(request)
        until = loop.time() + allowed_s
        while not waiting.done():
            left_s = until - loop.time()
            if left_s <= 0:
                raise DeadlineExceeded(
                    f"the agent {self._run.node!r} of {socket.gethostname()} ({self._run.process}) lives, but has not "
                    f"answered {type(request).__name__} within {allowed_s:.3g} s; its log is {self._run.log}. If it is "
                    "killed (kill -9), a trainer starts another, and nothing is lost"
                )
            await asyncio.wait([waiting], timeout=min(LOOK_S, left_s))
            if not waiting.done():
                self._check()
        return waiting.result()

    def _check(self) -> None:
        """Errors: :class:`AgentGone` if this agent is no more, or another one is in its place."""
        if not self.lives:
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


def as_told(request: Request) -> Request:
    """The request as the agent gets it."""
    whole_s = request.deadline_s
    answer_s = min(ANSWER_S_MAX, max(ANSWER_SHARE * whole_s, min(ANSWER_S_MIN, whole_s / 2)))
    return replace(request, deadline_s=round(whole_s - answer_s, 3))  # errors show it


def answer_s_max(request: Request) -> float:
    """How long its answer is waited for."""
    return request.deadline_s or request.look_s + ANSWER_S_MAX
