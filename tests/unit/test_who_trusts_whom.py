"""Who may say what to whom: a test for each line of docs/who-trusts-whom.md."""

from __future__ import annotations

import pytest

from tests.servers.agents import Node, base, fake_peer, node, open_generation, shard
from tiercheck.agent.neighbours import kept_for_neighbours, namespace_opener, shm_name
from tiercheck.agent.roster import nominating_namespaces
from tiercheck.agent.service import Agent
from tiercheck.errors import Unauthorized
from tiercheck.keys import LineageKey, NominationKey
from tiercheck.policy.lineage import Branch
from tiercheck.records import seal
from tiercheck.tiers.namespaces import NamespaceKind, namespace_path, namespaces
from tiercheck.tiers.shm import ShmDriver

__all__ = ["node"]


def running(node: Node) -> Agent:
    return Agent(node.settings(), make_peer_server=fake_peer)


# Nominations: from this user's trainers alone.


async def test_what_a_neighbour_has_put_is_never_taken_for_a_nomination(node: Node) -> None:
    name = shm_name(node.name, "stranger")
    node.namespaces.append(name)
    victim = node.folder / "victim"
    planted = node.nomination(f"shm://{name}", durable=f"nvme://{victim}?survives=rack")
    async with kept_for_neighbours(name) as kept:
        await kept.put(str(LineageKey(1)), [seal(LineageKey(1), Branch(1, 0, 0, 1, "ab" * 8).to_object())])
        await kept.put(str(base(0)), shard(base(0)))
        await kept.put(str(NominationKey(0)), [seal(NominationKey(0), planted.to_object())])
    async with running(node) as agent:
        assert list(agent.roster) == []
        # Not even if somebody asks for it by the control socket.
        with pytest.raises(Unauthorized, match="neighbours have put"):
            await agent.roster.nominate(f"shm://{name}", 0, 1)
    assert not victim.exists()


async def test_a_namespace_whose_kind_nobody_has_decided_nominates_nothing(node: Node) -> None:
    first = node.shm()
    async with node.open(node.nomination(first)) as hierarchy:
        await open_generation(hierarchy)
        content = seal(NominationKey(0), node.nomination(first).to_object())
        await hierarchy.first.driver.put(str(NominationKey(0)), [content])
    assert first.partition("?")[0] in nominating_namespaces()
    kind = namespace_path(node.namespaces[-1]) / ".tiercheck" / "kind"
    for odd in ("", "nonsense", "own" * 99, None):
        kind.unlink() if odd is None else kind.write_text(odd)
        assert first.partition("?")[0] not in nominating_namespaces()


async def test_a_job_and_a_peer_server_never_share_a_namespace(node: Node) -> None:
    own, kept = shm_name(node.name, "own"), shm_name(node.name, "kept")
    node.namespaces += [own, kept]
    async with ShmDriver(own) as driver:
        await driver.put("g", [b"mine"])
    with pytest.raises(Unauthorized, match="memory of a job"):
        await namespace_opener(node.name)("own")
    await (await namespace_opener(node.name)("kept")).close()
    with pytest.raises(Unauthorized, match="neighbours have put"):
        await ShmDriver(kept).open()
    kinds = {found.name: found.kind for found in namespaces()}
    assert (kinds[own], kinds[kept]) == (NamespaceKind.OWN, NamespaceKind.NEIGHBOURS)
