"""The losses in one picture: the paper's comparisons, and ours, each as its own panel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from benchmarks.checkfree.cost import Curve
from benchmarks.checkfree.report import ALONE, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_checkfree"]

COLOURS = ("#1f6feb", "#d1480f", "#2a9d4a", "#8250df", "#bf8700", "#57606a", "#cf222e", "#0a7ea4", "#6e4a1f")
LEAST_LOSS = 0.03
"""Of an axis of differences, the least that is shown above and below zero, in nats a byte."""


@dataclass(frozen=True)
class Panel:
    """Curves of one rate. ``gaps``: differences from the undisturbed training instead of losses; only of trainings
    that have a loss at each step."""

    title: str
    curves: Sequence[tuple[str, str]]
    """Strategy and rate."""
    hours: bool = False
    gaps: bool = False


def named(rate: str, *strategies: str) -> list[tuple[str, str]]:
    return [(each, rate) for each in strategies]


OURS = ("roll-back", "roll-back+movement", "moments", "by layer", "fitted", "distilled")
PANELS = (
    Panel(
        "how a stage is made anew (10 %)",
        named("10%", "random", "copy", "checkfree", "checkfree+", "roll-back"),
        gaps=True,
    ),
    Panel("swaps, no failure", named(ALONE, "none", "none, swaps")),
    Panel(
        "rates",
        [(each, rate) for each in ("checkfree", "roll-back") for rate in ("5%", "10%", "16%")],
        gaps=True,
    ),
    Panel(
        "wall clock (10 %)",
        [
            *named("10%", "checkfree", "checkfree+", "roll-back", "redundant"),
            *named("10%", *(f"full roll-back, {every}" for every in (10, 50, 100))),
        ],
        hours=True,
    ),
    Panel("exponent of the norms (10 %)", named("10%", "exponent 0", "exponent 1", "checkfree"), gaps=True),
    Panel("ours (10 %)", [*named("10%", "checkfree", *OURS), ("roll-back", "10%, pairs")], gaps=True),
)


def plot_checkfree(path: Path, results: Sequence[Result]) -> None:
    """Write an SVG (or what the suffix says), a row of panels for each model, means over its seeds."""
    # The object-oriented interface draws without a display and leaves pyplot's global state alone.
    import matplotlib
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(each.model for each in results))
    figure = Figure(figsize=(15, 8.5 * len(models)), layout="constrained")
    grid = figure.subplots(2 * len(models), 3, squeeze=False)
    for number, model in enumerate(models):
        own = [each for each in results if each.model == model]
        for at, panel in enumerate(PANELS):
            axes = grid[2 * number + at // 3, at % 3]
            draw(axes, panel, own)
            axes.set_title(f"{model}: {panel.title}", fontsize=10)
    # The same results give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "tiercheck", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw(axes: Axes, panel: Panel, results: Sequence[Result]) -> None:
    rates = {rate for _, rate in panel.curves}
    for number, (strategy, rate) in enumerate(panel.curves):
        same = [each for each in results if (each.strategy, each.rate) == (strategy, rate)]
        curve = mean_curve([gap_of(each, results) if panel.gaps else course(each, panel.hours) for each in same])
        if not curve:
            continue
        label = strategy if len(rates) == 1 else f"{strategy}, {rate}"
        axes.plot(
            [at for at, _ in curve],
            [loss for _, loss in curve],
            color=COLOURS[number % len(COLOURS)],
            linestyle="--" if same[0].derived else "-",
            linewidth=1.5,
            label=label,
        )
    axes.set_xlabel("hours, by the cost model" if panel.hours else "steps")
    axes.set_ylabel("loss above the undisturbed (nats a byte)" if panel.gaps else "validation loss (nats a byte)")
    if panel.gaps:
        axes.axhline(0, color="#b0b8c4", linewidth=1)
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, -LEAST_LOSS), max(high, LEAST_LOSS))
    axes.grid(visible=True, alpha=0.3)
    axes.tick_params(labelsize=8)
    if axes.lines:
        axes.legend(fontsize=7, frameon=False)


def course(result: Result, hours: bool) -> Curve:
    return result.by_hours if hours else result.by_iterations


def gap_of(result: Result, results: Sequence[Result]) -> Curve:
    """By step, how much the loss is above the undisturbed one's of the same seed."""
    (alone,) = (each for each in results if (each.strategy, each.seed) == ("none", result.seed))
    losses = dict(alone.by_iterations)
    return [(at, loss - losses[at]) for at, loss in result.by_iterations if at in losses]


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Of curves with as many points each, the mean of each; the shortest says how many."""
    return [(fmean(at for at, _ in points), fmean(loss for _, loss in points)) for points in zip(*curves, strict=False)]
