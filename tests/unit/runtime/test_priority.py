"""Threads that stand back, and those that do not."""

from __future__ import annotations

import os
import threading

import pytest

from tiercheck.runtime.priority import NICE, standing_back


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_work_stands_back_in_a_thread_of_its_own() -> None:
    before = niceness()
    found, name = standing_back(lambda: (niceness(), threading.current_thread().name), "stands back")
    assert found == max(NICE, before)
    assert name.startswith("stands back")
    assert niceness() == before, "who asked for it is as it was"


def test_its_errors_are_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        standing_back(lambda: 1 // 0, "fails")


def test_a_system_that_refuses_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "setpriority", refuse)
    assert standing_back(lambda: 7, "refused") == 7
