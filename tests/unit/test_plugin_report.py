"""The pytest plug-in's report: what it says of a driver, and that it says it whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tiercheck.testing.plugin import CAPABILITY, CERTIFIES, DRIVER, KIT, CertificationReport

CLAIMS = [(DRIVER, "x://y"), (f"{CAPABILITY}mappable", "False"), (f"{CAPABILITY}survives", "RACK")]


def outcome(
    report: CertificationReport, name: str, result: str, *certifies: str, kit: str = "TestX", when: str = "call"
) -> None:
    report.pytest_runtest_logreport(
        pytest.TestReport(
            f"test_x.py::{kit}::{name}",
            ("test_x.py", 1, name),
            {},
            result,  # type: ignore[arg-type]
            None,
            when,  # type: ignore[arg-type]
            user_properties=[(KIT, kit), *((CERTIFIES, flag) for flag in certifies), *CLAIMS],
        )
    )


def lines(report: CertificationReport) -> list[str]:
    return [line for name, found in sorted(report.found.items()) for line in found.lines(name)]


def test_a_driver_that_passes_is_certified() -> None:
    report = CertificationReport()
    outcome(report, "test_a", "passed", "mappable")
    outcome(report, "test_b", "passed", "mappable")
    outcome(report, "test_c", "passed")
    outcome(report, "test_c", "passed", when="setup")
    outcome(report, "test_c", "passed", when="teardown")
    assert lines(report) == [
        "test_x.py TestX (x://y): certified, 3 passed",
        "  mappable = False: is refused as Unsupported, in 2 tests",
        "  on the author's word: survives = RACK",
    ]


def test_one_that_fails_is_not() -> None:
    report = CertificationReport()
    outcome(report, "test_a", "failed", "mappable")
    outcome(report, "test_b", "passed", "mappable")
    assert lines(report)[:2] == [
        "test_x.py TestX (x://y): NOT certified, 1 passed, 1 failed",
        "  mappable = False: broken in 1 of 2 tests",
    ]


@pytest.mark.parametrize("when", ["setup", "teardown"])
def test_an_error_around_a_test_is_a_failure(when: str) -> None:
    report = CertificationReport()
    outcome(report, "test_a", "passed")
    outcome(report, "test_a", "failed", when=when)
    assert "NOT certified" in lines(report)[0]


def test_one_with_tests_skipped_is_not_certified_whole() -> None:
    report = CertificationReport()
    outcome(report, "test_a", "skipped", "mappable")
    outcome(report, "test_b", "passed")
    assert lines(report)[0] == "test_x.py TestX (x://y): not certified whole, 1 passed, 1 skipped"
    assert "mappable = False" in lines(report)[-1], "a skipped test holds nothing to its word"


def test_tests_of_others_are_no_part_of_it() -> None:
    report = CertificationReport()
    report.pytest_runtest_logreport(pytest.TestReport("t.py::t", ("t.py", 1, "t"), {}, "failed", None, "call"))
    assert report.found == {}


AUTHORS_TEST = """
import contextlib
from tiercheck.testing.conformance import TierDriverTests
from tiercheck.tiers.memory import MemoryDriver

class TestMine(TierDriverTests):
    async def make_driver(self): return MemoryDriver("mine")
    async def second_client(self, driver): return MemoryDriver("mine")
    async def raw_get(self, driver, key): return None
    async def raw_put(self, driver, key, content): ...
    def crash_before_publish(self, driver): return None
"""


def test_reports_of_several_processes_are_one(tmp_path: Path) -> None:
    """With pytest-xdist, and with nothing configured: the kit's marks work without asyncio_mode."""
    pytest.importorskip("xdist")
    (tmp_path / "test_mine.py").write_text(AUTHORS_TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-k", "test_reserve_and or test_create or test_closed"]
    done = subprocess.run(
        [*command, "--strict-markers"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "test_mine.py TestMine (memory://mine): NOT certified, 0 passed, 2 failed" in done.stdout
    assert "mappable = True: broken in 1 of 1 tests" in done.stdout
    assert "None == b'first'" in done.stdout, "the kit's assertions explain themselves"
