"""A driver of few capabilities, which says so: what must pass every test that asks for no more."""

from __future__ import annotations

from tiercheck.errors import Unsupported
from tiercheck.tiers.driver import Reservation, TierDriver
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.types import ByteRange, Capabilities, ObjectInfo, Payload, PutMode, Survives

__all__ = ["PlainDriver"]


class PlainDriver(MemoryDriver):
    """No memory inside the tier, no conditions, no ranges."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(survives=Survives.NOTHING, mappable=False, conditional_put=False, ranged_get=False)

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        if mode.conditional:
            raise Unsupported("no conditional puts", tier=self.url, key=key)
        return await super().put(key, payload)

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        if range is not None:
            raise Unsupported("no ranges", tier=self.url, key=key)
        return await super().get(key, into=into)

    async def reserve(self, key: str, nbytes: int) -> Reservation:
        return await TierDriver.reserve(self, key, nbytes)

    def reserve_nowait(self, key: str, nbytes: int) -> None:
        return None
