"""The wrappers, all of them around one driver that fails now and then."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tiercheck.errors import Transient
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.wrappers import (
    Call,
    MeteredDriver,
    Operation,
    PrefixedDriver,
    RetryingDriver,
    ThrottledDriver,
    WrappingDriver,
)

__all__ = ["FlakyDriver", "wrap"]

T = TypeVar("T")

FAILING = (Operation.PUT, Operation.GET, Operation.STAT, Operation.DELETE, Operation.USAGE, Operation.PUBLISH)
"""Not those whose result would be lost with them: a driver that is open, memory that is reserved."""


class FlakyDriver(WrappingDriver):
    """Fails with ``Transient``, before or after the work is done, in one of ``failures`` calls."""

    def __init__(self, inner: TierDriver, chance: random.Random, failures: float) -> None:
        super().__init__(inner)
        self._chance = chance
        self._failures = failures

    async def around(self, call: Call, work: Callable[[], Awaitable[T]]) -> T:
        fails = call.operation in FAILING and self._chance.random() < self._failures
        after = self._chance.random() < 0.5
        if fails and not after:
            raise Transient("a failure before the call", tier=self.url, key=call.key)
        result = await work()
        if fails:
            raise Transient("a failure after the call", tier=self.url, key=call.key)
        return result


def wrap(driver: TierDriver, chance: random.Random) -> TierDriver:
    """Metered, retrying, throttled, prefixed, around a flaky ``driver``."""
    flaky = FlakyDriver(driver, chance, 0.05)
    throttled = ThrottledDriver(PrefixedDriver(flaky, "job/7"), bytes_per_s=200e6, requests_per_s=2000)
    return MeteredDriver(RetryingDriver(throttled))
