"""A trainer and an agent of neighbouring releases work together, whichever of them is the newer one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import pytest

from tests.servers.agents import Node, fake_peer, node, shard
from tiercheck.agent.client import connection
from tiercheck.agent.client.client import connect_agent
from tiercheck.agent.client.remote_mover import RemoteMover
from tiercheck.agent.protocol import messages
from tiercheck.agent.protocol.messages import Protocols, RankReply, Request
from tiercheck.agent.server import router
from tiercheck.agent.server.service import Agent
from tiercheck.errors import ConfigurationError, Transient, UnknownRequest
from tiercheck.keys import ShardKey

__all__ = ["node"]


@dataclass(frozen=True)
class Foresee(Request):
    """What the next release may ask."""

    version: int = 7


def of_the_next_release(pack: Callable[..., bytes], said: list[str | None]) -> Callable[..., bytes]:
    """``pack`` with fields that this release does not know in every message, and one protocol more."""

    def packed(*given: Any) -> bytes:
        protocol, identifier, name, fields, *_ = msgpack.unpackb(pack(*given))
        if "protocols" in fields:
            fields["protocols"] = {"oldest": 1, "newest": 2, "preferred": 2}
        if "status" in fields:
            fields["status"]["mood"] = "calm"
        said.append(name)
        return bytes(msgpack.packb([protocol, identifier, name, {**fields, "new": {"of": ["all", "kinds"]}}, "more"]))

    return packed


async def life(node: Node, optional: bool) -> None:
    """Registering, saving and leaving. ``optional``: ask what the agent may not know, too."""
    job = node.job(node.shm())
    async with (
        Agent(node.settings(), make_peer_server=fake_peer) as agent,
        await connect_agent(node.name) as client,
        node.open(job) as hierarchy,
    ):
        mover = RemoteMover(client, hierarchy.first.driver, job)
        await mover.register()
        base = ShardKey.base(job.generation, 0, job.rank)
        await hierarchy.first.driver.put(str(base), shard(base))
        if optional:
            for _ in range(2):
                with pytest.raises(UnknownRequest, match=r"of TierCheck .*knows no request 'foresee'"):
                    await client.request(Foresee(5.0), RankReply)
        await mover.drain(30.0, closing=True)
        assert (mover.status.copied_objects, mover.status.errors) == (1, {})
        assert (await client.status())["ranks"][0]["rank"] == job.rank
        assert agent.registry.get(job.namespace, job.rank).job == job
        await mover.withdraw()


async def test_a_newer_trainer_with_an_older_agent(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str | None] = []
    monkeypatch.setitem(messages._NAMES, Foresee, "foresee")
    monkeypatch.setattr(connection, "pack_request", of_the_next_release(connection.pack_request, said))
    monkeypatch.setattr(connection, "PROTOCOLS", Protocols(1, 2))
    await life(node, optional=True)
    assert {"hello", "register-job", "drain", "withdraw", "foresee"} <= set(said)


async def test_an_older_trainer_with_a_newer_agent(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str | None] = []
    for name in ("pack_answer", "pack_error"):
        monkeypatch.setattr(router, name, of_the_next_release(getattr(router, name), said))
    await life(node, optional=False)
    assert len(said) >= 5


async def test_an_error_that_only_the_newer_agent_has_is_the_nearest_one(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Swamped(Transient):
        pass

    monkeypatch.setitem(messages._ERRORS, "Swamped", Swamped)
    frame = messages.pack_error(3, Swamped("too much", tier="shm"))
    monkeypatch.delitem(messages._ERRORS, "Swamped")
    error = messages.parse_answer(frame).error
    assert type(error) is Transient
    assert (error.message, error.tier) == ("too much", "shm")


async def test_releases_without_a_protocol_in_common_say_so(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Agent(node.settings(), make_peer_server=fake_peer):
        monkeypatch.setattr(connection, "PROTOCOLS", Protocols(2, 3))
        with pytest.raises(ConfigurationError, match=r"agent speaks protocol 1, this TierCheck protocols 2 to 3: end"):
            await connect_agent(node.name)
    assert Protocols(1, 3).common(Protocols(2, 5)) == 3
    assert Protocols(2, 5).common(Protocols(1, 3)) == 3
