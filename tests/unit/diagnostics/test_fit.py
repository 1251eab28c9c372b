"""Whether a job fits into its tiers, before it is started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tiercheck.cli.commands import app
from tiercheck.config import CheckpointConfig
from tiercheck.diagnostics.doctor import Diagnosis
from tiercheck.diagnostics.fit import JobSize, fit
from tiercheck.errors import ConfigurationError
from tiercheck.types import Capabilities, Survives, Usage

GIB = 1 << 30


def tier(url: str, survives: Survives, room: int | None = None) -> Diagnosis:
    return Diagnosis(url, capabilities=Capabilities(survives), usage=Usage(0, room))


SHM = tier("shm://run", Survives.PROCESS, 600 * GIB)
PEER = tier("peer://run?at=10.0.0.2:7070", Survives.NODE, 600 * GIB)
NVME = tier("nvme:///y?survives=rack", Survives.RACK)
JOB = JobSize(7 * 10**9 // 8, ranks=8, nodes=2, gradient_nbytes=2)


def test_each_tier_is_told_in_bytes_a_parameter() -> None:
    rooms = fit(JOB, [SHM, PEER, NVME])
    assert [(each.name, each.ranks) for each in rooms] == [("shm", 8), ("peer", 8), ("nvme", 16)]
    told = [(each.a_parameter(each.least_nbytes), each.a_parameter(each.usual_nbytes)) for each in rooms]
    assert told == [("52", "40"), ("142", "130"), ("140", "252")]
    assert [each.holds_least for each in rooms] == [True, False, True]
    captured = fit(replace(JOB, folds=False), [SHM, NVME])[0]
    assert captured.a_parameter(captured.least_nbytes) == "142"


def test_of_a_tier_that_was_not_opened_nothing_can_be_said() -> None:
    with pytest.raises(ConfigurationError, match=r"nvme:///y.* could not be opened"):
        fit(JOB, [SHM, Diagnosis("nvme:///y")])


def test_the_doctor_says_what_each_tier_will_hold(tmp_path: Path) -> None:
    urls = [f"memory://fit-{tmp_path.name}?size=64MiB", f"nvme://{tmp_path}/run?survives=rack"]
    options = ["--measure-s", "0", "--parameters", "1e6", "--ranks", "2"]
    told = CliRunner().invoke(app, ["doctor", *urls, *options])
    assert "what each tier will hold:" in told.output
    assert "68 / 56" in told.output
    assert "no room" in told.output, told.output
    assert told.exit_code == 1
    fewer = CliRunner().invoke(app, ["doctor", *urls, *options[:-1], "1", "--captures", "--base-every", "5", "--json"])
    assert [each["holds"] for each in json.loads(fewer.stdout)] == [
        {"least": 68 * 10**6, "usual": 56 * 10**6, "ranks": 1},
        {"least": 76 * 10**6, "usual": 108 * 10**6, "ranks": 1},
    ]


def test_the_doctor_takes_bases_for_made_as_a_job_with_the_defaults_makes_them(tmp_path: Path) -> None:
    assert JobSize(1).folds is (CheckpointConfig().bases != "capture")
    urls = [f"memory://fit-{tmp_path.name}?size=64MiB", f"nvme://{tmp_path}/run?survives=rack"]
    options = ["--measure-s", "0", "--parameters", "1e6", "--json"]
    told = [CliRunner().invoke(app, ["doctor", *urls, *options, *more]).stdout for more in ([], ["--folds"])]
    first, second = ([each["holds"] for each in json.loads(each)] for each in told)
    assert first == second


def test_the_doctor_says_which_tier_keeps_it_from_saying_what_they_will_hold(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    urls = [f"memory://fit-{tmp_path.name}?size=64MiB", f"nvme://{tmp_path}/file/run?survives=rack"]
    options = ["--measure-s", "0", "--parameters", "1e6"]
    told = CliRunner().invoke(app, ["doctor", *urls, *options])
    assert told.exit_code == 1
    said = "".join(told.output.split())  # lines are wrapped anywhere
    assert "whateachtierwillholdcannotbesaid:nvme://" in said
    assert "/file/run?survives=rackcouldnotbeopened" in said
    as_json = CliRunner().invoke(app, ["doctor", *urls, *options, "--json"])
    assert "holds" not in json.loads(as_json.stdout)[0]
    assert "cannot be said" in as_json.stderr
