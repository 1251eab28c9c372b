"""The record that a replication job is: what it holds is bounded before anybody acts on it."""

from __future__ import annotations

from typing import Any

import pytest

from tiercheck import schema
from tiercheck.replication.job import JobTier, ReplicationJob
from tiercheck.types import shown

SOUND = ReplicationJob((JobTier("shm", "shm://x"), JobTier("nvme", "nvme:///y", "zstd")), "n", 1, 2, 3, 4, 5)


def test_a_nomination_comes_back_as_it_was() -> None:
    assert schema.read(ReplicationJob, schema.plain(SOUND)) == SOUND


@pytest.mark.parametrize("name", ["rank", "world_size", "generation", "batch", "interval"])
def test_numbers_are_bounded(name: str) -> None:
    for value in (-1, 10**13, 10**5000, True, 1.0, "1", None, [[10**5000]]):
        refused({name: value})


@pytest.mark.parametrize(
    "changes",
    [
        {"node": "n" * 256},
        {"node": 10**5000},
        {"tiers": []},
        {"tiers": "shm"},
        {"tiers": 10**5000},
        {"tiers": [["shm", "shm://x", ""]] * 17},
        {"tiers": [["shm"]]},
        {"tiers": [["shm", 5, ""]]},
        {"tiers": [["shm", "shm://" + "x" * 9000, ""]]},
        {"tiers": [["s" * 256, "shm://x", ""]]},
        {"tiers": [["shm", "shm://x", 10**5000]]},
    ],
    ids=shown,
)
def test_texts_and_tiers_are_bounded(changes: dict[str, object]) -> None:
    refused(changes)


@pytest.mark.parametrize("value", [None, [], 10**5000, {"tiers": []}], ids=shown)
def test_anything_else_is_none(value: object) -> None:
    with pytest.raises(ValueError, match="invalid ReplicationJob"):
        schema.read(ReplicationJob, value)


def refused(changes: dict[str, Any]) -> None:
    try:
        schema.read(ReplicationJob, {**schema.plain(SOUND), **changes})
    except ValueError as refusal:
        assert "invalid ReplicationJob" in str(refusal)
        assert len(str(refusal).encode()) < 300
    else:
        pytest.fail(f"{shown(changes)} is taken")
