"""Which client holds how much of the memory for copies, so that one that reads nothing holds no other up."""

from __future__ import annotations

__all__ = ["CopyBudget"]


class CopyBudget:
    """Bytes of copies that were made for replies and are not sent yet.

    A client may hold as much as is free beside it: alone half of all, two clients a third each. So something is left
    for the next one, however many of them have stopped reading (dynamic thresholds: Choudhury and Hahne, 1998).
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held: dict[bytes, int] = {}
        self.held_bytes = 0

    def take(self, client: bytes, nbytes: int) -> bool:
        """Whether ``client`` may have a copy of ``nbytes``, which then count as held. If nobody holds any it may."""
        free = self._limit_bytes - self.held_bytes - nbytes
        held = self._held.get(client, 0)
        if self.held_bytes and (free < 0 or (held and held + nbytes > free)):
            return False
        self._held[client] = held + nbytes
        self.held_bytes += nbytes
        return True

    def give_back(self, client: bytes, nbytes: int) -> None:
        self.held_bytes -= nbytes
        self._held[client] -= nbytes
        if not self._held[client]:
            del self._held[client]
