"""Which trainings are interrupted: two sizes of model, and for the small one a second pair of betas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.fidelity.experiment import Course, Experiment
from benchmarks.training import SetUp

__all__ = ["experiments"]

SMALL = SetUp(width=256, layers=4, heads=4, seed=0, micro_batch=4)
LARGE = SetUp(width=512, layers=7, heads=8, seed=0, micro_batch=2)

TRAININGS = {
    "small": (SMALL, Course(to_base=100, lost=50, later=50)),
    "other-betas": (replace(SMALL, lr=5e-4, betas=(0.9, 0.999)), Course(to_base=100, lost=50, later=50)),
    "large": (LARGE, Course(to_base=50, lost=50, later=50)),
}

TRAINED_ON = {
    "small": ("sparse", "sparse+feedback", "onebit+feedback", "nf4+feedback"),
    "other-betas": (),
    "large": ("sparse", "sparse+feedback"),
}
"""The codecs that a training of its own steps with; each is a run from the first step on."""

QUICK_SIZES = {"small": (32, 1), "other-betas": (32, 1), "large": (64, 2)}
QUICK_COURSE = Course(to_base=4, lost=3, later=2)


def experiments(
    *,
    models: Sequence[str] | None,
    seeds: Sequence[int],
    threads: int,
    names: tuple[str, ...] | None,
    quick: bool,
    progress: Callable[[str], None],
) -> list[Experiment]:
    """One a seed and model; all models where none is named."""
    return [
        Experiment(
            model,
            replace(quick_setup(model) if quick else TRAININGS[model][0], seed=seed),
            QUICK_COURSE if quick else TRAININGS[model][1],
            TRAINED_ON[model],
            threads,
            names,
            progress,
        )
        for seed in seeds
        for model in models or TRAININGS
    ]


def quick_setup(model: str) -> SetUp:
    width, layers = QUICK_SIZES[model]
    return replace(TRAININGS[model][0], width=width, layers=layers, heads=2, sequence=32, validation_windows=8)
