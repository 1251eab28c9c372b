"""What keeps a record or a fold from being what the job had."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tiercheck.errors import Corruption, SaveError, TierCheckError

__all__ = [
    "CameTwice",
    "InDoubt",
    "NotExact",
    "OtherwiseStored",
    "Undecodable",
    "WrittenUnseen",
    "ill_formed_is_corrupt",
]

ILL_FORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, struct.error)
"""What Python raises where a value is not what its reader takes it for. Lack of memory is none of it."""


class Undecodable(Corruption):
    """A differential's bytes are what was written (``whole``), or not; either way they are not a ``version`` of this
    state."""

    def __init__(self, version: int, cause: Corruption, *, whole: bool) -> None:
        super().__init__(f"version {version} cannot be decoded: {cause.message}", tier=cause.tier, key=cause.key)
        self.version = version
        self.whole = whole


class NotExact(TierCheckError):
    """What a fold would give is not known to be what the job had."""


class WrittenUnseen(TierCheckError):
    """Something wrote to the state past what counts writes, so that a record does not lead to its version. ``late``: it
    did so after the version before was published, which does not hold it either."""

    def __init__(self, names: Sequence[str], *, late: bool) -> None:
        told = ", ".join(names[:3])
        super().__init__(f"something wrote to {told} outside of the optimizer's step, and past torch's counters")
        self.names = tuple(names)
        self.late = late


class CameTwice(SaveError):
    """The optimizer steps again before its last step has ended."""

    def __init__(self, name: str, version: int) -> None:
        super().__init__(
            f"the gradient of {name!r} came twice in iteration {version}: the optimizer steps again before its last "
            "step has ended. If that one has raised an error that the loop has caught, some parameters have stepped, "
            "and others have not: close the checkpointer, and attach again to go on from the version before"
        )


class OtherwiseStored(TierCheckError):
    """Gradients were stored on a GPU as the bf16 numbers that they were said to be times one scale, and are none."""

    def __init__(self, names: Sequence[str]) -> None:
        told = ", ".join(names[:3])
        super().__init__(f"the gradients of {told} are not bf16 numbers times one scale: later ones are stored whole")


class InDoubt(NotExact):
    """Only a doubt that a version holds stands in the way: what comes after a captured base may be exact again."""


@contextmanager
def ill_formed_is_corrupt(*, tier: str, key: str) -> Iterator[None]:
    """Whatever a reader inside trips over is the copy's fault. Errors: ``Corruption``."""
    try:
        yield
    except ILL_FORMED as error:
        raise Corruption(f"it is ill formed: {type(error).__name__}: {str(error)[:500]}", tier=tier, key=key) from error
