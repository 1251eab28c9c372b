"""One failure alone: how far the loss is above the undisturbed training's, right after it and some steps later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

__all__ = ["Aftermath", "aftermaths", "is_one_failure", "tables"]

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Aftermath:
    """What one failure did to one training. ``gaps``: by steps after it, the validation loss minus that of the training
    that lost nothing and has swaps if this one has, in nats a byte."""

    model: str
    parameters: int
    seed: int
    strategy: str
    lost: str
    gaps: Mapping[int, float]


def is_one_failure(line: Line) -> bool:
    return " at " in line["key"]["rate"]


def aftermaths(lines: Sequence[Line]) -> list[Aftermath]:
    """Of each line about one failure whose undisturbed training is there too."""
    alone = {kind_of(line): dict(map(tuple, line["validation"])) for line in lines if is_undisturbed(line)}
    found = []
    for line in lines:
        losses = alone.get(kind_of(line))
        if losses is None or not is_one_failure(line) or is_undisturbed(line):
            continue
        lost, _, at = line["key"]["rate"].rpartition(" at ")
        found.append(
            Aftermath(
                model=line["key"]["setup"]["name"],
                parameters=line["parameters"],
                seed=line["key"]["setup"]["seed"],
                strategy=line["key"]["strategy"]["name"],
                lost=lost,
                gaps={step - int(at): loss - losses[step] for step, loss in line["validation"] if step in losses},
            )
        )
    return found


def kind_of(line: Line) -> tuple[str, int, bool]:
    setup = line["key"]["setup"]
    return setup["name"], setup["seed"], line["key"]["strategy"]["swaps"]


def is_undisturbed(line: Line) -> bool:
    return str(line["key"]["rate"]).startswith("nothing at ")


def tables(found: Sequence[Aftermath]) -> list[tuple[str, list[str], list[list[str]]]]:
    """A title, headings and rows for each model and lost stage: means over the seeds, the least later gap first."""
    made = []
    for model, lost in dict.fromkeys((each.model, each.lost) for each in found):
        own = [each for each in found if (each.model, each.lost) == (model, lost)]
        after = sorted(set.intersection(*(set(each.gaps) for each in own)))
        rows: dict[str, list[Aftermath]] = {}
        for each in own:
            rows.setdefault(each.strategy, []).append(each)
        ordered = sorted(rows.values(), key=lambda same: fmean(each.gaps[after[-1]] for each in same))
        cells = [
            [
                same[0].strategy,
                *(f"{fmean(each.gaps[step] for each in same):+.4f}" for step in after),
                str(len(same)),
            ]
            for same in ordered
        ]
        headings = ["strategy", *("at once" if not step else f"{step} steps later" for step in after), "seeds"]
        made.append((f"{model} ({own[0].parameters / 1e6:.1f}M parameters), {lost} is lost", headings, cells))
    return made
