"""What a put and a get have in common on the client's side, without I/O: chunks under way over several links."""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable

from tiercheck.tiers.peer.client.protocol import Caller, Operation

__all__ = ["Transferring"]


class Transferring(Operation):
    """Moves the chunks of one object under a transfer's id, which ``new_transfer`` draws: 16 bytes."""

    key: str
    transfer: bytes

    def __init__(self, namespace: str, key: str, new_transfer: Callable[[], bytes]) -> None:
        super().__init__()
        self.key = key
        self.transfer = new_transfer()
        self._namespace = namespace
        self._new_transfer = new_transfer
        self._nbytes = 0
        """The object's."""
        self._next = 0
        """The first chunk that was never asked for, or never sent."""
        self._lost: deque[int] = deque()
        """Chunks to ask for, or to send, once more."""
        self._outstanding: dict[int, tuple[int, int]] = {}
        """Chunk to the link and the request that asked for it, or that it went with."""

    def start(self, caller: Caller, now: float) -> None:
        """Ask on every link that carries chunks; on any one if none does."""
        links = {link for link, _ in self._outstanding.values() if link in caller.links}
        link = caller.next_link()
        if link is None:
            return
        for each in sorted(links) or [link]:
            self._ask(caller, each, now)

    @abc.abstractmethod
    def _ask(self, caller: Caller, link: int, now: float) -> None:
        """Begin over that link, or ask how far it got."""

    def release(self, caller: Caller) -> None:
        self._give_back(caller)

    def _start_anew(self, caller: Caller, now: float) -> None:
        """The server knows nothing of this transfer: begin another one."""
        caller.rename(self, self._new_transfer())
        self.start(caller, now)

    def _settle(self, caller: Caller, index: int) -> None:
        """That chunk is not under way any more."""
        del self._outstanding[index]
        caller.return_credit(self._length(caller, index))

    def _find_lost(self, caller: Caller, link: int, request_id: int) -> None:
        """Lost is what went over that link before the request that was just answered, or over one that is gone."""
        for index, (carrier, sent) in list(self._outstanding.items()):
            if carrier not in caller.links or (carrier == link and sent <= request_id):
                self._settle(caller, index)
                self._lost.append(index)

    def _give_back(self, caller: Caller) -> None:
        """Nothing is under way any more; what was counts as lost."""
        self._lost.extend(self._outstanding)
        for index in list(self._outstanding):
            self._settle(caller, index)

    def _range(self, caller: Caller, index: int) -> tuple[int, int]:
        """The bytes of that chunk."""
        start = index * caller.settings.chunk_bytes
        return start, min(start + caller.settings.chunk_bytes, self._nbytes)

    def _length(self, caller: Caller, index: int) -> int:
        start, stop = self._range(caller, index)
        return stop - start
