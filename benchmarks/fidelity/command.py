"""``python -m benchmarks fidelity``: what a recovery by each codec restores, and what that costs the training."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine import machine_facts
from benchmarks.report import progress

__all__ = ["add_command"]


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--model", choices=("small", "other-betas", "large"), action="append", help="one alone (all)")
    parser.add_argument("--seeds", type=seeds, default=(1, 2), help="of training, such as 1,2,3 (1,2)")
    parser.add_argument(
        "--scheme", type=names, metavar="NAME,...", help="such as nf4,snapshot: these alone, and no training of its own"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of torch and the kernels")
    parser.add_argument("--quick", action="store_true", help="tiny models and a few steps: does it run at all?")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw error against bits, as SVG or PNG")
    parser.add_argument("--lines", type=Path, metavar="FILE", help="what --json printed before: train nothing")
    parser.add_argument("--markdown", action="store_true", help="the tables as Markdown")
    parser.set_defaults(run=run)


def seeds(text: str) -> tuple[int, ...]:
    found = tuple(int(each) for each in text.split(","))
    if len(set(found)) != len(found) or min(found) < 0:
        raise argparse.ArgumentTypeError(f"{text} are not seeds, each once")
    return found


def names(text: str) -> tuple[str, ...]:
    from tiercheck.streams.codecs import codec_names
    from tiercheck.streams.records.snapshot import SNAPSHOT_CODECS

    found, known = tuple(text.split(",")), ("nothing", *codec_names(), *SNAPSHOT_CODECS)
    if unknown := set(found) - set(known):
        raise argparse.ArgumentTypeError(f"there is no {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    return found


def run(arguments: argparse.Namespace) -> int:
    """Errors: lines that are none of this command's are wrong usage: exit code 2."""
    from benchmarks.fidelity import report
    from benchmarks.fidelity.plot import plot_fidelity

    lines: list[dict[str, Any]] = []
    if arguments.lines is None:
        for line in measured(arguments):
            lines.append(line)
            if arguments.json:
                print(json.dumps(line), flush=True)
    try:
        found = lines or report.read_lines(arguments.lines)
        if arguments.markdown:
            print(report.markdown(found), end="")
        elif not arguments.json:
            report.show(found)
    except (OSError, ValueError) as error:
        progress(f"error: {error}")
        return 2
    if arguments.plot is not None:
        plot_fidelity(arguments.plot, found)
    return 0


def measured(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from benchmarks.fidelity.setups import experiments
    from benchmarks.training import threads_of_torch

    yield {**machine_facts(), "threads": arguments.threads}
    with threads_of_torch(arguments.threads):
        for each in experiments(
            models=arguments.model,
            seeds=arguments.seeds,
            threads=arguments.threads,
            names=arguments.scheme,
            quick=arguments.quick,
            progress=progress,
        ):
            yield from each.lines()
