"""What the comparison concludes of what the jobs have said, as lines, a table, or Markdown."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.peers.job import Order
from tiercheck.types import bytes_text

__all__ = ["Result", "StepCost", "VersionCost", "markdown", "read_lines", "results_of", "tables_of"]


@dataclass(frozen=True)
class StepCost:
    """What one way costs a step at one interval. Seconds; medians over the blocks."""

    state_bytes: int
    """Of parameters and moments."""
    way: str
    every: int
    """Steps from one save to the next; 1 for what saves each step by itself."""
    step_s: float
    """Without saving."""
    stall_s: float
    """By how much a saved step is longer."""
    step_ratio: float
    """The mean step with saving, against the mean step without it."""


@dataclass(frozen=True)
class VersionCost:
    """What one way costs a version and a restart, whatever the interval. Seconds and bytes."""

    state_bytes: int
    way: str
    first_durable_s: float
    """Until the first version is on the disk, with all that it needs, while nothing is trained."""
    durable_s: float
    """Until the one after it is."""
    restart_s: float
    """From a process with its model to the end of its first step; the median of the restarts."""
    peak_bytes: int
    """Of memory, shared memory included, beyond what training alone takes."""
    first_saved_bytes: int
    """Written to the disk for the first version."""
    saved_bytes: int
    """Written for the one after it."""


Result = StepCost | VersionCost


def results_of(
    order: Order,
    trained: Sequence[Mapping[str, Any]],
    restarted: Sequence[Mapping[str, Any]],
    restored: Mapping[str, Any],
    peak_bytes: int,
) -> list[Result]:
    """The cost of a step at each interval, and that of a version. Errors: ``RuntimeError`` if another state was
    restored than was saved."""
    *blocks, first, later, last = trained
    if restored["digest"] != last["digest"]:
        raise RuntimeError("what was restored is not what was saved last")
    found: list[Result] = []
    for every in dict.fromkeys(block["every"] for block in blocks):
        own = [block for block in blocks if block["every"] == every]
        steps = [statistics.median(block["plain"]) for block in own]
        stalls = [
            statistics.median(seconds for seconds, saved in block["saving"] if saved) - step
            for block, step in zip(own, steps, strict=True)
        ]
        ratios = [
            statistics.fmean(seconds for seconds, _ in block["saving"]) / statistics.fmean(block["plain"])
            for block in own
        ]
        found.append(
            StepCost(
                state_bytes=order.nbytes,
                way=order.way,
                every=every,
                step_s=round(statistics.median(steps), 6),
                stall_s=round(statistics.median(stalls), 6),
                step_ratio=round(statistics.median(ratios), 4),
            )
        )
    restart_s = statistics.median(again["load_s"] + again["first_step_s"] for again in restarted)
    found.append(
        VersionCost(
            state_bytes=order.nbytes,
            way=order.way,
            first_durable_s=round(first["durable_s"], 4),
            durable_s=round(later["durable_s"], 4),
            restart_s=round(restart_s, 4),
            peak_bytes=peak_bytes,
            first_saved_bytes=first["bytes"],
            saved_bytes=later["bytes"],
        )
    )
    return found


def back_s(step: StepCost, version: VersionCost) -> float:
    """From a restart to the step that training had reached, in the mean: what came after the last save, half an
    interval's steps, is trained again."""
    return version.restart_s + (step.every - 1) / 2 * step.step_s


Cells = tuple[str, ...]


def tables_of(results: Sequence[Result]) -> list[Table]:
    tables = []
    for columns, rows in contents_of(results):
        table = Table()
        for column in columns:
            table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        tables.append(table)
    return tables


def markdown(results: Sequence[Result]) -> str:
    """Two tables, with a line for each result."""
    texts = []
    for columns, rows in contents_of(results):
        lines = [columns, ["---" if column == "way" else "---:" for column in columns], *rows]
        texts.append("".join(f"| {' | '.join(line)} |\n" for line in lines))
    return "\n".join(texts)


def contents_of(results: Sequence[Result]) -> Iterator[tuple[Cells, list[Cells]]]:
    """Columns and rows of each table."""
    versions = {(each.state_bytes, each.way): each for each in results if isinstance(each, VersionCost)}
    steps = [each for each in results if isinstance(each, StepCost)]
    yield (
        ("state", "way", "every", "step", "stall", "step ratio", "back"),
        [
            (
                *named(each),
                str(each.every),
                *(f"{1e3 * taken:.1f} ms" for taken in (each.step_s, each.stall_s)),
                f"{each.step_ratio:.3f}",
                f"{back_s(each, versions[each.state_bytes, each.way]):.2f} s",
            )
            for each in steps
        ],
    )
    yield (
        ("state", "way", "first durable", "durable", "restart", "peak", "first saved", "saved"),
        [
            (
                *named(each),
                *(f"{taken:.2f} s" for taken in (each.first_durable_s, each.durable_s, each.restart_s)),
                *map(bytes_text, (each.peak_bytes, each.first_saved_bytes, each.saved_bytes)),
            )
            for each in versions.values()
        ],
    )


def named(each: Result) -> Cells:
    return (f"{each.state_bytes / 1e6:.0f} MB", each.way)


def read_lines(path: Path) -> list[Result]:
    """What ``--json`` printed before, of one run or several. Errors: ``OSError``; ``ValueError`` for anything else, and
    for steps of a way whose versions are not told."""
    kinds = [(kind, {field.name for field in dataclasses.fields(kind)}) for kind in (StepCost, VersionCost)]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found: list[Result] = [kind(**line) for line in lines for kind, names in kinds if line.keys() == names]
    known = {(each.state_bytes, each.way) for each in found if isinstance(each, VersionCost)}
    if not known or not {(each.state_bytes, each.way) for each in found} <= known:
        raise ValueError(f"{path} has no figure of peers, or not all of a way")
    return found
