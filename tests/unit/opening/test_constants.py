"""What a recovered base refers to is brought in good time, or written anew."""

from __future__ import annotations

import uuid
from collections.abc import Coroutine
from typing import Any

from tiercheck.errors import DeadlineExceeded
from tiercheck.format.references import References
from tiercheck.hierarchy import Hierarchy
from tiercheck.keys import ShardKey
from tiercheck.opening.constants import brought
from tiercheck.policy.observation import Copy
from tiercheck.recovery.ranks import Ranks
from tiercheck.runtime.group import BlockingGroup, SingleProcess


class Hanging:
    """A scheduler under which no call comes to an end: each takes all of its time."""

    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now

    async def call(self, work: Coroutine[Any, Any, object], what: str, deadline_s: float) -> object:
        work.close()
        self.now += deadline_s
        raise DeadlineExceeded(f"{what} did not finish within {deadline_s:g} s")


async def test_stores_that_hang_leave_time_for_the_opening_base() -> None:
    """The other ranks wait no longer than the deadline for all that this one does meanwhile."""
    constants, scheduler = ShardKey.constant(1, 0, 0), Hanging()
    urls = [f"memory://constants-{uuid.uuid4().hex}-{index}" for index in range(3)]
    async with Hierarchy.of(*urls).open() as hierarchy:
        ranks = Ranks(BlockingGroup(SingleProcess()), scheduler, 10.0)  # type: ignore[arg-type]  # it does what is asked for here
        sound = [Copy(index, constants) for index in range(3)]
        assert not await brought(ranks, hierarchy, constants, References("", {}), sound)
    assert scheduler.now == 105.0
