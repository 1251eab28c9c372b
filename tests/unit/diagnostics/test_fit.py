"""Whether a job fits into its tiers, before it is started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.shared_memory import name as name
from tiercheck.cli.commands import app
from tiercheck.diagnostics.doctor import Diagnosis
from tiercheck.diagnostics.fit import JobSize, fit
from tiercheck.errors import ConfigurationError
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.opening.startup import _OpenTiers, _Startup
from tiercheck.types import Capabilities, Survives, Usage

GIB = 1 << 30


def tier(url: str, survives: Survives, room: int | None = None) -> Diagnosis:
    return Diagnosis(url, capabilities=Capabilities(survives), usage=Usage(0, room))


SHM = tier("shm://run", Survives.PROCESS, 600 * GIB)
PEER = tier("peer://run?at=10.0.0.2:7070", Survives.NODE, 600 * GIB)
NVME = tier("nvme:///y?survives=rack", Survives.RACK)
JOB = JobSize(7 * 10**9 // 8, ranks=8, nodes=2, gradient_nbytes=2, folds=True)


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
    options = ["--measure-s", "0", "--parameters", "1e6", "--ranks", "2", "--folds"]
    told = CliRunner().invoke(app, ["doctor", *urls, *options])
    assert "what each tier will hold:" in told.output
    assert "68 / 56" in told.output
    assert "no room" in told.output, told.output
    assert told.exit_code == 1
    fewer = CliRunner().invoke(app, ["doctor", *urls, *options[:-2], "1", "--captures", "--base-every", "5", "--json"])
    assert [each["holds"] for each in json.loads(fewer.stdout)] == [
        {"least": 68 * 10**6, "usual": 56 * 10**6, "ranks": 1},
        {"least": 76 * 10**6, "usual": 108 * 10**6, "ranks": 1},
    ]


@pytest.mark.parametrize("scheme", ["shm", "memory"])
@pytest.mark.parametrize("spare", [1, 0])
def test_the_doctor_takes_bases_for_made_as_a_job_with_the_defaults_makes_them(
    tmp_path: Path, name: str, scheme: str, spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It folds in shared memory if a processor is free, and captures else. Both tell the same sums."""
    bound = frozenset(range(1 + spare))
    monkeypatch.setattr("tiercheck.runtime.front.bound_to", lambda: bound)
    monkeypatch.setattr("tiercheck.runtime.processors.bound_to", lambda: bound)
    monkeypatch.setattr("tiercheck.runtime.front.quota", lambda: None)
    monkeypatch.setattr("tiercheck.runtime.processors.quota", lambda *_: None)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    width = 1024  # so that headers and host state, which the doctor does not count, are small
    urls = [f"{scheme}://{name}?size=1GiB", f"nvme://{tmp_path}/run?survives=rack"]
    tiers_opened: list[_OpenTiers] = []
    open_tiers = _Startup.open_tiers

    async def watched(self: _Startup, *arguments: Any) -> Any:
        opened = await open_tiers(self, *arguments)
        tiers_opened.append(opened[0])
        return opened

    monkeypatch.setattr(_Startup, "open_tiers", watched)
    model = torch.nn.Linear(width, width, bias=False)
    attach(model, torch.optim.AdamW(model.parameters()), Hierarchy.of(*urls)).abort()
    (opened,) = tiers_opened
    folds = scheme == "shm" and spare == 1
    assert (opened.folds is not None) is folds, opened.not_folded
    options = ["--measure-s", "0", "--parameters", str(width * width)]
    plain = CliRunner().invoke(app, ["doctor", *urls, *options]).output
    assert "".join(f"bases are taken for {'folded' if folds else 'captured'}".split()) in "".join(plain.split())
    told = json.loads(CliRunner().invoke(app, ["doctor", *urls, *options, "--json"]).stdout)
    assert told[0]["captures"] == opened.not_folded
    for said, room in zip(told, opened.rooms, strict=True):
        for key, nbytes in (("least", room.least_nbytes), ("usual", room.usual_nbytes)):
            assert abs(said["holds"][key] / nbytes - 1) < 0.02, (said, room)


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
