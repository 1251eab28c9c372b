"""What a mover says of itself."""

from __future__ import annotations

from dataclasses import asdict

from tiercheck.replication.handle import COUNTS, MoverStatus


def test_counts_go_on_from_the_mover_before_and_all_else_is_of_this_one() -> None:
    before = MoverStatus(watermark=10, undrained_bases=2, errors={"s3": "no"}, **dict.fromkeys(COUNTS, 5))
    now = MoverStatus(watermark=20, newest_base=30, **dict.fromkeys(COUNTS, 2))
    assert now.after(MoverStatus()) == now
    assert asdict(now.after(before)) == asdict(now) | dict.fromkeys(COUNTS, 7)
