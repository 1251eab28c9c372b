"""The driver's edge: what obstore raises becomes the ``TierError`` it means."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from obstore import exceptions as foreign

from tiercheck import errors

__all__ = ["first_lines", "mapped_errors"]

# Most specific first. What is missing, exists or has changed has its own meaning in each call, and is mapped there too.
_MEANINGS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], type[errors.TierError]], ...] = (
    (FileNotFoundError, errors.NotFound),
    (foreign.AlreadyExistsError, errors.AlreadyExists),
    (foreign.PreconditionError, errors.PreconditionFailed),
    ((foreign.PermissionDeniedError, foreign.UnauthenticatedError, PermissionError), errors.Unauthorized),
    ((foreign.NotSupportedError, NotImplementedError), errors.Unsupported),
)
_PASSING = re.compile(
    r"error sending request|timed? ?out|connection|connect error|broken pipe|reset|incomplete|after \d+ retries"
    r"|status: (?:408|429|5\d\d)|\b(?:429|5\d\d) (?:Too Many|Internal|Bad Gateway|Service|Gateway)|SlowDown",
    re.IGNORECASE,
)
_REFUSED = re.compile(
    r"\b40[13]\b|InvalidAccessKeyId|SignatureDoesNotMatch|AuthenticationFailed|credential|InvalidAuthenticationInfo",
    re.IGNORECASE,
)
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|specified (?:bucket|container) does not exist", re.IGNORECASE)
_URL = re.compile(r"https?://[^\s\"')]+")
_QUERY = re.compile(r"(https?://[^\s?\"')]+)\?[^\s\"')]*")


@contextmanager
def mapped_errors(tier: str, key: str | None = None) -> Iterator[None]:
    """Inside, foreign exceptions are mapped; TierCheck's own, and ``ValueError``, pass.

    A bucket or a container that is not there is a ``ConfigurationError``: nothing but another URL helps.
    """
    try:
        yield
    except (foreign.BaseError, OSError, NotImplementedError) as error:
        if _NO_BUCKET.search(str(error)):
            raise errors.ConfigurationError(
                f"the bucket or container of {tier} does not exist; create it, or correct the URL"
            ) from error
        raise meaning(error)(first_lines(error), tier=tier, key=key) from error


def meaning(error: Exception) -> type[errors.TierError]:
    text = _URL.sub("", str(error))  # an account may be called "credentials", or have 401 in its name
    for kinds, mapped in _MEANINGS:
        if isinstance(error, kinds):
            return mapped
    if _REFUSED.search(text):
        return errors.Unauthorized
    return errors.Transient if _PASSING.search(text) else errors.TierError


def first_lines(error: Exception) -> str:
    """What happened, without the debugging detail below it, and without what a URL may carry: signatures."""
    text = str(error).partition("\n\nDebug source")[0].strip()
    return _QUERY.sub(r"\1?...", " ".join(text.split()))
