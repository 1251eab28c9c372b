"""How fast shards are copied."""

from __future__ import annotations

import pytest

from tiercheck.errors import ConfigurationError
from tiercheck.keys import Stream
from tiercheck.policy.policies import BytesPerSecond, Copying, Unpaced
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
