"""What policy decides of one observation, decided once: a mover's lanes ask one after the other, and mostly none of
them has changed anything meanwhile."""

from __future__ import annotations

from tiercheck.keys import Key
from tiercheck.policy.observation import Observation
from tiercheck.policy.placement import Placement, Transfer
from tiercheck.policy.watermark import Retention

__all__ = ["Decisions"]


class Decisions:
    """The decisions of the last observation that was asked about."""

    def __init__(self, placement: Placement, retention: Retention) -> None:
        self._placement = placement
        self._retention = retention
        self._reclaimable: tuple[Observation, dict[int, list[Key]]] | None = None
        self._transfers: tuple[Observation, bool, list[Transfer]] | None = None

    def reclaimable(self, seen: Observation) -> dict[int, list[Key]]:
        """What retention lets go, by the index of the tier."""
        if self._reclaimable is None or self._reclaimable[0] is not seen:
            self._reclaimable = seen, self._retention.reclaimable(seen)
        return self._reclaimable[1]

    def transfers(self, seen: Observation, *, closing: bool) -> list[Transfer]:
        """What placement sends anywhere, and retention lets stay there. ``closing``: no further version will come."""
        if self._transfers is None or self._transfers[0] is not seen or self._transfers[1] is not closing:
            wanted = self._retention.wanted(seen, self._placement.transfers(seen, closing=closing))
            self._transfers = seen, closing, wanted
        return self._transfers[2]
