"""Copies wait for their turn, as the pacing policy says."""

from __future__ import annotations

import asyncio

from tiercheck.hierarchy import OpenTier
from tiercheck.keys import Stream
from tiercheck.policy.guard import ask_pacing
from tiercheck.policy.policies import Copying, PacingPolicy, Unpaced
from tiercheck.replication.refusals import Refusals

__all__ = ["Pacer"]


class Pacer:
    """One rank's copies to each tier.

    A copy is paid for when it begins: the next one to that tier waits until its bytes have flowed at the rate that held
    then. So a copy never waits for its own bytes, and the mean is bounded, whatever the sizes.
    """

    def __init__(self, policy: PacingPolicy, refusals: Refusals) -> None:
        self.paces = policy != Unpaced()
        self._policy = policy
        self._refusals = refusals
        self._paid_at: dict[int, float] = {}
        """By tier index, when the copies before are paid for (loop time, seconds)."""

    async def turn(self, tier: OpenTier, stream: Stream, nbytes: int, undrained_bases: int) -> None:
        """Wait for the turn of a copy to the tier. A cancelled one has paid nothing."""
        role = tier.role
        rate, refusal = ask_pacing(self._policy, Copying(tier.name, role.survives, stream, nbytes, undrained_bases))
        self._refusals.note(f"pacing of {tier.name}", [] if refusal is None else [refusal])
        if rate is None:
            return
        loop = asyncio.get_running_loop()
        if (pause_s := self._paid_at.get(tier.index, 0.0) - loop.time()) > 0:
            await asyncio.sleep(pause_s)
        self._paid_at[tier.index] = loop.time() + nbytes / rate
