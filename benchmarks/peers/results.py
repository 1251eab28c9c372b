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

__all__ = ["Result", "markdown", "read_lines", "results_of", "table_of"]

COLUMNS = (
    "state",
    "way",
    "every",
    "step",
    "stall",
    "step ratio",
    "first durable",
    "durable",
    "restart",
    "back",
    "peak",
    "first saved",
    "saved",
)


@dataclass(frozen=True)
class Result:
    """What one way costs at one interval. Seconds and bytes; medians over the blocks."""

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

    @property
    def back_s(self) -> float:
        """From a restart to the step that training had reached, in the mean: what came after the last save is trained
        again, half an interval's steps."""
        return self.restart_s + (self.every - 1) / 2 * self.step_s


def results_of(
    order: Order, trained: Sequence[Mapping[str, Any]], restarted: Sequence[Mapping[str, Any]], peak_bytes: int
) -> list[Result]:
    """A result for each interval. Errors: ``RuntimeError`` if another state was restored than was saved."""
    *blocks, first, later, last = trained
    if {again["digest"] for again in restarted} != {last["digest"]}:
        raise RuntimeError("what was restored is not what was saved last")
    restart_s = statistics.median(again["load_s"] + again["first_step_s"] for again in restarted)
    found = []
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
            Result(
                state_bytes=order.nbytes,
                way=order.way,
                every=every,
                step_s=round(statistics.median(steps), 6),
                stall_s=round(statistics.median(stalls), 6),
                step_ratio=round(statistics.median(ratios), 4),
                first_durable_s=round(first["durable_s"], 4),
                durable_s=round(later["durable_s"], 4),
                restart_s=round(restart_s, 4),
                peak_bytes=peak_bytes,
                first_saved_bytes=first["bytes"],
                saved_bytes=later["bytes"],
            )
        )
    return found


def table_of(results: Sequence[Result]) -> Table:
    table = Table()
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    for each in results:
        table.add_row(*cells(each))
    return table


def markdown(results: Sequence[Result]) -> str:
    """A table, with a line for each result."""
    lines = [COLUMNS, ["---" if column == "way" else "---:" for column in COLUMNS], *map(cells, results)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cells(each: Result) -> Iterator[str]:
    yield from (f"{each.state_bytes / 1e6:.0f} MB", each.way, str(each.every))
    yield from (f"{1e3 * taken:.1f} ms" for taken in (each.step_s, each.stall_s))
    yield f"{each.step_ratio:.3f}"
    yield from (f"{taken:.2f} s" for taken in (each.first_durable_s, each.durable_s, each.restart_s, each.back_s))
    yield from map(bytes_text, (each.peak_bytes, each.first_saved_bytes, each.saved_bytes))


def read_lines(path: Path) -> list[Result]:
    """What ``--json`` printed before, of one run or several. Errors: ``OSError``; ``ValueError`` for anything else."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    names = {field.name for field in dataclasses.fields(Result)}
    found = [Result(**line) for line in lines if line.keys() == names]
    if not found:
        raise ValueError(f"{path} has no figure of peers")
    return found
