"""A deadline bounds silence: what is new gives the time back, and what is read again does not."""

from __future__ import annotations

import asyncio

import pytest

from tiercheck.keys import ShardKey
from tiercheck.policy.observation import Copy
from tiercheck.recovery.reading.patience import Patience

BASE = Copy(1, ShardKey.base(1, 10, 0))
OTHER = Copy(1, ShardKey.base(1, 20, 0))


async def test_what_comes_gives_the_time_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    patience = Patience(10.0)
    now = 8.0
    assert patience.left_s == 2
    patience.came(BASE, 100)
    assert (patience.left_s, patience.arrivals) == (10, 1)
    now = 15.0
    patience.came(BASE, 100)
    patience.came(BASE, 50)
    assert (patience.left_s, patience.arrivals) == (3, 1)
    patience.came(BASE, 101)
    patience.came(OTHER, 1)
    assert (patience.left_s, patience.arrivals) == (10, 3)
    now = 30.0
    assert patience.left_s == 0
