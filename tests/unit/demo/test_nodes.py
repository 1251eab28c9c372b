"""The demo's nodes: what each tier holds is measured while others write there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tiercheck.demo.nodes import occupied

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
