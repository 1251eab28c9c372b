"""What is known of fsspec's protocols: how each publishes an object, and what its data outlive."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tiercheck.errors import ConfigurationError
from tiercheck.tiers.fsspec.backends import Backend, ClosingBackend, MemoryBackend
from tiercheck.tiers.fsspec.renaming import MovingBackend, SftpBackend
from tiercheck.tiers.url import TierURL
from tiercheck.types import Survives

__all__ = ["PROTOCOLS", "Protocol", "argument", "known_protocol", "shown_url"]

THREADS = 8
_SECRET = re.compile(r"secret|pass|token|key|credential|sas|sign|auth|connection_string|cookie|cert")


@dataclass(frozen=True)
class Protocol:
    """What is known of a protocol.

    ``refused_in_keys``: text that it takes for something else than a part of a name. ``needs_path``: a host alone is
    no place. ``arguments``: what its constructor is given if the user does not say, from the deadline in seconds.
    """

    backend: type[Backend]
    survives: Survives = Survives.NODE
    survives_max: Survives = Survives.SITE
    threads: int = THREADS
    refused_in_keys: tuple[str, ...] = ()
    needs_path: bool = False
    arguments: Callable[[float], dict[str, Any]] = field(default=lambda deadline_s: no_listings_cache(deadline_s))


def no_listings_cache(_: float) -> dict[str, Any]:
    """A cache of listings would hide what other clients do."""
    return {"use_listings_cache": False}


def sftp_arguments(deadline_s: float) -> dict[str, Any]:
    """Deadlines for connecting and for a dead connection; and the host's key is checked, which sshfs does not do."""
    return {
        "known_hosts": (),
        "connect_timeout": deadline_s,
        "login_timeout": deadline_s,
        "keepalive_interval": max(1.0, deadline_s / 4),
        "keepalive_count_max": 3,
    }


_AZURE = Protocol(ClosingBackend, refused_in_keys=("?versionid=",))
_OBJECT_STORE = Protocol(ClosingBackend)
_SFTP = Protocol(SftpBackend, needs_path=True, arguments=sftp_arguments)
PROTOCOLS: Mapping[str, Protocol] = MappingProxyType(
    {
        **dict.fromkeys(("abfs", "abfss", "az"), _AZURE),
        **dict.fromkeys(("gs", "gcs", "s3", "s3a"), _OBJECT_STORE),
        **dict.fromkeys(("sftp", "ssh"), _SFTP),
        "memory": Protocol(MemoryBackend, Survives.NOTHING, Survives.NOTHING),
    }
)
_DIRECTORIES = ("file", "local")
_UNSAFE: Mapping[str, str] = MappingProxyType(
    {
        "webdav": "its move does not replace an existing file",
        "ftp": "its rename does not replace an existing file on every server",
        "smb": "its rename does not replace an existing file",
        **dict.fromkeys(("hdfs", "arrow_hdfs", "webhdfs"), "its rename does not replace an existing file"),
        **dict.fromkeys(("http", "https", "zip", "tar", "github", "git", "data", "reference"), "it is read-only"),
    }
)


def known_protocol(protocol: str, publish: str | None, *, url: str) -> Protocol:
    """What is known of ``protocol``, or what the user says of it by ``publish``; ``url`` is for messages.

    Errors: ``ConfigurationError`` for a local directory, and if neither says how the file system could publish an
    object all at once.
    """
    if protocol in _DIRECTORIES:
        raise ConfigurationError(
            f"{url} cannot be used: directories have drivers of their own; write nvme:///path, or lustre:///path if "
            "several nodes mount it"
        )
    if publish not in (None, "close", "rename"):
        raise ConfigurationError(f"publish= of {url} is either close or rename, not {publish!r}")
    if publish is not None:
        # Nothing says that threads may share the file system.
        return Protocol(ClosingBackend if publish == "close" else MovingBackend, threads=1)
    if protocol not in PROTOCOLS:
        why = _UNSAFE.get(protocol, "it is not known how it publishes a file")
        raise ConfigurationError(
            f"{url} cannot be used: {why}, so a reader could see half an object, or none. If yours shows a "
            "file only once it is closed, say publish=close; if its mv replaces a file atomically, publish=rename"
        )
    return PROTOCOLS[protocol]


def shown_url(protocol: str, location: str, options: Mapping[str, Any]) -> str:
    """The tier's URL for messages: of the file system's options only those are shown that are known to be public."""
    return TierURL(f"fsspec+{protocol}", location, {f"fs.{name}": str(value) for name, value in options.items()}).text


def argument(name: str, text: str) -> Any:
    """An option's value for a file system's constructor: JSON if it is JSON, and the name does not look secret."""
    if _SECRET.search(name.lower()):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
