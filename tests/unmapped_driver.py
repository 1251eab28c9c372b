"""A store that can do all but hand out memory of its own, as one that is far away."""

from __future__ import annotations

from tiercheck.tiers.driver import Reservation
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.types import Capabilities, Survives

__all__ = ["UnmappedDriver"]


class UnmappedDriver(MemoryDriver):
    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(survives=Survives.NOTHING, conditional_put=True)

    async def reserve(self, key: str, nbytes: int) -> Reservation:
        raise AssertionError("a driver that is not mappable is not asked for memory")
