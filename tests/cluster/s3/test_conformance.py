"""The s3 driver passes the kit against a real server."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Iterator
from urllib.parse import quote

import pytest

from tests.servers.seaweed import Seaweed
from tiercheck.testing.conformance import TierDriverTests
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver

pytestmark = pytest.mark.cluster


class TestS3(TierDriverTests):
    large_nbytes = 12 << 20
    """Three parts."""
    overwrites = 12  # each sends three parts to a server on two cores; the file systems run all 30
    options = "part=5MiB&parts_in_flight=4"

    @pytest.fixture(autouse=True)
    def bucket_of_its_own(self, s3_server: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        for name, value in s3_server.environment.items():
            monkeypatch.setenv(name, value)
        self.server = s3_server
        self.bucket = s3_server.bucket
        self.prefix = f"some run/{secrets.token_hex(6)}"
        yield
        s3_server.remove(self.bucket, self.prefix)

    def endpoint_url(self) -> str:
        return self.server.endpoint_url

    def name(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    @property
    def tier_url(self) -> str:
        return f"s3://{quote(f'{self.bucket}/{self.prefix}')}?endpoint_url={self.endpoint_url()}&{self.options}"

    async def make_driver(self) -> TierDriver:
        return make_driver(self.tier_url)

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return await self.make_driver()

    def client_factory(self, driver: TierDriver) -> Callable[[], TierDriver]:
        return functools.partial(make_driver, self.tier_url)

    async def raw_get(self, driver: TierDriver, key: str) -> bytes | None:
        try:
            return bytes(self.server.client.get_object(Bucket=self.bucket, Key=self.name(key))["Body"].read())
        except self.server.client.exceptions.NoSuchKey:
            return None

    async def raw_put(self, driver: TierDriver, key: str, content: bytes) -> None:
        self.server.client.put_object(Bucket=self.bucket, Key=self.name(key), Body=content)

    def crash_before_publish(self, driver: TierDriver) -> contextlib.AbstractContextManager[object] | None:
        return None  # the last request publishes; a kill before it is the cluster test's
