"""TierCheck and its plug-ins, installed as wheels once for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugins.outside import PLUGINS, ROOT, Outside, install


@pytest.fixture(scope="package")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("installed") / "site"
    install(site, ROOT, PLUGINS / "tiercheck-template", PLUGINS / "tiercheck-obstore")
    return site


@pytest.fixture
def outside(site: Path, tmp_path: Path) -> Outside:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return Outside(site, folder)
