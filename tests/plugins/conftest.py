"""TierCheck and its plug-ins, installed as wheels once for all tests of this folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.outside import PLUGINS, ROOT, Outside, install


@pytest.fixture(scope="package")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("installed") / "site"
    plugins = ("tiercheck-template", "tiercheck-obstore", "tiercheck-transformers")
    install(site, ROOT, *(PLUGINS / name for name in plugins))
    return site


@pytest.fixture
def outside(site: Path) -> Iterator[Outside]:
    # In memory: the kits make thousands of files, and each waits for its fsync.
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="elsewhere-") as folder:
        yield Outside(site, Path(folder))
