"""A model that torch divides between ranks, by tensor parallelism or in stages, goes on when divided otherwise."""

from __future__ import annotations

import importlib.util
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Forks, tail

pytestmark = pytest.mark.cluster

WORKER = "tests.cluster.layouts.parallel_worker"
KINDS = ("tp", "tp-adam", "fsdp-tp", "pp")
PAIRS = {
    4: ("4-tp:tp", "4-tp-adam:tp-adam", "4-fsdp-tp:fsdp-tp", "4-pp:pp"),
    2: ("4-tp:tp", "4-pp:pp", "4-fsdp-tp:pp", "4-pp:tp", "4-tp:fsdp"),
}
"""By number of ranks that resume, what was saved and what goes on."""
SAVED_AT = 6


DEEPSPEED = {
    "pipeline": (("pipeline-of-2", 2), ("pipeline-of-3", 3)),
    "tensor-parallel": (("tensor-parallel", 2), ("plain", 1)),
    "sequence-parallel": (("sequence-parallel-of-1", 2), ("plain", 1)),
    "sequence-parallel-under-zero-3": (("sequence-parallel-of-3", 2), ("sequence-parallel-of-3", 2)),
}
"""What saves, and what goes on; each with its number of ranks."""


@pytest.fixture(scope="module")
def reports(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("parallel")

    def launch(ranks: int, *arguments: str | Path) -> tuple[list[int], str]:
        log = directory / f"log-{arguments[0]}-{ranks}"
        return forks.run(WORKER, *arguments, ranks=ranks, log=log), tail(log)

    codes, log = launch(4, "save", directory, *KINDS)
    assert set(codes) <= {-signal.SIGKILL}, log
    found: dict[int, list[dict[str, Any]]] = {}
    for ranks, pairs in PAIRS.items():
        codes, log = launch(ranks, "resume", directory, *pairs)
        assert codes == [0] * ranks, log
        found[ranks] = [json.loads((directory / f"{ranks}-r{rank}.json").read_text()) for rank in range(ranks)]
    return found


@pytest.mark.parametrize(("ranks", "pair"), [(ranks, pair) for ranks, pairs in PAIRS.items() for pair in pairs])
def test_every_bit_is_resumed(reports: dict[int, list[dict[str, Any]]], ranks: int, pair: str) -> None:
    """And if the split is the same, training goes on to the same bits."""
    for report in (each[pair] for each in reports[ranks]):
        assert (report["version"], report["fidelity"]) == (SAVED_AT, "exact"), report["notes"]
        assert report["differing"] == []
        assert report["after"] == []


def test_a_step_on_summands_is_refused_if_it_is_no_step_on_their_sum(reports: dict[int, list[dict[str, Any]]]) -> None:
    """``SequenceParallel`` leaves the sum over the slices to the optimizer's step; what is captured is the sum."""
    found = reports[4][0]["summing"]
    assert {bool(same) for _, _, same in found} == {True, False}
    assert [what for what, said, same in found if said != same] == []


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize("split", DEEPSPEED)
def test_deepspeeds_pipelines_and_slices_go_on_divided_otherwise(forks: Forks, tmp_path: Path, split: str) -> None:
    """Layers of a pipeline have the names of the whole model, whatever the stage."""
    states: list[list[dict[str, Any]]] = []
    for what, (kind, ranks) in zip(("save", "resume"), DEEPSPEED[split], strict=True):
        log = tmp_path / f"log-{kind}"
        codes = forks.run(
            "tests.cluster.layouts.parallel_deepspeed", what, tmp_path, kind, "saved", ranks=ranks, log=log
        )
        assert set(codes) <= {-signal.SIGKILL}, tail(log)
        states.append([json.loads((tmp_path / f"{what}-{kind}-{rank}.json").read_text()) for rank in range(ranks)])
    wanted = states[0][0]["state"]
    for report in states[1]:
        assert (report["version"], report["fidelity"]) == (SAVED_AT, "exact"), report["notes"]
        found = report["state"]
        assert [what for what in {**wanted, **found} if wanted.get(what) != found.get(what)] == []
        assert report["after"] == SAVED_AT + 1
