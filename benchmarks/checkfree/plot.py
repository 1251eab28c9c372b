"""The losses in one picture: the paper's comparisons, and ours, each as its own panel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from benchmarks.checkfree.cost import Curve
from benchmarks.checkfree.one_failure import SMOOTHED, Aftermath, aftermaths
from benchmarks.checkfree.report import Line, Result, results
from benchmarks.checkfree.trace import ALONE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_checkfree"]

COLOURS = ("#1f6feb", "#d1480f", "#2a9d4a", "#8250df", "#bf8700", "#57606a", "#cf222e", "#0a7ea4", "#6e4a1f")
COLUMNS = 3
LEAST_CURVES = 2
"""A comparison has at least two measured curves."""


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


OURS = ("roll-back", "roll-back, ends kept", "roll-back+movement", "moments", "by layer", "fitted", "distilled")
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


def plot_checkfree(path: Path, lines: Sequence[Line]) -> None:
    """Write an SVG (or what the suffix says): a panel for each comparison of which something was measured, means over
    the seeds. Raises ``ValueError`` if nothing was."""
    # The object-oriented interface draws without a display and leaves pyplot's global state alone.
    import matplotlib
    from matplotlib.figure import Figure

    drawn: list[tuple[str, Callable[[Axes], None]]] = []
    found, after = results(lines), aftermaths(lines)
    for model, lost in dict.fromkeys((each.model, each.lost) for each in after):
        own = [each for each in after if (each.model, each.lost) == (model, lost)]
        drawn.append((f"{model}: one failure, {lost}", partial(draw_one_failure, found=own)))
    for model in dict.fromkeys(each.model for each in found):
        mine = [each for each in found if each.model == model]
        for panel in PANELS:
            known = {(each.strategy, each.rate) for each in mine if not each.derived}
            if len(known & set(panel.curves)) >= LEAST_CURVES:
                drawn.append((f"{model}: {panel.title}", partial(draw, panel=panel, results=mine)))
    if not drawn:
        raise ValueError("nothing was measured yet that can be compared")
    rows = -(-len(drawn) // COLUMNS)
    figure = Figure(figsize=(15, 4.2 * rows), layout="constrained")
    grid = figure.subplots(rows, COLUMNS, squeeze=False)
    for axes in grid.flat[len(drawn) :]:
        axes.set_axis_off()
    for axes, (title, drawing) in zip(grid.flat, drawn, strict=False):
        drawing(axes)
        axes.set_title(title, fontsize=10)
    # The same lines give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "tiercheck", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_one_failure(axes: Axes, *, found: Sequence[Aftermath]) -> None:
    """A bar for each strategy and stretch of steps."""
    names = list(dict.fromkeys(each.strategy for each in found))
    names.sort(key=lambda name: fmean(each.trained[0] for each in found if each.strategy == name), reverse=True)
    stretches = len(found[0].trained)
    for at in range(stretches):
        gaps = [fmean(each.trained[at] for each in found if each.strategy == name) for name in names]
        places = [row + 0.4 - 0.8 * (at + 0.5) / stretches for row in range(len(names))]
        label = f"steps {SMOOTHED * at + 1} to {SMOOTHED * (at + 1)} after it"
        axes.barh(places, gaps, height=0.75 / stretches, color=COLOURS[at], label=label)
    axes.set_yticks(range(len(names)), names)
    axes.axvline(0, color="#57606a", linewidth=1)
    finish(axes, "training loss above the undisturbed (nats a byte)", "", zero=False)


def draw(axes: Axes, *, panel: Panel, results: Sequence[Result]) -> None:
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
    finish(
        axes,
        "hours, by the cost model" if panel.hours else "steps",
        "loss above the undisturbed (nats a byte)" if panel.gaps else "validation loss (nats a byte)",
        zero=panel.gaps,
    )


def finish(axes: Axes, x: str, y: str, *, zero: bool) -> None:
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    if zero:
        axes.axhline(0, color="#b0b8c4", linewidth=1)
    axes.grid(visible=True, alpha=0.3)
    axes.tick_params(labelsize=8)
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
