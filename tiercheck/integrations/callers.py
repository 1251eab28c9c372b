"""Who has called: what torch passes to no hook, the stack tells."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FrameType

__all__ = ["callers"]


def callers() -> Iterator[FrameType]:
    """The frames on the stack, the nearest first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
