"""The ranks of a job as one of them sees them: what they do together, each either succeeds in or hears of.

A rank that fails tells the others, which name it in their own error, instead of leaving them to wait.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from tiercheck import schema
from tiercheck.errors import GroupError, Mismatch, RecoveryError, TierCheckError
from tiercheck.format.host_state import pack, unpack
from tiercheck.runtime.group import AsyncGroup
from tiercheck.runtime.runtime import Scheduler

__all__ = ["TOLD_S", "Ranks", "gather"]

T = TypeVar("T")

TOLD_S = 5.0
"""A rank that ends its waiting at the deadline has so long to tell the others why."""


class _Message(Struct, frozen=True, array_like=True):
    """What a rank says in a collective."""

    what: str
    value: Raw = Raw(b"\xc0")
    after: str | None = None
    error: str | None = None
    mismatch: bool = False


async def gather(
    group: AsyncGroup,
    what: str,
    produce: Callable[[], Any],
    *,
    deadline_s: float,
    after: str | None = None,
    kind: Any = None,
) -> list[Any]:
    """Every rank's value of ``produce()``, which is awaited if need be, in rank order. A rank that fails tells the
    others instead of leaving them to wait. ``after``: an error of this rank's before, for those who are somewhere else
    for its sake. ``kind``: the type of the values, if they are not plain. Ranks that say the same get one value: it is
    not to be changed.

    Errors: this rank's own; ``RecoveryError`` naming another rank and its error; ``GroupError`` naming a rank that does
    something else meanwhile; those of the group.
    """
    failure: Exception | None = None
    try:
        value = produce()
        if inspect.isawaitable(value):
            value = await value
        message = _Message(what, Raw(pack(value) if kind is None else schema.pack(value)), after)
    except Exception as error:  # noqa: BLE001  it is raised below; the others must not wait for it
        failure = error
        said = str(error) if isinstance(error, TierCheckError) else f"{type(error).__name__}: {error}"
        message = _Message(what, error=said, mismatch=isinstance(error, Mismatch))
    gathered = await group.all_gather(schema.pack(message), what=what, deadline_s=deadline_s)
    if failure is not None:
        raise failure
    # Most ranks say the same: that is read once.
    known: dict[bytes, _Message] = {}
    answers = [known.get(each) or known.setdefault(each, _MESSAGES.decode(each)) for each in gathered]
    _check(what, answers)
    read: Callable[[Raw], Any] = unpack if kind is None else msgspec.msgpack.Decoder(kind).decode
    values = {content: read(answer.value) for content, answer in known.items()}
    return [values[each] for each in gathered]


_MESSAGES = msgspec.msgpack.Decoder(_Message)


def _check(what: str, answers: Sequence[_Message]) -> None:
    """Errors: ``RecoveryError`` or ``Mismatch`` for a rank that failed, ``GroupError`` for one that is elsewhere."""
    for rank, answer in enumerate(answers):
        if answer.error is not None:
            kind = Mismatch if answer.mismatch else RecoveryError
            raise kind(f"{answer.what}: rank {rank} reports: {answer.error}")
        if answer.what != what:
            errors = {each: other.after for each, other in enumerate(answers) if other.after}
            why = "".join(f"; rank {each} had failed before: {error}" for each, error in errors.items())
            raise GroupError(
                f"{what}: rank {rank} is at {answer.what!r} instead{why}: all ranks must take the same steps, and "
                "end their iterations and close the checkpointer at the same version"
            )


@dataclass(frozen=True)
class Ranks:
    """The ranks of the job, as one of them sees them, and the scheduler by which it calls its tiers."""

    group: AsyncGroup
    scheduler: Scheduler
    deadline_s: float

    @property
    def rank(self) -> int:
        """This one's number."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        return self.group.world_size

    async def gather(
        self, what: str, produce: Callable[[], Any], *, more_s: float = 0.0, kind: Any = None
    ) -> list[Any]:
        """As :func:`gather`. ``more_s``: how much longer than the deadline a rank may take."""
        return await gather(self.group, what, produce, deadline_s=self.deadline_s + more_s + TOLD_S, kind=kind)

    async def exchange(self, what: str, act: Callable[[], Awaitable[tuple[T, Any]]]) -> tuple[T, list[Any]]:
        """``act`` leads to a value that stays here, and what all ranks are told. Returns the value, and what each rank
        tells. Errors: as :func:`gather`."""
        own: list[T] = []

        async def produce() -> Any:
            value, told = await act()
            own.append(value)
            return told

        told = await self.gather(what, produce)
        return own[0], told

    async def together(self, what: str, act: Callable[[], Awaitable[T]]) -> T:
        """What ``act`` leads to on this rank, once no rank has failed in it. Errors: as :func:`gather`."""

        async def produce() -> tuple[T, None]:
            return await act(), None

        value, _ = await self.exchange(what, produce)
        return value

    async def call(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        """As :meth:`Scheduler.call`, on the event loop."""
        return await self.scheduler.call(coroutine, what=what, deadline_s=self.deadline_s)
