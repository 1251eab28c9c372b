"""What the tests of several rooms start from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.archived import Left


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Left:
    """A finished job, not to be changed."""
    from tests.archived import finish  # brings torch, which most tests of the drivers do without

    return finish(tmp_path_factory.mktemp("archived") / "run")


@pytest.fixture
def left(finished: Left, tmp_path: Path) -> Left:
    """A copy of it, to be damaged."""
    from tests.archived import Left

    shutil.copytree(finished.root, tmp_path / "run")
    return Left(tmp_path / "run", finished.weights)
