"""Collectives among the ranks of a job: over ``torch.distributed``, for one process, and simulated.

One operation is enough for all that the policies ask: everyone gives some bytes and gets everyone's. Each
call has a deadline, and a wait that ends names the ranks it waited for. What travels is msgpack, never
pickle.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from tiercheck.errors import GroupError, PeerLost, RanksLate

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["AsyncGroup", "BlockingGroup", "Group", "SimulatedGroup", "SingleProcess", "TorchGroup"]

MESSAGE_BYTES_MAX = 256 << 20
EXCHANGE_S_MIN = 30.0
"""What the exchange may take at least, when all ranks are here, unless the group's own deadline is shorter."""
FIRST_S = 1.0
"""How much longer than rank 0 the others wait."""
TIMER_S = 0.01
"""How finely torch's waits are timed; 0 would mean no end to it."""


class Group(Protocol):
    """The ranks of one job."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_gather(self, message: bytes, *, what: str, deadline_s: float) -> list[bytes]:
        """Every rank's ``message``, in rank order. Blocks until all ranks have called.

        Errors: ``RanksLate`` (naming ``what`` and the late ranks) after ``deadline_s`` seconds;
        ``PeerLost`` if a rank's connection breaks.
        """
        ...

    def among(self, parts: Sequence[Sequence[int]]) -> Group:
        """The ranks of that part in which this one is, as a group of its own: there a rank is its place in the part.
        ``parts``: of all ranks, each in one, in ascending order, the same on every rank. Collective. It is closed
        with this group."""
        ...

    def close(self) -> None:
        """Give up the group's resources. Idempotent, not a collective."""
        ...


class AsyncGroup(Protocol):
    """The ranks of one job, as the core awaits them."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    async def all_gather(self, message: bytes, *, what: str, deadline_s: float) -> list[bytes]:
        """As :meth:`Group.all_gather`."""
        ...

    def close(self) -> None:
        """As :meth:`Group.close`."""
        ...


class BlockingGroup:
    """A group whose collectives block, under the synchronous front: each runs in the trainer's own thread, one after
    the other, as a backend of torch wants it."""

    def __init__(self, group: Group) -> None:
        self._group = group

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def world_size(self) -> int:
        return self._group.world_size

    async def all_gather(self, message: bytes, *, what: str, deadline_s: float) -> list[bytes]:
        return self._group.all_gather(message, what=what, deadline_s=deadline_s)

    def close(self) -> None:
        self._group.close()


class SingleProcess:
    """A job of one rank."""

    rank = 0
    world_size = 1

    def all_gather(self, message: bytes, *, what: str, deadline_s: float) -> list[bytes]:
        return [message]

    def among(self, parts: Sequence[Sequence[int]]) -> Group:
        return self

    def close(self) -> None:
        pass


class TorchGroup:
    """The ranks of a ``torch.distributed`` job, or a part of them, over a gloo group of their own.

    A group of its own, so that a collective here never interleaves with one of the training. Making it is a
    collective: every rank must do so, at the same point.
    """

    def __init__(self, parts: Sequence[Sequence[int]] = (), *, deadline_s: float = 300.0) -> None:
        """``parts``: of all ranks, each in one; the group is that of this rank's part. By default that is all.
        ``deadline_s``: how long the others are waited for here.

        Errors: ``RanksLate``; ``GroupError``.
        """
        import torch.distributed as dist

        if not dist.is_initialized():
            raise GroupError("torch.distributed is not initialised; call init_process_group before attach")
        self._deadline_s = deadline_s
        self._made: list[TorchGroup] = []
        self._group: dist.ProcessGroup | None = None
        rank = dist.get_rank()
        for part in parts or [range(dist.get_world_size())]:
            try:
                made = dist.new_group([*part], backend="gloo", timeout=timedelta(seconds=deadline_s))
            except RuntimeError as error:
                raise _not_met(rank, part, deadline_s, error) from error
            if rank in part:
                self._group, self._members = made, tuple(part)
        self.rank = self._members.index(rank)
        self.world_size = len(self._members)

    def among(self, parts: Sequence[Sequence[int]]) -> Group:
        self._made.append(TorchGroup(parts, deadline_s=self._deadline_s))
        return self._made[-1]

    def all_gather(self, message: bytes, *, what: str, deadline_s: float) -> list[bytes]:
        import torch

        if self._group is None:
            raise GroupError("the group is closed")
        if len(message) > MESSAGE_BYTES_MAX:
            raise GroupError(f"a message of {len(message)} bytes is over the limit of {MESSAGE_BYTES_MAX}")
        until = time.monotonic() + deadline_s
        if self.rank == 0:
            self._hear_all(what, deadline_s)
        else:
            self._answer_first(what, deadline_s)
        try:
            lengths = self._gather(torch.tensor([len(message)], dtype=torch.int64), until).ravel().tolist()
            padded = torch.zeros(max(lengths), dtype=torch.uint8)
            if message:
                padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            if not len(padded):
                return [b""] * self.world_size
            gathered = self._gather(padded, until)
        except RuntimeError as error:
            raise PeerLost(f"{what}: a rank was lost during the exchange: {_first_line(error)}") from error
        return [each[:length].tobytes() for each, length in zip(gathered, lengths, strict=True)]

    def _gather(self, tensor: Any, until: float) -> Any:
        """Every rank's tensor, as the rows of one array."""
        import torch
        import torch.distributed as dist

        whole = torch.empty((self.world_size, len(tensor)), dtype=tensor.dtype)
        work = dist.all_gather(list(whole), tensor, group=self._group, async_op=True)
        _wait(work, max(EXCHANGE_S_MIN, until - time.monotonic()))
        return whole.numpy()

    # Every rank must be here before anything is exchanged: rank 0 hears from each, so it can tell who is missing. That
    # is torch's ``monitored_barrier``, but that one heeds its timeout on rank 0 alone.

    def _hear_all(self, what: str, deadline_s: float) -> None:
        import torch
        import torch.distributed as dist

        others = range(1, self.world_size)
        tokens = torch.zeros((self.world_size, 1), dtype=torch.uint8)
        until = time.monotonic() + deadline_s
        late: list[int] = []
        # All before any is waited for: a wait that ends in vain closes the connections to all.
        try:
            came = {each: dist.irecv(tokens[each], src=self._members[each], group=self._group) for each in others}
        except RuntimeError as error:
            raise PeerLost(f"{what}: the connection to a rank broke: {_first_line(error)}") from error
        for each in others:
            try:
                _wait(came[each], until - time.monotonic())
            except RuntimeError as error:
                if not late and until - time.monotonic() > TIMER_S:
                    text = _first_line(error)
                    raise PeerLost(f"{what}: the connection to rank {self._members[each]} broke: {text}") from error
                late.append(self._members[each])
        if late:
            named = ", ".join(map(str, late))
            raise RanksLate(
                f"{what}: rank {self._members[0]} waited {deadline_s:g} s for rank {named}", late=tuple(late)
            )
        until = time.monotonic() + EXCHANGE_S_MIN
        try:
            for each in others:
                told = dist.isend(tokens[each], dst=self._members[each], group=self._group)
                _wait(told, until - time.monotonic())
        except RuntimeError as error:
            raise PeerLost(f"{what}: the connection to a rank broke: {_first_line(error)}") from error

    def _answer_first(self, what: str, deadline_s: float) -> None:
        import torch
        import torch.distributed as dist

        own, first = self._members[self.rank], self._members[0]
        token = torch.zeros(1, dtype=torch.uint8)
        began = time.monotonic()
        wait_s = deadline_s + FIRST_S  # what rank 0 has to say names who is late
        try:
            _wait(dist.isend(token, dst=first, group=self._group), wait_s)
        except RuntimeError as error:
            if time.monotonic() - began < wait_s - TIMER_S:
                raise PeerLost(f"{what}: the connection to rank {first} broke: {_first_line(error)}") from error
            raise self._first_is_late(what, deadline_s) from error
        try:
            _wait(dist.irecv(token, src=first, group=self._group), wait_s - (time.monotonic() - began))
        except RuntimeError as error:
            waited_s = time.monotonic() - began
            if waited_s < deadline_s / 2:  # rank 0 closes its connections when it waits no longer for one of them
                raise RanksLate(
                    f"{what}: rank {first} has left rank {own} after {waited_s:.2g} s: it has died, or has given up on "
                    "another rank, which its message names",
                    late=(first,),
                ) from error
            raise self._first_is_late(what, deadline_s) from error

    def _first_is_late(self, what: str, deadline_s: float) -> RanksLate:
        own, first = self._members[self.rank], self._members[0]
        return RanksLate(
            f"{what}: rank {own} waited {deadline_s:g} s for rank {first}, which itself may be waiting for another; "
            "its message names it",
            late=(first,),
        )

    def close(self) -> None:
        import torch.distributed as dist

        for each in self._made:
            each.close()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


class SimulatedGroup:
    """Ranks that are threads of one process, for tests: make them with :meth:`of`."""

    def __init__(self, rank: int, room: _Room) -> None:
        self.rank = rank
        self.world_size = room.world_size
        self._room = room
        self._round = 0

    @classmethod
    def of(cls, world_size: int) -> list[SimulatedGroup]:
        """One group object a rank; each is to be used by one thread at a time."""
        room = _Room(world_size)
        return [cls(rank, room) for rank in range(world_size)]

    def all_gather(self, message: bytes, *, what: str, deadline_s: float) -> list[bytes]:
        self._round += 1
        return self._room.exchange(self.rank, self._round, message, what, deadline_s)

    def among(self, parts: Sequence[Sequence[int]]) -> Group:
        part = next(tuple(each) for each in parts if self.rank in each)
        return SimulatedGroup(part.index(self.rank), self._room.of_some(part))

    def close(self) -> None:
        pass


class _Room:
    """Where simulated ranks leave their messages, a round a collective."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._changed = threading.Condition()
        self._rounds: dict[int, dict[int, bytes]] = {}
        self._parts: dict[tuple[int, ...], _Room] = {}

    def of_some(self, ranks: tuple[int, ...]) -> _Room:
        with self._changed:
            return self._parts.setdefault(ranks, _Room(len(ranks)))

    def exchange(self, rank: int, number: int, message: bytes, what: str, deadline_s: float) -> list[bytes]:
        with self._changed:
            here = self._rounds.setdefault(number, {})
            here[rank] = message
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(here) == self.world_size, timeout=deadline_s):
                late = sorted(set(range(self.world_size)) - set(here))
                names = ", ".join(str(each) for each in late)
                raise RanksLate(f"{what}: rank {rank} waited {deadline_s:g} s for rank {names}", late=late)
            return [here[each] for each in range(self.world_size)]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _wait(work: dist.Work | None, seconds: float) -> None:
    """Errors: ``RuntimeError``, also if it has not ended by then."""
    assert work is not None, "this rank is in the group"
    work.wait(timedelta(seconds=max(TIMER_S, seconds)))


def _not_met(rank: int, part: Sequence[int], deadline_s: float, error: RuntimeError) -> GroupError:
    """Why the ranks could not make a group. Each leaves its address in torch's store, under its number in the group."""
    text = _first_line(error)
    if not re.search("time(d )?out", text, re.IGNORECASE):
        return GroupError(f"the ranks cannot be connected: {text}")
    match = re.search(r"keys: \S*/(\d+)$", text)  # of torch's TCP store
    late = [part[int(match[1])]] if match and int(match[1]) < len(part) else []
    named = f"rank {late[0]}: it" if late else "the others: one of them"
    return RanksLate(
        f"connecting the ranks: rank {rank} waited {deadline_s:g} s for {named} has died, or has not come to attach "
        "yet (CheckpointConfig.deadline_s is how long it is waited for)",
        late=late,
    )
