"""A tier whose calls fail as the test says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.wrappers.base import Call, Operation, WrappingDriver

T = TypeVar("T")

Says = Callable[[Call], Exception | None]


class Failing(WrappingDriver):
    """``inner``, whose calls raise what ``says(call)`` returns, if anything."""

    def __init__(self, inner: TierDriver, says: Says) -> None:
        super().__init__(inner)
        self.says = says

    async def around(self, call: Call, work: Callable[[], Awaitable[T]]) -> T:
        error = self.says(call)
        if error is not None and call.operation is not Operation.CLOSE:
            raise error
        return await work()
