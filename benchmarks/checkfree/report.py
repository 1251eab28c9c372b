"""Tables: the loss at the end of each training, and when it reaches a target, by iterations and by hours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.checkfree.cost import CHECKPOINTS, CostModel, Curve, in_place, redundant, rolled_back, steps_to
from benchmarks.checkfree.mending import ENDS_KEPT
from benchmarks.checkfree.one_failure import SMOOTHED, aftermaths, is_one_failure
from benchmarks.checkfree.one_failure import tables as tables_of_one_failure
from benchmarks.checkfree.pipeline import STAGES
from benchmarks.checkfree.trace import ALONE, HORIZON, RATES, plain_trace

__all__ = ["Line", "Result", "markdown", "read_lines", "results", "show"]

Line = Mapping[str, Any]

TARGET_AT = 2 / 3
"""The target is the loss that the undisturbed training has after that share of its steps."""

LAST = 250
"""The training loss is told of so many last steps: a mean over a hundred times as many bytes as a validation's."""

HEADINGS = (
    "strategy",
    "failures",
    "training loss",
    "above",
    "final loss",
    "worse by",
    "perplexity",
    "iterations to target",
    "hours to target",
    "seeds",
)


@dataclass(frozen=True)
class Result:
    """One training: measured, or derived from the undisturbed one by the cost model (``derived``)."""

    model: str
    parameters: int
    seed: int
    strategy: str
    rate: str
    failures: int
    """Stages made anew; of what is derived, stages lost before the last step was reached."""
    by_iterations: Curve
    by_hours: Curve
    trained: float | None
    """The training loss of the last :data:`LAST` steps, in nats a byte; ``None`` as ``final``."""
    trained_above: float | None
    """That of the undisturbed training, on the same bytes."""
    final: float | None
    """The validation loss after the last step, in nats a byte; ``None`` if it is not reached in the whole trace."""
    worse_by: float | None
    """Than the undisturbed training's, after the last step."""
    target: float
    derived: bool = False

    @property
    def iterations(self) -> float | None:
        return steps_to(self.by_iterations, self.target)

    @property
    def hours(self) -> float | None:
        return steps_to(self.by_hours, self.target)


def read_lines(path: Path) -> list[Line]:
    """What ``--lines`` holds. Errors: ``ValueError`` if it is something else."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def results(lines: Sequence[Line], cost: CostModel | None = None) -> list[Result]:
    """What was measured, and what follows from it. Trainings whose undisturbed one is not there yet are left out."""
    cost = cost or CostModel()
    alone = {
        (setup_of(line)["name"], setup_of(line)["seed"]): line
        for line in lines
        if line["key"]["strategy"]["name"] == "none" and not is_one_failure(line)
    }
    found: list[Result] = []
    for line in lines:
        if is_one_failure(line):
            continue
        base = alone.get((setup_of(line)["name"], setup_of(line)["seed"]))
        if base is not None:
            found.append(measured(line, base, cost))
    for line in alone.values():
        for rate in RATES:
            found += derived(line, rate, cost)
    return found


def setup_of(line: Line) -> Mapping[str, Any]:
    setup: Mapping[str, Any] = line["key"]["setup"]
    return setup


def curve_of(line: Line) -> Curve:
    return [(at, loss) for at, loss in line["validation"]]


def trained_of(line: Line) -> float:
    return fmean(line["training"][-LAST // SMOOTHED :])


def target_of(alone: Line) -> float:
    wanted = TARGET_AT * setup_of(alone)["steps"]
    return min(curve_of(alone), key=lambda point: abs(point[0] - wanted))[1]


def measured(line: Line, alone: Line, cost: CostModel) -> Result:
    rolls_back = "roll-back" in line["key"]["strategy"]["methods"]
    recoveries = [
        (each["step"], cost.state_s if rolls_back else cost.neighbours_s(max(map(len, each["shares"]), default=0)))
        for each in line["mended"]
    ]
    curve = curve_of(line)
    return Result(
        model=setup_of(line)["name"],
        parameters=line["parameters"],
        seed=setup_of(line)["seed"],
        strategy=line["key"]["strategy"]["name"],
        rate=line["key"]["rate"],
        failures=sum(len(each["stages"]) for each in line["mended"]),
        by_iterations=curve,
        by_hours=in_place(curve, recoveries, cost),
        trained=trained_of(line),
        trained_above=trained_of(line) - trained_of(alone),
        final=curve[-1][1],
        worse_by=curve[-1][1] - curve_of(alone)[-1][1],
        target=target_of(alone),
    )


def derived(alone: Line, rate: str, cost: CostModel) -> list[Result]:
    """Full roll-back and redundant computation: they train on the undisturbed curve, and only take longer. Full
    roll-back also with as many failures as the averages have."""
    setup, curve = setup_of(alone), curve_of(alone)
    steps = setup["steps"]
    trace = plain_trace(rate, seed=setup["seed"], steps=steps, stages=STAGES)
    spared = trace.struck(ENDS_KEPT.struck)
    courses = {"redundant": (trace, (curve, redundant(curve, cost)))}
    for ends, struck in (("", trace), (", ends kept", spared)):
        for every in CHECKPOINTS:
            course = rolled_back(curve, struck, every, steps, HORIZON * steps, cost)
            courses[f"full roll-back, {every}{ends}"] = struck, course
    found = []
    for name, (struck, (by_iterations, by_hours)) in courses.items():
        reached = len(by_iterations) == len(curve)
        found.append(
            Result(
                model=setup["name"],
                parameters=alone["parameters"],
                seed=setup["seed"],
                strategy=name,
                rate=rate,
                failures=struck.before(int(by_iterations[-1][0]) if reached else HORIZON * steps),
                by_iterations=by_iterations,
                by_hours=by_hours,
                trained=trained_of(alone) if reached else None,
                trained_above=0.0 if reached else None,
                final=curve[-1][1] if reached else None,
                worse_by=0.0 if reached else None,
                target=target_of(alone),
                derived=True,
            )
        )
    return found


def cells(same: Sequence[Result]) -> list[str]:
    """Means over the seeds; a dash if a seed never gets there."""

    def mean(values: Sequence[float | None], form: str) -> str:
        known = [each for each in values if each is not None]
        return f"{fmean(known):{form}}" if len(known) == len(values) else "-"

    return [
        same[0].strategy + ("" if not same[0].derived else " (derived)"),
        mean([each.failures for each in same], ".1f"),
        mean([each.trained for each in same], ".3f"),
        mean([each.trained_above for each in same], "+.3f"),
        mean([each.final for each in same], ".3f"),
        mean([each.worse_by for each in same], "+.3f"),
        mean([None if each.final is None else exp(each.final) for each in same], ".2f"),
        mean([each.iterations for each in same], ".0f"),
        mean([each.hours for each in same], ".1f"),
        str(len(same)),
    ]


Cells = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""A title, the headings, and the rows."""


def tables(lines: Sequence[Line]) -> list[Cells]:
    """Of one failure alone; then for each model and rate, the undisturbed trainings first."""
    made: list[Cells] = list(tables_of_one_failure(aftermaths(lines)))
    found = results(lines)
    for model in dict.fromkeys(each.model for each in found):
        own = [each for each in found if each.model == model]
        rates = [rate for rate in dict.fromkeys(each.rate for each in own) if rate != ALONE]
        for rate in [ALONE, *sorted(rates, key=lambda each: (float(each.split("%")[0]), each))]:
            groups: dict[str, list[Result]] = {}
            for each in own:
                if each.rate == rate:
                    groups.setdefault(each.strategy, []).append(each)
            title = f"{model} ({own[0].parameters / 1e6:.1f}M parameters), "
            title += "no failure" if rate == ALONE else f"failures at {rate} an hour and stage"
            made.append((title, HEADINGS, [cells(same) for same in groups.values()]))
    return made


def show(lines: Sequence[Line]) -> None:
    console = Console()
    for title, headings, rows in tables(lines):
        shown = Table(title=title, title_justify="left")
        for at, heading in enumerate(headings):
            shown.add_column(heading, justify="right" if at else "left")
        for each in rows:
            shown.add_row(*each)
        console.print(shown)


def markdown(lines: Sequence[Line]) -> str:
    """The tables for the documentation."""
    return "\n".join(
        f"{title}:\n\n"
        + "".join(f"| {' | '.join(each)} |\n" for each in (headings, ["---", *["---:"] * (len(headings) - 1)], *rows))
        for title, headings, rows in tables(lines)
    )
