"""Demos, one after the other, in a process that has everything imported. The arguments: a directory, and their names.

Writes ``DIRECTORY/NAME.json`` for each: the result, as the command line prints it. With ``command`` and words in the
place of names, the command line runs with these words; its ranks that recover are started by torchrun, as a user's are.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
from rich.console import Console

from tests.cluster.forked_ranks import fork_ranks
from tests.forks import ADDRESS
from tests.servers.agents import EAGER
from tiercheck import cli
from tiercheck.demo import launch
from tiercheck.demo.failure import Failure
from tiercheck.demo.run import DemoOptions, run_demo

__all__ = ["SMALL"]

torchrun = launch.torchrun

SMALL = {"steps": 26, "width": 64, "heads": 2, "layers": 2, "sequence": 64, "base_every": 8, "batch": 4}


DEMOS = {
    "software": DemoOptions(Failure.SOFTWARE, seed=11, **SMALL),
    "node": DemoOptions(Failure.NODE, seed=12, zero=3, dtype="bf16", **SMALL),
    "other-ranks": DemoOptions(Failure.SOFTWARE, seed=14, zero=2, resume_on=3, **SMALL),
    "stage": DemoOptions(
        Failure.STAGE,
        seed=16,
        pipeline=4,
        on_lost_stage="neighbours",
        **{**SMALL, "steps": 16, "base_every": 4, "batch": 2, "layers": 4},
    ),
    "fewer-ranks": DemoOptions(Failure.SOFTWARE, seed=15, zero=1, resume_on=1, **SMALL),
}


def main() -> None:
    if sys.argv[1] == "command":
        sys.argv[1:] = sys.argv[2:]
        del os.environ[ADDRESS]  # the processes that fold are real ones
        launch.torchrun = last_by_torchrun
        cli.main()
    else:
        run_demos()


def last_by_torchrun(ranks: int, arguments: Sequence[str], log: Path, variables: Mapping[str, str]) -> psutil.Process:
    """Two of the three starts of a demo are forked: an interpreter needs seconds to import DeepSpeed."""
    return (torchrun if log.parent.name == "second" else fork_ranks)(ranks, arguments, log, variables)


def run_demos() -> None:
    directory = Path(sys.argv[1])
    sys.path.insert(0, str(EAGER))  # what is to be in a neighbour's memory is brought there by an agent
    for name in sys.argv[2:]:
        options = replace(DEMOS[name], output=directory / name)
        result = run_demo(options, Console(stderr=True), start=fork_ranks)
        (directory / f"{name}.json").write_text(json.dumps(result.to_object()))
