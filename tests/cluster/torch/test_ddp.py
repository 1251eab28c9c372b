"""DistributedDataParallel over gloo: ranks fail, come back, and train on to the same bits."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.forks import Forks, tail

pytestmark = pytest.mark.cluster


RANKS = 3
"""The fewest for whom the order of a sum matters."""


@pytest.fixture(scope="module")
def reports(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """By rank."""
    directory = tmp_path_factory.mktemp("ddp")
    log = directory / "log"
    codes = forks.run("tests.cluster.torch.ddp_worker", directory, ranks=RANKS, log=log)
    assert codes == [0] * RANKS, tail(log)
    return [json.loads((directory / f"r{rank}.json").read_text()) for rank in range(RANKS)]


def test_ranks_resume_bit_for_bit(reports: list[Any]) -> None:
    """In whichever order DDP adds up what more than two ranks have."""
    for report in reports:
        assert {key: each for key, each in report["plain"].items() if key != "stored"} == {
            "recovered": 7,
            "same": True,
            "version": 11,
            "fidelity": "exact",
            "notes": [],
        }


def test_each_parameter_is_stored_by_one_rank(reports: list[Any]) -> None:
    """With which all of them go on."""
    names = [f"module.{layer}.{name}" for layer in (0, 1, 3, 4) for name in ("bias", "weight")]
    for kind in ("plain", "static"):
        assert sorted(name for report in reports for name in report[kind]["stored"]) == names


def test_an_order_that_cannot_be_kept_is_approximate(reports: list[Any]) -> None:
    for each in reports:
        report = each["static"]
        assert (report["recovered"], report["version"], report["fidelity"]) == (7, 11, "approximate")
        assert report["notes"] == [
            "DDP sums the gradients of the first step after a restart in another order, which static_graph=True leaves "
            "no way around; static_graph=False does"
        ]
