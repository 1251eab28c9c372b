"""The demo's nodes: what each tier holds is measured while others write there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tiercheck.demo.nodes import occupied

PAGE = 4096


def test_the_size_of_a_tier_is_told_while_its_folders_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for generation in ("g000001", "g000002"):
        (tmp_path / generation / "base").mkdir(parents=True)
        (tmp_path / generation / "base" / "0.safetensors").write_bytes(bytes(10 * PAGE))
        (tmp_path / generation / "base" / "0.safetensors.part").write_bytes(bytes(5 * PAGE))
        with (tmp_path / generation / "base" / "sparse").open("wb") as sparse:
            sparse.truncate(100 * PAGE)
    assert occupied(tmp_path) == 30 * PAGE, "what is being written counts, and what is not there does not"
    assert occupied(tmp_path / "none") == 0
    scandir = os.scandir

    def deleting(path: Any) -> Iterator[Any]:
        if path == str(tmp_path / "g000001"):
            shutil.rmtree(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", deleting)
    assert occupied(tmp_path) == 15 * PAGE
