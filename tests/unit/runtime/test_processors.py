"""How many processors this process may use."""

from __future__ import annotations

import os
from pathlib import Path

from tiercheck.runtime.processors import processors


def test_a_control_group_bounds_them(tmp_path: Path) -> None:
    bound = len(os.sched_getaffinity(0))
    own = tmp_path / "own"
    own.write_text("1:cpu:/old\n0::/pod/container\n")
    assert processors(tmp_path / "root", own) == bound
    pod = tmp_path / "root/pod"
    (pod / "container").mkdir(parents=True)
    (pod / "container/cpu.max").write_text("max 100000\n")
    assert processors(tmp_path / "root", own) == bound
    (pod / "cpu.max").write_text("150000 100000\n")
    assert processors(tmp_path / "root", own) == 1, "one and a half"
    assert processors(tmp_path / "root", tmp_path / "none") == bound
