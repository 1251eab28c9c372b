"""The table: for each scheme the means over the seeds, a group of columns for each model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["Row", "label", "markdown", "read_lines", "rows", "show"]

Line = Mapping[str, Any]

HEADINGS = ("scheme", "bits/param/step", "error", "gap at resumption", "gap later")

MODES = {"stale": "", "replay": "", "snapshot": "", "trained-on": " (trained on)"}


@dataclass(frozen=True)
class Row:
    """A scheme on one model: means over ``seeds`` seeds."""

    scheme: str
    mode: str
    model: str
    parameters: int
    seeds: int
    bits: float
    held_bits: float
    error: float
    gap_resumed: float
    gap_later: float
    exact: bool
    """Not a bit of parameters or moments differed, for any seed."""


def read_lines(path: Path) -> list[Line]:
    """What ``--json`` has printed. Errors: ``ValueError`` where that is something else."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def rows(lines: Sequence[Line]) -> list[Row]:
    """One a scheme and model, in the order in which they first came. Errors: ``ValueError`` where there is none."""
    found: dict[tuple[str, str, str], list[Line]] = {}
    for line in lines:
        if line.get("figure") == "fidelity" and "error" in line:
            found.setdefault((line["mode"], line["scheme"], line["model"]), []).append(line)
    if not found:
        raise ValueError("there is no figure of fidelity among the lines")
    return [
        Row(
            scheme=scheme,
            mode=mode,
            model=model,
            parameters=same[0]["parameters"],
            seeds=len(same),
            **{
                name: fmean(line[name] for line in same)
                for name in ("bits", "held_bits", "error", "gap_resumed", "gap_later")
            },
            exact=not any(line["differing"] for line in same),
        )
        for (mode, scheme, model), same in found.items()
    ]


def label(row: Row) -> str:
    return row.scheme + MODES[row.mode]


def show(lines: Sequence[Line]) -> None:
    console = Console()
    for title, cells in tables(rows(lines)):
        shown = Table(title=title, title_justify="left")
        for heading in HEADINGS:
            shown.add_column(heading, justify="left" if heading == HEADINGS[0] else "right", no_wrap=True)
        for each in cells:
            shown.add_row(*each)
        console.print(shown)


def markdown(lines: Sequence[Line]) -> str:
    """The tables for the documentation."""
    rules = ["---", *["---:"] * (len(HEADINGS) - 1)]
    return "\n".join(
        f"{title}:\n\n" + "".join(f"| {' | '.join(each)} |\n" for each in (HEADINGS, rules, *cells))
        for title, cells in tables(rows(lines))
    )


def tables(found: Sequence[Row]) -> list[tuple[str, list[list[str]]]]:
    """A title and the cells for each model, schemes in the order in which they came."""
    return [
        (
            f"{model}: {mine[0].parameters / 1e6:.1f}M parameters, {mine[0].seeds} seeds",
            [cells_of(row) for row in mine],
        )
        for model in dict.fromkeys(row.model for row in found)
        if (mine := [row for row in found if row.model == model])
    ]


def cells_of(row: Row) -> list[str]:
    error = "0, bit for bit" if row.exact else f"{row.error:.2g}"
    return [label(row), f"{row.bits:.3g}", error, f"{row.gap_resumed:+.4f}", f"{row.gap_later:+.4f}"]
