"""The s3 driver against a dictionary, in orders that Hypothesis chooses, on a real server."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

from tests.servers.seaweed import Seaweed
from tiercheck.testing.stateful import DriverMachine
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver

pytestmark = pytest.mark.cluster

FEW = settings(max_examples=6, stateful_step_count=30, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True, scope="module")
def server(s3_server: Seaweed) -> Iterator[None]:
    S3Machine.server = s3_server
    with mock.patch.dict("os.environ", s3_server.environment):
        yield


@pytest.fixture(autouse=True)
def small_parts() -> Iterator[None]:
    """Parts that S3 would refuse and this server does not, so that objects of a few hundred KB have many."""
    with mock.patch("tiercheck.tiers.s3.settings.PART_BYTES_MIN", 1):
        yield


class S3Machine(DriverMachine):
    server: Seaweed
    options = ""

    def make_driver(self) -> TierDriver:
        self.prefix = getattr(self, "prefix", None) or f"stateful/{secrets.token_hex(6)}"
        return make_driver(self.server.url(self.server.bucket, self.prefix, part="64KiB") + self.options)

    def remove_tier(self) -> None:
        self.server.remove(self.server.bucket, self.prefix)


class ShardedMachine(S3Machine):
    options = "&shards=3&conditional=off"


TestS3 = S3Machine.TestCase
TestS3.settings = FEW
TestSharded = ShardedMachine.TestCase
TestSharded.settings = FEW
