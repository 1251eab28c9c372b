"""Both loss curves in one picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tiercheck.demo.results.report import DemoResult, ranks_text

__all__ = ["plot_losses"]


def plot_losses(
    path: Path, result: DemoResult, *, uninterrupted: Mapping[int, float], before_failure: Mapping[int, float]
) -> None:
    """Write a PNG of the mean losses by version, in nats a byte.

    ``uninterrupted`` is the run without a failure, ``before_failure`` the other run up to its failure; what it
    trained after the recovery is in ``result``.
    """
    # The object-oriented interface draws without a display and leaves pyplot's global state alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    after_recovery = {v: loss for v, loss in result.losses.items() if v > result.resumed_at}
    axes.plot(
        list(uninterrupted),
        list(uninterrupted.values()),
        color="#b0b8c4",
        linewidth=6,
        solid_capstyle="round",
        label="uninterrupted",
    )
    axes.plot(
        list(before_failure),
        list(before_failure.values()),
        color="#1f6feb",
        linewidth=1.6,
        label="interrupted, to the failure",
    )
    axes.plot(
        list(after_recovery),
        list(after_recovery.values()),
        color="#d1480f",
        linewidth=1.6,
        label="interrupted, recovered",
    )
    axes.axvline(result.failed_at, color="#c00020", linestyle="--", linewidth=1.2)
    early = result.failed_at < result.steps / 2  # then the room for a note is on the line's right
    axes.annotate(
        f"{result.failure} failure after step {result.failed_at},\nresumed from {result.resumed_at}",
        xy=(result.failed_at, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(6 if early else -6, 0),
        textcoords="offset points",
        horizontalalignment="left" if early else "right",
        verticalalignment="top",
        color="#c00020",
    )
    what, same = "the curves are", result.loss_bit_identical
    if result.ranks_changed:
        what, same = f"what {ranks_text(result.resumed_on)} resumed is", same and result.params_bit_identical
    identical = "identical to the last bit" if same else "not identical"
    axes.set_title(
        f"{result.parameters / 1e6:.1f}M-parameter byte-level GPT, ZeRO-{result.zero}, {result.dtype}: "
        f"{what} {identical}"
    )
    axes.set_xlabel("step (version)")
    axes.set_ylabel("training loss (nats a byte, mean of the ranks)")
    axes.grid(visible=True, alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, format="png")
