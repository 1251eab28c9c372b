"""The s3 driver against a real server behind a proxy that breaks what healthy servers do not."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tests.servers.s3_place import PART, Place, driver, place
from tests.servers.s3_proxy import Answer, Fault, Request, Reset, S3Proxy, is_operation
from tiercheck.errors import (
    AlreadyExists,
    CapacityExceeded,
    Closed,
    Corruption,
    NotFound,
    PreconditionFailed,
    TierError,
    Transient,
    Unauthorized,
    Unsupported,
)
from tiercheck.tiers.s3 import S3Driver
from tiercheck.tiers.s3.client import EXPECT_BYTES_MIN
from tiercheck.tiers.s3.payload import Body
from tiercheck.types import ByteRange, PutMode

__all__ = ["driver", "place"]

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio]

LARGE = random.Random(3).randbytes(3 * PART + 7)


Break = Callable[[S3Proxy, str], None]
PASSING: dict[str, Break] = {
    "SlowDown": lambda proxy, on: proxy.fail(503, "SlowDown", on=on, times=2),
    "InternalError": lambda proxy, on: proxy.fail(500, "InternalError", on=on, times=2),
    "bad gateway": lambda proxy, on: proxy.fail(502, "", on=on),
    "reset": lambda proxy, on: proxy.reset(on=on, times=2),
    "lost answer": lambda proxy, on: proxy.lose_answer(on=on, times=2),
}
OPERATIONS = (
    "PutObject", "GetObject", "HeadObject", "ListObjectsV2", "DeleteObjects", "CreateMultipartUpload", "UploadPart",
    "CompleteMultipartUpload",
)  # fmt: skip


@pytest.mark.parametrize("fault", PASSING)
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_what_passes_is_tried_again(place: Place, driver: S3Driver, fault: str, operation: str) -> None:
    await driver.put("small", [b"first"])
    PASSING[fault](place.proxy, operation)
    await driver.put("small", [b"second"])
    await driver.put("large", [LARGE[:100], LARGE[100:]])
    await driver.put("created", [b"once"], mode=PutMode.CREATE)
    assert await driver.get("small") == b"second"
    assert await driver.get("large", into=memoryview(bytearray(len(LARGE)))) == LARGE
    assert (await driver.stat("large")).nbytes == len(LARGE)
    assert [info.key async for info in driver.list()] == ["created", "large", "small"]
    await driver.delete(["small", "created"])
    assert place.raw("small") is None
    assert place.raw("large") == LARGE
    assert place.uploads() == [] or fault == "lost answer", "an upload whose id was lost is left to the sweep"
    assert driver.retries > 0


FOR_GOOD = [(507, "QuotaExceeded"), (403, "AccessDenied"), (400, "Unforeseen")]


class TestLostAnswers:
    """The server has acted and the client does not know: the put's token in the metadata tells."""

    async def test_a_create_does_not_meet_itself(self, place: Place, driver: S3Driver) -> None:
        place.proxy.lose_answer(on="PutObject")
        info = await driver.put("a", [b"mine"], mode=PutMode.CREATE)
        assert place.proxy.count("PutObject") == 2
        assert await driver.stat("a") == info

    async def test_a_create_that_was_lost_to_another_says_so(self, place: Place, driver: S3Driver) -> None:
        await driver.put("a", [b"theirs"])
        place.proxy.lose_answer(on="PutObject")
        with pytest.raises(AlreadyExists):
            await driver.put("a", [b"theirs"], mode=PutMode.CREATE)

    async def test_an_update_does_not_meet_itself(self, place: Place, driver: S3Driver) -> None:
        first = await driver.put("a", [b"first"])
        place.proxy.lose_answer(on="PutObject")
        second = await driver.put("a", [b"second"], mode=PutMode.UPDATE(first.etag))
        assert await driver.stat("a") == second
        with pytest.raises(PreconditionFailed):
            await driver.put("a", [b"third"], mode=PutMode.UPDATE(first.etag))

    @pytest.mark.parametrize(("status", "code"), FOR_GOOD)
    @pytest.mark.parametrize("content", [b"small", LARGE], ids=["at once", "in parts"])
    async def test_what_was_published_is_known_again_though_the_next_try_fails_for_good(
        self, place: Place, driver: S3Driver, status: int, code: str, content: bytes
    ) -> None:
        operation = "PutObject" if content == b"small" else "CompleteMultipartUpload"
        place.proxy.lose_answer(on=operation)
        place.proxy.fail(status, code, on=operation)
        info = await driver.put("a", [content])
        assert place.proxy.count(operation) == 2
        assert await driver.stat("a") == info
        assert place.raw("a") == content

    @pytest.mark.parametrize(("status", "code"), FOR_GOOD)
    @pytest.mark.parametrize("looks", ["in vain", "at another's"])
    async def test_what_may_have_been_published_is_never_told_as_refused(
        self, place: Place, driver: S3Driver, status: int, code: str, looks: str
    ) -> None:
        """The object cannot be looked at either, or is another client's, which may have replaced ours."""
        place.proxy.lose_answer(on="PutObject")
        place.proxy.fail(status, code, on="PutObject")
        if looks == "in vain":
            place.proxy.fail(403, "AccessDenied", on="HeadObject")
        else:
            place.proxy.add(
                Fault(
                    is_operation("HeadObject"),
                    1,
                    after=lambda _, answer: Answer(
                        answer.status,
                        {name: value for name, value in answer.headers.items() if "x-amz-meta" not in name.lower()},
                        answer.body,
                    ),
                )
            )
        with pytest.raises(Transient, match=f"an earlier try went without an answer.*{code}"):
            await driver.put("a", [b"new"])
        assert place.raw("a") == b"new"

    @pytest.mark.parametrize(
        ("before", "refused"),
        [
            (lambda proxy: proxy.fail(503, "SlowDown", on="PutObject"), CapacityExceeded),
            (lambda proxy: proxy.fail(500, "InternalError", on="PutObject"), Transient),
        ],
        ids=["not begun", "perhaps begun"],
    )
    async def test_an_answer_that_says_that_nothing_was_begun_leaves_no_doubt(
        self, place: Place, driver: S3Driver, before: Callable[[S3Proxy], None], refused: type[TierError]
    ) -> None:
        before(place.proxy)
        place.proxy.fail(507, "QuotaExceeded", on="PutObject")
        with pytest.raises(TierError) as caught:
            await driver.put("a", [b"new"])
        assert isinstance(caught.value, refused)
        assert place.raw("a") is None

    async def test_an_update_that_was_stored_and_then_replaced_is_not_told_as_lost(
        self, place: Place, driver: S3Driver
    ) -> None:
        first = await driver.put("a", [b"first"])

        def replaced(_: Request, answer: Answer) -> Answer:
            place.server.client.put_object(Bucket=place.server.bucket, Key=f"{place.prefix}/a", Body=b"theirs")
            raise Reset

        place.proxy.add(Fault(is_operation("PutObject"), 1, after=replaced))
        with pytest.raises(Transient, match="may have published"):
            await driver.put("a", [b"second"], mode=PutMode.UPDATE(first.etag))
        assert place.raw("a") == b"theirs"

    async def test_a_completed_upload_is_known_again(self, place: Place, driver: S3Driver) -> None:
        """A server that has forgotten the upload once it is completed, as S3 does."""
        place.proxy.lose_answer(on="CompleteMultipartUpload")
        place.proxy.fail(404, "NoSuchUpload", on="CompleteMultipartUpload")
        info = await driver.put("large", [LARGE])
        assert place.raw("large") == LARGE
        assert await driver.stat("large") == info

    async def test_an_upload_that_somebody_aborted_is_no_success(self, place: Place, driver: S3Driver) -> None:
        await driver.put("large", [b"old"])
        place.proxy.fail(404, "NoSuchUpload", on="CompleteMultipartUpload")
        with pytest.raises(TierError, match="NoSuchUpload"):
            await driver.put("large", [LARGE])
        assert place.raw("large") == b"old"
        assert place.uploads() == []


class TestDamage:
    @pytest.mark.parametrize("operation", ["PutObject", "UploadPart"])
    async def test_a_body_damaged_on_the_way_is_refused_and_sent_again(
        self, place: Place, driver: S3Driver, operation: str
    ) -> None:
        place.proxy.flip_request(3, on=operation)
        content = LARGE if operation == "UploadPart" else b"0123456789"
        await driver.put("a", [content])
        assert place.raw("a") == content
        assert driver.retries == 1

    async def test_a_body_that_always_arrives_damaged_is_an_error(self, place: Place) -> None:
        async with place.driver(deadline="500ms") as driver:
            await driver.put("a", [b"old"])
            place.proxy.flip_request(3, on="PutObject", times=1000)
            with pytest.raises(Corruption, match="arrived damaged"):
                await driver.put("a", [b"0123456789"])
            assert place.raw("a") == b"old"

    @pytest.mark.parametrize("content", [b"0123456789", LARGE], ids=["small", "large"])
    async def test_an_answer_damaged_on_the_way_is_read_again(
        self, place: Place, driver: S3Driver, content: bytes
    ) -> None:
        await driver.put("a", [content])
        place.proxy.flip_answer(5)
        assert await driver.get("a") == content

    @pytest.mark.parametrize(
        ("content", "parts"), [(b"", 0), (b"0123456789", 1), (LARGE, 3)], ids=["empty", "small", "large"]
    )
    async def test_an_object_that_may_be_large_is_read_in_parts_and_verified(
        self, place: Place, driver: S3Driver, content: bytes, parts: int
    ) -> None:
        """The caller's room says so: then it is divided among the connections."""
        await driver.put("a", [content])
        into = memoryview(bytearray(len(LARGE) + 1))
        place.proxy.seen.clear()
        assert await driver.get("a", into=into) == content
        gets = [request for request in place.proxy.seen if request.operation == "GetObject"]
        assert len(gets) == parts
        assert all("range" in {name.lower() for name in request.headers} for request in gets)
        if content:
            place.proxy.flip_answer(5, times=100)
            with pytest.raises(Corruption, match=r"the CRC32C? of what arrived is .* and the server holds"):
                await driver.get("a", into=into)

    @pytest.mark.parametrize("content", [b"0123456789", LARGE], ids=["small", "large"])
    async def test_damage_that_stays_is_corruption(self, place: Place, driver: S3Driver, content: bytes) -> None:
        await driver.put("a", [content])
        place.proxy.flip_answer(5, times=100)
        with pytest.raises(Corruption, match=r"the CRC32C? of what arrived is .* and the server holds"):
            await driver.get("a")

    @pytest.mark.parametrize("nbytes", [0, 1, PART - 1])
    async def test_an_answer_cut_short_is_read_again(self, place: Place, driver: S3Driver, nbytes: int) -> None:
        await driver.put("a", [LARGE])
        place.proxy.truncate(nbytes, times=3)
        assert await driver.get("a") == LARGE
        assert bytes(await driver.get("a", range=ByteRange(10, PART + 30))) == LARGE[10 : PART + 30]

    async def test_after_a_failure_what_has_arrived_is_not_asked_for_again(
        self, place: Place, driver: S3Driver
    ) -> None:
        await driver.put("a", [LARGE])
        stops_in_the_middle = Fault(
            is_operation("GetObject"), 1, after=lambda _, answer: replace(answer, body=answer.body[: PART // 2])
        )
        async with place.driver(timeout="1s", access="read") as reader:
            place.proxy.seen.clear()
            place.proxy.add(stops_in_the_middle)
            assert await reader.get("a", into=memoryview(bytearray(len(LARGE)))) == LARGE
        ranges = {request.headers["range"] for request in place.proxy.seen if request.operation == "GetObject"}
        starts, ends = zip(*(map(int, text.removeprefix("bytes=").split("-")) for text in ranges), strict=True)
        assert len(set(ends)) == 3
        assert len(set(starts)) == 4

    async def test_what_another_client_put_with_another_checksum_is_verified(
        self, place: Place, driver: S3Driver
    ) -> None:
        place.server.client.put_object(
            Bucket=place.server.bucket, Key=f"{place.prefix}/a", Body=LARGE, ChecksumAlgorithm="CRC32"
        )
        into = memoryview(bytearray(len(LARGE)))
        assert await driver.get("a", into=into) == LARGE
        place.proxy.flip_answer(5, times=100)
        with pytest.raises(Corruption, match="the CRC32 of what arrived"):
            await driver.get("a", into=into)

    async def test_a_server_without_checksums(self, place: Place) -> None:
        place.proxy.forget_checksum_types()
        async with place.driver() as driver:
            for content in (b"small", LARGE):
                await driver.put("a", [content])
                assert await driver.get("a") == content


class TestWaits:
    async def test_a_server_that_never_answers_is_left(self, place: Place) -> None:
        async with place.driver(timeout="300ms") as driver:
            for operation in ("PutObject", "GetObject", "ListObjectsV2"):
                place.proxy.stall(on=operation)
                await driver.put("a", [b"x"])
                assert await driver.get("a") == b"x"
                assert [info.key async for info in driver.list()] == ["a"]

    async def test_the_deadline_ends_it(self, place: Place) -> None:
        async with place.driver(deadline="700ms") as driver:
            place.proxy.fail(503, "SlowDown", on="PutObject", times=1000)
            with pytest.raises(Transient, match=r"SlowDown.*\(tried \d+ times\)"):
                await driver.put("a", [b"x"])
            place.proxy.fail(503, "SlowDown", on="UploadPart", times=1000)
            with pytest.raises(Transient, match="SlowDown"):
                await driver.put("a", [LARGE])
        assert place.raw("a") is None
        assert place.uploads() == []

    async def test_a_refusal_is_not_tried_again(self, place: Place, driver: S3Driver) -> None:
        for status, code, kind in (
            (403, "AccessDenied", Unauthorized),
            (403, "QuotaExceeded", CapacityExceeded),
            (507, "", CapacityExceeded),
            (400, "EntityTooLarge", CapacityExceeded),
            (501, "NotImplemented", TierError),
        ):
            place.proxy.seen.clear()
            place.proxy.fail(status, code, on="PutObject")
            with pytest.raises(kind):
                await driver.put("a", [b"x"])
            assert place.proxy.count("PutObject") == 1


class TestCancellation:
    async def test_an_upload_is_aborted(self, place: Place, driver: S3Driver) -> None:
        for turns in (1, 3, 10, 30, 100, 300):
            putting = asyncio.create_task(driver.put("large", [LARGE]))
            for _ in range(turns):
                await asyncio.sleep(0)
            putting.cancel()
            await asyncio.wait({putting})
            assert place.uploads() == []
            assert place.raw("large") in (None, LARGE)

    async def test_a_put_that_may_have_arrived_is_waited_for(self, place: Place, driver: S3Driver) -> None:
        """Otherwise it might be published later, over what the caller puts next."""
        arrived, go_on = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def before(request: Request) -> Request:
            loop.call_soon_threadsafe(arrived.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(20)
            return request

        place.proxy.add(Fault(is_operation("PutObject"), 1, before=before))
        putting = asyncio.create_task(driver.put("a", [b"cancelled"]))
        await arrived.wait()
        putting.cancel()
        done, _ = await asyncio.wait({putting}, timeout=0.05)
        assert not done
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert place.raw("a") == b"cancelled"

    async def test_a_failed_abort_leaves_a_note(self, place: Place, driver: S3Driver) -> None:
        place.proxy.fail(403, "AccessDenied", on="UploadPart", times=10)
        place.proxy.fail(403, "AccessDenied", on="AbortMultipartUpload")
        with pytest.raises(Unauthorized) as caught:
            await driver.put("large", [LARGE])
        assert "stay until a later open sweeps them" in caught.value.__notes__[0]
        assert len(place.uploads()) == 1


class TestReadersAndWriters:
    async def test_a_get_is_of_one_put(self, place: Place, driver: S3Driver) -> None:
        other = bytes(len(LARGE))
        await driver.put("a", [LARGE])
        swapped = asyncio.Event()

        def after(request: Request, answer: Answer) -> Answer:
            if not swapped.is_set():
                swapped.set()
                place.server.client.put_object(Bucket=place.server.bucket, Key=f"{place.prefix}/a", Body=other)
            return answer

        place.proxy.add(Fault(lambda request: request.operation == "GetObject", 1, after=after))
        assert bytes(await driver.get("a")) in (LARGE, other)
        assert swapped.is_set()

    async def test_an_object_deleted_while_it_is_read(self, place: Place, driver: S3Driver) -> None:
        await driver.put("a", [LARGE])

        def after(request: Request, answer: Answer) -> Answer:
            place.server.client.delete_object(Bucket=place.server.bucket, Key=f"{place.prefix}/a")
            return answer

        place.proxy.add(Fault(lambda request: request.operation == "GetObject", 1, after=after))
        with pytest.raises(NotFound):
            await driver.get("a")


class TestPagesOfOthers:
    """A 404 of what is between us and the store is none of S3's."""

    OPERATIONS = (
        "AbortMultipartUpload", "CompleteMultipartUpload", "CreateMultipartUpload", "DeleteObjects", "GetObject",
        "HeadObject", "ListObjectsV2", "PutObject", "UploadPart",
    )  # fmt: skip

    @pytest.fixture(params=[b"404 page not found\n", b"", b"<html><body>nothing here</body></html>"])
    def page(self, request: pytest.FixtureRequest) -> Answer:
        return Answer(404, {"Content-Type": "text/html"}, request.param)

    @staticmethod
    def away(place: Place, page: Answer, times: int) -> None:
        for operation in TestPagesOfOthers.OPERATIONS:
            place.proxy.add(Fault(is_operation(operation), times, before=lambda _: page))

    async def test_a_moment_of_it_is_waited_for(self, place: Place, driver: S3Driver, page: Answer) -> None:
        await driver.put("a", [LARGE])
        self.away(place, page, 2)
        await driver.put("b", [b"x"], mode=PutMode.CREATE)
        await driver.put("c", [LARGE])
        assert await driver.get("a") == LARGE
        assert (await driver.stat("a")).nbytes == len(LARGE)
        assert [info.key async for info in driver.list()] == ["a", "b", "c"]
        await driver.delete(["a"])
        assert [info.key async for info in driver.list()] == ["b", "c"]

    async def test_more_of_it_is_an_outage_and_no_absence(self, place: Place, page: Answer) -> None:
        async with place.driver(deadline="100ms") as driver:
            await driver.put("a", [LARGE])
            self.away(place, page, 1000)
            for call in (
                lambda: driver.get("a"),
                lambda: driver.get("a", range=ByteRange(0, 4)),
                lambda: driver.stat("a"),
                lambda: driver.put("b", [b"x"], mode=PutMode.CREATE),
                lambda: driver.put("b", [b"x"]),
                lambda: driver.put("b", [LARGE]),
                lambda: anext(driver.list()),
                lambda: driver.delete(["a"]),
            ):
                with pytest.raises(Transient, match="the answer is not S3's"):
                    await call()

    async def test_what_is_not_there_is_not_there(self, driver: S3Driver) -> None:
        await driver.put("a/b", [b"x"])
        for key in ("a", "a/b/c", "c"):
            with pytest.raises(NotFound):
                await driver.stat(key)
            with pytest.raises(NotFound):
                await driver.get(key)


class TestConditionalPutsOfLargeObjects:
    """One request, whatever the size: a condition on CompleteMultipartUpload is not to be trusted."""

    async def test_create_and_update(self, place: Place, driver: S3Driver) -> None:
        first = await driver.put("large", [LARGE], mode=PutMode.CREATE)
        assert place.raw("large") == LARGE
        with pytest.raises(AlreadyExists):
            await driver.put("large", [LARGE[::-1]], mode=PutMode.CREATE)
        second = await driver.put("large", [LARGE[::-1]], mode=PutMode.UPDATE(first.etag))
        with pytest.raises(PreconditionFailed):
            await driver.put("large", [LARGE], mode=PutMode.UPDATE(first.etag))
        assert await driver.stat("large") == second
        assert await driver.get("large") == LARGE[::-1]
        assert place.proxy.count("CreateMultipartUpload") == 0

    async def test_a_condition_that_fails_is_told_before_the_body_is_sent(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        content, sent = LARGE * (EXPECT_BYTES_MIN // len(LARGE) + 1), 0

        def counting(self: Body, nbytes: int = -1) -> bytes:
            nonlocal sent
            chunk = read(self, nbytes)
            sent += len(chunk)
            return chunk

        read = Body.read
        async with place.driver() as driver:
            await driver.put("large", [content], mode=PutMode.CREATE)
            monkeypatch.setattr(Body, "read", counting)
            place.proxy.hasty = "PutObject"
            for _ in range(3):
                with pytest.raises(AlreadyExists):
                    await driver.put("large", [content], mode=PutMode.CREATE)
            assert (sent, driver.retries) == (0, 0)
            assert await driver.get("large") == content

    async def test_a_server_that_does_not_know_the_question_gets_the_body_after_all(self, place: Place) -> None:
        content = LARGE * (EXPECT_BYTES_MIN // len(LARGE) + 1)
        place.proxy.knows_expect = False
        async with place.driver(timeout="1s") as driver:
            await driver.put("large", [content], mode=PutMode.CREATE)
            assert driver.retries == 1
            assert await driver.get("large") == content

    async def test_more_than_one_request_holds_is_refused(self, place: Place, driver: S3Driver) -> None:
        """5 GiB and a byte, of one small buffer put in again and again."""
        place.proxy.seen.clear()
        block = bytes(1 << 20)
        with pytest.raises(Unsupported, match=r"at most 5.0 GiB"):
            await driver.put("a", [block] * 5120 + [b"x"], mode=PutMode.CREATE)
        assert place.proxy.seen == []


async def test_what_is_under_way_when_the_driver_closes_ends_as_closed(place: Place) -> None:
    driver = place.driver()
    await driver.open()
    loop = asyncio.get_running_loop()
    arrived = [asyncio.Event(), asyncio.Event()]
    for event, operation in zip(arrived, ("PutObject", "GetObject"), strict=True):
        tell = functools.partial(loop.call_soon_threadsafe, event.set)
        place.proxy.add(Fault(is_operation(operation), 1, before=lambda _, tell=tell: tell() and None))
    calls = [asyncio.create_task(driver.put("a", [b"x"])), asyncio.create_task(driver.get("b"))]
    async with asyncio.timeout(20):
        for event in arrived:
            await event.wait()
    await driver.close()
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, Closed)


class TestSweep:
    async def test_abandoned_uploads_go_and_live_ones_stay(self, place: Place) -> None:
        client, bucket = place.server.client, place.server.bucket
        ids = {}
        for name in ("abandoned", "live", "fed"):
            ids[name] = client.create_multipart_upload(Bucket=bucket, Key=f"{place.prefix}/{name}")["UploadId"]
        stranger = client.create_multipart_upload(Bucket=bucket, Key=f"{place.prefix}-not-ours/x")["UploadId"]
        client.upload_part(Bucket=bucket, Key=f"{place.prefix}/fed", UploadId=ids["fed"], PartNumber=1, Body=b"x")
        old = (datetime.now(UTC) - timedelta(days=2)).strftime("%Y-%m-%dT%H:%M:%SZ").encode()

        def age(request: Request, answer: Answer) -> Answer:
            """The server's listing, with two of the uploads begun two days ago."""
            uploads = answer.body.split(b"<Upload>")
            for index, upload in enumerate(uploads):
                if ids["abandoned"].encode() in upload or ids["fed"].encode() in upload:
                    before, _, rest = upload.partition(b"<Initiated>")
                    uploads[index] = before + b"<Initiated>" + old + rest[rest.index(b"</Initiated>") :]
            body = b"<Upload>".join(uploads)
            headers = {name: value for name, value in answer.headers.items() if name.lower() != "content-length"}
            return Answer(answer.status, headers, body)

        place.proxy.add(Fault(is_operation("ListMultipartUploads"), 2, after=age))
        async with place.driver(access="read") as driver:
            (left,) = await driver.leftovers()
            assert (left.what, left.name) == ("unfinished upload", f"{place.prefix}/abandoned")
            assert left.age_s > 47 * 3600
        async with place.driver() as driver:
            assert await driver.leftovers() == ()
            assert set(place.uploads()) == {ids["live"], ids["fed"]}
        client.abort_multipart_upload(Bucket=bucket, Key=f"{place.prefix}-not-ours/x", UploadId=stranger)

    async def test_who_may_not_sweep_is_told_and_works_on(self, place: Place, caplog: pytest.LogCaptureFixture) -> None:
        place.proxy.fail(403, "AccessDenied", on="ListMultipartUploads", times=2)
        async with place.driver() as driver:
            await driver.put("a", [b"x"])
            with pytest.raises(Unauthorized):
                await driver.leftovers()
        assert "allow ListBucketMultipartUploads" in caplog.text

    async def test_nobody_waits_for_a_store_that_cannot_sweep(
        self, place: Place, caplog: pytest.LogCaptureFixture
    ) -> None:
        place.proxy.fail(503, "SlowDown", on="ListMultipartUploads", times=1000)
        async with place.driver(deadline="100ms") as driver:
            await driver.put("a", [b"x"])
            with pytest.raises(Transient):
                await driver.leftovers()
        assert "abandoned uploads are left for the next open" in caplog.text

    async def test_a_reader_sweeps_and_tries_nothing(self, place: Place) -> None:
        async with place.driver() as driver:
            await driver.put("a/b", [b"x"])
            await driver.put("a-b", [b"x"])
        place.proxy.seen.clear()
        async with place.driver(access="read") as driver:
            assert {request.method for request in place.proxy.seen} == {"GET"}
            assert [info.key async for info in driver.list()] == ["a-b", "a/b"]
            assert await driver.get("a/b") == b"x"
            assert not driver.capabilities.conditional_put
            with pytest.raises(Unauthorized, match="access=read"):
                await driver.put("a", [b"x"])
            with pytest.raises(Unauthorized, match="access=read"):
                await driver.delete(["a/b"])


async def test_a_server_that_ignores_conditions_is_found_out(place: Place) -> None:
    """Said so once the driver is open, and refused from then on; all else is as ever."""
    place.proxy.ignore_conditions()
    async with place.driver() as driver:
        assert not driver.capabilities.conditional_put
        with pytest.raises(Unsupported):
            await driver.put("a", [b"x"], mode=PutMode.CREATE)
        assert place.raw("a") is None
        first = await driver.put("a", [b"first"])
        with pytest.raises(Unsupported):
            await driver.put("a", [b"x"], mode=PutMode.UPDATE(first.etag))
        assert place.raw("a") == b"first"
        place.proxy.lose_answer(on="PutObject")
        second = await driver.put("a", [b"second"])
        assert await driver.stat("a") == second
        await driver.put("a", [LARGE])
        assert await driver.get("a") == LARGE
    place.proxy.clear()
    async with place.driver() as driver:
        assert driver.capabilities.conditional_put
