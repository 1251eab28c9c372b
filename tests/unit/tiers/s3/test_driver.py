"""The parts of the s3 driver that need no server."""

from __future__ import annotations

import asyncio
import base64
import itertools
import random
import socket
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore import exceptions as boto
from botocore.utils import parse_timestamp
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.servers.process import free_port
from tiercheck.errors import ConfigurationError, NothingListens, TierError, Transient, Unauthorized
from tiercheck.hierarchy import Hierarchy
from tiercheck.tiers.registry import TierURL, make_driver
from tiercheck.tiers.s3 import S3Driver, S3Settings, client
from tiercheck.tiers.s3.checksums import CRC32C, KNOWN, Checksum, stored_checksum
from tiercheck.tiers.s3.client import time_of
from tiercheck.tiers.s3.download import PART_BYTES_MAX, get_part_bytes
from tiercheck.tiers.s3.failures import classify, to_open_error
from tiercheck.tiers.s3.listing import Listing
from tiercheck.tiers.s3.names import Names, etag_in, etag_of, server_etag
from tiercheck.tiers.s3.payload import Body, Buffers
from tiercheck.tiers.s3.upload import part_bounds
from tiercheck.types import ObjectInfo, Survives


class TestURL:
    def test_options(self) -> None:
        driver = make_driver(
            "s3://bucket/some/run?endpoint_url=https://store:9000&region=eu-west-1&profile=me&part=32MiB&parts_in_flight=4"
            "&survives=site&conditional=off&listing=tree&shards=16&storage_class=STANDARD_IA&timeout=5s&deadline=2m"
        )
        assert isinstance(driver, S3Driver)
        chosen = driver.settings
        assert (chosen.bucket, chosen.prefix, chosen.endpoint_url) == ("bucket", "some/run", "https://store:9000")
        assert (chosen.part_bytes, chosen.parts_in_flight, chosen.shards) == (32 << 20, 4, 16)
        assert (chosen.timeout_s, chosen.deadline_s, chosen.abandoned_after_s) == (5.0, 120.0, 86400.0)
        assert driver.capabilities.survives is Survives.SITE
        assert not driver.capabilities.conditional_put
        assert chosen.put_arguments == {"StorageClass": "STANDARD_IA"}

    @pytest.mark.parametrize(
        ("url", "pattern"),
        [
            ("s3://", "no bucket name"),
            ("s3://B/x", "no bucket name"),
            ("s3://bucket/a//b", "empty"),
            ("s3://bucket/../b", r"'\.\.'"),
            (f"s3://bucket/{'k' * 600}", "too long"),
            ("s3://me:hunter2@bucket/x", "do not belong into"),
            ("s3://bucket?secret_access_key=hunter2", "does not know the option 'secret_access_key'"),
            ("s3://bucket?endpoint_url=http://me:hunter2@host", "must not hold credentials"),
            ("s3://bucket?endpoint_url=host:9000", "must look like https://host:port"),
            ("s3://bucket?part=1MiB", "part must be from 5.0 MiB"),
            ("s3://bucket?parts_in_flight=0", "from 1 to 256"),
            ("s3://bucket?shards=1000", "from 1 to 256"),
            ("s3://bucket?conditional=maybe", "choose one of auto, on, off"),
            ("s3://bucket?timeout=60", "write it like"),
            ("s3://bucket?sse_kms_key=x", "needs sse=aws:kms"),
            ("s3://bucket?abandoned_after=1s", "from 60 s"),
        ],
    )
    def test_what_cannot_be(self, url: str, pattern: str) -> None:
        with pytest.raises(ConfigurationError, match=pattern) as caught:
            make_driver(url)
        assert "hunter2" not in str(caught.value)

    def test_the_budget_follows_the_transfers_and_not_their_size(self) -> None:
        small, large, many = (
            make_driver(f"s3://bucket?{options}").memory_bytes  # type: ignore[attr-defined]
            for options in ("part=5MiB", "part=1GiB", "parts_in_flight=64")
        )
        assert small == large < many <= 80 << 20


class TestChecksums:
    @given(st.binary(max_size=300), st.binary(max_size=300))
    def test_two_pieces(self, first: bytes, second: bytes) -> None:
        for checksum in KNOWN:
            whole = checksum.combine(checksum.update(first, 0), checksum.update(second, 0), len(second))
            assert whole == checksum.update(first + second, 0)

    def test_the_check_values_of_the_algorithms(self) -> None:
        """Source: the CRC catalogue's check values, over ``123456789``."""
        expected = {"CRC32": 0xCBF43926, "CRC32C": 0xE3069283, "CRC64NVME": 0xAE8B14860A799888}
        for checksum in KNOWN:
            assert checksum.update(b"123456789", 0) == expected[checksum.name]

    @pytest.mark.parametrize("checksum", KNOWN, ids=lambda checksum: checksum.name)
    def test_long_pieces_are_combined_without_reading_them(self, checksum: Checksum) -> None:
        block = bytes(1 << 20)
        expected = 0
        for _ in range(256):
            expected = checksum.update(block, expected)
        combined = checksum.update(block, 0)
        for doubling in range(8):  # 1 MiB to 256 MiB of zeros
            combined = checksum.combine(combined, combined, 1 << 20 << doubling)
        assert combined == expected
        assert checksum.combine(1, 0, 5 << 30) != 0

    def test_only_checksums_of_the_whole_are_taken(self) -> None:
        encoded = base64.b64encode(b"abcd").decode()
        assert stored_checksum({CRC32C.field: encoded}) == (CRC32C, encoded)
        assert stored_checksum({CRC32C.field: encoded, "ChecksumType": "COMPOSITE"}) is None
        assert stored_checksum({CRC32C.field: f"{encoded}-3"}) is None
        assert stored_checksum({"ChecksumSHA256": encoded}) is None


payloads = st.lists(st.binary(max_size=40), max_size=12)


class TestBuffers:
    @given(payloads, st.data())
    def test_any_range_is_found(self, payload: Sequence[bytes], data: st.DataObject) -> None:
        whole = b"".join(payload)
        start = data.draw(st.integers(0, len(whole)))
        stop = data.draw(st.integers(start, len(whole)))
        with Buffers(payload) as buffers:
            assert buffers.nbytes == len(whole)
            assert buffers.copy(start, stop) == whole[start:stop]
            value = asyncio.run(buffers.checksum(CRC32C, start, stop))
            assert value == CRC32C.update(whole[start:stop], 0)

    async def test_a_body_is_iterated_and_rewound(self) -> None:
        content = bytes(range(256)) * 4096
        progress: list[int] = []
        with Buffers([content[:5], content[5:]]) as buffers:
            body = Body(buffers, 3, len(content) - 2, lambda: progress.append(1))
            for _ in range(2):
                body.seek(0)
                assert not body.handed_over
                assert b"".join([chunk async for chunk in body]) == content[3:-2]
                assert body.handed_over
            assert len(body) == len(content) - 5
            assert (body.seek(0, 2), body.read()) == (len(body), b"")
            assert (body.seek(10), body.read(4), body.tell()) == (10, content[13:17], 14)
        assert progress

    async def test_a_body_whose_payload_was_taken_back_breaks_its_request(self) -> None:
        """It must not end early as if it were complete: the connection would be used again."""
        with Buffers([b"0123456789"]) as buffers:
            body = Body(buffers, 0, 10, lambda: None)
        with pytest.raises(OSError, match="taken back"):
            await anext(aiter(body))

    async def test_a_cancelled_checksum_leaves_no_buffer_in_use(self) -> None:
        content = bytearray(8 << 20)
        with Buffers([content]) as buffers:
            summing = asyncio.create_task(buffers.checksum(SLOW, 0, len(content)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            summing.cancel()
            await asyncio.wait({summing})
            assert summing.cancelled()
        content.append(0)


def slowly(data: Any, value: int) -> int:
    for _ in range(5):
        value = zlib.crc32(data, value)
    return value


SLOW = replace(CRC32C, update=slowly)


class TestParts:
    @given(st.integers(1, 6 << 40), st.sampled_from([5 << 20, 16 << 20, 1 << 30]))
    @settings(max_examples=50)
    def test_they_cover_the_object_and_are_not_too_many(self, nbytes: int, part_bytes: int) -> None:
        bounds = part_bounds(nbytes, part_bytes)
        assert 1 <= len(bounds) <= 10_000
        assert (bounds[0][0], bounds[-1][1]) == (0, nbytes)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
        assert all(stop - start >= part_bytes for start, stop in bounds[:-1])

    @given(st.integers(1, 6 << 40), st.sampled_from([5 << 20, 16 << 20, 1 << 30]), st.integers(1, 32))
    @settings(max_examples=50)
    def test_those_of_a_get_keep_all_connections_busy(self, nbytes: int, part_bytes: int, in_flight: int) -> None:
        size = get_part_bytes(nbytes, S3Settings("abc", part_bytes=part_bytes, parts_in_flight=in_flight))
        assert part_bytes <= size <= max(part_bytes, PART_BYTES_MAX)
        rounds = -(-nbytes // (size * in_flight))
        # More than the unit only where the last round is as full as the others, but for what does not divide evenly.
        assert size == part_bytes or nbytes > rounds * in_flight * (size - 1)


def answer(code: str, status: int, **headers: str) -> boto.ClientError:
    metadata = {"HTTPStatusCode": status, "HTTPHeaders": headers}
    return boto.ClientError({"Error": {"Code": code, "Message": "so"}, "ResponseMetadata": metadata}, "PutObject")


class TestFailures:
    @pytest.mark.parametrize(
        ("error", "retryable"),
        [
            (answer("SlowDown", 503), True),
            (answer("", 503), True),
            (answer("500", 500), True),
            (answer("RequestTimeout", 400), True),
            (answer("BadDigest", 400), True),
            (answer("ConditionalRequestConflict", 409), True),
            (answer("TooMany", 429), True),
            (answer("AccessDenied", 403), False),
            (answer("404", 404), False),
            (answer("PreconditionFailed", 412), False),
            (answer("NotImplemented", 501), False),
            (answer("MalformedXML", 400), False),
            (boto.EndpointConnectionError(endpoint_url="x", error=OSError()), True),
            (boto.ReadTimeoutError(endpoint_url="x"), True),
            (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), True),
            (boto.NoCredentialsError(), False),
            (boto.ParamValidationError(report="x"), False),
            (ConnectionResetError(), True),
            (TimeoutError(), True),
        ],
        ids=repr,
    )
    def test_what_is_worth_another_try(self, error: Exception, retryable: bool) -> None:
        failure = classify(error, 60.0)
        assert failure.retryable is retryable
        assert isinstance(failure.error("s3://x", "a", 1), TierError)

    def test_a_mistake_of_ours_is_not_taken_for_the_network(self) -> None:
        error = boto.HTTPClientError(error=None)
        error.__cause__ = TypeError("sequence item 0")
        assert not classify(error, 60.0).retryable

    def test_a_region_is_told(self) -> None:
        failure = classify(answer("PermanentRedirect", 301, **{"x-amz-bucket-region": "eu-west-1"}), 60.0)
        assert "the bucket is in region eu-west-1" in failure.reason

    def test_a_wrong_clock_is_told(self) -> None:
        failure = classify(answer("RequestTimeTooSkewed", 403), 60.0)
        assert failure.kind is Unauthorized
        assert "clock" in failure.reason

    def test_tries_are_told(self) -> None:
        error = classify(answer("SlowDown", 503), 60.0).error("s3://x", "a", 7)
        assert isinstance(error, Transient)
        assert "(tried 7 times)" in str(error)


class TestNames:
    def test_plain(self) -> None:
        names = Names(S3Settings("bucket", "some/run"))
        assert names.name("a/b") == "some/run/a/b"
        assert names.key("some/run/a/b", "some/run/") == "a/b"
        assert names.key("some/run/folder/", "some/run/") is None
        assert names.key("some/run/.tiercheck-probe/x/a", "some/run/") is None
        assert Names(S3Settings("bucket")).name("a") == "a"
        with pytest.raises(ValueError, match="tries out"):
            names.name(".tiercheck-probe/x")

    def test_one_version_is_spread_over_the_shards(self) -> None:
        names = Names(S3Settings("bucket", "run", shards=8))
        found = [names.name(f"g000001/base/000000000040/r{rank:05d}.safetensors") for rank in range(800)]
        counts = [sum(name.startswith(root) for name in found) for root in names.roots]
        assert sum(counts) == 800
        assert min(counts) > 50
        for root in names.roots:
            assert len(root) == len("run/shard-000-of-008/")

    def test_a_key_is_of_one_shard_only(self) -> None:
        names = Names(S3Settings("bucket", "run", shards=8))
        name = names.name("a")
        assert [names.key(root + "a", root) for root in names.roots].count("a") == 1
        assert names.key(name, next(root for root in names.roots if name.startswith(root))) == "a"


class TestEtags:
    def test_they_are_taken_apart(self) -> None:
        assert server_etag(etag_of('"0a1b-3"', "00ff")) == "0a1b-3"

    @pytest.mark.parametrize("text", ["", "no such etag", "a.b\r\nx: y", '".0', "a" * 500 + ".0", "a.b.c"])
    def test_what_is_none(self, text: str) -> None:
        assert server_etag(text) is None

    def test_a_foreign_object_has_one(self) -> None:
        changed = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
        assert server_etag(etag_in({"ETag": '"0a"', "LastModified": changed})) == "0a"


class Server:
    """ListObjectsV2 over a set of names: pages of three, in byte order or, like a file system, folder by folder."""

    def __init__(self, names: set[str], *, flat: bool) -> None:
        self.tier = "s3://bucket"
        self.order = sorted(
            names, key=str.encode if flat else (lambda name: [part.encode() for part in name.split("/")])
        )
        self.requests = 0

    async def ask(self, operation: str, key: str | None = None, **arguments: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        if operation == "HeadObject":
            return {
                "ContentLength": 1,
                "ETag": '"0a"',
                "LastModified": datetime(2026, 1, 1, tzinfo=UTC),
                "Metadata": {"tiercheck-put": "ff"},
            }
        assert operation == "ListObjectsV2"
        self.requests += 1
        prefix, delimiter = arguments["Prefix"], arguments.get("Delimiter")
        entries: dict[str, bool] = {}
        for name in self.order:
            if name.startswith(prefix):
                rest = name.removeprefix(prefix)
                if delimiter and delimiter in rest:
                    entries[prefix + rest[: rest.index(delimiter) + 1]] = True
                else:
                    entries[name] = False
        start = int(arguments.get("ContinuationToken", 0))
        page = list(entries.items())[start : start + 3]
        return {
            "Contents": [{"Key": name, "Size": 1, "ETag": '"0a"'} for name, folder in page if not folder],
            "CommonPrefixes": [{"Prefix": name} for name, folder in page if folder],
            "IsTruncated": start + 3 < len(entries),
            "NextContinuationToken": str(start + 3),
        }


components = st.text(st.sampled_from("a-.0~é"), min_size=1, max_size=2).filter(lambda part: part not in (".", ".."))
PREFIXES = ("", "a", "a/", "a-", "a/a", "/", "a//", "..")
some_keys = st.lists(st.lists(components, min_size=1, max_size=3).map("/".join), max_size=25)


class TestListing:
    @given(
        keys=some_keys, prefix=st.sampled_from(["", "a", "a/", "a-", "a/a", "/", "a//", ".."]), shards=st.integers(1, 3)
    )
    @settings(max_examples=150)
    @pytest.mark.parametrize("flat", [True, False])
    def test_order_and_completeness(self, flat: bool, keys: list[str], prefix: str, shards: int) -> None:
        names = Names(S3Settings("bucket", "run", shards=shards))
        stored = {names.name(key) for key in keys}
        stored |= {"run/folder/", "run/.tiercheck-probe/x/a/b", "other/x", "run-2/x"}
        listing = Listing(Server(stored, flat=flat), names, flat=flat)  # type: ignore[arg-type]

        async def listed() -> list[str]:
            return [info.key async for info in listing.infos(prefix)]

        expected = sorted({key for key in keys if key.startswith(prefix)}, key=str.encode)
        assert asyncio.run(listed()) == expected

    async def test_a_server_that_is_out_of_order_is_told(self) -> None:
        names = Names(S3Settings("bucket", "run"))
        listing = Listing(Server({"run/a/b", "run/a-b"}, flat=False), names, flat=True)  # type: ignore[arg-type]
        with pytest.raises(TierError, match="listing=tree"):
            _ = [info async for info in listing.infos("")]

    async def test_a_shard_that_cannot_be_listed_is_what_is_told(self) -> None:
        class Failing(Server):
            async def ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
                if "shard-001" in arguments["Prefix"]:
                    raise Unauthorized("no")
                await asyncio.Event().wait()
                return await super().ask(operation, **arguments)

        names = Names(S3Settings("bucket", "run", shards=3))
        listing = Listing(Failing(set(), flat=True), names, flat=True)  # type: ignore[arg-type]
        with pytest.raises(Unauthorized):
            _ = [info async for info in listing.infos("")]
        assert len(asyncio.all_tasks()) == 1

    async def test_folders_are_listed_ahead_and_let_go(self) -> None:
        names = Names(S3Settings("bucket", "run"))
        server = Server({f"run/{n}/x" for n in range(30)}, flat=False)
        listing = Listing(server, names, flat=False)  # type: ignore[arg-type]
        found = listing._below(await listing._level("run/"))
        assert (await anext(found)).name == "run/0/x"
        made = server.requests
        await found.aclose()
        for _ in range(10):
            await asyncio.sleep(0)
        assert server.requests <= made + 8
        assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(
    "text",
    [
        "Sun, 22 Nov 2026 11:16:44 GMT",  # HTTP's own
        "Sun, 22 Nov 2026 11:16:44 -0000",  # of no zone, for its parser
        "Sun, 22 Nov 2026 12:16:44 +0100",
        "2026-11-22T11:16:44.000Z",
        "2026-11-22T12:16:44+01:00",
        "1795346204",
        1795346204,
        1795346204.0,
    ],
)
def test_a_time_is_what_botocore_would_have_read(text: object) -> None:
    assert time_of(text) == parse_timestamp(text) == datetime(2026, 11, 22, 11, 16, 44, tzinfo=UTC)


@pytest.mark.parametrize("text", ["", "yesterday", "Sun, 99 Nov 2026 11:16:44 GMT", None])
def test_what_is_no_time_is_refused(text: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        time_of(text)


def test_the_url_is_shown_without_what_looks_secret() -> None:
    url = TierURL.parse("s3://bucket/x?sse=aws:kms&sse_kms_key=arn:aws:kms:k")
    assert "arn" not in S3Driver.from_url(url).url


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.usefixtures("credentials")
class TestOpening:
    """What an endpoint that cannot serve makes of opening a tier."""

    async def test_where_nothing_listens_it_fails_long_before_the_deadline(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client, "UNREACHABLE_S_MAX", 0.2)
        port = free_port()
        opened = Hierarchy.of("memory://", f"s3://bucket/x?endpoint_url=http://127.0.0.1:{port}&deadline=1h").open()
        async with asyncio.timeout(60):
            with pytest.raises(
                NothingListens, match=rf"'bucket' at http://127.0.0.1:{port}.*connection was refused.*s3://"
            ):
                await opened.__aenter__()

    @pytest.mark.parametrize("status", ["503 Slow Down", "500 Internal Server Error"])
    async def test_a_busy_endpoint_is_asked_until_the_deadline_which_names_the_tier_and_the_cause(
        self, status: str
    ) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            endpoint = f"http://127.0.0.1:{port}"
            opened = Hierarchy.of("memory://", f"s3://bucket/x?endpoint_url={endpoint}&deadline=1h").open()
            cause = rf"the tier s3 could not be opened within 5 s: .*'bucket' at {endpoint}: .*{status[:3]}"
            training = random.getstate()
            with pytest.raises(Transient, match=cause):
                await opened.opened(5.0)  # a busy machine takes a second to make the client
            assert random.getstate() == training, "its generator is drawn from by training alone"

    def test_a_name_that_does_not_exist_is_an_error_of_the_url_and_a_name_server_that_is_away_is_not(self) -> None:
        for number, kind in ((socket.EAI_NONAME, ConfigurationError), (socket.EAI_AGAIN, Transient)):
            cause = boto.EndpointConnectionError(endpoint_url="http://nowhere")
            cause.__cause__ = socket.gaierror(number, "no such name")
            failure = classify(cause, 1.0)
            assert failure.unreachable
            assert not failure.acted
            error = failure.error("s3://bucket", None, 1)
            error.__cause__ = cause
            assert type(to_open_error(error, S3Settings("bucket"), "s3://bucket")) is kind


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"<html>We are back in an hour.</html>",
        b"We are back in an hour.",
        b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>x/a</Key></Contents></ListBucketResult>",
        b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><LastModified>soon</LastModified></Contents>"
        b"</ListBucketResult>",
    ],
    ids=["nothing", "a proxy's page", "text", "no size", "no time"],
)
async def test_what_is_no_answer_of_s3_is_no_empty_tier_and_no_bare_exception(page: bytes) -> None:
    empty = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
    body = [empty]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        content = b"" if head.startswith(b"HEAD") else body[0]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(content) + content)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        url = f"s3://bucket/x?endpoint_url={endpoint}&access=read&deadline=100ms"
        async with make_driver(url) as driver:
            assert [info async for info in driver.list()] == []
            body[0] = page
            calls = (lambda: first_of(driver.list()), driver.usage, lambda: driver.stat("a"), lambda: driver.get("a"))
            for call in calls:
                with pytest.raises(Transient, match=r"the answer is not S3's|the server says 500"):
                    await call()


async def first_of(listing: AsyncIterator[ObjectInfo]) -> ObjectInfo | None:
    return await anext(listing, None)


def test_aiobotocore_is_imported_only_for_an_s3_url() -> None:
    report = "import sys; print('aiobotocore' in sys.modules)"
    made = "import tiercheck.cli.commands; from tiercheck.tiers.registry import make_driver; make_driver"
    for statement, imported in (
        (f"{made}('memory://')", False),
        (f"{made}('s3://bucket/x')", True),
    ):
        done = subprocess.run(
            [sys.executable, "-c", f"{statement}\n{report}"], capture_output=True, text=True, timeout=120, check=True
        )
        assert done.stdout.strip() == str(imported)
