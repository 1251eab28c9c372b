"""Copies wait for their turn, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from tests.simulation import virtual_time
from tiercheck.hierarchy import Hierarchy, OpenTier
from tiercheck.keys import Stream
from tiercheck.policy.policies import BytesPerSecond, Copying, PacingPolicy, Unpaced
from tiercheck.replication.pacing import Pacer
from tiercheck.replication.refusals import Refusals


def tier() -> OpenTier:
    return Hierarchy.of("memory://first", "memory://second").open().tiers[1]


def began(
    policy: PacingPolicy, sizes: list[int], refusals: Refusals | None = None, sending_s: float = 0.0
) -> list[float]:
    """When each copy of so many bytes began."""

    async def copy() -> list[float]:
        pacer, target, found = Pacer(policy, refusals or Refusals()), tier(), []
        for nbytes in sizes:
            await pacer.turn(target, Stream.BASE, nbytes, 0)
            found.append(asyncio.get_running_loop().time())
            await asyncio.sleep(sending_s)
        return found

    return virtual_time.run(copy())


def test_a_copy_begins_when_those_before_it_are_paid_for() -> None:
    assert began(BytesPerSecond("memory-2", 100), [500, 100, 0, 100]) == [0, 5, 6, 6]
    assert began(BytesPerSecond("another", 100), [500, 100]) == [0, 0]
    assert began(Unpaced(), [500, 100]) == [0, 0]


def test_time_that_a_copy_takes_counts() -> None:
    assert began(BytesPerSecond("memory-2", 100), [500, 500, 500], sending_s=4) == [0, 5, 10]
    assert began(BytesPerSecond("memory-2", 100), [500, 500, 500], sending_s=9) == [0, 9, 18]


@dataclass(frozen=True)
class Stopping(PacingPolicy):
    """Would have nothing copied for ever."""

    def bytes_per_s(self, seen: Copying) -> float | None:
        return 0.0 if seen.nbytes > 100 else 100.0


def test_a_pace_that_stops_copies_is_refused_told_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    assert began(Stopping(), [500, 500, 50, 100], refusals) == [0, 0, 0, 0.5]
    assert refusals.count == 1
    assert refusals.text == "", "it is no trouble any more"
    told = [each.message for each in caplog.records if "Stopping() is refused: at 0.0 bytes per second" in each.message]
    assert len(told) == 1
