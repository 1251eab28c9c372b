"""A tier that is only looked at: whatever would change it is refused before it reaches the wrapped driver."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from tiercheck.errors import Unsupported
from tiercheck.tiers.wrappers.base import Call, Operation, WrappingDriver
from tiercheck.types import Capabilities

__all__ = ["ReadOnlyDriver"]

T = TypeVar("T")

READS = frozenset(
    {Operation.OPEN_TO_READ, Operation.CLOSE, Operation.GET, Operation.STAT, Operation.LIST, Operation.USAGE}
)


class ReadOnlyDriver(WrappingDriver):
    """``inner``, opened by :meth:`~tiercheck.tiers.driver.TierDriver.open_to_read`. It hands out no memory and knows no
    conditional puts; every call that writes raises ``Unsupported``."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, mappable=False, conditional_put=False)

    async def open(self) -> None:
        await self.open_to_read()

    async def reclaim(self) -> None:
        raise Unsupported("reclaim is refused: the tier was opened to read", tier=self.url)

    async def around(self, call: Call, work: Callable[[], Awaitable[T]]) -> T:
        if call.operation not in READS:
            raise Unsupported(f"{call.operation} is refused: the tier was opened to read", tier=self.url, key=call.key)
        return await work()
