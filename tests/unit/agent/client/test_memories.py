"""What a node's memory holds of a job: found by the names of its URLs, whatever numbers their fields stood for."""

from __future__ import annotations

from tests.servers.agents import Node, base, node, shard
from tiercheck.agent.client.endpoint import RankEndpoint
from tiercheck.agent.client.memories import memories_of_node, pattern_of
from tiercheck.agent.server.neighbours import namespace_opener, shm_name
from tiercheck.hierarchy import Hierarchy
from tiercheck.tiers.registry import make_driver

__all__ = ["node"]


def test_a_field_stands_for_any_number() -> None:
    assert pattern_of("shm://run.7-{node}-{local_rank}?size=4GiB") == r"run\.7\-\d+\-\d+"
    assert pattern_of("peer://run") == "run"


async def test_memory_is_told_with_the_ranks_that_have_shards_there(node: Node) -> None:
    job = node.name
    for place, ranks in ((f"{job}-0", [0]), (f"{job}-11", [3, 4]), (f"{job}-x", [7]), (f"{job}-2", [])):
        node.namespaces.append(place)
        async with make_driver(f"shm://{place}?size=1MiB") as driver:
            for rank in ranks:
                await driver.put(str(base(0, rank)), shard(base(0, rank)))
    for name, rank in ((job, 5), ("another", 6)):
        node.namespaces.append(shm_name(node.name, name))
        kept = await namespace_opener(node.name)(name)
        await kept.put(str(base(0, rank)), shard(base(0, rank)))
        await kept.close()
    endpoint = RankEndpoint("gpu1/0", "", "gpu1", "ipc:///run/x.sock", None)
    hierarchy = Hierarchy.of(f"shm://{job}-{{node}}?size=1MiB", f"peer://{job}")
    found = memories_of_node(hierarchy, node.name, endpoint, 5.0)
    assert [(each.name, each.local, each.ranks) for each in found] == [
        ("memory of gpu1/0", f"shm://{job}-0", ((0, 0),)),
        ("memory of gpu1/0", f"shm://{job}-11", ((3, 4),)),
        ("memory of gpu1/0 for its neighbours", "", ((5, 5),)),
    ]
    assert {(each.host, each.only_here) for each in found} == {("gpu1", True)}
    driver = make_driver(found[0].url)
    assert driver.url == make_driver(f"peer://{job}-0?at=ipc:///run/x.sock&own=yes").url
    alone = memories_of_node(Hierarchy.of(f"shm://{job}?size=1MiB"), node.name, endpoint, 5.0)
    assert [each.ranks for each in alone] == [((5, 5),)], "the last node of a job has what others kept there"
    assert memories_of_node(Hierarchy.of("memory://x"), node.name, endpoint, 5.0) == []
