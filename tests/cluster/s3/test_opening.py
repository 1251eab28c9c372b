"""Opening an s3 tier that cannot be opened: one line that says what is wrong and where, and holds no secret."""

from __future__ import annotations

import os

import pytest

from tests.servers.process import free_port
from tests.servers.s3_place import Place, place
from tiercheck.errors import ConfigurationError, TierError, Transient, Unauthorized
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver

__all__ = ["place"]

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio]


class TestOpening:
    """One line that says what is wrong and where, and holds no secret."""

    async def refused(self, driver: TierDriver, kind: type[Exception], pattern: str) -> None:
        with pytest.raises(kind, match=pattern) as caught:
            await driver.open()
        message = str(caught.value)
        assert "\n" not in message
        assert os.environ["AWS_SECRET_ACCESS_KEY"] not in message
        with pytest.raises(TierError, match="not open"):
            await driver.stat("a")

    async def test_a_wrong_secret(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2-hunter2")
        await self.refused(
            place.driver(), Unauthorized, rf"{place.server.bucket}.*{place.proxy.port}.*SignatureDoesNot"
        )

    async def test_a_wrong_key(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stranger")
        await self.refused(place.driver(), Unauthorized, "InvalidAccessKeyId")

    async def test_no_credentials(self, place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", f"{tmp_path}/none")
        monkeypatch.setenv("AWS_CONFIG_FILE", f"{tmp_path}/none")
        await self.refused(place.driver(), Unauthorized, "no usable credentials")

    async def test_a_profile_that_is_not_there(self, place: Place) -> None:
        await self.refused(place.driver(profile="nobody"), ConfigurationError, "nobody")

    async def test_a_wrong_bucket(self, place: Place) -> None:
        driver = make_driver(f"s3://no-such-bucket/x?endpoint_url={place.proxy.endpoint_url}")
        pattern = r"'no-such-bucket' at http://127.*NoSuchBucket.*create it"
        await self.refused(driver, ConfigurationError, pattern)

    async def test_a_wrong_region(self, place: Place) -> None:
        place.proxy.fail(
            400, "AuthorizationHeaderMalformed", on="ListObjectsV2", times=9, extra="<Region>eu-west-1</Region>"
        )
        await self.refused(place.driver(), ConfigurationError, r"the bucket is in region eu-west-1; say region=NAME")

    async def test_an_endpoint_that_is_down(self, place: Place) -> None:
        driver = make_driver(f"s3://bucket/x?endpoint_url=http://127.0.0.1:{free_port()}&deadline=300ms")
        await self.refused(driver, Transient, r"'bucket' at http://127.0.0.1:\d+ cannot be used: .*was refused")

    async def test_an_endpoint_that_has_no_name(self, place: Place) -> None:
        driver = make_driver("s3://bucket/x?endpoint_url=http://nowhere.invalid:1&deadline=300ms")
        # Which of the two depends on whether a name server answers.
        with pytest.raises((ConfigurationError, Transient), match=r"nowhere.invalid.*is endpoint_url right"):
            await driver.open()

    async def test_credentials_that_may_not_write(self, place: Place) -> None:
        place.proxy.fail(403, "AccessDenied", on="PutObject", times=9)
        await self.refused(place.driver(), Unauthorized, "a client that only reads says access=read")

    async def test_a_bucket_that_takes_no_object_without_encryption(self, place: Place) -> None:
        place.proxy.refuse_what_is_not_encrypted()
        await self.refused(place.driver(), Unauthorized, "AccessDenied")
        async with place.driver(sse="AES256") as driver:
            assert driver.capabilities.conditional_put
            await driver.put("a", [b"x"])

    async def test_another_number_of_shards(self, place: Place) -> None:
        async with place.driver(shards=4) as driver:
            await driver.put("a", [b"x"])
        await self.refused(place.driver(), ConfigurationError, r"shards=1.*shard-00\d-of-004/.*all clients")
        await self.refused(place.driver(shards=2), ConfigurationError, "shards=2")
        async with place.driver(shards=4) as driver:
            assert await driver.get("a") == b"x"

    async def test_opening_leaves_nothing_behind(self, place: Place) -> None:
        async with place.driver():
            pass
        found = place.server.client.list_objects_v2(Bucket=place.server.bucket, Prefix=f"{place.prefix}/")
        assert "Contents" not in found
