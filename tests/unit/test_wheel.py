"""What an installation brings along."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BARE = """
import sys
sys.path.insert(0, sys.argv[1])
import tiercheck
from tiercheck.tiers.registry import schemes
print(tiercheck.__file__, *schemes())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = directory.glob("*.whl")
    return wheel


def test_the_wheel_installs_one_package_and_nothing_beside_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        top = {name.partition("/")[0] for name in archive.namelist()}
    assert top == {"tiercheck", "tiercheck-0.1.0.dist-info"}


def test_a_wheel_alone_imports_and_lists_its_drivers(wheel: Path, tmp_path: Path) -> None:
    """Beside it there is only Python's own library: no extra, and no requirement either."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    command = [sys.executable, "-I", "-S", "-c", BARE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    drivers = ["fsspec", "lustre", "memory", "nvme", "peer", "s3", "shm"]
    assert done.stdout.split() == [str(tmp_path / "tiercheck" / "__init__.py"), *drivers]


def test_the_benchmarks_are_run_from_the_repository() -> None:
    command = [sys.executable, "-m", "benchmarks", "--help"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120)
    assert "tiers" in done.stdout
