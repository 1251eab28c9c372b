"""What each way costs, in one picture: a row for each way, a column for each figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.results import Result, StepCost, VersionCost, back_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_peers"]

COLOURS = ("#1f6feb", "#d1480f", "#2a9d4a", "#8250df")
"""One an interval."""
ANY = "#57606a"
"""For what does not depend on the interval."""
STALL_MIN_MS = 0.1
"""A stall within the noise may be negative; a logarithmic axis has no zero."""
Value = Callable[[StepCost, VersionCost], float]
PANELS: tuple[tuple[str, Value, bool], ...] = (
    ("stall of a saved step (ms)", lambda step, _: max(STALL_MIN_MS, 1e3 * step.stall_s), True),
    ("mean step, against none saved", lambda step, _: step.step_ratio, True),
    ("until a version is on the disk (s)", lambda _, version: version.durable_s, False),
    ("restart to first step (s)", lambda _, version: version.restart_s, False),
    ("restart to where it was (s)", back_s, True),
    ("peak memory (GB)", lambda _, version: version.peak_bytes / 1e9, False),
    ("of a version, on the disk (GB)", lambda _, version: version.saved_bytes / 1e9, False),
)
"""The title, the value, and whether it depends on the interval."""


def plot_peers(path: Path, results: Sequence[Result]) -> None:
    """Write an SVG (or what the suffix says), a row of panels for each size of state."""
    # The object-oriented interface draws without a display and leaves pyplot's global state alone.
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    sizes = list(dict.fromkeys(each.state_bytes for each in results))
    ways = list(dict.fromkeys(each.way for each in results))
    versions = {(each.state_bytes, each.way): each for each in results if isinstance(each, VersionCost)}
    steps = [each for each in results if isinstance(each, StepCost)]
    costs = [(each, versions[each.state_bytes, each.way]) for each in steps]
    intervals = sorted({each.every for each in steps})
    colours = dict(zip(intervals, COLOURS, strict=False))
    figure = Figure(figsize=(16, len(sizes) * (0.8 + 0.4 * len(ways))), layout="constrained")
    panels = figure.subplots(len(sizes), len(PANELS), sharey=True, squeeze=False)
    for row, nbytes in zip(panels, sizes, strict=True):
        own = [cost for cost in costs if cost[0].state_bytes == nbytes]
        for axes, (title, value, by_interval) in zip(row, PANELS, strict=True):
            draw(axes, ways, own, value, colours if by_interval else {})
            axes.set_title(title, fontsize=9)
        row[0].set_yticks(range(len(ways)), ways)
        row[0].set_ylabel(f"{nbytes / 1e6:.0f} MB of state")
        row[0].set_xscale("log")
        row[1].axvline(1, color="#b0b8c4", linewidth=1)
    panels[0, 0].invert_yaxis()
    handles = [Patch(color=colours[every], label=interval_text(every)) for every in intervals]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    # The same results give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "tiercheck", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw(
    axes: Axes,
    ways: Sequence[str],
    costs: Sequence[tuple[StepCost, VersionCost]],
    value: Value,
    colours: Mapping[int, str],
) -> None:
    """A bar for each way, or for each of its intervals if they have colours."""
    for row, way in enumerate(ways):
        own = [cost for cost in costs if cost[0].way == way]
        bars = sorted(own, key=lambda cost: cost[0].every) if colours else own[:1]
        height = 0.8 / max(1, len(bars))
        for number, (step, version) in enumerate(bars):
            at = row - 0.4 + height * (number + 0.5)
            length = value(step, version)
            axes.barh(at, length, height=0.9 * height, color=colours.get(step.every, ANY))
            text = f"{length:.0f}" if length >= 100 else f"{length:.3g}"
            axes.annotate(text, (length, at), (2, 0), textcoords="offset points", va="center", size=6)
    axes.tick_params(labelsize=8)
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.margins(x=0.18)


def interval_text(every: int) -> str:
    return "each step saved" if every == 1 else f"each {every}th step saved"
