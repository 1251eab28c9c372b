"""``python -m benchmarks tiers``: measure the figures one after the other, and report them."""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
import shutil
import tempfile
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.figures import Chosen, Figure, Settings, Unavailable
from benchmarks.machine import machine_facts
from benchmarks.pairs import PAIRS_MIN
from benchmarks.report import JsonReport, Report, TableReport, line_of, progress
from tiercheck.errors import ConfigurationError
from tiercheck.tiers.url import parse_size

__all__ = ["add_command", "chosen_figures", "pair_count", "run_figures"]

QUICK_SIZE = 4 << 20
QUICK_PEAK = 192 << 20


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="figures to measure, such as 'peer.*,s3.put*'")
    parser.add_argument("--size", type=size, default=256 << 20, help="bytes of an object (256MiB)")
    parser.add_argument("--peak-size", type=size, default=4 << 30, help="bytes of the put of *.peak_bytes (4GiB)")
    parser.add_argument("--pairs", type=pair_count, default=25, help=f"pairs a ratio, at least {PAIRS_MIN} (25)")
    parser.add_argument("--quick", action="store_true", help="small objects and few pairs: does it run at all?")
    parser.add_argument("--directory", type=Path, default=None, help="where the disk to be measured is mounted")
    parser.add_argument("--list", action="store_true", help="say what each figure means, and measure nothing")
    parser.set_defaults(run=run)


def size(text: str) -> int:
    nbytes = parse_size(text)
    if nbytes < 1 << 20:
        raise argparse.ArgumentTypeError("an object of less than 1 MiB says nothing of bandwidth")
    return nbytes


def pair_count(text: str) -> int:
    count = int(text)
    if count < PAIRS_MIN:
        raise argparse.ArgumentTypeError(f"{count} pairs say too little: take at least {PAIRS_MIN}")
    return count


def run(arguments: argparse.Namespace) -> int:
    """Errors: a pattern that no figure matches is wrong usage: exit code 2."""
    from benchmarks.tiers import FIGURES

    figures = chosen_figures(FIGURES, arguments.only)
    if not figures:
        progress(f"error: no figure matches {arguments.only!r}; there are: {', '.join(item.name for item in FIGURES)}")
        return 2
    if arguments.list:
        for item in figures:
            print(f"{item.name:28} {item.meaning}")
        return 0
    directory = Path(tempfile.mkdtemp(prefix="tiercheck-benchmark-", dir=arguments.directory))
    try:
        settings = Settings(
            size_bytes=QUICK_SIZE if arguments.quick else arguments.size,
            peak_bytes=QUICK_PEAK if arguments.quick else arguments.peak_size,
            pairs=PAIRS_MIN if arguments.quick else arguments.pairs,
            directory=directory,
            progress=progress,
        )
        return run_figures(figures, settings, JsonReport() if arguments.json else TableReport())
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def chosen_figures(figures: Iterable[Figure[Chosen]], only: str) -> tuple[Figure[Chosen], ...]:
    """Those whose name matches one of the comma-separated patterns; ``peer`` alone means all of it."""
    patterns = [pattern.strip() for pattern in only.split(",")]
    wanted = [pattern for each in patterns for pattern in (each, f"{each}.*", f"{each}/*")]
    return tuple(item for item in figures if any(fnmatch.fnmatchcase(item.name, pattern) for pattern in wanted))


def run_figures(figures: Sequence[Figure[Chosen]], settings: Chosen, report: Report) -> int:
    """Measure and report each; 1 where one failed. One that cannot run here is reported as skipped."""
    failed = 0
    report.machine(machine_facts())
    for number, item in enumerate(figures, 1):
        assert item.measure is not None, item.name
        settings.progress(f"[{number}/{len(figures)}] {item.name}: {item.meaning}")
        try:
            measured = asyncio.run(item.measure(settings))
        except Exception as error:  # noqa: BLE001  (one figure's failure is reported, and the others are measured)
            if is_unavailable(error):
                report.figure({"figure": item.name, "skipped": str(error)})
                continue
            failed += 1
            settings.progress(traceback.format_exc())
            report.figure({"figure": item.name, "failed": f"{type(error).__name__}: {error}"})
        else:
            report.figure(line_of(item, measured))
    report.close()
    return 1 if failed else 0


def is_unavailable(error: Exception) -> bool:
    """Whether a program or a package is missing here, rather than something wrong with what is measured."""
    return isinstance(error, Unavailable | ImportError) or (
        isinstance(error, ConfigurationError) and isinstance(error.__cause__, ImportError)
    )
