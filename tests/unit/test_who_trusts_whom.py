"""Who may say what to whom: a test for each line of docs/who-trusts-whom.md."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.servers.agents import Node, base, fake_peer, node, open_generation, shard
from tiercheck.agent.jobs.registry import namespaces_with_jobs
from tiercheck.agent.server.neighbours import kept_for_neighbours, namespace_opener, open_own, shm_name
from tiercheck.agent.server.service import Agent
from tiercheck.errors import CapacityExceeded, ConfigurationError, NotFound, Unauthorized
from tiercheck.keys import JobKey, LineageKey
from tiercheck.policy.recovery.lineage import Branch
from tiercheck.replication.objects.records import seal
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.peer import PeerDriver, PeerKeys, PeerLimits, PeerServer
from tiercheck.tiers.peer.messages import Hello, encode
from tiercheck.tiers.peer.server.effects import Greet, Work
from tiercheck.tiers.peer.server.protocol import ServerProtocol
from tiercheck.tiers.registry import make_driver
from tiercheck.tiers.shm.driver import ShmDriver
from tiercheck.tiers.shm.namespaces import (
    NamespaceKind,
    in_use,
    namespace_names,
    namespace_path,
    namespaces,
    remove_namespace,
)
from tiercheck.types import ByteRange, PutMode

__all__ = ["node"]

ROOT = Path(__file__).parents[2]


def running(node: Node) -> Agent:
    return Agent(node.settings(), make_peer_server=fake_peer)


@asynccontextmanager
async def serving_neighbours(node: Node) -> AsyncIterator[str]:
    """The address of an agent's own peer server, for this user on this machine."""
    async with Agent(node.settings(bind=None)) as agent:
        endpoint = agent.hello().peer_endpoint
        assert endpoint is not None
        yield endpoint


# Nominations: from this user's trainers alone.


async def test_what_a_neighbour_has_put_is_never_taken_for_a_nomination(node: Node) -> None:
    name = shm_name(node.name, "stranger")
    node.namespaces.append(name)
    victim = node.folder / "victim"
    planted = node.job(f"shm://{name}", durable=f"nvme://{victim}?survives=rack")
    async with kept_for_neighbours(name) as kept:
        await kept.put(str(LineageKey(1)), [seal(LineageKey(1), Branch(1, 0, 0, 1, "ab" * 8))])
        await kept.put(str(base(0)), shard(base(0)))
        await kept.put(str(JobKey(0)), [seal(JobKey(0), planted)])
    async with running(node) as agent:
        assert list(agent.registry) == []
        # Not even if somebody asks for it by the control socket.
        with pytest.raises(Unauthorized, match="neighbours have put"):
            await agent.registry.register(f"shm://{name}", 0, 1)
    assert not victim.exists()


async def test_a_namespace_whose_kind_nobody_has_decided_nominates_nothing(node: Node) -> None:
    first = node.shm()
    async with node.open(node.job(first)) as hierarchy:
        await open_generation(hierarchy)
        content = seal(JobKey(0), node.job(first))
        await hierarchy.first.driver.put(str(JobKey(0)), [content])
    assert first.partition("?")[0] in namespaces_with_jobs()
    kind = namespace_path(node.namespaces[-1]) / ".tiercheck" / "kind"
    for odd in ("", "nonsense", "own" * 99, None):
        kind.unlink() if odd is None else kind.write_text(odd)
        assert first.partition("?")[0] not in namespaces_with_jobs()


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


# Neighbours: their own objects, in the namespaces that are kept for them.


@pytest.mark.parametrize(
    "key", ["replication/r00000", "replication/x", "tmp/x", "g000001", "job/lineage/g000001/x", "a/b"]
)
async def test_a_neighbour_names_nothing_but_shards_and_their_records(node: Node, key: str) -> None:
    node.namespaces.append(shm_name(node.name, "run"))
    async with serving_neighbours(node) as endpoint, make_driver(f"peer://run?at={endpoint}&deadline=10") as neighbour:
        await neighbour.put(str(base(0)), shard(base(0)))
        for mode in (PutMode.OVERWRITE, PutMode.CREATE):
            for nbytes in (1, 9 << 20):  # in one piece, and in several
                with pytest.raises(Unauthorized):
                    await neighbour.put(key, [bytes(nbytes)], mode=mode)
        for attempt in (neighbour.get(key), neighbour.stat(key), neighbour.delete([str(base(0)), key])):
            with pytest.raises(Unauthorized):
                await attempt
        assert [info.key async for info in neighbour.list()] == [str(base(0))]


async def test_clients_of_another_owner_have_namespaces_of_their_own(tmp_path: Path) -> None:
    ours, theirs = (PeerKeys.generate(tmp_path / owner, owner=owner) for owner in ("ours", "theirs"))
    listed = replace(ours, allowed={**ours.allowed, **theirs.allowed})
    stores: dict[str, TierDriver] = {}

    async def open_namespace(name: str) -> TierDriver:
        stores[name] = MemoryDriver()
        await stores[name].open()
        return stores[name]

    async with PeerServer(open_namespace, keys=listed) as server:
        own = PeerDriver("run", server.endpoint, keys=ours)
        other = PeerDriver("run", server.endpoint, keys=theirs, server_key=server.server_key)
        async with own, other:
            await own.put("a", [b"ours"])
            assert [info.key async for info in other.list()] == []
            with pytest.raises(NotFound):
                await other.get("a")
            await other.put("a", [bytes(9 << 20)])
            await other.delete(["a"])
            assert bytes(await own.get("a")) == b"ours"
        assert set(stores) == {"run", "theirs/run"}


def test_no_name_stands_for_two_namespaces() -> None:
    theirs = shm_name("n", "theirs/run")
    for name in ("run", "theirs.run", "theirs-run", theirs.removeprefix("peer-n-"), "x.", "x.run"):
        assert shm_name("n", name) != theirs
    assert shm_name("n", "run") == "peer-n-run"
    assert len(shm_name("n" * 40, "theirs/run")) == 64


async def test_an_agent_gives_away_nothing_that_another_one_keeps(node: Node) -> None:
    node.namespaces.append(shm_name(f"{node.name}-b", "c"))
    driver = await namespace_opener(f"{node.name}-b")("c")
    await driver.put(str(base(0)), shard(base(0)))
    await driver.close()
    assert shm_name(node.name, "b-c") == shm_name(f"{node.name}-b", "c")
    with pytest.raises(Unauthorized, match="another agent"):
        await namespace_opener(node.name)("b-c")
    await (await namespace_opener(f"{node.name}-b")("c")).close()


async def test_a_namespace_whose_name_cannot_be_noted_is_closed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    own = shm_name(node.name, "run")
    node.namespaces.append(own)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("tiercheck.agent.server.neighbours.keep_under", full)
        with pytest.raises(CapacityExceeded, match="the file system is full"):
            await namespace_opener(node.name)("run")
    assert not in_use(namespace_path(own))
    await (await namespace_opener(node.name)("run")).close()


async def test_clients_make_no_more_namespaces_than_an_agent_keeps_over_all_its_lives(node: Node) -> None:
    names = [shm_name(node.name, name) for name in ("a", "b", "c")]
    node.namespaces += names
    for life in range(2):
        opened = namespace_opener(node.name, namespaces_max=2)
        for name in ("a", "b"):
            driver = await opened(name)
            await driver.put(str(base(life)), shard(base(life)))
            await driver.close()
        with pytest.raises(CapacityExceeded, match="2 namespaces"):
            await opened("c")
    driver = await opened("a")
    await driver.delete([str(base(life)) for life in range(2)])
    await driver.close()
    await (await opened("c")).close()  # it takes the place of an empty one
    assert set(names) & set(namespace_names()) == set(names[1:])


@pytest.mark.parametrize("namespace", ["theirs/run", "../run", "/run", "run/", "a/b/c", ""])
def test_no_client_names_the_namespace_of_another_owner(namespace: str) -> None:
    for owner in ("", "ours"):
        protocol = ServerProtocol(PeerLimits(), 7)
        asked = protocol.receive(b"1", [encode(1, Hello(namespace))], 0.0, owner)
        if "/" in namespace:
            assert (asked, protocol.desk.dropped) == ([], {"malformed": 1})
        else:
            assert [effect.task for effect in asked if isinstance(effect, Work)] == [
                Greet(f"{owner}/{namespace}" if owner else namespace)
            ]


# A node's own memory: other nodes of the job recover from it.


async def test_a_nodes_own_memory_is_read_by_the_other_nodes_and_changed_by_nobody(node: Node) -> None:
    url = node.shm()
    name = url.removeprefix("shm://").partition("?")[0]
    content = b"".join(shard(base(0), nbytes=9 << 20))
    async with serving_neighbours(node) as endpoint, make_driver(url) as first:
        await first.put(str(base(0)), [content])
        await first.put(str(JobKey(0)), [b"secret"])
        async with make_driver(f"peer://{name}?at={endpoint}&own=yes&deadline=10") as other:
            assert str(base(0)) in [info.key async for info in other.list("r00000/")]
            assert bytes(await other.get(str(base(0)))) == content
            assert bytes(await other.get(str(base(0)), range=ByteRange(7, 1007))) == content[7:1007]
            for attempt in (other.put(str(base(1)), [b"x"]), other.delete([str(base(0))]), other.get(str(JobKey(0)))):
                with pytest.raises(Unauthorized):
                    await attempt
            with pytest.raises(Unauthorized):  # in several pieces
                await other.put(str(base(1)), [bytes(9 << 20)])
            assert (await first.stat(str(base(0)))).nbytes == len(content)
            await first.close()
            remove_namespace(name)  # nobody holds it
            with pytest.raises(NotFound):
                await other.get(str(base(0)))
            await first.open()


async def test_a_nodes_own_memory_is_no_memory_that_it_keeps_and_not_for_other_owners(
    node: Node, tmp_path: Path
) -> None:
    node.namespaces.append(shm_name(node.name, "run"))
    async with serving_neighbours(node) as endpoint, make_driver(f"peer://run?at={endpoint}") as neighbour:
        await neighbour.put(str(base(0)), shard(base(0)))
        for name in ("run", shm_name(node.name, "run"), "../run"):
            with pytest.raises((NotFound, ConfigurationError)):
                async with make_driver(f"peer://{name}?at={endpoint}&own=yes"):
                    pass
        with pytest.raises(ConfigurationError, match="own=yes"):
            make_driver(f"peer://own:run?at={endpoint}")
    ours, theirs = (PeerKeys.generate(tmp_path / owner, owner=owner) for owner in ("ours", "theirs"))
    listed = replace(ours, allowed={**ours.allowed, **theirs.allowed})
    async with PeerServer(namespace_opener(node.name), keys=listed, open_own=open_own) as server:
        url = node.shm()
        name = url.removeprefix("shm://").partition("?")[0]
        async with make_driver(url):
            async with PeerDriver(name, server.endpoint, keys=ours, own=True):
                pass
            with pytest.raises(Unauthorized):
                async with PeerDriver(name, server.endpoint, keys=theirs, server_key=server.server_key, own=True):
                    pass


# The page.


def test_every_line_of_the_page_names_its_tests() -> None:
    text = (ROOT / "docs" / "who-trusts-whom.md").read_text()
    table, _, shown = text.partition("## Shown by")
    lines = re.findall(r"^\| (\d+) \|", table, re.MULTILINE)
    named = re.split(r"^(\d+)\. ", shown, flags=re.MULTILINE)
    assert lines == named[1::2] == [str(number + 1) for number in range(len(lines))]
    for number, tests in zip(named[1::2], named[2::2], strict=True):
        found = re.findall(r"`([\w/.]+)::(\w+)`", tests)
        assert found, f"line {number} is shown by nothing"
        for file, name in found:
            assert f"def {name}(" in (ROOT / file).read_text(), f"line {number}: there is no {file}::{name}"
