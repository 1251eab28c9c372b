"""What the benchmarks print: one JSON object a line, or a table for people. Progress goes to standard error."""

from __future__ import annotations

import abc
import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.figures import Figure, Measured
from tiercheck.types import bytes_text

__all__ = ["JsonReport", "Report", "TableReport", "line_of", "progress"]


NO_NUMBERS = {"skipped": "dim", "failed": "red"}
"""What a line says instead of numbers, and in which style; the reasons follow the table."""


def progress(text: str) -> None:
    """One line for whoever waits."""
    print(text, file=sys.stderr, flush=True)


def line_of(figure: Figure[Any], measured: Measured) -> dict[str, Any]:
    """The figure's line."""
    summary = measured.summary
    line: dict[str, Any] = {
        "figure": figure.name,
        "value": rounded(summary.value),
        "ceiling": rounded(summary.ceiling),
        "ratio": round(summary.ratio, 4),
        "unit": measured.unit,
        "spread": [round(bound, 4) for bound in summary.spread],
        "pairs": summary.pairs,
        "bytes": measured.nbytes,
        "device": measured.device,
    }
    if figure.goal is not None:
        line["goal"] = f"{'<=' if figure.at_most else '>='} {figure.goal:g}"
        line["met"] = figure.met(summary.ratio)
    return line | measured.details


def rounded(number: float) -> float:
    """To the unit where there are thousands of them, else to four decimals, and never to fewer than four digits."""
    if number >= 1000:
        return round(number)
    return round(number, 4) if number >= 1 else float(f"{number:.4g}")


class Report(abc.ABC):
    """Takes the lines as they come."""

    @abc.abstractmethod
    def machine(self, facts: Mapping[str, Any]) -> None:
        """Where the figures were measured."""

    @abc.abstractmethod
    def figure(self, line: Mapping[str, Any]) -> None:
        """One figure's line."""

    def close(self) -> None:  # noqa: B027  (not everybody waits for the last of them)
        """All lines are there."""


class JsonReport(Report):
    def machine(self, facts: Mapping[str, Any]) -> None:
        print(json.dumps(facts), flush=True)

    def figure(self, line: Mapping[str, Any]) -> None:
        print(json.dumps(line), flush=True)


class TableReport(Report):
    def __init__(self) -> None:
        self._lines: list[Mapping[str, Any]] = []
        self._facts: Mapping[str, Any] = {}

    def machine(self, facts: Mapping[str, Any]) -> None:
        self._facts = facts

    def figure(self, line: Mapping[str, Any]) -> None:
        self._lines.append(line)

    def close(self) -> None:
        facts = self._facts
        title = f"{facts.get('cpu', '')}, Linux {facts.get('kernel', '')}, Python {facts.get('python', '')}"
        table = Table(title=title, title_justify="left", caption_justify="left")
        for column in ("figure", "value", "ceiling", "ratio", "quartiles", "goal"):
            table.add_column(column, justify="left" if column == "figure" else "right", no_wrap=column == "figure")
        for line in self._lines:
            table.add_row(*cells(line))
        console = Console()
        console.print(table)
        for line in self._lines:
            for reason in NO_NUMBERS:
                if reason in line:
                    console.print(f"{line['figure']} {reason}: {line[reason]}", markup=False, soft_wrap=True)


def cells(line: Mapping[str, Any]) -> tuple[str, ...]:
    name = escape(line["figure"])
    for reason, style in NO_NUMBERS.items():
        if reason in line:
            return name, f"[{style}]{reason}[/]", "", "", "", ""
    low, high = line["spread"]
    goal = line.get("goal", "")
    if goal:
        goal = f"[green]{goal} ✓[/]" if line["met"] else f"[red]{goal} ✗[/]"
    return (
        name,
        amount(line["value"], line["unit"]),
        amount(line["ceiling"], line["unit"]),
        ratio_text(line["ratio"]),
        f"{ratio_text(low)} - {ratio_text(high)}",
        goal,
    )


def ratio_text(ratio: float) -> str:
    """Two decimals; four for a share of little."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.4f}"


def amount(number: float, unit: str) -> str:
    """``1.5 GB/s``, ``2.50 ms`` or ``48.0 MiB``."""
    if unit == "s":
        return f"{number * 1e3:.2f} ms"
    if unit == "bytes/s":
        return f"{number / 1e9:.2f} GB/s" if number >= 1e9 else f"{number / 1e6:.0f} MB/s"
    return bytes_text(int(number))
