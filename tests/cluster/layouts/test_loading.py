"""A job of any framework goes on with another model, from what each tensor of it was saved as."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from tests.forks import Forks, tail

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]


@pytest.fixture(scope="module")
def reports(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank says, by pair of frameworks."""
    directory = tmp_path_factory.mktemp("loading")
    log = directory / "log"
    codes = forks.run("tests.cluster.layouts.loading_worker", directory, ranks=2, log=log)
    assert codes == [0, 0], tail(log)
    return [json.loads((directory / f"r{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("pair", ["zero3:zero1-bf16", "ddp:fsdp"])
def test_what_fits_is_loaded_and_the_rest_is_what_the_script_made(reports: list[dict[str, Any]], pair: str) -> None:
    for report in (each[pair] for each in reports):
        saved, first = report["saved"], report["first"]
        made, loaded = first["made"], first["loaded"]
        for name in ("weight", "bias"):
            for what in ("", "exp_avg", "exp_avg_sq"):
                assert loaded[f"first.{name} {what}"] == saved[f"0.{name} {what}"], what
            assert loaded[f"head.{name} "] == made[f"head.{name} "]
        assert loaded["thawed.weight "] == saved["1.weight "] != made["thawed.weight "]
        assert loaded["middle.seen "] == saved["2.seen "]
        assert first["version"] == 6
        assert first["recovery"]["fidelity"] == "approximate"
        fit = first["recovery"]["fit"]
        assert fit["kept"] == ["head.bias", "head.weight"]
        assert fit["dropped"] == ["3.bias", "3.weight"]
        assert fit["restarted"] == ["thawed.weight"]
        assert ["0.weight", "first.weight"] in fit["renamed"]


@pytest.mark.parametrize("pair", ["zero3:zero1-bf16", "ddp:fsdp"])
def test_the_next_restart_loads_what_the_job_has_saved_itself(reports: list[dict[str, Any]], pair: str) -> None:
    for report in (each[pair] for each in reports):
        first, again = report["first"], report["again"]
        assert (again["version"], again["recovery"]["fit"]) == (7, None)
        assert again["recovery"]["fidelity"] == "exact", again["notes"]
        assert again["loaded"] == first["end"]
