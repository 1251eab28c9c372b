"""Launches of ranks that run many checks, and what each check found."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.forks import Forks, tail

__all__ = ["LAUNCH_SECONDS_MAX", "MARKS", "Results", "holds", "launch"]

LAUNCH_SECONDS_MAX = 240
MARKS = [
    pytest.mark.cluster,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
    pytest.mark.timeout(LAUNCH_SECONDS_MAX + 30),
]


@dataclass(frozen=True)
class Results:
    """What a launch found."""

    ranks: list[dict[str, list[str]]]
    """What did not hold in each check, for each rank."""
    ending: list[str]
    """If a rank failed, how the launch ended and what it printed last, until the first check that fails has said so."""

    def __getitem__(self, rank: int) -> dict[str, list[str]]:
        return self.ranks[rank]


def launch(forks: Forks, directory: Path, program: str, *checks: str, ranks: int) -> Results:
    """Run the checks on all ranks: ``program`` is a module beside this one. It gets the directory and the checks, and
    writes what each rank found to ``r{rank}.json``."""
    log = directory / "log"
    module = f"tests.cluster.deepspeed.{program}"
    codes = forks.run(module, directory, *checks, ranks=ranks, log=log, deadline_s=LAUNCH_SECONDS_MAX)
    files = [directory / f"r{rank}.json" for rank in range(ranks)]
    ending = [f"the launch ended with {codes}:\n{tail(log)}"] if any(codes) else []
    if not all(file.exists() for file in files):
        pytest.fail("\n".join(["before its first check", *ending]))
    return Results([json.loads(file.read_text()) for file in files], ending)


def holds(results: Results, check: str) -> None:
    """Fails with a line for each thing that did not hold, on any rank; and, once, how the launch failed."""
    lines = []
    for rank, checks in enumerate(results.ranks):
        found = checks.get(check, [f"never ran; the last one that did was {list(checks)[-1]}"])
        lines += [f"rank {rank}: {failure}" for failure in found[:20]]
    if lines:
        if results.ending:
            lines.append(results.ending.pop())
        pytest.fail("\n".join(lines), pytrace=False)  # whole: an assertion would show its ends alone
