"""A recovery as its ranks reported it: what was still there, and what is read from where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from tiercheck import keys
from tiercheck.keys import ShardKey, Stream

__all__ = ["availability_table", "count_sources", "plan_table", "version_ranges"]

Report = Mapping[str, Any]
"""``Recovery.to_object()`` of one rank."""


def availability_table(report: Report) -> Table:
    """The availability matrix: per rank and tier, whether it has the anchor, and which differentials after it."""
    table = Table(title="What could be used: what every rank still had its part of", title_justify="left")
    tiers = list(dict.fromkeys(row["tier"] for row in report["matrix"]))
    table.add_column("shard of", no_wrap=True)
    for tier in tiers:
        table.add_column(f"in {tier}")
    cells = {(rank, row["tier"]): row for row in report["matrix"] for rank in numbers(row["ranks"])}
    for rank in sorted({rank for rank, _ in cells}):
        table.add_row(f"rank {rank}", *(held_text(cells.get((rank, tier)), report["anchor"]) for tier in tiers))
    return table


def held_text(row: Mapping[str, Any] | None, anchor: int) -> Text:
    parts = []
    if row is not None and row["anchor"]:
        parts.append(f"base {anchor}")
    if row is not None and row["differentials"]:
        parts.append(f"differentials {version_ranges(numbers(row['differentials']))}")
    return Text(" + ".join(parts), style="green") if parts else Text("nothing", style="red")


def numbers(spans: Iterable[Sequence[int]]) -> list[int]:
    return [number for first, last in spans for number in range(first, last + 1)]


def plan_table(reports: Sequence[Report]) -> Table:
    """Which objects each rank reads from which tier, in the order of reading; one report a rank."""
    table = Table(title="The plan of the recovery", title_justify="left")
    for column in ("rank", "reads", "objects", "from tier"):
        table.add_column(column, no_wrap=True)
    for rank, report in enumerate(reports):
        for (tier, stream), grouped in groupby(readings(report), key=lambda reading: (reading[0], reading[1].stream)):
            shards = [shard for _, shard in grouped]
            # A snapshot leads to its own version, and to none before it.
            reached = (each.versions if stream is not Stream.SNAPSHOT else [each.last] for each in shards)
            versions = version_ranges(version for each in reached for version in each)
            what = f"differentials {versions}" if stream is Stream.DIFFERENTIAL else f"{stream} {versions}"
            table.add_row(str(rank), what, str(len(shards)), tier)
    return table


def readings(report: Report) -> list[tuple[str, ShardKey]]:
    found = []
    for source in report["sources"]:
        key = keys.parse(source["object"])
        if not isinstance(key, ShardKey):
            raise ValueError(f"a recovery reads shards, and {source['object']!r} is none")
        found.append((source["tier"], key))
    return found


def count_sources(reports: Iterable[Report]) -> dict[str, int]:
    """Per tier, the objects that were read from it, all ranks together."""
    counts: dict[str, int] = {}
    for report in reports:
        for source in report["sources"]:
            counts[source["tier"]] = counts.get(source["tier"], 0) + 1
    return counts


def version_ranges(versions: Iterable[int]) -> str:
    """``[1, 2, 3, 7]`` to ``"1-3, 7"``."""
    runs: list[list[int]] = []
    for version in sorted(set(versions)):
        if runs and version == runs[-1][1] + 1:
            runs[-1][1] = version
        else:
            runs.append([version, version])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)
