"""Whose memory keeps a rank's objects."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercheck.policy.peers import RankLocation, peer_of


def cluster(*nodes: int, domains: str = "") -> list[RankLocation]:
    """``nodes[i]`` ranks on node i, whose domain is ``domains[i]``."""
    return [
        RankLocation(f"node{index}", domains[index] if domains else "")
        for index, ranks in enumerate(nodes)
        for _ in range(ranks)
    ]


def test_the_ring_goes_to_the_next_node_at_the_same_local_rank() -> None:
    places = cluster(2, 2, 2)
    assert [peer_of(rank, places) for rank in range(6)] == [2, 3, 4, 5, 0, 1]


def test_one_node_has_no_peer() -> None:
    assert peer_of(0, cluster(8)) is None


def test_a_smaller_node_takes_what_it_has_no_equal_rank_for() -> None:
    assert [peer_of(rank, cluster(3, 1)) for rank in range(4)] == [3, 3, 3, 0]


def test_the_peer_is_in_the_failure_domain() -> None:
    places = cluster(1, 1, 1, 1, domains="abab")
    assert [peer_of(rank, places) for rank in range(4)] == [2, 3, 0, 1]


def test_a_node_alone_in_its_domain_joins_the_others() -> None:
    places = cluster(1, 1, 1, domains="aab")
    assert [peer_of(rank, places) for rank in range(3)] == [1, 0, 0]


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("ab")), min_size=1, max_size=30))
def test_a_peer_is_always_another_node_and_each_node_of_a_ring_keeps_for_one(drawn: list[tuple[int, str]]) -> None:
    domain = dict(drawn)
    places = [RankLocation(str(node), domain[node]) for node, _ in drawn]
    kept: dict[str, set[str]] = {}
    for rank, place in enumerate(places):
        peer = peer_of(rank, places)
        if len(domain) == 1:
            assert peer is None
            continue
        assert peer is not None
        assert places[peer].node != place.node
        kept.setdefault(places[peer].node, set()).add(place.node)
    sizes = {name: sum(each == name for each in domain.values()) for name in "ab"}
    if len(domain) > 1 and 1 not in sizes.values():
        assert all(len(keepers) == 1 for keepers in kept.values())
