"""How a rank finds its peer's agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiercheck import schema
from tiercheck.agent.client import endpoint as endpoints
from tiercheck.agent.client.endpoint import RankEndpoint, beside_neighbour, peer_address
from tiercheck.errors import ConfigurationError
from tiercheck.hierarchy import Hierarchy


def rank_on(node: str, host: str = "here", endpoint: str | None = None, key: str | None = None) -> RankEndpoint:
    return RankEndpoint(node, "", host, endpoint or f"127.0.0.1:{1000 + int(node)}", key)


def test_each_rank_gets_the_address_of_the_next_node() -> None:
    ranks = [rank_on("0"), rank_on("1"), rank_on("2", key="ab" * 32)]
    assert [peer_address(rank, ranks) for rank in range(3)] == [
        ("127.0.0.1:1001", None),
        ("127.0.0.1:1002", "ab" * 32),
        ("127.0.0.1:1000", None),
    ]


def test_one_node_has_no_neighbour_and_goes_on_without(caplog: pytest.LogCaptureFixture) -> None:
    hierarchy = Hierarchy.of("shm://run", "peer://run", "nvme:///shared/run?survives=rack")
    ranks = [rank_on("0"), rank_on("0")]
    left = [beside_neighbour(hierarchy, rank, ranks) for rank in range(2)]
    assert [[each.url for each in one.tiers] for one in left] == [[hierarchy.tiers[0].url, hierarchy.tiers[2].url]] * 2
    assert caplog.text.count("all 2 ranks are on one node (0): there is no neighbour, and peer:// is left out") == 1
    assert not any(each.needs_peer for each in left)
    assert "at=127.0.0.1" in beside_neighbour(hierarchy, 0, [rank_on("0"), rank_on("1")]).tiers[1].url


@pytest.mark.parametrize("endpoint", ["127.0.0.1:7", "[::1]:7", "localhost:7", "ipc:///run/peer-node.sock"])
def test_a_peer_on_another_machine_that_only_listens_to_itself_is_refused(endpoint: str) -> None:
    ranks = [rank_on("0", "alpha"), rank_on("1", "beta", endpoint)]
    with pytest.raises(ConfigurationError, match=r"rank 1 on beta.*alpha cannot reach.*tiercheck keys"):
        peer_address(0, ranks)
    assert peer_address(0, [ranks[0], rank_on("1", "beta", "10.0.0.2:7")]) == ("10.0.0.2:7", None)


def test_an_introduction_survives_the_way_and_nothing_else_does() -> None:
    endpoint = rank_on("1", key="cd" * 32)
    said = schema.plain(endpoint)
    assert schema.read(RankEndpoint, said) == endpoint
    for broken in ({}, {**said, "endpoint": None}, {**said, "node": 1}, None):
        with pytest.raises(ValueError, match="invalid RankEndpoint"):
            schema.read(RankEndpoint, broken)


def test_one_agent_is_no_neighbour_of_itself() -> None:
    ranks = [rank_on("0", endpoint="127.0.0.1:7"), rank_on("1", endpoint="127.0.0.1:7")]
    with pytest.raises(ConfigurationError, match=r"with one agent, 127.0.0.1:7: .*TIERCHECK_AGENT_NODE"):
        peer_address(0, ranks)
    elsewhere = [rank_on("0", endpoint="10.0.0.1:7"), rank_on("1", "beta", "10.0.0.2:7")]
    assert peer_address(0, elsewhere) == ("10.0.0.2:7", None)


def test_machines_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Containers that all are ``localhost``: what one holds is no other's, and no loopback leads there."""
    found = []
    for boot in ("11111111-aaaa", "22222222-bbbb"):
        (tmp_path / boot).write_text(f"{boot}\n")
        monkeypatch.setattr(endpoints, "BOOT", tmp_path / boot)
        monkeypatch.setattr(endpoints.socket, "gethostname", lambda: "localhost")
        found.append(RankEndpoint.of(f"localhost/{len(found)}", "127.0.0.1:7", None, {}))
    assert [each.host for each in found] == ["localhost (11111111)", "localhost (22222222)"]
    with pytest.raises(ConfigurationError, match=r"rank 1 on localhost \(22222222\).*cannot reach"):
        peer_address(0, found)
    served = RankEndpoint.of("localhost/0", "0.0.0.0:7", None, {})
    assert served.endpoint == "localhost:7"
