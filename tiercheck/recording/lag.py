"""The bound on lag: training waits before a tier lacks more versions than ``lag_max`` allows."""

from __future__ import annotations

from collections.abc import Callable

from tiercheck.errors import SaveError
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.recording.modes import Modes, Room, RoomEvent
from tiercheck.recording.waits import Wait, asking
from tiercheck.replication.mover import MoverHandle

__all__ = ["LagBound"]


class LagBound:
    """Keeps each tier behind the first one from lacking more than ``versions_max`` of one rank's versions. 0: there is
    no such bound, and the room in the first tier is one."""

    def __init__(
        self,
        hierarchy: OpenHierarchy,
        mover: MoverHandle,
        wait: Callable[[], Wait],
        *,
        modes: Modes,
        rank: int,
        versions_max: int,
        deadline_s: float,
    ) -> None:
        self._urls = {tier.name: tier.driver.url for tier in hierarchy.tiers[1:]}
        self._mover = mover
        self._new_wait = wait
        self._room = modes.lag_room
        self._rank = rank
        self._versions_max = versions_max
        self._deadline_s = deadline_s

    async def admit(self, version: int) -> None:
        """Wait until this version may be captured, at most for the deadline. Errors: ``SaveError`` naming the tiers
        that lag."""
        if not self._versions_max:
            return
        if self._lagging(version):
            await self._wait(version)
        if self._room.state is Room.IN_DOUBT:
            self._room.on(RoomEvent.FOUND)

    def _lagging(self, version: int) -> dict[str, int]:
        """The tiers that would lag too far with this version, and the version up to which each has everything."""
        reached = self._mover.status.reached_versions
        return {tier: reached[tier] for tier in self._urls if version - reached.get(tier, version) > self._versions_max}

    async def _wait(self, version: int) -> None:
        with asking(self._room, self._deadline_s) as deadline_s, self._new_wait() as wait:
            while lagging := self._lagging(version):
                said = self._said(version, lagging)
                if wait.waited_s >= deadline_s:
                    raise SaveError(
                        f"{said}; that did not change within {deadline_s:g} s. Make sure that the tier answers and is "
                        "fast enough, or raise lag_max"
                    )
                await wait.moment(said)

    def _said(self, version: int, lagging: dict[str, int]) -> str:
        errors = self._mover.status.errors
        tiers = [
            f"{name} ({self._urls[name]}) lacks the {version - 1 - last} versions after version {last}"
            + (f": {errors[name]}" if name in errors else "")
            for name, last in sorted(lagging.items())
        ]
        bound = f"lag_max={self._versions_max} lets no tier lack more versions"
        return f"rank {self._rank} cannot capture version {version} yet, since {bound}: {'; '.join(tiers)}"
