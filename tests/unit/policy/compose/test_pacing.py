"""How fast shards are copied."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tiercheck.errors import ConfigurationError
from tiercheck.keys import Stream
from tiercheck.policy.policies import BytesPerSecond, Copying, Spread, Unpaced
from tiercheck.types import Survives


def copying(tier: str) -> Copying:
    return Copying(tier, Survives.RACK, Stream.BASE, 1000, 0)


def test_a_tier_is_paced_by_its_name_and_by_the_slowest_of_several() -> None:
    policy = BytesPerSecond("s3", 100) & BytesPerSecond("s3", 50) & BytesPerSecond("peer", 10) & Unpaced()
    assert policy.bytes_per_s(copying("s3")) == 50
    assert policy.bytes_per_s(copying("peer")) == 10
    assert policy.bytes_per_s(copying("nvme")) is None


@pytest.mark.parametrize("rate", [0, 0.5, float("nan"), float("inf"), True, "100"])
def test_an_impossible_rate_is_refused(rate: float) -> None:
    with pytest.raises(ConfigurationError, match="rate must be"):
        BytesPerSecond("s3", rate)


def test_a_base_is_spread_over_the_versions_until_the_next_one_less_a_margin() -> None:
    seen = Copying("s3", Survives.RACK, Stream.BASE, 1000, 1, 1000, 20, 20, 0.5)
    spread = Spread(margin=0.25, chunk=10**9)
    assert spread.bytes_per_s(seen) == 1000 / 15 / 0.5
    assert spread.bytes_per_s(replace(seen, left_nbytes=500, versions_left=10)) == 500 / 5 / 0.5, "by what is left"
    assert spread.bytes_per_s(replace(seen, left_nbytes=500, versions_left=4)) == 500 / 0.5, "also in the margin"
    assert replace(spread, chunk=40).bytes_per_s(seen) == 40 / 0.5
    unheld = [
        replace(seen, stream=Stream.DIFFERENTIAL),
        replace(seen, version_s=None),
        replace(seen, versions_left=0),
        replace(seen, undrained_bases=2),
        replace(seen, awaited=True),
    ]
    assert {spread.bytes_per_s(each) for each in unheld} == {None}


@pytest.mark.parametrize("options", [{"margin": 1.0}, {"margin": -0.1}, {"chunk": 0}, {"chunk": True}, {"margin": "1"}])
def test_a_spread_that_is_none_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"(margin|chunk) must be"):
        Spread(**options)
