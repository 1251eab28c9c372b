"""Whether the interpreter ends: then no thread takes work any more."""

from __future__ import annotations

import concurrent.futures

import pytest

from tiercheck.runtime.shutdown import threads_have_ended


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        ("cannot schedule new futures after interpreter shutdown", True),
        ("can't create new thread at interpreter shutdown", True),
        ("can't start new thread", False),
    ],
)
def test_a_system_without_threads_is_not_the_end(monkeypatch: pytest.MonkeyPatch, said: str, ends: bool) -> None:
    def submit(*_: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(concurrent.futures.ThreadPoolExecutor, "submit", submit)
    assert threads_have_ended() is ends


def test_a_process_that_goes_on_is_not_at_its_end() -> None:
    assert not threads_have_ended()
