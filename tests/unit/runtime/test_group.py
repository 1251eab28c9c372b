"""Collectives: everyone gets everyone's message, and a wait that ends names whom it waited for."""

from __future__ import annotations

import threading
import traceback
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest

from tiercheck.errors import DeadlineExceeded, GroupError, PeerLost, RanksLate
from tiercheck.runtime.group import SimulatedGroup, SingleProcess, TorchGroup
from tiercheck.runtime.loop_thread import LoopThread


def on_all_ranks(world_size: int, act: Any) -> list[Any]:
    """``act(group)`` on a thread a rank; the results, or the exceptions, in rank order."""
    outcomes: list[Any] = [None] * world_size

    def run(group: SimulatedGroup) -> None:
        try:
            outcomes[group.rank] = act(group)
        except Exception as error:
            outcomes[group.rank] = error

    threads = [threading.Thread(target=run, args=(group,)) for group in SimulatedGroup.of(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outcome in outcomes:
        if isinstance(outcome, RanksLate):
            for rank in outcome.late:  # why they were
                outcome.add_note(f"rank {rank}: {told(outcomes[rank])}")
    return outcomes


def told(outcome: object) -> str:
    return "".join(traceback.format_exception(outcome)) if isinstance(outcome, Exception) else repr(outcome)


def test_everyone_gets_everyones_message() -> None:
    def act(group: SimulatedGroup) -> list[bytes]:
        first = group.all_gather(b"a" * group.rank, what="first", deadline_s=10)
        return [*first, *group.all_gather(bytes([group.rank]), what="second", deadline_s=10)]

    assert on_all_ranks(3, act) == [[b"", b"a", b"aa", b"\0", b"\1", b"\2"]] * 3
    assert SingleProcess().all_gather(b"x", what="alone", deadline_s=1) == [b"x"]


def test_the_ranks_of_a_part_are_a_group_of_their_own() -> None:
    parts = (0, 2), (1, 3)

    def act(group: SimulatedGroup) -> tuple[int, int, list[bytes]]:
        part = group.among(parts)
        return part.rank, part.world_size, part.all_gather(b"%d" % group.rank, what="in a part", deadline_s=10)

    even, odd = [b"0", b"2"], [b"1", b"3"]
    assert on_all_ranks(4, act) == [(0, 2, even), (0, 2, odd), (1, 2, even), (1, 2, odd)]
    assert SingleProcess().among([(0,)]).world_size == 1


def test_the_late_ranks_are_named() -> None:
    groups = SimulatedGroup.of(4)
    errors = []

    def wait(rank: int) -> None:
        with pytest.raises(RanksLate, match=r"the survey: rank \d waited 0.05 s for rank 1, 3") as caught:
            groups[rank].all_gather(b"", what="the survey", deadline_s=0.05)
        errors.append(caught.value.late)

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [(1, 3), (1, 3)]


class FakeDistributed(TorchGroup):
    """Rank 1 of 2, without the others."""

    def __init__(self) -> None:
        self.rank, self.world_size, self._members = 1, 2, (0, 1)
        self._group: Any = object()


class Breaks:
    """What is sent or received, and the connection to rank 0 breaks."""

    def wait(self, timeout: timedelta) -> None:
        raise RuntimeError("Connection closed by peer")


class Arrives(Breaks):
    def wait(self, timeout: timedelta) -> None:
        pass


@pytest.mark.parametrize(
    ("sent", "deadline_s", "raised", "said"),
    [
        (Arrives(), 300.0, RanksLate, r"rank 0 has left rank 1 after [\de.-]+ s: it has died"),
        (Arrives(), 0.0, RanksLate, "rank 1 waited 0 s for rank 0, which itself may be wait"),
        (Breaks(), 300.0, PeerLost, "the connection to rank 0 broke: Connection closed"),
    ],
)
def test_who_is_left_by_the_first_rank_does_not_say_that_it_has_waited(
    monkeypatch: pytest.MonkeyPatch, sent: Breaks, deadline_s: float, raised: type[Exception], said: str
) -> None:
    """Gloo's connections break when rank 0 has died, and when it waits no longer for another rank."""
    monkeypatch.setattr("torch.distributed.isend", lambda *_, **__: sent)
    monkeypatch.setattr("torch.distributed.irecv", lambda *_, **__: Breaks())
    with pytest.raises(raised, match=said):
        FakeDistributed().all_gather(b"", what="the survey", deadline_s=deadline_s)


def test_without_torch_distributed_the_message_says_what_to_do() -> None:
    with pytest.raises(GroupError, match="init_process_group before attach"):
        TorchGroup()


class TestBackgroundLoop:
    def test_a_call_gives_the_result_or_the_error(self) -> None:
        loop = LoopThread()

        async def good() -> int:
            return 7

        async def bad() -> None:
            raise TimeoutError("its own")

        try:
            assert loop.call(good(), what="it", deadline_s=10) == 7
            with pytest.raises(TimeoutError, match="its own"):
                loop.call(bad(), what="it", deadline_s=10)
        finally:
            loop.close()
            loop.close()

    def test_a_result_that_comes_just_after_the_deadline_is_taken(self) -> None:
        class Late(Future[int]):
            def result(self, timeout: float | None = None) -> int:
                if not self.done():
                    self.set_result(7)
                    raise TimeoutError
                return super().result(timeout)

        loop = LoopThread()
        try:
            assert loop.result(Late(), what="the upload", deadline_s=0.05) == 7
        finally:
            loop.close()

    def test_a_call_that_does_not_end_is_cancelled_and_named(self) -> None:
        import asyncio

        loop = LoopThread()
        cancelled = threading.Event()

        async def never() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        try:
            with pytest.raises(DeadlineExceeded, match=r"the upload did not finish within 0.05 s"):
                loop.call(never(), what="the upload", deadline_s=0.05)
            assert cancelled.wait(10)
        finally:
            loop.close()
