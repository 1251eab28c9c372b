"""Demos, one after the other, in a process that has everything imported. The arguments: a directory, and their names.

Writes ``DIRECTORY/NAME.json`` for each: the result, as the command line prints it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tests.cluster.forked_ranks import fork_ranks
from tiercheck.demo.failure import Failure
from tiercheck.demo.run import DemoOptions, run_demo

__all__ = ["SMALL"]

SMALL = {"steps": 44, "width": 64, "heads": 2, "layers": 2, "sequence": 64, "batch": 5}


DEMOS = {
    "software": DemoOptions(Failure.SOFTWARE, seed=11, **SMALL),
    "node": DemoOptions(Failure.NODE, seed=12, zero=3, dtype="bf16", **SMALL),
    "other-ranks": DemoOptions(Failure.SOFTWARE, seed=14, zero=2, resume_on=3, **SMALL),
}


def main() -> None:
    directory = Path(sys.argv[1])
    for name in sys.argv[2:]:
        options = replace(DEMOS[name], output=directory / name)
        result = run_demo(options, Console(stderr=True), start=fork_ranks)
        (directory / f"{name}.json").write_text(json.dumps(result.to_object()))
