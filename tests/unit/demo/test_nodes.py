"""The demo's nodes: what each tier holds is measured while others write there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tiercheck.demo.nodes import delete_of, occupied
from tiercheck.keys import MarkerKey, ShardKey
from tiercheck.tiers.registry import make_driver

PAGE = 4096


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory, where a file takes whole pages and nothing else, whatever tmp_path's file system does."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tiercheck-test-") as name:
        yield Path(name)


def test_the_size_of_a_tier_is_told_while_its_folders_are_deleted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for generation in ("g000001", "g000002"):
        (folder / generation / "base").mkdir(parents=True)
        (folder / generation / "base" / "0.safetensors").write_bytes(bytes(10 * PAGE))
        (folder / generation / "base" / "0.safetensors.part").write_bytes(bytes(5 * PAGE))
        with (folder / generation / "base" / "sparse").open("wb") as sparse:
            sparse.truncate(100 * PAGE)
    assert occupied(folder) == 30 * PAGE, "what is being written counts, and what is not there does not"
    assert occupied(folder / "none") == 0
    scandir = os.scandir

    def deleting(path: Any) -> Iterator[Any]:
        if path == str(folder / "g000001"):
            shutil.rmtree(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", deleting)
    assert occupied(folder) == 15 * PAGE


async def test_of_a_lost_stage_nothing_is_left_but_the_bases_that_are_to_be_kept(tmp_path: Path) -> None:
    def captured(rank: int) -> list[str]:
        bases = [ShardKey.base(1, version, rank) for version in (0, 4)]
        differentials = [ShardKey.differential(1, version, version, rank) for version in (1, 5)]
        markers = [MarkerKey.of(base, 9, 4, "0" * 16, "") for base in bases]
        return [str(each) for each in (*bases, *differentials, *markers)]

    async def left(kept_until: int) -> set[str]:
        driver = make_driver(f"nvme://{tmp_path}")
        async with driver:
            for key in (*captured(0), *captured(1), "job/commits/g000001/000000000000"):
                await driver.put(key, [b"something"])
        await delete_of(1, driver, kept_until)
        async with driver:
            return {info.key async for info in driver.list()}

    others = {*captured(0), "job/commits/g000001/000000000000"}
    base, _, _, _, marker, _ = captured(1)
    assert await left(3) == {*others, base, marker}
    assert await left(-1) == others
