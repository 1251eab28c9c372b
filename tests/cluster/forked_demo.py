"""Demos, one after the other, in a process that has everything imported: the argument is a directory.

Writes ``DIRECTORY/{software,node,elsewhere}.json``: the results, as the command line prints them.
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


def main() -> None:
    directory = Path(sys.argv[1])
    for name, options in {
        "software": DemoOptions(Failure.SOFTWARE, seed=11, **SMALL),
        "node": DemoOptions(Failure.NODE, seed=12, zero=3, dtype="bf16", **SMALL),
        "elsewhere": DemoOptions(Failure.SOFTWARE, seed=14, zero=2, resume_on=3, **SMALL),
    }.items():
        result = run_demo(replace(options, output=directory / name), Console(stderr=True), start=fork_ranks)
        (directory / f"{name}.json").write_text(json.dumps(result.to_object()))
