"""The stores of a soak: where the objects are, and what can befall them."""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from benchmarks.ceilings.child import Child
from benchmarks.figures import Unavailable
from benchmarks.soak.limited import LimitedDirectory
from benchmarks.stores import needed
from tiercheck.tiers.shm.driver import remove_namespace

__all__ = ["STORES", "Store", "Wrong"]

ROOM_BYTES = 64 << 20
"""Of a file system that is mounted for a soak."""
REMOTE_FAULTS = 0.03
LUSTRE_DEBRIS_S = 65.0
"""Its writers may be on other nodes, so what they leave is kept for a minute."""
AWAY_S_MAX = 2.0
FULL_S_MAX = 1.5
SPARE_BYTES_MAX = 256 << 10


@dataclass(frozen=True)
class Wrong:
    """Something that goes wrong for a while: ``start``, and then ``heal``, which is called in any case."""

    name: str
    start: Callable[[random.Random], None]
    heal: Callable[[], None]
    seconds_max: float


@dataclass(frozen=True)
class Store:
    """A store that is up."""

    url: str
    processes: int = 2
    linger_s: float = 0.0
    """How long after a call's end it may still act, where its outcome is unknown: on a server, not in this process."""
    faults: float = 0.15
    """The share of calls that are cancelled, or that fail; less where their keys then have to rest."""
    debris_s: float = 0.0
    """How long what a killed writer has left may lie about, where its death cannot be known at once."""
    large_bytes: int = 2 << 20
    wrapped: bool = False
    wrongs: tuple[Wrong, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def on_room(url: str, room: LimitedDirectory, *, wrapped: bool = False, debris_s: float = 0.0) -> Store:
    """A store in ``room``, whose disk is full at times; or with a note that this cannot be had."""
    if not room.limited:
        return Store(url, wrapped=wrapped, debris_s=debris_s, notes=(f"no full disk: {room.why}",))

    def fill(chance: random.Random) -> None:
        room.fill(chance.choice((0, 4096, chance.randrange(SPARE_BYTES_MAX))))

    wrong = Wrong("disk full", fill, room.free, FULL_S_MAX)
    return Store(url, wrapped=wrapped, debris_s=debris_s, wrongs=(wrong,))


@contextlib.contextmanager
def memory() -> Iterator[Store]:
    # One process has it, and it dies with it: nobody is killed. It is full now and then by itself.
    yield Store("memory://soak?size=4MiB", processes=1)


@contextlib.contextmanager
def shm() -> Iterator[Store]:
    with LimitedDirectory("tmpfs", ROOM_BYTES) as room:
        name = f"soak-{secrets.token_hex(4)}"
        mount = f"&mount={quote(str(room.path))}" if room.limited else ""
        try:
            yield on_room(f"shm://{name}?size=8MiB{mount}", room)
        finally:
            if not room.limited:
                remove_namespace(name)


@contextlib.contextmanager
def files(scheme: str, kind: str, *, wrapped: bool = False, debris_s: float = 0.0) -> Iterator[Store]:
    with LimitedDirectory(kind, ROOM_BYTES) as room:
        yield on_room(f"{scheme}://{quote(str(room.path))}/tier", room, wrapped=wrapped, debris_s=debris_s)


@contextlib.contextmanager
def peer() -> Iterator[Store]:
    name = f"soak-{secrets.token_hex(4)}"
    server = Child("benchmarks.peer_server", f"shm://{name}?size=16MiB", "--bind", f"tcp://127.0.0.1:{free_port()}")
    try:
        server.start()
        endpoint = server.ready.split()[0]
        wrong = killing("server killed", server.kill, server.start)
        yield Store(
            f"peer://soak?at={endpoint}", linger_s=2.0, faults=REMOTE_FAULTS, large_bytes=4 << 20, wrongs=(wrong,)
        )
    finally:
        server.stop()
        remove_namespace(f"{name}-soak")


@contextlib.contextmanager
def s3() -> Iterator[Store]:
    from tests.servers.seaweed import Seaweed

    with needed():
        server = Seaweed()
    with server:
        yield Store(
            server.url(server.new_bucket(), part="5MiB"),
            linger_s=5.0,
            faults=REMOTE_FAULTS,
            large_bytes=12 << 20,
            wrongs=(killing("server killed", server.kill, server.restart),),
            environment=server.environment,
        )


@contextlib.contextmanager
def sftp() -> Iterator[Store]:
    from tests.servers.sshd import Sshd

    with tempfile.TemporaryDirectory(prefix="tiercheck-soak-") as directory:
        folder = Path(directory)
        with needed(), contextlib.ExitStack() as stack:
            server = Sshd(folder)
            stack.enter_context(server)
            running = stack.pop_all()
        with running:
            url = f"fsspec+sftp://127.0.0.1{quote(directory)}/tier?{server.client_options}"
            wrong = killing("server killed", server.kill, server.restart)
            yield Store(url, linger_s=2.0, faults=REMOTE_FAULTS, wrongs=(wrong,))


def killing(name: str, kill: Callable[[], None], restart: Callable[[], None]) -> Wrong:
    return Wrong(name, lambda chance: kill(), restart, AWAY_S_MAX)


def free_port() -> int:
    """A port that is free now, below those that the kernel hands out: a server that is restarted finds it again."""
    for port in random.Random(time.monotonic_ns()).sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise Unavailable("no free port was found")


STORES: Mapping[str, Callable[[], contextlib.AbstractContextManager[Store]]] = {
    "memory": memory,
    "shm": shm,
    "nvme": lambda: files("nvme", "ext4"),
    "lustre": lambda: files("lustre", "tmpfs", debris_s=LUSTRE_DEBRIS_S),
    "peer": peer,
    "s3": s3,
    "sftp": sftp,
    "wrappers": lambda: files("nvme", "tmpfs", wrapped=True),
}
