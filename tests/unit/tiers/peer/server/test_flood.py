"""The watch over connections, where the kernel has given a number of theirs to something else."""

from __future__ import annotations

import mmap
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tiercheck.tiers.peer.server import flood
from tiercheck.tiers.peer.server.flood import FloodWatch


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield listener


def test_a_number_that_is_another_kind_of_socket_now_is_left_alone(listener: socket.socket) -> None:
    watch = watch_of(listener, 0)
    ours, theirs = socket.socketpair()
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with ours, theirs, datagrams:
        for each in (ours, datagrams):
            watch.accepted(each.fileno())
        assert watch.sweep() == 0
        theirs.sendall(b"still open")
        assert ours.recv(100) == b"still open"
    assert watch.sweep() == 0, "and nothing at all by now"


def watch_of(listener: socket.socket, unread_bytes_max: int) -> FloodWatch:
    return FloodWatch(f"127.0.0.1:{listener.getsockname()[1]}", unread_bytes_max, 1 << 40)


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_number_that_is_a_file_now_costs_nothing(listener: socket.socket, tmp_path: Path) -> None:
    watch = watch_of(listener, 0)
    with (tmp_path / "file").open("wb") as file:
        watch.accepted(file.fileno())
        before = open_files()
        for _ in range(20):
            assert watch.sweep() == 0
        assert open_files() == before


def test_who_sends_more_than_is_read_is_cut(listener: socket.socket) -> None:
    watch = watch_of(listener, 1000)
    with socket.create_connection(listener.getsockname()) as client, listener.accept()[0] as accepted:
        watch.accepted(accepted.fileno())
        client.sendall(bytes(900))
        assert watch.sweep() == 0
        client.sendall(bytes(9000))
        accepted.recv(9900, socket.MSG_WAITALL)
        watch.handled(accepted.fileno(), 1, 9000)
        assert watch.sweep() == 0
        client.sendall(bytes(90000))
        accepted.recv(90000, socket.MSG_WAITALL)
        assert watch.sweep() == 1


def test_one_that_is_gone_is_not_counted_for_ever(listener: socket.socket) -> None:
    watch = watch_of(listener, 1000)
    with socket.create_connection(listener.getsockname()), listener.accept()[0] as there:
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as gone:
            number = gone.fileno()
        watch.disconnected(number)
        watch.accepted(number)  # the two events come from two threads
        watch.accepted(there.fileno())
        assert watch.sweep() == 0
        assert len(watch) == 1


# The memory of the whole process.


class Memory:
    """What the process holds, and what time it is, as the watch sees them."""

    def __init__(self) -> None:
        self.nbytes = 1000
        self.now = 100.0

    def __call__(self) -> int:
        return self.nbytes

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr(flood, "time", memory)
    return memory


@pytest.mark.parametrize("family", ["tcp", "unix"])
def test_whoever_may_hold_the_memory_is_cut_until_it_is_free(memory: Memory, tmp_path: Path, family: str) -> None:
    path = str(tmp_path / "s")
    with closing(socket.socket(socket.AF_UNIX) if family == "unix" else socket.socket()) as listener:
        listener.bind(path if family == "unix" else ("127.0.0.1", 0))
        listener.listen()
        endpoint = f"ipc://{path}" if family == "unix" else f"127.0.0.1:{listener.getsockname()[1]}"
        watch = FloodWatch(endpoint, 1 << 40, 500, memory)
        with ExitStack() as stack:
            pairs = []
            for _ in range(2):
                client = stack.enter_context(socket.socket(listener.family))
                client.connect(listener.getsockname())
                pairs.append((client, stack.enter_context(listener.accept()[0])))
                watch.accepted(pairs[-1][1].fileno())
            (flooding, _), (working, taken) = pairs
            working.settimeout(0)
            assert (watch.sweep(), watch.full) == (0, False)
            flooding.sendall(bytes(500))
            memory.now += 1
            memory.nbytes = 1500
            assert (watch.sweep(), watch.full) == (0, False)
            memory.nbytes = 1501
            watch.handled(taken.fileno(), 2, 100)
            assert (watch.sweep(), watch.full) == (1, True)
            assert flooding.recv(1) == b"", "it is cut"
            with pytest.raises(BlockingIOError):
                working.recv(1)
            memory.nbytes = 900
            assert (watch.sweep(), watch.full) == (0, False)


def test_memory_that_goes_with_nobody_is_what_the_process_needs(memory: Memory, tmp_path: Path) -> None:
    """Of connections of which the kernel does not count what they received."""
    path = str(tmp_path / "s")
    with closing(socket.socket(socket.AF_UNIX)) as listener, closing(socket.socket(socket.AF_UNIX)) as client:
        listener.bind(path)
        listener.listen()
        client.connect(path)
        watch = FloodWatch(f"ipc://{path}", 1 << 40, 500, memory)
        with closing(listener.accept()[0]) as accepted:
            watch.accepted(accepted.fileno())
            watch.handled(accepted.fileno(), 1, 1)
            watch.sweep()
            memory.nbytes = 9000
            assert (watch.sweep(), watch.full) == (0, True)
            memory.now += flood.SETTLE_S + 0.1
            assert (watch.sweep(), watch.full) == (0, False)
            memory.nbytes = 9400
            assert (watch.sweep(), watch.full) == (0, False)
            watch.handled(accepted.fileno(), 1, 1)
            memory.nbytes = 9501
            assert (watch.sweep(), watch.full) == (0, True)


def test_what_the_process_needs_for_itself_turns_nobody_away(memory: Memory, listener: socket.socket) -> None:
    """Such as a list of what the tiers hold."""
    watch = FloodWatch(f"127.0.0.1:{listener.getsockname()[1]}", 1 << 40, 500, memory)
    with socket.create_connection(listener.getsockname()) as client, listener.accept()[0] as accepted:
        watch.accepted(accepted.fileno())
        client.sendall(bytes(10))
        assert accepted.recv(10, socket.MSG_WAITALL | socket.MSG_PEEK)
        watch.sweep()
        memory.nbytes, memory.now = 9000, memory.now + 1
        assert (watch.sweep(), watch.full) == (0, False), "its connection cannot hold that"
        client.sendall(bytes(100))
        assert accepted.recv(110, socket.MSG_WAITALL | socket.MSG_PEEK)
        memory.nbytes = 9000 + 500 + 10 * 32 + 1
        assert (watch.sweep(), watch.full) == (1, True), "this may be a flood"


def test_shared_memory_is_not_the_processs_own() -> None:
    before = flood.private_bytes()
    size, page = 64 << 20, mmap.PAGESIZE
    with mmap.mmap(-1, size, flags=mmap.MAP_SHARED) as shared, mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE) as own:
        shared[::page] = b"x" * (size // page)
        assert flood.private_bytes() - before < size // 2
        own[::page] = b"x" * (size // page)
        assert flood.private_bytes() - before > size // 2
