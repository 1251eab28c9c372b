"""What a recorder asks of the ranks together, if no tier is shared: which version each of them can go back to."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Agreement"]


class Agreement(Protocol):
    """The mark of a job without a shared tier (:class:`tiercheck.opening.agreement.Agreement`). All ranks call the same
    methods in the same order."""

    async def settle(self, version: int) -> None:
        """A base is due on every rank: agree on a mark, and wait until each rank has room for the base."""

    async def advance(self, version: int) -> None:
        """No base is due: look whether there is a mark by now, if one is still missing."""
