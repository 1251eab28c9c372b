"""Records that are closed beside training."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import pytest

from tiercheck.errors import DeadlineExceeded, SaveError
from tiercheck.recording.record_closer import RecordCloser, _OnItsWay
from tiercheck.runtime.front import ThreadScheduler, run


def closer(scheduler: ThreadScheduler, *published: Future[int]) -> RecordCloser:
    made = RecordCloser(cast(Any, None), scheduler, lambda version: None, cast(Any, None), deadline_s=0.05)
    made._on_their_way.extend(_OnItsWay(version, each) for version, each in enumerate(published, 10))
    return made


def test_what_became_of_a_record_is_told_though_a_later_one_is_late() -> None:
    scheduler = ThreadScheduler()
    failed, late = Future[int](), Future[int]()
    failed.set_exception(SaveError("no"))
    try:
        records = closer(scheduler, failed, late)
        with pytest.raises(SaveError, match=r"version 11 was not copied to the first tier in 0.05 s"):
            run(records.ended(0))
        (ended,) = run(records.ended())
        assert (ended.version, str(ended.error)) == (10, "no")
        with pytest.raises(DeadlineExceeded, match=r"version 11 is still copied, after 0.05 s more"):
            run(records.close())
        late.set_result(7)
        (ended,) = run(records.ended(0))
        assert (ended.version, ended.nbytes, ended.error) == (11, 7, None)
        run(records.close())
    finally:
        run(scheduler.close())
