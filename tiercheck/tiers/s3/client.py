"""One aiobotocore client: every request of a driver goes through here, with retries, deadlines and error mapping."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from email.utils import parsedate_to_datetime
from importlib import metadata
from typing import Any, TypeVar, cast

import aiobotocore.session
import botocore.loaders
from aiobotocore.config import AioConfig
from botocore import exceptions as boto
from botocore.handlers import add_expect_header
from botocore.parsers import ResponseParserError
from botocore.utils import parse_timestamp

from tiercheck.errors import Closed, ConfigurationError, Transient
from tiercheck.runtime.backoff import Backoff
from tiercheck.runtime.chance import CHANCE
from tiercheck.runtime.waiting import settled
from tiercheck.tiers.s3.failures import FOREIGN, IllFormed, InDoubt, classify, is_bare_404
from tiercheck.tiers.s3.payload import Body, Buffers
from tiercheck.tiers.s3.settings import S3Settings

__all__ = ["COMPLETION_PATIENCE", "SMALL_REQUESTS", "Answer", "Progress", "S3Client"]

T = TypeVar("T")
Answer = dict[str, Any]

SMALL_REQUESTS = 128
"""Requests that are under way at once beside the transfers: those without a body of ours, and gets of a few bytes."""
CAUGHT: tuple[type[Exception], ...] = (*FOREIGN, RuntimeError)
TRIES_MAX = 30
UNREACHABLE_S_MAX = 3.0
"""While a driver opens, an endpoint where nothing listens is given this long: a server that restarts may come back."""
BACKOFF = Backoff(0.2, 5.0)
EXPECT_BYTES_MIN = 1 << 20
COMPLETION_PATIENCE = 10
"""Completing a large upload takes the server minutes: so many times the usual timeout."""


@functools.cache
def service_models(path: str | None) -> Any:
    """botocore's description of S3, read once a process: it takes a fifth of a second."""
    return botocore.loaders.create_loader(path)


class Progress:
    """A deadline that moves on with the signs of life, a tenth of the timeout at a time: moving it is not free."""

    def __init__(self, scope: asyncio.Timeout, timeout_s: float) -> None:
        self._scope = scope
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._moved_at = self._loop.time()

    def __call__(self) -> None:
        now = self._loop.time()
        if now - self._moved_at > self._timeout_s / 10 and not self._scope.expired():
            self._moved_at = now
            # A request whose scope has ended may still be winding down.
            with contextlib.suppress(RuntimeError):
                self._scope.reschedule(now + self._timeout_s)


class S3Client:
    """Requests to one endpoint. ``tier`` is the URL that errors name."""

    def __init__(self, settings: S3Settings, tier: str) -> None:
        self.settings = settings
        self.tier = tier
        self.retries = 0
        """Tries beyond the first, since the driver was made."""
        self.opening = False
        """An endpoint where nothing listens is then given up within :data:`UNREACHABLE_S_MAX`."""
        self.trouble = ""
        """What the last try met, while something is tried again."""
        self._client: Any = None
        self._context: Any = None
        self._asks_first = True
        """Not any more once a request with a body went without an answer: its server may know no such question."""
        self._transfers = asyncio.Semaphore(settings.parts_in_flight)
        self._small = asyncio.Semaphore(SMALL_REQUESTS)

    async def open(self) -> None:
        """Errors: ``ConfigurationError`` for a profile or an endpoint that botocore does not accept."""
        settings = self.settings
        addressing = settings.addressing
        if addressing == "auto" and settings.endpoint_url is not None:
            addressing = "path"  # a private store seldom has a wildcard name in DNS
        config = AioConfig(
            user_agent=f"tiercheck/{metadata.version('tiercheck')}",  # botocore's own is put together anew each time
            connect_timeout=min(settings.timeout_s, 10.0),
            read_timeout=None,  # every request has a deadline below; the connection's would be moved with each piece
            max_pool_connections=settings.parts_in_flight + SMALL_REQUESTS,
            retries={"total_max_attempts": 1, "mode": "standard"},
            # The checksum below is signed and covers the body: hashing it once more would cost more than sending it.
            s3={"addressing_style": addressing, "payload_signing_enabled": False},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        try:
            session = aiobotocore.session.AioSession(profile=settings.profile)
            session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=time_of)
            session.register_component("data_loader", service_models(session.get_config_variable("data_path")))
            region = settings.region or session.get_config_variable("region") or "us-east-1"
            self._context = session.create_client(
                "s3", region_name=region, endpoint_url=settings.endpoint_url, config=config
            )
            self._client = await self._context.__aenter__()
        except (boto.BotoCoreError, ValueError) as error:
            raise ConfigurationError(f"{settings.place} cannot be used: {error}") from error
        events = self._client.meta.events
        events.unregister("before-call.s3", add_expect_header)
        events.register("before-call.s3.PutObject", self._ask_first)

    async def close(self) -> None:
        context, self._context, self._client = self._context, None, None
        if context is not None:
            await context.__aexit__(None, None, None)

    @property
    def is_open(self) -> bool:
        return self._client is not None

    def check_open(self, key: str | None = None) -> None:
        if self._client is None:
            raise Closed("the driver is not open", tier=self.tier, key=key)

    async def ask(self, operation: str, key: str | None = None, *, patience: int = 1, **arguments: Any) -> Answer:
        """A request without a body to speak of. ``key`` is the object's, for errors, which are :meth:`send`'s."""

        async def once() -> Answer:
            async with self._small, asyncio.timeout(self.settings.timeout_s * patience):
                return await self._send(operation, arguments)

        return await self.retrying(once, key, acted=lambda: operation == "CompleteMultipartUpload")

    async def send(self, operation: str, key: str, buffers: Buffers, start: int, stop: int, **arguments: Any) -> Answer:
        """A request with ``[start, stop)`` of the payload as its body.

        Cancellation stops it if the server cannot have the whole body, and waits for the answer if it may:
        afterwards the server acts on it no more.

        Errors: ``InDoubt`` if a request that publishes fails for good after a try that may have done so.
        """
        bodies: list[Body] = []

        async def once() -> Answer:
            bodies.clear()
            async with self._transfers:

                async def transfer() -> Answer:
                    try:
                        async with asyncio.timeout(self.settings.timeout_s) as scope:
                            body = Body(buffers, start, stop, Progress(scope, self.settings.timeout_s))
                            bodies.append(body)
                            return await self._send(operation, {**arguments, "Body": body if len(body) else b""})
                    except TimeoutError:
                        self._asks_first = False
                        raise

                def may_stop(task: asyncio.Future[Answer]) -> None:
                    if not bodies or not bodies[0].handed_over:
                        task.cancel()

                return await settled(transfer(), stop=may_stop)

        def acted() -> bool:
            return operation == "PutObject" and bool(bodies) and bodies[0].handed_over

        return await self.retrying(once, key, acted)

    @contextlib.asynccontextmanager
    async def receiving(self, *, small: bool = False) -> AsyncIterator[Progress]:
        """A slot for one answer with a body, and the progress to report while it is read. ``small``: of a few bytes."""
        slots = self._small if small else self._transfers
        async with slots, asyncio.timeout(self.settings.timeout_s) as scope:
            yield Progress(scope, self.settings.timeout_s)

    async def begin_get(self, **arguments: Any) -> Answer:
        """``GetObject`` without retries or mapping; the caller reads the body and closes it."""
        return await self._send("GetObject", arguments)

    async def retrying(
        self, attempt: Callable[[], Awaitable[T]], key: str | None, acted: Callable[[], bool] = lambda: False
    ) -> T:
        """``attempt`` until it succeeds, or fails for good, or the deadline has passed since it first failed.

        ``acted``, asked after a try that failed: whether the server may have published by it, for all that was sent.
        """
        in_doubt = False
        failing_since: float | None = None
        for tries in itertools.count(1):
            self.check_open(key)
            try:
                answer = await attempt()
                self.trouble = ""
                return answer
            except CAUGHT as error:
                self.check_open(key)  # what was under way when the driver was closed fails in many ways
                if isinstance(error, RuntimeError):
                    raise
                failure = classify(error, self.settings.timeout_s)
                pause = BACKOFF.pause_s(tries, CHANCE.random())
                now = asyncio.get_running_loop().time()
                # A try may take longer than all that is given to trying again: a large part, or a wait for its turn.
                failing_since = now if failing_since is None else failing_since
                patience_s = self.settings.deadline_s
                if self.opening and failure.unreachable:
                    patience_s = min(patience_s, UNREACHABLE_S_MAX)
                late = now + pause >= failing_since + patience_s
                self.trouble = failure.reason
                if not failure.retryable or tries >= TRIES_MAX or late:
                    final = failure.error(self.tier, key, tries)
                    if in_doubt and not isinstance(final, Transient):
                        reason = f"an earlier try went without an answer, and may have published; then: {final.message}"
                        raise InDoubt(reason, tier=self.tier, key=key) from final
                    raise final from error
                in_doubt = in_doubt or (failure.acted and acted())
            self.retries += 1
            await asyncio.sleep(pause)
        raise AssertionError("unreachable: the tries have a bound")

    async def _send(self, operation: str, arguments: dict[str, Any]) -> Answer:
        self.check_open()
        method = getattr(self._client, METHODS[operation])
        try:
            answer: Answer = await method(Bucket=self.settings.bucket, **arguments)
        except (ResponseParserError, ValueError) as error:
            raise IllFormed(f"{operation}: {str(error)[:200]}") from error
        except boto.ClientError as error:
            if is_bare_404(error):
                await self._check_absent(operation, arguments)
            raise
        lacks = missing_from(answer, operation)
        if lacks:
            if "Body" in answer:
                answer["Body"].close()
            raise IllFormed(f"{operation} without {lacks}")
        return answer

    async def _check_absent(self, operation: str, arguments: dict[str, Any]) -> None:
        """A 404 in which S3 says nothing may be a proxy's, and must not pass for an object that is not there: the
        listing tells. Errors: ``IllFormed`` if there is such an object, or the request is not about one; the listing's.
        """
        if operation in ("GetObject", "HeadObject"):
            name = arguments["Key"]
            listed = await self._send("ListObjectsV2", {"Prefix": name})
            if all(each["Key"] != name for each in listed.get("Contents", ())):
                return
        raise IllFormed(f"{operation}: 404 without a reason")

    def _ask_first(self, params: dict[str, Any], **_: object) -> None:
        """``Expect: 100-continue`` if it pays: a condition that fails is then told before a large body is sent, and not
        by breaking the connection in the middle of it. Elsewhere it would cost each part a round trip."""
        conditional = {"If-None-Match", "If-Match"} & set(params["headers"])
        body = params["body"]
        if self._asks_first and conditional and isinstance(body, Body) and len(body) >= EXPECT_BYTES_MIN:
            params["headers"]["Expect"] = "100-continue"


METHODS = {
    "AbortMultipartUpload": "abort_multipart_upload",
    "CompleteMultipartUpload": "complete_multipart_upload",
    "CreateMultipartUpload": "create_multipart_upload",
    "DeleteObjects": "delete_objects",
    "GetObject": "get_object",
    "HeadObject": "head_object",
    "ListMultipartUploads": "list_multipart_uploads",
    "ListObjectsV2": "list_objects_v2",
    "ListParts": "list_parts",
    "PutObject": "put_object",
    "UploadPart": "upload_part",
}


NEEDED: dict[str, tuple[str, ...]] = {
    "CompleteMultipartUpload": ("ETag",),
    "CreateMultipartUpload": ("UploadId",),
    "GetObject": ("ContentLength", "ETag"),
    "HeadObject": ("ContentLength", "ETag", "LastModified"),
    # Without it a page in HTML would pass for the listing of a tier that holds nothing.
    "ListObjectsV2": ("IsTruncated",),
    "PutObject": ("ETag",),
    "UploadPart": ("ETag",),
}
"""What each answer is asked for, and S3 always tells."""
NEEDED_OF_EACH: dict[str, tuple[str, ...]] = {
    "CommonPrefixes": ("Prefix",),
    "Contents": ("Key", "Size", "ETag", "LastModified"),
    "Parts": ("LastModified",),
    "Uploads": ("Key", "UploadId", "Initiated"),
}
"""The same of what is listed."""


def missing_from(answer: Answer, operation: str) -> str:
    """The first field that the answer lacks; empty if it has all."""
    for name in NEEDED.get(operation, ()):
        if name not in answer:
            return name
    for listed, names in NEEDED_OF_EACH.items():
        for item in answer.get(listed, ()):
            for name in names:
                if name not in item:
                    return f"{listed}.{name}"
    return ""


def time_of(value: object) -> datetime:
    """A timestamp of an answer. HTTP's own format is recognised at a tenth of the price of all that botocore knows."""
    try:
        found = parsedate_to_datetime(value) if isinstance(value, str) else None
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        found = cast(datetime, parse_timestamp(value))  # botocore has no types
    return found
