"""What every tier will hold is told before the first step, and a tier that cannot hold the least is refused."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.training import Training, life, memory
from tiercheck.config import CheckpointConfig
from tiercheck.errors import CapacityExceeded
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.opening.room import TierRoom, check_rooms, rooms_text, too_little_room
from tiercheck.policy.other_tiers import ObjectCounts, TierNeed
from tiercheck.tiers.wrappers.base import WrappingDriver
from tiercheck.types import Usage

GIB = 1 << 30
NEED = TierNeed(ObjectCounts(2, 58), ObjectCounts(3, 108))
ROOM = TierRoom("nvme", "nvme:///y", 2, 1 << 26, 10 * GIB, 16 * GIB, NEED, shared=True, limit_bytes=12 * GIB)
CONFIG = CheckpointConfig()


def test_a_tier_that_cannot_hold_the_least_is_refused_with_numbers() -> None:
    check_rooms([ROOM, replace(ROOM, limit_bytes=None), replace(ROOM, limit_bytes=10 * GIB)], CONFIG)
    with pytest.raises(CapacityExceeded) as refused:
        check_rooms([replace(ROOM, limit_bytes=9 * GIB)], CONFIG)
    assert refused.value.message == (
        "nvme must hold at least 2 bases and 58 differentials or snapshots of each of 2 ranks, 10.0 GiB in all "
        "(80 bytes a trained parameter), but has room for 9.0 GiB: give it more room (free space, size=, or the "
        "neighbour's 'tiercheck agent --memory') or lower base_every (now 50) or send it bases only "
        '(placement="bases_only?tier=nvme")'
    )
    bases = replace(ROOM, need=TierNeed(ObjectCounts(3, 0), ObjectCounts(3, 0)), limit_bytes=GIB)
    with pytest.raises(CapacityExceeded, match=r"at least 3 bases of each .* agent --memory'\) \(tier"):
        check_rooms([bases], CONFIG)


def test_a_tier_that_holds_the_least_alone_is_told() -> None:
    assert too_little_room([replace(ROOM, limit_bytes=16 * GIB), replace(ROOM, limit_bytes=None)], CONFIG) is None
    assert too_little_room([ROOM], CONFIG) == (
        "nvme has room for 12.0 GiB, but usually holds 16.0 GiB: give it more room, or lower keep_last (now 2)"
    )
    said = too_little_room([replace(ROOM, limit_bytes=9 * GIB)], CONFIG)
    assert said is not None
    assert said.startswith(
        "nvme has room for 9.0 GiB, but must hold at least 10.0 GiB, so that training will wait for it: "
    )


def test_the_table_has_a_row_a_tier() -> None:
    first = TierRoom("shm", "shm://x", 2, 0, GIB, GIB)
    assert rooms_text([first, ROOM]).splitlines() == [
        "what each tier will hold:",
        "  tier  ranks  least     usual     bytes a parameter  room",
        "  shm   2      1.0 GiB   1.0 GiB   ? / ?              not known",
        "  nvme  2      10.0 GiB  16.0 GiB  80 / 128           12.0 GiB",
    ]


class Small(WrappingDriver):
    """Has room for so many bytes."""

    limit_bytes = 1000

    async def usage(self) -> Usage:
        return Usage(0, self.limit_bytes)


@pytest.mark.parametrize("survives", ["rack", "process"], ids=["shared", "a node's own"])
def test_a_job_is_told_what_each_tier_will_hold(
    tmp_path: Path, survives: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="tiercheck")
    training = Training()
    last = Tier(f"nvme://{tmp_path}/run?survives={survives}", wrap=Small)
    tiers = Hierarchy.of(f"memory://room-{tmp_path.name}?size=1GiB", last)
    with pytest.raises(CapacityExceeded, match=r"nvme must hold at least . bases and .* trained parameter\)"):
        training.attach(tiers)
    monkeypatch.setattr(Small, "limit_bytes", 1 << 26)
    training.attach(tiers).abort()
    rows = r"what each tier will hold:\n  tier .*\n  memory  1 .* 1.0 GiB\n  nvme    1 .* 64.0 MiB"
    assert re.search(rows, caplog.text)


def test_a_job_that_has_something_to_go_on_from_is_not_kept_from_it_by_a_full_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = Hierarchy.of(memory(), Tier(f"nvme://{tmp_path}/run?survives=rack", wrap=Small))
    monkeypatch.setattr(Small, "limit_bytes", 1 << 26)
    training = Training()
    with life(training.attach(tiers)):
        for version in (1, 2):
            training.step(version)
    monkeypatch.setattr(Small, "limit_bytes", 1000)
    again = Training()
    with life(again.attach(tiers)):
        assert again.parameters() == training.states[2]
        assert "nvme has room for 1000 B, but must hold at least" in caplog.text
        again.step(3)
