"""Whether the process ends while coroutines of it still run."""

from __future__ import annotations

import concurrent.futures

__all__ = ["process_ends", "threads_have_ended"]


def process_ends(error: BaseException) -> bool:
    """Whether the error comes of the end of the process: the interpreter shuts down, and no thread takes work any more,
    while this one still runs."""
    each: BaseException | None = error
    while each is not None and not isinstance(each, RuntimeError):
        each = each.__cause__ or each.__context__
    return each is not None and threads_have_ended()


def threads_have_ended() -> bool:
    """Whether the interpreter shuts down: no thread takes work any more. Functions of ``atexit`` run after that."""
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(int)
    except RuntimeError as error:
        return "shutdown" in str(error)  # else the system has no thread to give just now
    return False
