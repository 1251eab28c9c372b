"""The agent's end of the line: takes requests from the trainers of its node, and answers them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import zmq
import zmq.asyncio

from tiercheck.agent.protocol.messages import (
    REPLY_BYTES_MAX,
    REQUEST_BYTES_MAX,
    Nudge,
    Refused,
    Request,
    pack_answer,
    pack_error,
    parse_request,
)
from tiercheck.errors import DeadlineExceeded, TierCheckError, Transient

__all__ = ["Router"]

log = logging.getLogger(__name__)

REQUESTS_MAX = 4096
"""Requests being worked on at a time; more are turned away."""
OVERDUE_S_MIN, OVERDUE_S_MAX = 0.25, 2.5
OVERDUE_SHARE = 0.05
"""What a request may take beyond its deadline, whose own error says more; less than what its client waits."""


class Router:
    """Answers requests at ``address`` (``ipc://...``) by ``handle``, which returns a dataclass for the reply.

    Each request is worked on by itself, within its deadline. A message that is no request is counted, and
    refused where it can be answered.
    """

    def __init__(self, context: zmq.asyncio.Context, address: str, handle: Callable[[Request], Awaitable[Any]]) -> None:
        self.dropped = 0
        """Messages that were no request."""
        self._handle = handle
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.bind(address)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            frames: list[bytes] = await self._socket.recv_multipart()
            if len(frames) != 2:
                self._drop(f"it has {len(frames)} frames")
                continue
            sender, body = frames
            try:
                identifier, request = parse_request(body)
            except Refused as refused:
                self._drop(str(refused))
                await self._send(sender, refused.identifier, pack_error(refused.identifier, refused.error))
            except ValueError as error:
                self._drop(str(error))
            else:
                await self._accept(sender, identifier, request)

    async def close(self) -> None:
        """Break off what is being worked on. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()

    async def _accept(self, sender: bytes, identifier: int, request: Request) -> None:
        if len(self._tasks) >= REQUESTS_MAX:
            busy = Transient(f"the agent is working on {REQUESTS_MAX} requests already; ask again")
            await self._send(sender, identifier, pack_error(identifier, busy))
            return
        task = asyncio.create_task(self._work(sender, identifier, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, sender: bytes, identifier: int, request: Request) -> None:
        what = type(request).__name__
        allowed_s = work_s_max(request)
        try:
            async with asyncio.timeout(allowed_s):
                answer = await self._handle(request)
            reply = pack_answer(identifier, answer)
            if len(reply) > REPLY_BYTES_MAX:
                raise Transient(f"the answer to {what} has {len(reply)} bytes, over {REPLY_BYTES_MAX}")
        except TierCheckError as error:
            reply = pack_error(identifier, error)
        except TimeoutError:
            reply = pack_error(identifier, DeadlineExceeded(f"{what} took over {allowed_s:.3g} s"))
        except Exception as error:
            # A bug of one request is not to end the agent; its client is told, and the log has the rest.
            log.exception("%s failed", what)
            reply = pack_error(
                identifier, TierCheckError(f"{what} failed in the agent: {type(error).__name__}: {error}")
            )
        if isinstance(request, Nudge):
            return
        await self._send(sender, identifier, reply)

    async def _send(self, sender: bytes, identifier: int, reply: bytes) -> None:
        # To a client that is gone the socket drops it.
        if identifier:
            await self._socket.send_multipart([sender, reply])

    def _drop(self, reason: str) -> None:
        self.dropped += 1
        log.debug("a message was dropped: %s", reason)


def work_s_max(request: Request) -> float:
    """How long a request is worked on."""
    if not request.deadline_s:
        return request.look_s
    within_s = request.deadline_s
    return within_s + min(OVERDUE_S_MAX, max(OVERDUE_SHARE * within_s, min(OVERDUE_S_MIN, within_s / 2)))
