"""A place in a bucket for one test, behind a proxy of its own, and a driver on it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.servers.s3_proxy import S3Proxy
from tests.servers.seaweed import Seaweed
from tiercheck.tiers.registry import make_driver
from tiercheck.tiers.s3 import S3Driver

__all__ = ["PART", "Place", "driver", "place"]

PART = 256 << 10
"""Less than S3 takes, and this server does not mind: an object of a few parts is soon sent, again and again."""


class Place:
    """A prefix of its own, behind a proxy of its own."""

    def __init__(self, server: Seaweed, proxy: S3Proxy) -> None:
        self.server, self.proxy, self.prefix = server, proxy, secrets.token_hex(6)

    def driver(self, **options: object) -> S3Driver:
        chosen = {"part": f"{PART}B", "parts_in_flight": 3, "timeout": "20s", "deadline": "20s", **options}
        query = "&".join(f"{name}={value}" for name, value in chosen.items())
        location = f"{self.server.bucket}/{self.prefix}"
        made = make_driver(f"s3://{location}?endpoint_url={self.proxy.endpoint_url}&{query}")
        assert isinstance(made, S3Driver)
        return made

    def raw(self, key: str) -> bytes | None:
        try:
            return bytes(
                self.server.client.get_object(Bucket=self.server.bucket, Key=f"{self.prefix}/{key}")["Body"].read()
            )
        except self.server.client.exceptions.NoSuchKey:
            return None

    def uploads(self) -> list[str]:
        found = self.server.client.list_multipart_uploads(Bucket=self.server.bucket, Prefix=f"{self.prefix}/")
        return [upload["UploadId"] for upload in found.get("Uploads", [])]


@pytest.fixture
def place(s3_server: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tiercheck.tiers.s3.settings.PART_BYTES_MIN", PART)
    with S3Proxy(s3_server) as proxy:
        yield Place(s3_server, proxy)


@pytest.fixture
async def driver(place: Place) -> AsyncIterator[S3Driver]:
    async with place.driver() as driver:
        place.proxy.seen.clear()
        yield driver
