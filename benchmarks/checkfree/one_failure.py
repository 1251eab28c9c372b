"""One failure alone: how far the loss is above the undisturbed training's, right after it and some steps later.

The training loss tells more than the validation loss: both trainings compute it on the same batches, and the batches of
25 steps hold many times the bytes of the validation windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

__all__ = ["SMOOTHED", "Aftermath", "aftermaths", "is_one_failure", "tables"]

Line = Mapping[str, Any]

SMOOTHED = 25
"""Steps of which the training loss is told as one mean."""


@dataclass(frozen=True)
class Aftermath:
    """What one failure did to one training, in nats a byte, against the training that lost nothing; with swaps if this
    one has them."""

    model: str
    parameters: int
    seed: int
    strategy: str
    lost: str
    trained: Sequence[float]
    """Mean training losses of :data:`SMOOTHED` steps each, from the failure on."""
    gaps: Mapping[int, float]
    """The validation loss by steps after the failure."""


def is_one_failure(line: Line) -> bool:
    return " at " in line["key"]["rate"]


def aftermaths(lines: Sequence[Line]) -> list[Aftermath]:
    """Of each line about one failure whose undisturbed training is there too."""
    alone = {kind_of(line): line for line in lines if is_undisturbed(line)}
    found = []
    for line in lines:
        beside = alone.get(kind_of(line))
        if beside is None or not is_one_failure(line) or is_undisturbed(line):
            continue
        lost, _, at = line["key"]["rate"].rpartition(" at ")
        losses = dict(map(tuple, beside["validation"]))
        found.append(
            Aftermath(
                model=line["key"]["setup"]["name"],
                parameters=line["parameters"],
                seed=line["key"]["setup"]["seed"],
                strategy=line["key"]["strategy"]["name"],
                lost=lost,
                trained=[own - other for own, other in zip(line["training"], beside["training"], strict=True)],
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
    """A title, headings and rows for each model and lost stage: means over the seeds, the least trained gap first."""
    made = []
    for model, lost in dict.fromkeys((each.model, each.lost) for each in found):
        own = [each for each in found if (each.model, each.lost) == (model, lost)]
        after = sorted(set.intersection(*(set(each.gaps) for each in own)))
        rows: dict[str, list[Aftermath]] = {}
        for each in own:
            rows.setdefault(each.strategy, []).append(each)
        ordered = sorted(rows.values(), key=lambda same: fmean(each.trained[0] for each in same))
        headings = ["strategy"]
        headings += [f"training, steps {SMOOTHED * at + 1}-{SMOOTHED * (at + 1)}" for at in range(len(own[0].trained))]
        headings += ["validation at once" if not step else f"after {step}" for step in after]
        made.append(
            (
                f"{model} ({own[0].parameters / 1e6:.1f}M parameters), lost: {lost}; loss above the undisturbed",
                [*headings, "seeds"],
                [[same[0].strategy, *means(same, after), str(len(same))] for same in ordered],
            )
        )
    return made


def means(same: Sequence[Aftermath], after: Sequence[int]) -> list[str]:
    trained = [fmean(each) for each in zip(*(each.trained for each in same), strict=True)]
    return [f"{gap:+.3f}" for gap in (*trained, *(fmean(each.gaps[step] for each in same) for step in after))]
