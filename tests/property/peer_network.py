"""A client and a server of the peer protocol without I/O, and between them a network that goes wrong as it is told.

Time is virtual. Messages are delivered in order on each link, links break and lose what is under way, frames are
flipped, replayed and swallowed, the server is restarted and keeps only its objects.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tiercheck.errors import AlreadyExists, NotFound, PreconditionFailed, TierError
from tiercheck.tiers.peer.client.protocol import ClientProtocol, ClientSettings, Finish, Operation, Reset, Send
from tiercheck.tiers.peer.server.effects import (
    DeleteObjects,
    DropMemory,
    OpenObject,
    PublishMemory,
    ReadableObject,
    ReadChunk,
    Reply,
    ReserveMemory,
    StatObject,
    StoreWhole,
    Task,
    Work,
)
from tiercheck.tiers.peer.server.limits import PeerLimits
from tiercheck.tiers.peer.server.protocol import ServerProtocol
from tiercheck.types import Buffer, ByteRange, ObjectInfo, PutMode

__all__ = ["Network"]

Frames = list[Buffer]


class SimulatedMemory:
    def __init__(self, key: str, nbytes: int) -> None:
        self.key = key
        self.buffer = memoryview(bytearray(nbytes))

    async def publish(self, nbytes: int | None = None, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        raise AssertionError("the simulation publishes itself")

    async def drop(self) -> None:
        raise AssertionError("the simulation drops itself")


@dataclass
class Store:
    """Objects, and a log of what was published."""

    mappable: bool = True
    objects: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    log: list[tuple[str, bytes]] = field(default_factory=list)
    reserved: list[SimulatedMemory] = field(default_factory=list)

    def do(self, task: Task) -> object:
        try:
            return self._do(task)
        except (TierError, ValueError) as error:
            return error

    def _do(self, task: Task) -> object:
        match task:
            case StatObject(_, key):
                return ObjectInfo(key, len(self.find(key)[0]), self.find(key)[1])
            case DeleteObjects(_, keys):
                for key in keys:
                    self.objects.pop(key, None)
                return None
            case StoreWhole(_, key, data, mode):
                return self.publish(key, bytes(data), mode)
            case ReserveMemory(_, key, nbytes):
                self.reserved.append(SimulatedMemory(key, nbytes))
                return self.reserved[-1]
            case PublishMemory(memory, mode):
                assert isinstance(memory, SimulatedMemory)
                self.reserved.remove(memory)
                return self.publish(memory.key, bytes(memory.buffer), mode)
            case DropMemory(memory):
                assert isinstance(memory, SimulatedMemory)
                self.reserved.remove(memory)
                return None
            case OpenObject(namespace, key, wanted, whole_bytes):
                content, etag = self.find(key)
                part = ByteRange(0, len(content)) if wanted is None else wanted
                if part.stop > len(content):
                    raise ValueError("past the end")
                mapped = self.mappable or len(part) <= whole_bytes
                view = memoryview(content)[part.start : part.stop] if mapped else None
                return ReadableObject(namespace, key, part, etag, view)
            case ReadChunk(source, wanted):
                content, etag = self.find(source.key)
                if etag != source.etag:
                    raise NotFound("replaced")
                return memoryview(content)[wanted.start : wanted.stop]
            case _:
                raise AssertionError(f"no test asks for {task}")

    def find(self, key: str) -> tuple[bytes, str]:
        if key not in self.objects:
            raise NotFound("nothing there")
        return self.objects[key]

    def publish(self, key: str, content: bytes, mode: PutMode) -> ObjectInfo:
        current = self.objects.get(key)
        if mode.kind == "create" and current is not None:
            raise AlreadyExists("there is one")
        if mode.kind == "update" and (current is None or current[1] != mode.etag):
            raise PreconditionFailed("another etag")
        self.log.append((key, content))
        self.objects[key] = (content, str(len(self.log)))
        return ObjectInfo(key, len(content), str(len(self.log)))


@dataclass
class Pipe:
    """One link: what is under way in each direction."""

    up: deque[Frames] = field(default_factory=deque)
    down: deque[Frames] = field(default_factory=deque)


class Network:
    """``chances``: how likely each kind of trouble is at a step; :meth:`settle` ends all trouble."""

    def __init__(
        self,
        seed: int,
        chances: dict[str, float],
        *,
        connections: int = 1,
        limits: PeerLimits | None = None,
        credit_bytes: int = 4 << 16,
        mappable: bool = True,
        deadline_s: float = 240.0,
    ) -> None:
        self.random = random.Random(seed)
        self.chances = dict(chances)
        self.now = 0.0
        self.limits = limits or PeerLimits(chunk_bytes=1 << 16, in_flight_bytes=8 << 16, idle_s=60)
        self.store = Store(mappable)
        self.settings = ClientSettings("simulated:1", 1 << 16, credit_bytes, deadline_s)
        self.client = ClientProtocol(self.settings)
        self.server = ServerProtocol(self.limits, 1)
        self.client.caller.incarnation = 1
        self.restarts = 0
        self.pipes: dict[int, Pipe] = {}
        self.tasks: deque[Work] = deque()
        self.past: list[tuple[int, Frames]] = []
        self.results: dict[int, object] = {}
        self._next_link = 0
        self._number = 0
        self.events: dict[str, Callable[[], None]] = {
            "cut": self.cut,
            "swallow": self.swallow,
            "flip": self.flip,
            "replay": self.replay,
            "restart": self.restart,
        }
        for _ in range(connections):
            self.connect()

    # What happens.

    def connect(self) -> None:
        self._next_link += 1
        self.pipes[self._next_link] = Pipe()
        self.act_client(self.client.connected(self._next_link, self.now))

    def cut(self) -> None:
        """A link breaks, and all that was under way on it is lost; another comes up."""
        link = self.random.choice(list(self.pipes))
        del self.pipes[link]
        self.act_client(self.client.disconnected(link, self.now))
        self.connect()

    def swallow(self) -> None:
        """The server had no room for a reply, or was too busy for a message."""
        queue = self.some_queue()
        if queue:
            del queue[self.random.randrange(len(queue))]

    def flip(self) -> None:
        queue = self.some_queue()
        if queue:
            index = self.random.randrange(len(queue))
            frames = [bytearray(frame) for frame in queue[index]]
            frame = self.random.choice(frames)
            if frame:
                frame[self.random.randrange(len(frame))] ^= 1 << self.random.randrange(8)
            queue[index] = list(frames)

    def replay(self) -> None:
        """A message of a client's comes once more, on any link."""
        if self.past:
            _, frames = self.random.choice(self.past[-30:])
            self.pipes[self.random.choice(list(self.pipes))].up.append(frames)

    def restart(self) -> None:
        """The server dies with all its memory but the objects; tasks under way are done or not."""
        self.restarts += 1
        if self.random.random() < 0.5:
            while self.tasks:
                self.store.do(self.tasks.popleft().task)
        self.tasks.clear()
        self.store.reserved.clear()
        self.server = ServerProtocol(self.limits, 1 + self.restarts * 1_000_000)
        for link in list(self.pipes):
            del self.pipes[link]
            self.act_client(self.client.disconnected(link, self.now))
            self.connect()

    def some_queue(self) -> deque[Frames]:
        pipe = self.pipes[self.random.choice(list(self.pipes))]
        return pipe.up if self.random.random() < 0.5 else pipe.down

    def step(self) -> None:
        """One thing happens, trouble or progress."""
        for name, chance in self.chances.items():
            if self.random.random() < chance:
                self.events[name]()
        ready: list[Callable[[], None]] = []
        for link, pipe in self.pipes.items():
            if pipe.up and not self.server.saturated:
                ready.append(lambda link=link, pipe=pipe: self.arrive(link, pipe))  # type: ignore[misc]
            if pipe.down:
                ready.append(lambda link=link, pipe=pipe: self.answer(link, pipe))  # type: ignore[misc]
        if self.tasks:
            ready.append(self.finish_task)
        if ready:
            self.now += 0.001
            self.random.choice(ready)()
        else:
            self.now += 0.5
            self.act_server(self.server.tick(self.now))
            self.act_client(self.client.tick(self.now))

    def arrive(self, link: int, pipe: Pipe) -> None:
        frames = pipe.up.popleft()
        self.act_server(self.server.receive(b"%d" % link, frames, self.now))

    def answer(self, link: int, pipe: Pipe) -> None:
        self.act_client(self.client.receive(link, pipe.down.popleft(), self.now))

    def finish_task(self) -> None:
        work = self.tasks.popleft()
        self.act_server(self.server.done(work.number, self.store.do(work.task), self.now))

    def act_server(self, effects: list[Reply | Work]) -> None:
        for effect in effects:
            if isinstance(effect, Work):
                self.tasks.append(effect)
                continue
            pipe = self.pipes.get(int(effect.peer))
            if pipe is not None:
                pipe.down.append([effect.head] if effect.data is None else [effect.head, bytes(effect.data)])
            if effect.copied_bytes:
                self.server.gets.copies.give_back(effect.peer, effect.copied_bytes)
        assert self.server.puts.credit_bytes <= self.limits.in_flight_bytes
        assert self.server.puts.credit_bytes >= 0
        assert len(self.server.puts.outcomes) <= self.limits.outcomes

    def act_client(self, effects: list[Send | Finish | Reset]) -> None:
        for effect in effects:
            if isinstance(effect, Finish):
                assert effect.number not in self.results
                self.results[effect.number] = effect.result
            elif isinstance(effect, Send):
                frames: Frames = [effect.head] if effect.data is None else [effect.head, bytes(effect.data)]
                if effect.data is not None:
                    effect.data.release()
                if effect.link in self.pipes:
                    self.pipes[effect.link].up.append(frames)
                    self.past.append((effect.link, frames))
            else:
                for link in list(self.pipes):
                    del self.pipes[link]
                    self.act_client(self.client.disconnected(link, self.now))
                    self.connect()
        caller = self.client.caller
        assert 0 <= caller.in_flight_bytes <= caller.settings.credit_bytes

    # What tests do.

    def begin(self, operation: Operation) -> int:
        self._number += 1
        self.act_client(self.client.begin(operation, self._number, self.now))
        return self._number

    def settle(self, *numbers: int, steps: int = 400) -> list[object]:
        """The operations' results: ``steps`` with trouble, and as many as it takes without."""
        for _ in range(steps):
            if all(number in self.results for number in numbers):
                break
            self.step()
        self.chances = {}
        until = self.now + 3 * self.settings.deadline_s
        while not all(number in self.results for number in numbers):
            assert self.now < until, "an operation neither succeeds nor fails"
            self.step()
        return [self.results[number] for number in numbers]

    def rest(self, *, seconds: float = 0.0) -> None:
        """Let everything that is under way arrive."""
        until = self.now + seconds
        while self.now < until or self.tasks or any(pipe.up or pipe.down for pipe in self.pipes.values()):
            self.step()
