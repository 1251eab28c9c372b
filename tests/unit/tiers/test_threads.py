"""Pieces shared out among threads: each done once, and nobody at work any more when the call is over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from unittest import mock

import pytest

from tiercheck.runtime.daemon_threads import DaemonThreads
from tiercheck.tiers.threads import Threads

WAIT_S = 10.0


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads(3, "test")
    yield threads
    threads.close()


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_every_piece_is_done_once(threads: Threads, count: int) -> None:
    done: list[int] = []
    threads.share(range(count), done.append)
    assert sorted(done) == list(range(count))


def test_as_many_at_once_as_there_are_threads_and_the_callers_is_one(threads: Threads) -> None:
    together = threading.Barrier(3)
    names: set[str] = set()

    def work(piece: int) -> None:
        together.wait(WAIT_S)
        names.add(threading.current_thread().name)

    threads.share(range(3), work)
    assert len(names) == 3
    assert threading.current_thread().name in names


def test_one_thread_makes_no_others() -> None:
    with mock.patch.object(DaemonThreads, "submit", side_effect=AssertionError):
        done: list[str] = []
        Threads(1, "test").share("abc", done.append)
        assert done == ["a", "b", "c"]


def test_after_an_error_no_piece_is_begun_and_nobody_is_at_work(threads: Threads) -> None:
    begun: list[int] = []
    ended: list[int] = []
    at_work, failed = threading.Event(), threading.Event()

    def work(piece: int) -> None:
        begun.append(piece)
        if threading.current_thread() is threading.main_thread():
            assert at_work.wait(WAIT_S)
            raise ValueError("of the caller's thread")
        at_work.set()
        assert failed.wait(WAIT_S)
        ended.append(piece)

    def wait_for(running: list[Future[None]]) -> None:
        failed.set()
        wait(running)

    with (
        mock.patch("tiercheck.tiers.threads.wait", wait_for),
        pytest.raises(ValueError, match="of the caller's thread"),
    ):
        threads.share(range(1000), work)
    assert 1 <= len(ended) == len(begun) - 1 <= 2, "each of the others ends its piece, and takes no other"


def test_the_error_of_another_thread_is_the_callers(threads: Threads) -> None:
    failed = threading.Event()

    def work(piece: int) -> None:
        if threading.current_thread() is threading.main_thread():
            assert failed.wait(WAIT_S)
        else:
            failed.set()
            raise ValueError("of another thread")

    with pytest.raises(ValueError, match="of another thread"):
        threads.share(range(3), work)


def test_where_another_thread_cannot_be_made_the_first_is_waited_for(threads: Threads) -> None:
    at_work, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    submit, calls = DaemonThreads.submit, [0]

    def fails_the_second_time(pool: DaemonThreads, task: object) -> object:
        calls[0] += 1
        if calls[0] == 2:
            assert at_work.wait(WAIT_S)
            go_on.set()
            raise RuntimeError("can't start new thread")
        return submit(pool, task)  # type: ignore[arg-type]

    def work(piece: int) -> None:
        at_work.set()
        assert go_on.wait(WAIT_S)
        if piece == 0:
            ended.set()

    with (
        mock.patch.object(DaemonThreads, "submit", fails_the_second_time),
        pytest.raises(RuntimeError, match="can't start"),
    ):
        threads.share(range(9), work)
    assert ended.is_set()


def test_closed_they_are_made_again(threads: Threads) -> None:
    threads.share(range(9), lambda piece: None)
    threads.close()
    threads.close()
    done: list[int] = []
    threads.share(range(9), done.append)
    assert sorted(done) == list(range(9))
