"""A payload in parts of one size, each a copy; the payload itself is never joined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["parts_of"]


def parts_of(views: Sequence[memoryview], part_bytes: int) -> Iterator[bytes]:
    """Copies of the next ``part_bytes`` of the concatenation, the last one shorter; nothing for no bytes."""
    waiting: list[memoryview] = []
    held = 0
    for view in views:
        at = 0
        while at < view.nbytes:
            taken = view[at : at + part_bytes - held]
            waiting.append(taken)
            held += taken.nbytes
            at += taken.nbytes
            if held == part_bytes:
                yield joined(waiting)
                held = 0
    if held:
        yield joined(waiting)


def joined(waiting: list[memoryview]) -> bytes:
    """The buffers as one, and released."""
    try:
        return b"".join(waiting)
    finally:
        for view in waiting:
            view.release()
        waiting.clear()
