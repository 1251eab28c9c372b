"""A put goes on wherever the server has got to, also if that is further back than it was."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tests.property.peer_network import Frames, Store
from tiercheck.tiers.peer.client.content import PayloadChunks
from tiercheck.tiers.peer.client.protocol import ClientProtocol, ClientSettings, Effect, Finish, Send
from tiercheck.tiers.peer.client.put import Putting
from tiercheck.tiers.peer.server.effects import Reply, Work
from tiercheck.tiers.peer.server.limits import PeerLimits
from tiercheck.tiers.peer.server.protocol import ServerProtocol
from tiercheck.types import ObjectInfo, PutMode

CHUNK = 1 << 20


class Conversation:
    """Between one client and one server, in which nothing takes time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.store = Store()
        self.server = ServerProtocol(PeerLimits(), 5)
        self.client = ClientProtocol(ClientSettings("p", CHUNK, 2 * CHUNK, 300.0))
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
