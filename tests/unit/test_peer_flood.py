"""The watch over connections, where the kernel has given a number of theirs to something else."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tiercheck.tiers.peer.flood import FloodWatch


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield listener


def test_a_number_that_is_another_kind_of_socket_now_is_left_alone(listener: socket.socket) -> None:
    watch = FloodWatch(endpoint_of(listener), 0)
    ours, theirs = socket.socketpair()
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with ours, theirs, datagrams:
        for each in (ours, datagrams):
            watch.accepted(each.fileno())
        assert watch.sweep() == 0
        theirs.sendall(b"still open")
        assert ours.recv(100) == b"still open"
    assert watch.sweep() == 0, "and nothing at all by now"


def endpoint_of(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_number_that_is_a_file_now_costs_nothing(listener: socket.socket, tmp_path: Path) -> None:
    watch = FloodWatch(endpoint_of(listener), 0)
    with (tmp_path / "file").open("wb") as file:
        watch.accepted(file.fileno())
        before = open_files()
        for _ in range(20):
            assert watch.sweep() == 0
        assert open_files() == before


def test_who_sends_more_than_is_read_is_cut(listener: socket.socket) -> None:
    watch = FloodWatch(endpoint_of(listener), 1000)
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
    watch = FloodWatch(endpoint_of(listener), 1000)
    with socket.create_connection(listener.getsockname()), listener.accept()[0] as there:
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as gone:
            number = gone.fileno()
        watch.disconnected(number)
        watch.accepted(number)  # the two events come from two threads
        watch.accepted(there.fileno())
        assert watch.sweep() == 0
        assert len(watch) == 1
