"""Composing tiers: what is refused, in which words, and what an open hierarchy says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiercheck.errors import CapacityExceeded, ConfigurationError, TierError
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.testing.faults import FaultPlan, FaultyDriver
from tiercheck.types import Survives


def test_tiers_are_named_after_their_scheme_and_numbered() -> None:
    tiers = Hierarchy.of("shm://a", "nvme:///b", Tier("nvme:///c"), Tier("nvme:///d", name="archive")).tiers
    assert [tier.name for tier in tiers] == ["shm", "nvme", "nvme-2", "archive"]


def test_no_two_tiers_have_one_name() -> None:
    tiers = Hierarchy.of(*(Tier("nvme:///a", name=name) for name in ("a", "a", "a-2", "a-2", "a"))).tiers
    assert [tier.name for tier in tiers] == ["a", "a-3", "a-2", "a-2-2", "a-4"]
    again = Hierarchy(tiers).tiers
    assert again == tiers


def test_a_number_may_be_written_in_any_form_of_its_own() -> None:
    assert Tier("nvme:///a/r{rank:05d}").resolved({"rank": 7}) == "nvme:///a/r00007"


def test_places_are_filled_in_for_each_rank() -> None:
    opened = Hierarchy.of("memory://run-{node}-{local_rank}-{rank}").open(rank=5, local_rank=1, node=2)
    assert opened.first.driver.url == "memory://run-2-1-5"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://{pod}", r"has the field \{pod\}; known are \{rank\}, \{local_rank\}, \{node\}"),
        ("memory://{rank", "unbalanced brace"),
        ("memory://{rank:zz}", "in a form that no number has"),
        ("memory://{rank:{foo}}", "in a form that no number has"),
        ("memory://{}", r"has the field \{\}"),
    ],
)
def test_unknown_places_are_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Hierarchy.of(url).open()


def test_an_empty_hierarchy_and_no_url_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one tier"):
        Hierarchy(())
    with pytest.raises(ConfigurationError, match="'s3:/bucket' is no tier URL: it has no scheme"):
        Tier("s3:/bucket?fs.password=hunter2")
    with pytest.raises(ConfigurationError, match="has no scheme"):
        Hierarchy.of("/mnt/ssd")
    with pytest.raises(ConfigurationError, match=r"a tier is a URL, such as shm://NAME.*PosixPath\('/mnt'\)"):
        Hierarchy.of(Path("/mnt"))  # type: ignore[arg-type]  # that is the mistake
    with pytest.raises(ConfigurationError, match=r"must_survive: unknown failure class 'rock': choose one of .*rack"):
        Hierarchy.of("memory://", must_survive="rock")


async def test_a_hierarchy_survives_what_one_of_its_tiers_does(tmp_path: Path) -> None:
    async with Hierarchy.of("memory://", f"nvme://{tmp_path}/a", f"nvme://{tmp_path}/b?survives=rack").open() as tiers:
        assert tiers.survives is Survives.RACK
        assert [role.shared for role in tiers.roles] == [False, False, True]


async def test_a_hierarchy_that_cannot_survive_what_is_asked_is_closed_again(tmp_path: Path) -> None:
    opened = Hierarchy.of("memory://", f"nvme://{tmp_path}/a", must_survive="node").open()
    with pytest.raises(
        ConfigurationError, match=r"no tier survives a node failure.*memory \(nothing\), nvme \(process\)"
    ):
        await opened.__aenter__()
    with pytest.raises(TierError, match="not open"):
        await opened.first.driver.stat("x")


async def test_a_tier_that_does_not_open_leaves_none_open() -> None:
    failing = FaultPlan.fail_call("open", lambda: CapacityExceeded("too small"))
    opened = Hierarchy.of("memory://", Tier("memory://", wrap=lambda driver: FaultyDriver(driver, failing))).open()
    with pytest.raises(CapacityExceeded, match="too small"):
        await opened.__aenter__()
    with pytest.raises(TierError, match="not open"):
        await opened.first.driver.stat("x")


def test_a_brace_that_is_meant_as_one_stays_one() -> None:
    hierarchy = Hierarchy.of("memory://a-{{rank}}-{rank}")
    assert hierarchy.open(rank=3).first.driver.url == "memory://a-{rank}-3"
    assert hierarchy.resolved(rank=3).open(rank=5).first.driver.url == "memory://a-{rank}-3"


@pytest.mark.parametrize("url", ["sftp://me:p4ssword{w@host/x", "sftp://me:p4ssword@{host}/x", "me:p4ssword@host/x"])
def test_a_password_shows_in_no_message(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Hierarchy.of(url).open()
    assert "p4ssword" not in str(caught.value)


def test_the_neighbours_address_goes_into_the_tiers_that_lack_one() -> None:
    hierarchy = Hierarchy.of("shm://run", "peer://run", "peer://run?at=10.0.0.9:1", "peer://other?deadline=5")
    assert hierarchy.needs_peer
    filled = hierarchy.with_peer("10.0.0.2:7", "ab" * 32)
    assert not filled.needs_peer
    assert [tier.url for tier in filled.tiers] == [
        "shm://run",
        f"peer://run?at=10.0.0.2%3A7&server_key={'ab' * 32}",
        "peer://run?at=10.0.0.9:1",
        f"peer://other?deadline=5&at=10.0.0.2%3A7&server_key={'ab' * 32}",
    ]


def test_what_is_printed_of_a_hierarchy_holds_no_secret() -> None:
    hierarchy = Hierarchy.of(
        "shm://run-7?size=8GiB", "fsspec+sftp://user:hidden@host/x?fs.password=hidden&survives=rack"
    )
    assert "hidden" not in repr(hierarchy)
    assert "Tier(url='shm://run-7?size=8GiB', name='shm', wrap=None, codec='')" in repr(hierarchy)
