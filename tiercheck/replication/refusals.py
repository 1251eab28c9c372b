"""What was refused of the policies' decisions: told once, counted, and shown as long as it lasts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tiercheck.policy.guard import Refusal

__all__ = ["Refusals"]

log = logging.getLogger(__name__)

TOLD_MAX = 256
"""So many refusals are remembered; more of them are counted, and not logged."""


class Refusals:
    """The refusals of one rank."""

    def __init__(self) -> None:
        self.count = 0
        """How often a decision was refused that was not refused before."""
        self._now: dict[str, tuple[Refusal, ...]] = {}
        self._told: set[Refusal] = set()

    def note(self, where: str, refusals: Sequence[Refusal]) -> None:
        """The refusals of the newest decision of one kind: there may be none any more."""
        for refusal in set(refusals).difference(self._now.get(where, ())):
            self.count += 1
            if refusal not in self._told and len(self._told) < TOLD_MAX:
                self._told.add(refusal)
                log.error("%s; the safe decision is taken instead", refusal)
        self._now[where] = tuple(refusals)

    @property
    def text(self) -> str:
        """What is refused now; empty if nothing is."""
        return "; ".join(dict.fromkeys(str(each) for refusals in self._now.values() for each in refusals))
