"""Error against bits, both logarithmic, in one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fidelity.report import Row, rows

__all__ = ["plot_fidelity"]

COLOURS = ("#1f6feb", "#d1480f", "#2a9d4a", "#8250df")
"""One a model."""
MARKERS = {"replay": "o", "snapshot": "s"}
MEANINGS = {"replay": "differentials, replayed", "snapshot": "snapshot of the state, each version"}
FLOOR = 0.4
"""Where an error of zero is drawn, as a share of the smallest other one: a logarithmic axis has no zero."""
LABEL_STEPS = 3
"""Labels of neighbours are set at so many heights in turns."""


def plot_fidelity(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write an SVG (or what the suffix says) of the lines of ``--json``, means over the seeds.

    What the training itself stepped with, and what is not saved at all, is not in it.
    """
    # The object-oriented interface draws without a display and leaves pyplot's global state alone.
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    found = [row for row in rows(lines) if row.mode in MARKERS]
    floor = FLOOR * min((row.error for row in found if not row.exact), default=1.0)
    models = list(dict.fromkeys(row.model for row in found))
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    for row in found:
        axes.plot(
            row.bits,
            floor if row.exact else row.error,
            marker=MARKERS[row.mode],
            color=COLOURS[models.index(row.model) % len(COLOURS)],
            linestyle="none",
            markersize=7,
            alpha=0.8,
        )
    for index, row in enumerate(sorted(one_a_scheme(found), key=lambda each: each.bits)):
        axes.annotate(
            row.scheme,
            xy=(row.bits, floor if row.exact else row.error),
            xytext=(6, 6 + 11 * (index % LABEL_STEPS)),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.axhline(1, color="#b0b8c4", linewidth=1)
    axes.annotate(
        "as far off as the base itself", xy=(1, 1), xycoords=("axes fraction", "data"), ha="right", va="bottom"
    )
    axes.axhline(floor, color="#b0b8c4", linewidth=1, linestyle=":")
    axes.annotate("0, bit for bit", xy=(0, floor), xycoords=("axes fraction", "data"), ha="left", va="bottom")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("bits written per parameter and step")
    axes.set_ylabel(f"distance from the true parameters / their movement in {steps_of(lines)} steps")
    axes.set_title("What a recovery restores")
    axes.grid(visible=True, alpha=0.3)
    handles = [
        Line2D([], [], color=COLOURS[n % len(COLOURS)], marker="o", linestyle="none", label=text)
        for n, text in enumerate(model_texts(found))
    ]
    handles += [
        Line2D([], [], color="#57606a", marker=MARKERS[mode], linestyle="none", label=MEANINGS[mode])
        for mode in MARKERS
        if any(row.mode == mode for row in found)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    # The same lines give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "tiercheck", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def one_a_scheme(found: Sequence[Row]) -> list[Row]:
    """The row that is labelled: the one of largest error among the models'."""
    names = dict.fromkeys(row.scheme for row in found)
    return [max((row for row in found if row.scheme == name), key=lambda row: row.error) for name in names]


def model_texts(found: Sequence[Row]) -> list[str]:
    models = dict.fromkeys((row.model, row.parameters, row.seeds) for row in found)
    return [f"{model}: {parameters / 1e6:.1f}M parameters, {seeds} seeds" for model, parameters, seeds in models]


def steps_of(lines: Sequence[Mapping[str, Any]]) -> int:
    return next(int(line["steps"]) for line in lines if line.get("figure") == "fidelity")
