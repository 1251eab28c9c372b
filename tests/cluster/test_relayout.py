"""What some ranks saved is resumed by others, under another framework too: every bit, at a differential's version."""

from __future__ import annotations

import importlib.util
import json
import signal
from typing import Any

import pytest

from tests.forks import Forks

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]

PAIRS = {
    1: ("3-zero1:zero1", "2-zero3:ddp", "3-fsdp:zero0", "2-zero3-bf16:zero1-bf16"),
    2: ("2-zero1:zero3", "3-zero2:fsdp", "1-ddp:zero1", "3-zero3:zero2", "2-zero0:ddp", "1-fsdp:fsdp"),
    3: ("1-zero3:zero3", "2-ddp:ddp", "2-fsdp:zero3", "1-zero2:ddp", "3-ddp:fsdp", "2-zero1-bf16:zero3-bf16"),
}
"""By the number of ranks that resume: how many ranks saved, under what, and under what they resume."""
SAVED_AT = 6


@pytest.fixture(scope="module")
def reports(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By number of ranks, what each says."""
    directory = tmp_path_factory.mktemp("relayout")
    for ranks in PAIRS:
        log = directory / f"save-{ranks}"
        codes = forks.run("tests.cluster.relayout_worker", "save", directory, ranks=ranks, log=log)
        assert set(codes) <= {-signal.SIGKILL}, log.read_text()[-4000:]
    found = {}
    for ranks, pairs in PAIRS.items():
        log = directory / f"resume-{ranks}"
        codes = forks.run("tests.cluster.relayout_worker", "resume", directory, *pairs, ranks=ranks, log=log)
        assert codes == [0] * ranks, log.read_text()[-4000:]
        found[ranks] = [json.loads((directory / f"{ranks}-r{rank}.json").read_text()) for rank in range(ranks)]
    return found


@pytest.mark.parametrize(("ranks", "pair"), [(ranks, pair) for ranks, pairs in PAIRS.items() for pair in pairs])
def test_every_bit_is_resumed(reports: dict[int, list[dict[str, Any]]], ranks: int, pair: str) -> None:
    for report in (each[pair] for each in reports[ranks]):
        assert report["differing"] == [], report["detail"]
        assert (report["version"], report["fidelity"]) == ([SAVED_AT] * 3, "exact"), report["notes"]
        assert report["after"] == SAVED_AT + 1
