"""What the exceptions of foreign file systems mean.

Each file system raises its own, and few are documented. None of their packages is imported here: an exception is
known by its errno, by the HTTP status it carries, or by the names of its classes; so are those it was raised from.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from tiercheck.errors import CapacityExceeded, NotFound, TierCheckError, TierError, Transient, Unauthorized, Unsupported
from tiercheck.tiers.fsspec.workers import Abandoned

__all__ = ["first_line", "map_foreign_errors", "meaning_of"]

_NESTED = "here a key cannot lie under another key, nor be what others lie under; rename one"
_REFUSED = "the file system refuses this user; check its credentials and permissions"
_FULL = "the file system is full, or its quota is used up"
_BROKEN = "the file system, or the way to it, failed, perhaps not for long"
_CANNOT = "the file system cannot do this"

Meaning = tuple[type[TierError], str]

_BY_ERRNO: dict[int, Meaning] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), (CapacityExceeded, _FULL)),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), (Unauthorized, _REFUSED)),
    **dict.fromkeys((errno.EEXIST, errno.EISDIR, errno.ENOTDIR), (Unsupported, _NESTED)),
    **dict.fromkeys((errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV, errno.ENAMETOOLONG), (Unsupported, _CANNOT)),
    errno.ELOOP: (Unauthorized, "a symbolic link stands where an object, or a directory above it, should; remove it"),
    errno.ENOENT: (NotFound, "there is no object under this key"),
}
_BY_STATUS: dict[int, Meaning] = {
    **dict.fromkeys((401, 403, 407), (Unauthorized, _REFUSED)),
    **dict.fromkeys((404, 410), (NotFound, "there is no object under this key")),
    **dict.fromkeys((413, 507), (CapacityExceeded, _FULL)),
    **dict.fromkeys((405, 501), (Unsupported, _CANNOT)),
    **dict.fromkeys((408, 412, 425, 429), (Transient, _BROKEN)),
}
_BY_NAME: dict[str, Meaning] = {
    **dict.fromkeys(
        ("PermissionError", "PermissionDenied", "SFTPPermissionDenied", "SFTPWriteProtect", "ClientAuthenticationError",
         "HostKeyNotVerifiable", "KeyExchangeFailed", "NoCredentialsError", "CredentialUnavailableError",
         "AuthenticationException"),
        (Unauthorized, _REFUSED),
    ),
    **dict.fromkeys(("FileNotFoundError", "SFTPNoSuchFile", "SFTPNoSuchPath"), _BY_ERRNO[errno.ENOENT]),
    **dict.fromkeys(("SFTPNoSpaceOnFilesystem", "SFTPQuotaExceeded"), (CapacityExceeded, _FULL)),
    **dict.fromkeys(
        ("FileExistsError", "IsADirectoryError", "NotADirectoryError", "SFTPFileAlreadyExists", "SFTPFileIsADirectory",
         "SFTPNotADirectory", "SFTPDirNotEmpty"),
        (Unsupported, _NESTED),
    ),
    **dict.fromkeys(("NotImplementedError", "SFTPOpUnsupported", "UnsupportedOperation"), (Unsupported, _CANNOT)),
    **dict.fromkeys(
        ("TimeoutError", "FSTimeoutError", "ConnectionError", "EOFError", "SFTPConnectionLost", "SFTPNoConnection",
         "ConnectionLost", "DisconnectError", "ChannelOpenError", "SSHException", "ServiceRequestError",
         "ServiceResponseError", "IncompleteReadError", "ClientConnectionError", "ClientPayloadError", "gaierror",
         "HTTPClientError", "EndpointConnectionError", "SMBConnectionClosed"),
        (Transient, _BROKEN),
    ),
}  # fmt: skip
_BY_TEXT: dict[tuple[str, str], Meaning] = {
    ("ValueError", "Can't create any SFTP connections!"): (Transient, _BROKEN),  # sshfs, of a server that is not there
}


@contextmanager
def map_foreign_errors(tier: str, key: str | None = None) -> Iterator[None]:
    """The driver's edge: inside, whatever a file system raises becomes the ``TierError`` it means."""
    try:
        yield
    except TierError as error:
        error.tier = error.tier or tier
        error.key = error.key or key
        raise
    except (Abandoned, TierCheckError):
        raise
    except Exception as error:
        kind, advice = meaning_of(error) or (TierError, "the file system failed in an unexpected way")
        raise kind(f"{advice}: {type(error).__name__}: {first_line(error)}", tier=tier, key=key) from error


def meaning_of(error: BaseException) -> Meaning | None:
    """What an exception means, by itself or by those it was raised from; ``None`` if nothing is known of them."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        found = _meaning(at)
        if found is not None:
            return found
        at = at.__cause__ or at.__context__
    # The operating system refused, and did not say what is known above: the disk or the network failed.
    return (Transient, _BROKEN) if isinstance(error, OSError) and error.errno else None


def _meaning(error: BaseException) -> Meaning | None:
    if isinstance(error, OSError) and error.errno in _BY_ERRNO:
        return _BY_ERRNO[error.errno]
    status = status_of(error)
    if status is not None:
        return _BY_STATUS.get(status, (Transient, _BROKEN) if status >= 500 else (TierError, "the server refused"))
    if (said := (type(error).__name__, str(error))) in _BY_TEXT:
        return _BY_TEXT[said]
    names = (kind.__name__ for kind in type(error).__mro__)
    return next((_BY_NAME[name] for name in names if name in _BY_NAME), None)


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an exception of azure-core, aiohttp, botocore, gcsfs or requests carries."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        metadata = response.get("ResponseMetadata")
        candidates = [metadata.get("HTTPStatusCode")] if isinstance(metadata, dict) else []
    else:
        candidates = [getattr(error, "status_code", None), getattr(error, "status", None), getattr(error, "code", None)]
        candidates.append(getattr(response, "status_code", None))
    return next((value for value in candidates if isinstance(value, int) and 400 <= value < 600), None)


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")[:300]
