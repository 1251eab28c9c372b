"""The neighbours' objects in an agent's keeping: they outlive the agent, and it comes back where it was."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.agents.test_kills import started
from tests.servers.agents import Node, base, capture, node, open_generation, record
from tiercheck.agent.client.remote_mover import RemoteMover
from tiercheck.errors import CapacityExceeded
from tiercheck.replication.job import JobTier, ReplicationJob
from tiercheck.tiers.peer import PeerKeys
from tiercheck.tiers.registry import make_driver

__all__ = ["node"]

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("with_keys", [False, True], ids=["plain", "curve"])
async def test_a_neighbours_objects_outlive_the_agent(
    node: Node, tmp_path: Path, with_keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys" if with_keys else None
    if keys is not None:
        PeerKeys.generate(keys)
        monkeypatch.setenv("TIERCHECK_KEYS", str(keys))
    async with started(node, bind=None, keys=keys) as client:
        node.namespaces.append(f"peer-{node.name}-run")
        endpoint, key = client.hello.peer_endpoint, client.hello.peer_server_key
        assert (key is not None) == with_keys
        url = f"peer://run?at={endpoint}" + (f"&server_key={key}" if key else "")
        async with make_driver(url) as neighbour:
            await neighbour.put(str(base(0)), [b"x" * 3_000_000])
            os.kill(client.hello.pid, signal.SIGKILL)
            status = await client.status()  # which starts another
            assert client.hello.peer_endpoint == endpoint, "the neighbours know the port"
            assert bytes(await neighbour.get(str(base(0)))) == b"x" * 3_000_000
        assert status["peer"]["encrypted"] is with_keys
        assert (await client.status())["peer"]["counts"]["bytes_got"] == 3_000_000


async def test_a_rank_is_moved_to_its_neighbours_memory(node: Node) -> None:
    """Two agents on one machine, as two nodes: what one captures the other keeps, and gives back."""
    other = Node(node.folder)
    async with started(node, bind=None) as client, started(other, bind=None) as there:
        node.namespaces.append(f"peer-{other.name}-run")
        plain = node.job(node.shm(), batch=1)
        peer = JobTier("peer", f"peer://run?at={there.hello.peer_endpoint}&deadline=2")
        job = ReplicationJob((plain.tiers[0], peer, plain.tiers[1]), node.name, 0, 1, 1, 1)
        async with node.open(job) as hierarchy:
            await open_generation(hierarchy)
            mover = RemoteMover(client, hierarchy.first.driver, job)
            await mover.register()
            await capture(hierarchy, base(0), record(1), record(2), nbytes=500_000)
            await mover.drain(30, closing=True)
            kept = [info.key async for info in hierarchy.tiers[1].driver.list("r")]
            assert {str(base(0)), str(record(1)), str(record(2))} <= set(kept)
            # The neighbour fails. What is captured still reaches the durable tier, and what failed is shown.
            await there.stop(drain=False)
            await there.close()
            await capture(hierarchy, base(3), nbytes=500_000)
            assert not await mover.cycle()
            assert mover.status.watermark == 3
            assert "peer" in mover.status.errors


async def test_memory_for_neighbours_is_bounded(node: Node) -> None:
    async with started(node, bind=None, memory_bytes=1_000_000) as client:
        node.namespaces.append(f"peer-{node.name}-run")
        async with make_driver(f"peer://run?at={client.hello.peer_endpoint}") as neighbour:
            await neighbour.put(str(base(0)), [b"x" * 500_000])
            with pytest.raises(CapacityExceeded):
                await neighbour.put(str(base(1)), [b"x" * 4_000_000])
