"""What went wrong in a request: foreign exceptions to the ``TierError`` they mean, and whether to try again."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp
from botocore import exceptions as boto

from tiercheck.errors import (
    CapacityExceeded,
    ConfigurationError,
    Corruption,
    NotFound,
    NothingListens,
    PreconditionFailed,
    TierCheckError,
    TierError,
    Transient,
    Unauthorized,
)
from tiercheck.tiers.s3.settings import S3Settings

__all__ = ["FOREIGN", "Failure", "IllFormed", "InDoubt", "Refused", "classify", "is_bare_404", "to_open_error"]


class IllFormed(Exception):
    """An answer that is not S3's, though its status would be one of S3's: a proxy's page, or a broken server's."""


FOREIGN: tuple[type[Exception], ...] = (
    IllFormed,
    boto.BotoCoreError,
    boto.ClientError,
    aiohttp.ClientError,
    OSError,
    TimeoutError,
)
"""What aiobotocore and its HTTP client raise."""

UNAUTHORIZED = frozenset({
    "401", "403", "AccessDenied", "AccountProblem", "AllAccessDisabled", "ExpiredToken", "InvalidAccessKeyId",
    "InvalidObjectState", "InvalidSecurity", "InvalidToken", "RequestTimeTooSkewed", "SignatureDoesNotMatch",
    "TokenRefreshRequired", "UnauthorizedAccess",
})  # fmt: skip
WRONG_PLACE = frozenset({
    "301", "307", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "InvalidBucketName",
    "NoSuchBucket", "PermanentRedirect", "TemporaryRedirect", "WrongRegion",
})  # fmt: skip
FULL = frozenset({"507", "EntityTooLarge", "QuotaExceeded", "ServiceQuotaExceeded", "XMinioStorageFull"})
DAMAGED = frozenset({"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"})
BUSY = frozenset({
    "ConditionalRequestConflict", "IncompleteBody", "InternalError", "OperationAborted", "RequestTimeout", "ServerBusy",
    "ServiceUnavailable", "SlowDown", "ThrottlingException", "TooManyRequestsException",
    "XMinioServerNotInitialized", "XMinioReadQuorum", "XMinioWriteQuorum",
})  # fmt: skip
THROTTLED = frozenset({
    "ServerBusy", "ServiceUnavailable", "SlowDown", "ThrottlingException", "TooManyRequestsException",
    "XMinioServerNotInitialized",
})  # fmt: skip
"""Answers of 500 and more by which the server says that it has not even begun."""
BROKEN = (AssertionError, AttributeError, NameError, TypeError)
"""A mistake in a program rather than in the network: trying again would hide it."""
ABSENT = frozenset(["404", "NoSuchKey", "NotFound"])


class Refused(TierError):
    """The server's answer is an error that only its caller can judge (or nobody foresaw); ``code`` is S3's."""

    def __init__(self, message: str, *, code: str, tier: str | None = None, key: str | None = None) -> None:
        super().__init__(message, tier=tier, key=key)
        self.code = code


class InDoubt(Transient):
    """A request that publishes has failed for good (``__cause__`` says how), and an earlier try may have published."""


@dataclass(frozen=True)
class Failure:
    """``retryable``: another try may succeed. ``code``: S3's, or empty if no answer came. ``acted``: the server may
    have done what it was asked, or may still do it. ``unreachable``: nothing listens there, as far as the system knows.
    """

    kind: type[TierError]
    reason: str
    retryable: bool
    code: str = ""
    acted: bool = True
    unreachable: bool = False

    def error(self, tier: str, key: str | None, tries: int) -> TierError:
        reason = f"{self.reason} (tried {tries} times)" if tries > 1 else self.reason
        if self.kind is Refused:
            return Refused(reason, code=self.code, tier=tier, key=key)
        return self.kind(reason, tier=tier, key=key)


def classify(error: Exception, timeout_s: float) -> Failure:
    """What ``error``, one of :data:`FOREIGN`, means. It is told by code, host and reason: none of them is a secret."""
    if isinstance(error, boto.ClientError):
        return classify_answer(error)
    if isinstance(error, IllFormed):
        return Failure(Transient, f"the answer is not S3's ({error}); is something between us and the endpoint?", True)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError | boto.CredentialRetrievalError):
        return Failure(Unauthorized, "no usable credentials were found in the environment, profile or role", False)
    if isinstance(error, boto.SSLError):
        return Failure(Unauthorized, f"the endpoint's certificate is not trusted: {last_cause(error)}", False)
    if isinstance(error, boto.ParamValidationError | boto.UnknownServiceError | boto.InvalidRegionError):
        return Failure(Refused, f"the request cannot be made: {error}", False, type(error).__name__)
    if isinstance(error, boto.ConnectTimeoutError | boto.ReadTimeoutError | TimeoutError):
        return Failure(Transient, f"the server did nothing for {timeout_s:g} s", True)
    if any(isinstance(cause, BROKEN) for cause in causes(error)):
        return Failure(Refused, f"the request cannot be sent: {last_cause(error)}", False, type(error).__name__)
    unreachable = any(is_unreachable(cause) for cause in causes(error))
    said = f"the connection failed: {last_cause(error)}"
    if any(isinstance(cause, ConnectionRefusedError) for cause in causes(error)):
        refused = "the connection was refused: nothing listens there"
        return Failure(NothingListens, refused, True, acted=False, unreachable=True)
    return Failure(Transient, said, True, acted=not unreachable, unreachable=unreachable)


def is_unreachable(error: BaseException) -> bool:
    """Whether the system knew at once that nobody is there to connect to."""
    refused = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH)
    return isinstance(error, socket.gaierror) or (isinstance(error, OSError) and error.errno in refused)


def classify_answer(error: boto.ClientError) -> Failure:
    answer = error.response
    detail = answer.get("Error", {})
    code = str(detail.get("Code", ""))
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    said = f"the server says {code or status}: {detail.get('Message') or 'no reason given'}"
    if code in BUSY:
        return Failure(Transient, said, True, code, acted=status >= 500 and code not in THROTTLED)
    if code in DAMAGED:
        return Failure(Corruption, f"the bytes arrived damaged; {said}", True, code, acted=False)
    if code in FULL or status == 507:
        return Failure(CapacityExceeded, said, False, code)
    if code in WRONG_PLACE:
        # A wrong region names the right one.
        expected = detail.get("Region") or answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get(
            "x-amz-bucket-region"
        )
        hint = f"; the bucket is in region {expected}" if expected else ""
        return Failure(Refused, said + hint, False, code)
    if code in UNAUTHORIZED or status in (401, 403):
        clock = "; set this machine's clock" if code == "RequestTimeTooSkewed" else ""
        return Failure(Unauthorized, said + clock, False, code)
    if code in ABSENT:
        return Failure(NotFound, "there is no object under this key", False, code)
    if status == 412:
        return Failure(PreconditionFailed, said, False, code)
    if status in (409, 429) or (status >= 500 and status != 501):
        return Failure(Transient, said, True, code, acted=status >= 500)
    return Failure(Refused, said, False, code or str(status))


def is_bare_404(error: boto.ClientError) -> bool:
    """Whether nothing but the status says that something is not there: S3's own answers tell what, but for a HEAD."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status == 404 and error.response.get("Error", {}).get("Code", "") in ("", "404")


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """``error`` and what led to it, down to the first of all."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def last_cause(error: BaseException) -> str:
    """The innermost reason in words."""
    *_, first = causes(error)
    return f"{type(first).__name__}: {first}" if str(first) else type(first).__name__


def to_open_error(error: TierError, settings: S3Settings, tier: str) -> TierCheckError:
    """``error``, met while opening, as one line that names bucket and endpoint."""
    message = f"{settings.place} cannot be used: {error.message}"
    if isinstance(error, Unauthorized):
        return Unauthorized(message, tier=tier)
    if isinstance(error, Refused):
        hint = {
            "NoSuchBucket": "; create it, or correct the URL",
            "InvalidBucketName": "; correct the URL",
        }.get(error.code, "; say region=NAME" if error.code in WRONG_PLACE else "")
        return ConfigurationError(message + hint)
    if isinstance(error, Transient) and (unknown := name_unknown(error)) is not None:
        # A name server that does not answer is an outage; one that knows no such name is not.
        message += "; is endpoint_url right?"
        if unknown:
            return ConfigurationError(message)
    return type(error)(message, tier=tier)


def name_unknown(error: BaseException) -> bool | None:
    """Whether a name server said that there is no such host; ``None`` if the failure is of another kind."""
    found = next((cause for cause in causes(error) if isinstance(cause, socket.gaierror)), None)
    return None if found is None else found.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", -5))
