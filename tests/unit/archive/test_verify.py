"""Every byte is compared, and what is lost is said."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import tiercheck
from tests.archived import LAST, Left
from tiercheck.archive import shards, verify
from tiercheck.errors import NotFound
from tiercheck.format.header import ShardHeader
from tiercheck.hierarchy import OpenTier
from tiercheck.keys import ShardKey


def test_whole_tiers_are_healthy_and_every_byte_is_read(finished: Left) -> None:
    seen: list[tuple[int, int]] = []
    with tiercheck.open(finished.url) as archive:
        found = archive.verify(lambda done, total: seen.append((done, total)))
        assert (found.healthy, found.damaged, found.lost, found.newest) == (True, (), (), LAST)
        assert seen[-1] == (found.nbytes, archive.inventory.tiers[0].nbytes)
        assert found.nbytes == archive.inventory.tiers[0].nbytes


@pytest.mark.parametrize("chunk_nbytes", [16 << 20, 512])
def test_a_flipped_bit_costs_the_versions_that_need_it(
    left: Left, chunk_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "CHUNK_NBYTES", chunk_nbytes)
    left.flip("r00001/g000002/differential/000000000013-*")
    with tiercheck.open(left.url) as archive:
        found = archive.verify()
        (damaged,) = found.damaged
        assert "checksum" in damaged.reason
        assert damaged.key.startswith("r00001/g000002/differential/000000000013")
        assert (found.healthy, found.newest) == (False, 12)
        assert found.lost == ((LAST, LAST),)


def test_damage_of_which_another_tier_has_a_copy_loses_nothing(left: Left, tmp_path: Path) -> None:
    shutil.copytree(left.root, tmp_path / "copy")
    left.flip("r00001/g000002/base/*")
    left.flip("job/commits/g000002/*")
    with tiercheck.open(left.url, f"nvme://{tmp_path}/copy") as archive:
        found = archive.verify()
        assert len(found.damaged) == len(left.files("r00001/g000002/base/*")) + len(left.files("job/commits/g000002/*"))
        assert found.healthy


def test_damaged_records_are_told_of(left: Left) -> None:
    left.flip("job/lineage/*")
    with tiercheck.open(left.url) as archive:
        found = archive.verify()
        assert {each.key for each in found.damaged} == {"job/lineage/g000001", "job/lineage/g000002"}
        assert (found.lost, found.newest, found.healthy) == ((), None, False), "no version can be read without them"


def test_a_shard_of_another_job_under_the_same_key_is_none(left: Left, finished: Left) -> None:
    """It is whole, and its token is another's."""
    base = left.files("r00000/g000002/base/*")[-1]
    shutil.copy(left.files("r00000/g000002/base/*")[0], base)
    with tiercheck.open(left.url) as archive:
        (damaged,) = archive.verify().damaged
        assert "the shard under this key is another" in damaged.reason


def test_what_a_live_job_deletes_meanwhile_is_gone_and_no_damage(left: Left) -> None:
    with tiercheck.open(left.url) as archive:
        left.remove("r0000?/g000001/*/*")
        found = archive.verify()
        assert found.gone > 0
        assert found.healthy


def test_what_is_listed_and_cannot_be_read_is_damage(finished: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    async def absent(tier: OpenTier, key: ShardKey, nbytes: int) -> ShardHeader:
        raise NotFound("there is no object under this key", tier=tier.driver.url, key=str(key))

    monkeypatch.setattr(verify, "verify_shard", absent)
    with tiercheck.open(finished.url) as archive:
        found = archive.verify()
        assert (found.healthy, found.newest, found.gone) == (False, None, 0)
        assert all(each.unread for each in found.damaged)
        assert found.lost[-1][-1] == LAST
