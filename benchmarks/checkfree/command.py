"""``python -m benchmarks checkfree``: what it costs a training to lose pipeline stages, by how they are made anew."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine import machine_facts
from benchmarks.report import progress

__all__ = ["add_command"]

LINES = Path("checkfree.jsonl")


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of tables")
    parser.add_argument("--model", choices=("3M", "20M"), action="append", help="3M takes less than an hour (3M)")
    parser.add_argument("--traces", action="store_true", help="whole trainings under the failure traces too: hours")
    parser.add_argument("--seed", type=int, action="append", help="of training, data and trace (1 and 2)")
    parser.add_argument("--rate", choices=("5%", "10%", "16%"), action="append", help="of failures an hour (all)")
    parser.add_argument(
        "--lines",
        type=Path,
        default=LINES,
        metavar="FILE",
        help=f"where each training's line is appended; what it has is not trained again ({LINES})",
    )
    parser.add_argument("--only-lines", action="store_true", help="train nothing: what the lines tell")
    parser.add_argument("--one", action="store_true", help="end after the first training that was not there")
    parser.add_argument("--quick", action="store_true", help="a tiny model and a few steps: does it run at all?")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses, as SVG or PNG")
    parser.add_argument("--markdown", action="store_true", help="the tables as Markdown")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Errors: lines that are none of this command's are wrong usage: exit code 2."""
    from benchmarks.checkfree import report
    from benchmarks.checkfree.plot import plot_checkfree

    try:
        lines: list[report.Line] = []
        for line in report.read_lines(arguments.lines) if arguments.only_lines else trained(arguments):
            lines.append(line)
            if arguments.json:
                print(json.dumps(line), flush=True)
        if arguments.json:
            print(json.dumps(machine_facts()), flush=True)
        elif arguments.markdown:
            print(report.markdown(lines), end="")
        else:
            report.show(lines)
        if arguments.plot is not None:
            plot_checkfree(arguments.plot, lines)
    except (OSError, ValueError, KeyError) as error:
        progress(f"error: {arguments.lines}: {error}")
        return 2
    return 0


def trained(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from benchmarks.checkfree.experiment import parts, run_parts, single_parts, undisturbed_parts
    from benchmarks.checkfree.trace import RATES
    from benchmarks.training import threads_of_torch

    models = ("tiny",) if arguments.quick else arguments.model or ("3M",)
    seeds = arguments.seed or ((1,) if arguments.quick else (1, 2))
    rates = arguments.rate or (("10%",) if arguments.quick else tuple(RATES))
    chosen = [part for model in models for part in single_parts(model, seeds)]
    if arguments.traces or arguments.quick:
        chosen += [part for model in models for part in parts(model, seeds, rates=rates)]
    else:
        chosen += [part for model in models for part in undisturbed_parts(model, seeds)]
    with threads_of_torch(1):
        yield from run_parts(chosen, arguments.lines, progress=progress, one=arguments.one)
