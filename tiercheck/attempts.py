"""Actions against tiers that may be in trouble: tried again with growing pauses, each tier for itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tiercheck.errors import TierError
from tiercheck.hierarchy import OpenTier

__all__ = ["RETRY_FIRST_S", "RETRY_MAX_S", "Attempts"]

log = logging.getLogger(__name__)

RETRY_FIRST_S = 0.5
RETRY_MAX_S = 30.0


@dataclass
class _Trouble:
    """A tier's failures in a row, and when it is worth another try (loop time, seconds)."""

    failures: int
    retry_at: float
    listing: bool
    """It could not even be listed. Otherwise that goes on, and what it holds is known."""
    error: str


class Attempts:
    """Remembers which tiers are in trouble."""

    def __init__(self) -> None:
        self._trouble: dict[str, _Trouble] = {}

    @property
    def errors(self) -> dict[str, str]:
        """Per tier, the error of its last failed action, until one succeeds."""
        return {name: trouble.error for name, trouble in self._trouble.items()}

    async def run(self, tier: OpenTier, action: Callable[[], Awaitable[None]], *, listing: bool = False) -> bool:
        """Run the action unless the tier is pausing. ``False`` where it failed or was not tried.

        That a tier can be listed ends no trouble with writing to it: its pauses go on growing.
        """
        now = asyncio.get_running_loop().time()
        trouble = self._trouble.get(tier.name)
        if trouble is not None and now < trouble.retry_at and (trouble.listing or not listing):
            return False
        try:
            await action()
        except TierError as error:
            self._fail(tier, error, listing)
            return False
        if trouble is not None and (trouble.listing or not listing):
            self.settle(tier)
        return True

    def settle(self, tier: OpenTier) -> None:
        """The tier's trouble, if any, is over."""
        self._trouble.pop(tier.name, None)

    def _fail(self, tier: OpenTier, error: TierError, listing: bool) -> None:
        before = self._trouble.get(tier.name)
        failures = before.failures + 1 if before else 1
        pause = min(RETRY_MAX_S, RETRY_FIRST_S * 2 ** min(failures - 1, 10))
        retry_at = asyncio.get_running_loop().time() + pause
        self._trouble[tier.name] = _Trouble(failures, retry_at, listing, str(error))
        level = logging.WARNING if before is None or str(error) != before.error else logging.DEBUG
        log.log(level, "tier %s: %s; trying again, every %g s at most", tier.name, error, RETRY_MAX_S)
