"""What a cancelled call leaves behind: nothing that is still at work."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

from tiercheck.errors import Transient
from tiercheck.runtime.waiting import in_threads, settled, together


async def test_work_settles_before_the_cancellation_is_raised() -> None:
    done: list[str] = []
    go_on = asyncio.Event()

    async def work() -> str:
        await go_on.wait()
        done.append("work")
        return "result"

    async def undo(result: str) -> None:
        done.append(f"undo {result}")

    task = asyncio.create_task(settled(work(), undo=undo))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["work", "undo result"]


async def test_work_that_may_stop_is_stopped() -> None:
    task = asyncio.create_task(settled(asyncio.Event().wait(), stop=lambda work: work.cancel()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_error_of_work_nobody_waits_for_is_not_reported() -> None:
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    async def work() -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        raise ValueError

    task = asyncio.create_task(settled(work()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    gc.collect()
    assert reported == []


async def test_together_raises_the_error_itself() -> None:
    stopped: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append("waits")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise Transient("no")

    with pytest.raises(Transient):
        await together([waits(), fails()])
    assert stopped == ["waits"]


async def test_work_that_does_not_end_is_left_after_a_while() -> None:
    endless = asyncio.get_running_loop().create_future()
    work = asyncio.shield(endless)
    task = asyncio.create_task(settled(work, within_s=0.01))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.cancelled()
    endless.cancel()


async def test_together_returns_all_results_in_order() -> None:
    async def later(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return turns

    assert await together(later(turns) for turns in (3, 0, 2)) == [3, 0, 2]
    assert await together([]) == []


class TestInThreads:
    async def test_each_piece_is_taken_once_by_no_more_threads_than_are_granted(self) -> None:
        both = threading.Barrier(2, timeout=10)
        taken: list[tuple[int, int]] = []

        def work(piece: int) -> None:
            if piece < 2:
                both.wait()  # the two threads have one each
            taken.append((piece, threading.get_ident()))

        await in_threads(range(20), work, 2)
        assert sorted(piece for piece, _ in taken) == list(range(20))
        assert len({thread for _, thread in taken}) == 2

    async def test_after_an_error_no_further_piece_is_begun(self) -> None:
        taken: list[int] = []

        def work(piece: int) -> None:
            taken.append(piece)
            raise ValueError(piece)

        with pytest.raises(ValueError, match="0"):
            await in_threads(range(20), work, 1)
        assert taken == [0]

    async def test_nothing_is_held_at_the_end(self) -> None:
        class Work:
            def __call__(self, piece: int) -> None: ...

        work = Work()
        gone = weakref.ref(work)
        await in_threads([1, 2], work, 2)
        del work
        assert gone() is None
