"""A put goes on wherever the server has got to, also if that is further back than it was."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

from tests.property.peer_network import Frames, Store
from tiercheck.errors import Closed, Transient
from tiercheck.tiers.peer.client.content import PayloadChunks
from tiercheck.tiers.peer.client.protocol import ClientProtocol, ClientSettings, Effect, Finish, Send
from tiercheck.tiers.peer.client.put import RESERVING_S_MAX, Putting
from tiercheck.tiers.peer.messages import AbortPut, Message, decode
from tiercheck.tiers.peer.server.effects import DropMemory, Reply, ReserveMemory, Task, Work
from tiercheck.tiers.peer.server.limits import PeerLimits
from tiercheck.tiers.peer.server.protocol import ServerProtocol
from tiercheck.types import ObjectInfo, PutMode

CHUNK = 1 << 20


class Conversation:
    """Between one client and one server, in which nothing takes time."""

    def __init__(self, deadline_s: float = 300.0) -> None:
        self.now = 1000.0
        self.store = Store()
        self.server = ServerProtocol(PeerLimits(), 5)
        self.client = ClientProtocol(ClientSettings("p", CHUNK, 2 * CHUNK, deadline_s))
        self.client.caller.incarnation = 5
        self.results: list[object] = []

    def play(self, effects: list[Effect], chunks_max: int = 1 << 30) -> None:
        """Until nobody has anything to say. After so many chunks the network takes no more."""
        chunks, waiting = 0, list(effects)
        while waiting:
            effect = waiting.pop(0)
            if isinstance(effect, Finish):
                self.results.append(effect.result)
            if not isinstance(effect, Send):
                continue
            chunks += effect.data is not None
            if chunks > chunks_max:
                continue
            frames: Frames = [effect.head] if effect.data is None else [effect.head, bytes(effect.data)]
            for head in self.served(self.server.receive(b"client", frames, self.now)):
                waiting += self.client.receive(effect.link, [head], self.now)

    def served(self, effects: Sequence[Reply | Work]) -> list[bytes]:
        replies: list[bytes] = []
        waiting = list(effects)
        while waiting:
            effect = waiting.pop(0)
            if isinstance(effect, Work):
                waiting += self.server.done(effect.number, self.store.do(effect.task), self.now)
            else:
                replies.append(effect.head)
        return replies


def test_memory_that_takes_long_to_make_is_waited_for() -> None:
    """The server says that it is at it. Who has given up says so, and no memory is made for him."""
    for waits_s in (100.0, RESERVING_S_MAX + 60.0):
        talk = Conversation(deadline_s=30.0)
        held: list[Work] = []
        sent: list[Message] = []

        def hear(effects: list[Effect], talk: Conversation = talk, held: Any = held, sent: Any = sent) -> None:
            for effect in effects:
                if isinstance(effect, Finish):
                    talk.results.append(effect.result)
                elif isinstance(effect, Send):
                    sent.append(decode(effect.head)[1])
                    for answer in talk.server.receive(b"client", [effect.head], talk.now):
                        if isinstance(answer, Work):
                            held.append(answer)
                        else:
                            hear(talk.client.receive(effect.link, [answer.head], talk.now))

        chunks = PayloadChunks([bytes(3 * CHUNK)])
        talk.client.connected(1, talk.now)
        hear(talk.client.begin(Putting("n", "k", chunks, PutMode.OVERWRITE, lambda: os.urandom(16)), 1, talk.now))
        (work,) = held
        assert isinstance(work.task, ReserveMemory)
        end = talk.now + waits_s
        while talk.now < end and not talk.results:
            talk.now += 0.5
            hear(talk.client.tick(talk.now))
            talk.server.tick(talk.now)
        if waits_s > RESERVING_S_MAX:
            assert isinstance(talk.results[0], Transient)
            assert isinstance(sent[-1], AbortPut)
            assert not work.task.is_wanted()
            continue
        assert work.task.is_wanted()
        assert len(sent) < 60, "it asks now and then"
        assert talk.results == []
        done = talk.server.done(work.number, talk.store.do(work.task), talk.now)
        for head in talk.served(done):
            talk.play(talk.client.receive(1, [head], talk.now))
        (info,) = talk.results
        assert isinstance(info, ObjectInfo)


def test_a_put_whose_memory_is_gone_is_begun_anew_by_its_caller() -> None:
    class Gone:
        @property
        def buffer(self) -> memoryview:
            raise Closed("the driver is not open")

    talk = Conversation()
    chunks = PayloadChunks([bytes(3 * CHUNK)])
    talk.client.connected(1, talk.now)
    dropped: list[Task] = []

    def do(task: Task) -> object:
        if isinstance(task, DropMemory):
            dropped.append(task)
            return None
        return Gone()

    with mock.patch.object(talk.store, "do", do):
        talk.play(talk.client.begin(Putting("n", "k", chunks, PutMode.OVERWRITE, lambda: os.urandom(16)), 1, talk.now))
    (error,) = talk.results
    assert isinstance(error, Transient)
    assert "begin anew" in str(error)
    assert len(dropped) == 1
    assert talk.server.statistics(0).bytes_in_flight == 0, "its credit is others'"


def test_a_put_that_was_dropped_for_silence_is_sent_whole() -> None:
    """Under the same number, and by a server that has not been restarted: nothing but its answer tells."""
    talk, content = Conversation(), os.urandom(8 * CHUNK)
    talk.play(talk.client.connected(1, talk.now))
    putting = Putting("run", "a", PayloadChunks([content]), PutMode.OVERWRITE, lambda: os.urandom(16))
    talk.play(talk.client.begin(putting, 1, talk.now), chunks_max=4)
    talk.play(talk.client.disconnected(1, talk.now))
    for _ in range(70):
        talk.now += 1.0
        assert not talk.served(talk.server.tick(talk.now))
    assert talk.store.reserved == []
    talk.play(talk.client.connected(2, talk.now))
    (result,) = talk.results
    assert isinstance(result, ObjectInfo)
    assert talk.store.objects["a"][0] == content
