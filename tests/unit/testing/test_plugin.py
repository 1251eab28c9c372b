"""The pytest plug-in's report: what it says of a driver, and that it says it whole."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tiercheck.testing.conformance import TierDriverTests
from tiercheck.testing.plugin import (
    CAPABILITY,
    CERTIFIES,
    CRASHED,
    DRIVER,
    FILLED,
    KILLED,
    KIT,
    OTHER_CLIENT,
    OWN,
    UNJOINED,
    WHOLE,
    CertificationReport,
    kit_tests,
    times,
)

CLAIMS = [(DRIVER, "x://y"), (f"{CAPABILITY}mappable", "False"), (f"{CAPABILITY}survives", "RACK")]
WHOLE_KIT = (WHOLE, json.dumps({"test_a": 1, "test_b": 2}))
DEATHS = ((OTHER_CLIENT, "another process"), (CRASHED, "before it published"), (KILLED, "kill -9"))
BOUNDS = ((UNJOINED, "64 bytes"), (FILLED, "64 bytes"))


def outcome(
    report: CertificationReport,
    name: str,
    result: str,
    *certifies: str,
    kit: str = "TestX",
    when: str = "call",
    shown: Sequence[tuple[str, str]] = (*DEATHS, *BOUNDS),
) -> None:
    own = [(OWN, name.partition("[")[0])] if name.startswith(("test_a", "test_b")) else []
    report.pytest_runtest_logreport(
        pytest.TestReport(
            f"test_x.py::{kit}::{name}",
            ("test_x.py", 1, name),
            {},
            result,  # type: ignore[arg-type]
            None,
            when,  # type: ignore[arg-type]
            user_properties=[
                (KIT, kit),
                WHOLE_KIT,
                *own,
                *((CERTIFIES, flag) for flag in certifies),
                *CLAIMS,
                *shown,
            ],
        )
    )


def lines(report: CertificationReport) -> list[str]:
    return [line for name, found in sorted(report.found.items()) for line in found.lines(name)]


def test_a_driver_that_passes_is_certified() -> None:
    report = CertificationReport()
    outcome(report, "test_a", "passed", "mappable")
    outcome(report, "test_b[1]", "passed", "mappable")
    outcome(report, "test_b[2]", "passed", "mappable")
    outcome(report, "test_the_author_s_own", "passed")
    outcome(report, "test_a", "passed", when="setup")
    outcome(report, "test_a", "passed", when="teardown")
    assert lines(report) == [
        "test_x.py TestX (x://y): certified, 4 passed",
        "  mappable = False: is refused as Unsupported, in 3 tests",
        "  on the author's word: survives = RACK, durability (no test cuts the power)",
    ]


@pytest.mark.parametrize(
    ("left_out", "says"), [(UNJOINED, "payloads are not joined"), (FILLED, "what a full tier says")]
)
def test_a_bound_that_was_not_reached_is_on_the_authors_word(left_out: str, says: str) -> None:
    report = CertificationReport()
    outcome(report, "test_a", "passed", shown=[each for each in (*DEATHS, *BOUNDS) if each[0] != left_out])
    (word,) = [line for line in lines(report) if line.startswith("  on the author's word: ")]
    assert says in word


@pytest.mark.parametrize("names", [("test_a",), ("test_a", "test_b[1]"), ("test_b[1]", "test_b[2]"), ("test_other",)])
def test_a_part_of_the_kit_certifies_nothing(names: tuple[str, ...]) -> None:
    report = CertificationReport()
    for name in names:
        outcome(report, name, "passed")
    assert lines(report)[0] == f"test_x.py TestX (x://y): not certified whole, {len(names)} passed"
    assert "of the kit's 2 tests did not pass whole: test_" in lines(report)[-1]


@pytest.mark.parametrize(
    ("shown", "verdict", "remarks"),
    [
        (DEATHS, "certified", []),
        ((DEATHS[0], DEATHS[2]), "certified", ["a death right between write and publish"]),
        (
            ((OTHER_CLIENT, "another thread"), DEATHS[1]),
            "certified within one process only",
            ["atomicity and conditions against another process (the other client was in another thread)"],
        ),
        (
            ((OTHER_CLIENT, "another thread"),),
            "not certified whole",
            ["atomicity and conditions against another process", "a death right between write and publish"],
        ),
    ],
)
def test_what_was_not_staged_is_said(shown: tuple[tuple[str, str], ...], verdict: str, remarks: list[str]) -> None:
    report = CertificationReport()
    for name in ("test_a", "test_b[1]", "test_b[2]"):
        outcome(report, name, "passed", shown=shown)
    found = lines(report)
    assert f": {verdict}, 3 passed" in found[0]
    said = [line for line in found if line.startswith("  not shown: ")]
    assert len(said) == len(remarks)
    for line, remark in zip(said, remarks, strict=True):
        assert line.startswith(f"  not shown: {remark}")


def test_what_a_failed_test_staged_shows_nothing() -> None:
    report = CertificationReport()
    for name in ("test_a", "test_b[1]", "test_b[2]"):
        outcome(report, name, "failed")
    assert any("another process" in line for line in lines(report))


def test_the_kit_s_tests_are_known_whatever_a_subclass_makes_of_them() -> None:
    class Cut(TierDriverTests):
        test_create = None  # type: ignore[assignment]

        async def test_update(self) -> None:  # type: ignore[override]
            """Says that all is well."""

        async def test_my_own(self) -> None:
            """No part of the kit."""

    whole = kit_tests(Cut)
    assert whole == kit_tests(TierDriverTests)
    assert whole["test_create"] == whole["test_update"] == 1
    assert "test_my_own" not in whole


def test_a_test_of_the_kit_with_parameters_runs_once_for_each() -> None:
    @pytest.mark.parametrize("n", range(3))
    @pytest.mark.parametrize("name", ["a", "b"])
    def test_many() -> None: ...

    assert times(test_many) == 6


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
    assert "word: mappable = False" in lines(report)[1], "a skipped test holds nothing to its word"


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


CUT_TEST = """
from tiercheck.testing.conformance import TierDriverTests
from tiercheck.tiers.memory import MemoryDriver

class TestCut(TierDriverTests):
    test_create = None
    async def test_update(self): ...
    async def make_driver(self): return MemoryDriver("cut")
    async def second_client(self, driver): return MemoryDriver("cut")
    async def raw_get(self, driver, key): return None
    async def raw_put(self, driver, key, content): ...
    def crash_before_publish(self, driver): return None
"""


def run_authors_tests(folder: Path, processes: int) -> str:
    """What pytest says of them, with nothing configured: the kit's marks work without asyncio_mode."""
    (folder / "test_cut.py").write_text(CUT_TEST)
    (folder / "test_mine.py").write_text(AUTHORS_TEST)
    select = (
        "TestCut and (test_update or test_create or test_into_must) or TestMine and (test_reserve_and or test_create)"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(processes), "-k", select, "--strict-markers"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    return done.stdout


@pytest.mark.parametrize("processes", [0, 2])
def test_the_report_says_what_failed_and_what_an_author_replaced(tmp_path: Path, processes: int) -> None:
    """Reports of several processes, by pytest-xdist, are one."""
    pytest.importorskip("xdist")
    said = run_authors_tests(tmp_path, processes)
    whole = kit_tests(TierDriverTests)
    assert "TestCut (memory://cut): not certified whole, 2 passed" in said
    assert f"{len(whole) - 1} of the kit's {len(whole)} tests did not pass whole" in said
    assert "test_mine.py TestMine (memory://mine): NOT certified, 0 passed, 2 failed" in said
    assert "mappable = True: broken in 1 of 1 tests" in said
    assert "None == b'first'" in said, "the kit's assertions explain themselves"
