"""Where a peer server listens: a TCP address, or a socket that one user alone can reach.

``HOST:PORT`` is reached by whoever can connect, so that a server there asks for keys. ``ipc:///DIRECTORY/NAME`` is a
Unix socket, and the file system proves the user: the directory is this user's alone, and the kernel says who is at the
other end.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import socket
import stat
from pathlib import Path

from tiercheck.errors import ConfigurationError, Transient, Unauthorized
from tiercheck.runtime.daemon_threads import DaemonThreads
from tiercheck.types import shown

__all__ = [
    "check_bind",
    "check_private_socket",
    "endpoint_of",
    "has_ipv6_alone",
    "is_socket",
    "parse_at",
    "peer_user",
    "zmq_address",
]

IPC = "ipc://"
SOCKET_BYTES_MAX = 107
"""What a Unix socket's address holds (``sun_path``), without its end."""
_TCP = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})\Z", re.ASCII)


def is_socket(endpoint: str) -> bool:
    """Whether the endpoint is a socket in a directory."""
    return endpoint.startswith(IPC)


def zmq_address(endpoint: str) -> str:
    """As ZeroMQ wants it."""
    return endpoint if is_socket(endpoint) else f"tcp://{endpoint}"


def endpoint_of(address: str) -> str:
    """The endpoint that ZeroMQ calls ``address``."""
    return address.removeprefix("tcp://")


def parse_at(text: str) -> str:
    """An endpoint. Errors: ``ValueError``."""
    if is_socket(text):
        path = text.removeprefix(IPC)
        if path.startswith("/") and not path.endswith("/") and len(os.fsencode(path)) <= SOCKET_BYTES_MAX:
            return text
    elif (match := _TCP.match(text)) is not None and 0 < int(match[2]) < 65536:
        return text
    raise ValueError(f"{shown(text)} is no address; write it like 10.0.0.2:7070, [fd00::2]:7070 or ipc:///run/x.sock")


async def has_ipv6_alone(endpoint: str, deadline_s: float) -> bool:
    """Whether no address of IPv4 leads there. ZeroMQ looks for one if it is not told. A name that cannot be resolved
    by the deadline counts as one that has such an address: ZeroMQ tries it again and again."""
    if is_socket(endpoint):
        return False
    host = endpoint.rpartition(":")[0]
    if host.startswith("["):
        return True
    resolving = DaemonThreads(1, f"tiercheck name {host}")  # for which the end of the process does not wait long
    try:
        async with asyncio.timeout(deadline_s):
            future = resolving.submit(lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
            found = await asyncio.wrap_future(future)
    except (OSError, UnicodeError):  # a deadline that has passed is one, too
        return False
    finally:
        resolving.end()
    return bool(found) and all(family == socket.AF_INET6 for family, *_ in found)


def check_bind(bind: str, *, with_keys: bool) -> str:
    """What to bind to, as ZeroMQ wants it. ``ConfigurationError`` for no address, one that needs keys, or a socket
    that others could reach."""
    if is_socket(bind):
        return check_socket_bind(bind, with_keys=with_keys)
    host, separator, port = bind.removeprefix("tcp://").rpartition(":")
    if not bind.startswith("tcp://") or not separator or not port.isdecimal() or int(port) > 65535 or not host:
        raise ConfigurationError(
            f"a peer server binds to tcp://HOST:PORT (port 0: any that is free) or ipc:///PATH, not to {bind!r}"
        )
    if host == "localhost":
        host = "127.0.0.1"
    try:
        is_loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        is_loopback = False  # an interface or a wildcard
    if not with_keys and not is_loopback:
        raise ConfigurationError(
            f"without keys a peer server binds to loopback only, not to {bind!r}: anybody who reaches it could read "
            f"and replace checkpoints; make keys with 'tiercheck keys DIRECTORY', copy the directory to every node, "
            f"and give it by keys= or TIERCHECK_KEYS"
        )
    return f"tcp://{host}:{int(port)}"


def check_socket_bind(bind: str, *, with_keys: bool) -> str:
    if with_keys:
        raise ConfigurationError(f"the socket {bind} proves the user by itself; keys are for tcp://HOST:PORT")
    try:
        check_private_socket(parse_at(bind))
    except (ValueError, Transient, Unauthorized) as error:
        raise ConfigurationError(f"the peer server cannot bind {bind}: {error}") from error
    return bind


def check_private_socket(endpoint: str) -> None:
    """Check that nobody but this user can have made the socket, or can reach it.

    Errors: ``Unauthorized``; ``Transient`` if its directory is not there.
    """
    directory = Path(endpoint.removeprefix(IPC)).parent
    try:
        status = directory.lstat()
    except OSError as error:
        raise Transient(f"the directory of the socket {endpoint} is not there: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise Unauthorized(
            f"{directory} must be a directory of this user's alone (mode 0700), so that nobody else can reach or "
            f"replace the socket {endpoint}"
        )


def peer_user(address: str) -> int | None:
    """The user at the other end of a Unix socket, from what ZeroMQ calls its address (``NAME:UID:GID:PID``, which it
    has from the kernel); ``None`` if it does not say."""
    parts = address.rsplit(":", 3)
    return int(parts[1]) if len(parts) == 4 and all(part.isdecimal() for part in parts[1:]) else None
