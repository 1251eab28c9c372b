"""DeepSpeed's own ``load_checkpoint`` reads what is exported for it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.forks import Forks, tail

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]


def test_engines_of_other_stages_load_what_is_exported(forks: Forks, tmp_path: Path) -> None:
    log = tmp_path / "log"
    codes = forks.run("tests.cluster.layouts.universal_worker", tmp_path, ranks=2, log=log)
    assert codes == [0, 0], tail(log)
    for rank in range(2):
        reports = json.loads((tmp_path / f"r{rank}.json").read_text())
        assert len(reports) == 5
        for pair, report in reports.items():
            assert (report["version"], report["fidelity"], report["frozen"]) == (6, "exact", True)
            # What is not trained is in a file that universal checkpoints are not loaded from.
            differing = [name for name in report["differing"] if not name.startswith("1.weight ")]
            assert differing == (["options", "schedule"] if pair.endswith("zero3") else []), pair
