"""``python -m benchmarks kernels``: measure the kernels' figures one after the other, and report them."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

from benchmarks.measure import chosen_figures, pair_count, run_figures
from benchmarks.pairs import PAIRS_MIN
from benchmarks.report import JsonReport, TableReport, progress

__all__ = ["add_command"]

MILLION = 1_000_000
ELEMENTS_MIN = 1 << 16


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="figures to measure: 'compaction,replay.*'")
    parser.add_argument(
        "--device", choices=("any", "cuda"), default="any", help="cuda: the figures of a GPU, which must be there (any)"
    )
    parser.add_argument("--elements", type=elements, default=100 * MILLION, help="of a gradient (100000000)")
    parser.add_argument("--replay-elements", type=elements, default=12 * MILLION, help="of a replay (12000000)")
    parser.add_argument("--pairs", type=pair_count, default=9, help=f"pairs a ratio, at least {PAIRS_MIN} (9)")
    parser.add_argument("--threads", type=thread_counts, default=(1,), help="on both sides, such as 1 or 1,2 (1)")
    parser.add_argument("--seed", type=int, default=1, help="of the training that gives the gradients")
    parser.add_argument("--quick", action="store_true", help="small arrays and few pairs: does it run at all?")
    parser.add_argument("--list", action="store_true", help="say what each figure means, and measure nothing")
    parser.set_defaults(run=run)


def elements(text: str) -> int:
    count = int(text)
    if count < ELEMENTS_MIN:
        raise argparse.ArgumentTypeError(f"a kernel on fewer than {ELEMENTS_MIN} elements is over before it has begun")
    return count


def thread_counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(each) for each in text.split(","))
    available = len(os.sched_getaffinity(0))
    if not all(1 <= count <= available for count in counts):
        raise argparse.ArgumentTypeError(f"{text} is not in 1..{available}, the processors there are")
    return counts


def run(arguments: argparse.Namespace) -> int:
    """Errors: a pattern that no figure matches is wrong usage, and so is a device that is not there: exit code 2."""
    from benchmarks.kernels.figures import FIGURES
    from benchmarks.kernels.settings import KernelSettings
    from benchmarks.training import SetUp

    figures = chosen_figures(FIGURES, arguments.only)
    if arguments.device == "cuda":
        from benchmarks.figures import Unavailable
        from benchmarks.kernels.device import cupy_with_device

        figures = tuple(item for item in figures if item.name.startswith("gpu."))
        try:
            cupy_with_device()
        except Unavailable as error:
            progress(f"error: --device cuda measures on a GPU, and {error}")
            return 2
    if not figures:
        progress(f"error: no figure matches {arguments.only!r}; there are: {', '.join(item.name for item in FIGURES)}")
        return 2
    if arguments.list:
        for item in figures:
            print(f"{item.name:48} {item.meaning}")
        return 0
    settings = KernelSettings(
        elements=arguments.elements,
        replay_elements=arguments.replay_elements,
        pairs=arguments.pairs,
        threads=1,
        setup=SetUp(width=320, layers=5, heads=5, seed=arguments.seed),  # the demo's model
        encode_steps=15,
        progress=progress,
    )
    if arguments.quick:
        settings = replace(
            settings,
            elements=MILLION,
            replay_elements=MILLION,
            pairs=PAIRS_MIN,
            setup=SetUp(width=64, layers=2, heads=2, seed=arguments.seed),
            encode_steps=5,
        )
    failed = 0
    for threads in arguments.threads:
        report = JsonReport() if arguments.json else TableReport()
        failed |= run_figures(figures, replace(settings, threads=threads), report)
    return failed
