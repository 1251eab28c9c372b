"""Both schedulers keep the same promises: under the front they block the caller, in a loop they suspend the task."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.simulation import virtual_time
from tiercheck.errors import DeadlineExceeded
from tiercheck.runtime.front import ThreadScheduler, run
from tiercheck.runtime.runtime import Scheduler, TaskScheduler

Story = Callable[[Scheduler], Coroutine[Any, Any, None]]


def in_a_thread(story: Story) -> None:
    scheduler = ThreadScheduler()
    try:
        run(story(scheduler))
    finally:
        run(scheduler.close())


def in_a_loop(story: Story) -> None:
    async def main() -> None:
        scheduler = TaskScheduler()
        try:
            await story(scheduler)
        finally:
            await scheduler.close()

    virtual_time.run(main())


@pytest.fixture(params=[in_a_thread, in_a_loop])
def tell(request: pytest.FixtureRequest) -> Callable[[Story], None]:
    chosen: Callable[[Story], None] = request.param
    return chosen


async def seven() -> int:
    await asyncio.sleep(0)
    return 7


async def fails() -> None:
    raise TimeoutError("its own")


def test_a_call_gives_the_result_or_the_error(tell: Callable[[Story], None]) -> None:
    async def story(scheduler: Scheduler) -> None:
        assert await scheduler.call(seven(), what="it", deadline_s=10) == 7
        with pytest.raises(TimeoutError, match="its own"):
            await scheduler.call(fails(), what="it", deadline_s=10)

    tell(story)


def test_a_call_that_does_not_end_is_named_and_cancelled(tell: Callable[[Story], None]) -> None:
    cancelled = threading.Event()

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def story(scheduler: Scheduler) -> None:
        with pytest.raises(DeadlineExceeded, match=r"the upload did not finish within 0.05 s"):
            await scheduler.call(never(), what="the upload", deadline_s=0.05)

    tell(story)
    assert cancelled.is_set()


def test_what_is_only_waited_for_goes_on(tell: Callable[[Story], None]) -> None:
    async def story(scheduler: Scheduler) -> None:
        gate = asyncio.Event()
        waiting = scheduler.start(gate.wait())
        assert not await scheduler.ends(waiting, 0.01)

        async def open_it() -> None:
            gate.set()

        scheduler.start(open_it())
        assert await scheduler.ends(waiting, 10)
        assert waiting.result() is True

    tell(story)


def test_work_beside_is_done_in_order_and_time_passes(tell: Callable[[Story], None]) -> None:
    done: list[int] = []

    async def story(scheduler: Scheduler) -> None:
        began = scheduler.time()
        works = [scheduler.beside(lambda each=each: done.append(each)) for each in range(5)]  # type: ignore[misc]  # mypy infers no default
        await scheduler.sleep(0.002)
        assert scheduler.time() > began
        assert all([await scheduler.ends(work, 10) for work in works])

    tell(story)
    assert done == [0, 1, 2, 3, 4]


def test_close_ends_what_was_started(tell: Callable[[Story], None]) -> None:
    async def story(scheduler: Scheduler) -> None:
        waiting = scheduler.start(asyncio.Event().wait())
        await scheduler.close()
        assert await scheduler.ends(waiting, 10)
        assert waiting.cancelled()

    tell(story)


def test_a_coroutine_that_awaits_past_its_scheduler_is_refused_under_the_front() -> None:
    with pytest.raises(AssertionError, match="awaits something else than its scheduler"):
        run(bare())


async def bare() -> None:
    await Bare()


class Bare:
    def __await__(self) -> Any:
        yield
