"""What the tests' own run says last when it breaks off."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
CONFTEST = """
import pytest
from tests import breaking_off

def pytest_configure(config):
    breaking_off.listen(config)

def pytest_runtest_logstart(nodeid):
    if nodeid.endswith("test_second") and not hasattr(pytest, "controller"):
        pytest.fail("raised between two tests")

def pytest_configure_node():
    pytest.controller = True
"""
TESTS = """
def test_first():
    assert 1 == 2, "what did not hold"

def test_second(): pass
def test_third(): pass
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_the_cause_and_what_had_failed_come_last(tmp_path: Path, workers: int) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)]
    command += [f"-n{workers}"] if workers else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == pytest.ExitCode.INTERNAL_ERROR, done.stdout
    _, _, words = done.stdout.rpartition("the run broke off")
    assert len(words.splitlines()) < 20
    assert "Failed: raised between two tests" in words
    assert "failed before: 1" in words
    assert "test_first (call): AssertionError: what did not hold" in words
    assert "test_second" in words.partition("under way: ")[2]
