"""What some ranks saved is resumed by others, under another framework too: every bit, at a differential's version."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.cluster.layouts.relayout_pairs import Pair, covering, every, in_fp32
from tests.forks import Forks, tail

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]

WORKER = "tests.cluster.layouts.relayout_worker"
PAIRS = every() if os.environ.get("TIERCHECK_MATRIX") == "full" else covering()
"""``TIERCHECK_MATRIX=full python -m pytest tests/cluster/layouts/test_relayout.py`` runs all of them."""
SAVED_AT = 6
LAUNCH_S_MAX = 240 if len(PAIRS) < 100 else 1800

Reports = Callable[[int], list[dict[str, Any]]]
"""By number of ranks that resume, what each of them says."""


@pytest.fixture(scope="module")
def reports(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    directory = tmp_path_factory.mktemp("relayout")

    @cache
    def save(ranks: int) -> None:
        kinds = sorted({pair.kind for pair in PAIRS if pair.saved_by == ranks})
        log, arguments = directory / f"save-{ranks}", ("save", directory, *kinds)
        codes = forks.run(WORKER, *arguments, ranks=ranks, log=log, deadline_s=LAUNCH_S_MAX)
        assert set(codes) <= {-signal.SIGKILL}, tail(log)

    @cache
    def resume(ranks: int) -> list[dict[str, Any]]:
        pairs = [pair for pair in PAIRS if pair.resumed_by == ranks]
        for saved_by in {pair.saved_by for pair in pairs}:
            save(saved_by)
        log, arguments = directory / f"resume-{ranks}", ("resume", directory, *(pair.name for pair in pairs))
        codes = forks.run(WORKER, *arguments, ranks=ranks, log=log, deadline_s=LAUNCH_S_MAX)
        assert codes == [0] * ranks, tail(log)
        return [json.loads((directory / f"{ranks}-r{rank}.json").read_text()) for rank in range(ranks)]

    return resume


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.name}-{pair.resumed_by}")
def test_every_bit_is_resumed(reports: Reports, pair: Pair) -> None:
    for report in (each[pair.name] for each in reports(pair.resumed_by)):
        assert report["differing"] == [], report["detail"]
        assert (report["version"], report["fidelity"]) == ([SAVED_AT] * 3, "exact"), report["notes"]
        assert report["after"] == SAVED_AT + 1


def test_the_short_form_has_each_framework_with_each_and_all_numbers_of_ranks() -> None:
    pairs = covering()
    assert {fact for pair in pairs for fact in pair.covers()} >= {fact for pair in in_fp32() for fact in pair.covers()}
    assert len({(pair.saved_by, pair.resumed_by) for pair in pairs}) == 16
    assert len(pairs) < 24
    assert len(every()) == 552 + 2
