"""What is installed is read once, whatever is asked for."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tiercheck import entry_points as module
from tiercheck.entry_points import EntryPointGroup

TIERS = EntryPointGroup("tiercheck.tiers", "driver")
CODECS = EntryPointGroup("tiercheck.codecs", "codec")


def test_all_groups_share_one_look_at_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def counted(**asked: str) -> object:
        looks.append(asked)
        return entry_points(**asked)

    monkeypatch.setattr(module, "entry_points", counted)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])  # another path: nothing is known of it
    assert TIERS.names()["shm"] == CODECS.names()["exact"] == "tiercheck"
    assert TIERS.find("nvme").name == "nvme"
    assert looks == [{}]


def test_what_is_installed_later_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert "later" not in CODECS.names()
    info = tmp_path / "later-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: later\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[tiercheck.codecs]\nlater = later:Codec\n")
    assert CODECS.names()["later"] == "later"
    assert "later" not in TIERS.names()
