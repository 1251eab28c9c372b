"""What an ``s3://`` URL says: the options, their defaults and their bounds."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tiercheck.errors import ConfigurationError
from tiercheck.keys import KEY_BYTES_MAX
from tiercheck.tiers.url import TierURL, parse_size
from tiercheck.types import Survives, bytes_text

__all__ = ["OBJECT_KEY_BYTES_MAX", "PART_BYTES_MIN", "SHARDS_MAX", "SINGLE_PUT_BYTES_MAX", "S3Settings"]

T = TypeVar("T", int, float)

PART_BYTES_MIN = 5 << 20
"""S3 refuses smaller parts, but for the last."""
PART_BYTES_MAX = 5 << 30
SINGLE_PUT_BYTES_MAX = 5 << 30
OBJECT_KEY_BYTES_MAX = 1024
PARTS_IN_FLIGHT_MAX = 256
SHARDS_MAX = 256
SHARD_NAME_BYTES = len("shard-000-of-000/")

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)\Z")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class S3Settings:
    """Where the tier is and how it is spoken to; :class:`~tiercheck.tiers.s3.driver.S3Driver` documents each option.

    Errors: ``ConfigurationError`` for a value out of its bounds.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    addressing: str = "auto"
    survives: Survives = Survives.RACK
    part_bytes: int = 16 << 20
    parts_in_flight: int = 8
    conditional: str = "auto"
    listing: str = "auto"
    access: str = "write"
    shards: int = 1
    storage_class: str | None = None
    sse: str | None = None
    sse_kms_key: str | None = None
    timeout_s: float = 60.0
    deadline_s: float = 120.0
    abandoned_after_s: float = 86400.0

    def __post_init__(self) -> None:
        if not _BUCKET.match(self.bucket):
            raise ConfigurationError(
                f"{self.bucket!r} is no bucket name (3 to 63 of a-z, 0-9, '.', '-'): write s3://bucket/prefix"
            )
        if any(part in ("", ".", "..") for part in self.prefix.split("/")) and self.prefix:
            raise ConfigurationError(f"the prefix {self.prefix!r} has an empty, '.' or '..' component")
        longest = len(self.prefix.encode()) + 1 + SHARD_NAME_BYTES + KEY_BYTES_MAX
        if longest > OBJECT_KEY_BYTES_MAX:
            raise ConfigurationError(f"the prefix is too long: S3 takes names of {OBJECT_KEY_BYTES_MAX} bytes in all")
        if self.endpoint_url is not None:
            check_endpoint(self.endpoint_url)
        check_range("part", self.part_bytes, PART_BYTES_MIN, PART_BYTES_MAX, bytes_text)
        check_range("parts_in_flight", self.parts_in_flight, 1, PARTS_IN_FLIGHT_MAX, str)
        check_range("shards", self.shards, 1, SHARDS_MAX, str)
        check_range("timeout", self.timeout_s, 0.1, 3600.0, seconds_text)
        check_range("deadline", self.deadline_s, 0.1, 86400.0, seconds_text)
        check_range("abandoned_after", self.abandoned_after_s, 60.0, 365 * 86400.0, seconds_text)
        if self.sse_kms_key is not None and self.sse != "aws:kms":
            raise ConfigurationError("sse_kms_key needs sse=aws:kms")

    @classmethod
    def from_url(cls, url: TierURL) -> S3Settings:
        """Errors: ``ConfigurationError`` for an unknown option, or one that cannot be used."""
        bucket, _, prefix = url.location.partition("/")
        if "@" in bucket:
            raise ConfigurationError(
                "credentials do not belong into an s3:// URL: use the environment, a profile (profile=NAME) or the "
                "instance's role"
            )
        options = url.reader()
        endpoint_url = options.take("endpoint_url", str, None)
        settings: dict[str, Any] = {
            "region": options.take("region", str, None),
            "profile": options.take("profile", str, None),
            "addressing": options.take("addressing", one_of("auto", "path", "virtual"), "auto"),
            "survives": options.take("survives", Survives.parse, Survives.RACK),
            "part_bytes": options.take("part", parse_size, cls.part_bytes),
            "parts_in_flight": options.take("parts_in_flight", int, cls.parts_in_flight),
            "conditional": options.take("conditional", one_of("auto", "on", "off"), "auto"),
            "listing": options.take("listing", one_of("auto", "flat", "tree"), "auto"),
            "access": options.take("access", one_of("write", "read"), "write"),
            "shards": options.take("shards", int, 1),
            "storage_class": options.take("storage_class", str, None),
            "sse": options.take("sse", one_of("AES256", "aws:kms"), None),
            "sse_kms_key": options.take("sse_kms_key", str, None),
            "timeout_s": options.take("timeout", parse_seconds, cls.timeout_s),
            "deadline_s": options.take("deadline", parse_seconds, cls.deadline_s),
            "abandoned_after_s": options.take("abandoned_after", parse_seconds, cls.abandoned_after_s),
        }
        options.finish()
        return cls(bucket, prefix.strip("/"), endpoint_url, **settings)

    @property
    def root(self) -> str:
        """What every name in the bucket begins with: empty, or the prefix and a slash."""
        return f"{self.prefix}/" if self.prefix else ""

    @property
    def place(self) -> str:
        """The bucket and the endpoint, for messages."""
        return f"the bucket {self.bucket!r} at {self.endpoint_url or 'AWS'}"

    @property
    def put_arguments(self) -> dict[str, Any]:
        """What is said about storage with each new object."""
        named = {"StorageClass": self.storage_class, "ServerSideEncryption": self.sse, "SSEKMSKeyId": self.sse_kms_key}
        return {name: value for name, value in named.items() if value is not None}


def check_endpoint(endpoint_url: str) -> None:
    try:
        parts = urlsplit(endpoint_url)
    except ValueError as error:  # such as http://[
        raise ConfigurationError(f"endpoint_url must look like https://host:port: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(
            f"endpoint_url must look like https://host:port, not {parts.scheme}://{parts.hostname}"
        )
    if "@" in parts.netloc:
        raise ConfigurationError("endpoint_url must not hold credentials: use the environment or a profile")


def check_range(name: str, value: T, low: T, high: T, text: Callable[[T], str]) -> None:
    if not low <= value <= high:
        raise ConfigurationError(f"{name} must be from {text(low)} to {text(high)}, not {text(value)}")


def one_of(*names: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in names:
            raise ValueError(f"choose one of {', '.join(names)}, not {text!r}")
        return text

    return convert


def parse_seconds(text: str) -> float:
    """``"250ms"``, ``"60s"``, ``"2m"``, ``"24h"``, ``"7d"``. ``ValueError`` otherwise."""
    match = _DURATION.match(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no duration; write it like 500ms, 60s, 2m, 24h or 7d")
    return float(match[1]) * _SECONDS[match[2]]


def seconds_text(value: float) -> str:
    return f"{value:g} s"
