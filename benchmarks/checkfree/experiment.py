"""The trainings, each a *part*: one model, seed, strategy and trace. A part whose line is there is not run again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checkfree.mending import BASELINES, STRATEGIES, Bases, Strategy, mend
from benchmarks.checkfree.pipeline import RECORDED, STAGES, Held, Pipeline, SetUp
from benchmarks.checkfree.trace import RATES, Trace, hard_trace, plain_trace

__all__ = ["MODELS", "Part", "parts", "run_part", "run_parts"]

MODELS = {
    "3M": SetUp("3M", width=144, heads=4, seed=0, steps=1500),
    "20M": SetUp("20M", width=384, heads=6, seed=0, steps=1500, lr=6e-4),
    "tiny": SetUp(
        "tiny",
        width=16,
        heads=2,
        seed=0,
        steps=24,
        layers_per_stage=2,
        sequence=16,
        warmup_steps=4,
        validation_windows=4,
        validate_every=6,
        base_every=8,
    ),
}

AT_ALL_RATES = ("checkfree", "checkfree+", "roll-back")
MIDDLE = "10%"
AT_THE_MIDDLE_RATE = ("copy", "random", "exponent 0", "exponent 1", "moments", "by layer", "fitted", "distilled")
ALONE = "-"
"""The rate of a training without failures."""
SMOOTHED = 25
"""Steps of which the training loss is told as one mean."""


@dataclass(frozen=True)
class Part:
    """One training."""

    setup: SetUp
    strategy: Strategy
    trace: Trace

    @property
    def key(self) -> dict[str, Any]:
        """What decides its figures."""
        return {"setup": asdict(self.setup), "strategy": told(self.strategy), "rate": self.trace.rate}

    def __str__(self) -> str:
        return f"{self.setup.name}, seed {self.setup.seed}, {self.strategy.name}, {self.trace.rate}"


def told(strategy: Strategy) -> dict[str, Any]:
    return {**asdict(strategy), "methods": [str(each) for each in strategy.methods]}


def parts(model: str, seeds: Sequence[int], *, rates: Sequence[str] = tuple(RATES)) -> list[Part]:
    """In the order in which they are run: what the others are compared with, then the middle rate, then the rest.

    The larger model runs only what is measured at all rates.
    """
    middle = MIDDLE if MIDDLE in rates else rates[0]
    more = AT_THE_MIDDLE_RATE if model != "20M" else ()
    found: list[Part] = []
    setups = [replace(MODELS[model], seed=seed) for seed in seeds]

    def add(name: str, rate: str, *, hard: bool = False) -> None:
        for setup in setups:
            found.append(Part(setup, STRATEGIES[name], trace_of(setup, rate, hard=hard)))

    for baseline in BASELINES:
        add(baseline.name, ALONE)
    for name in AT_ALL_RATES:
        add(name, middle)
    for rate in rates:
        for name in AT_ALL_RATES if rate != middle else more:
            add(name, rate)
    if more:
        add("roll-back+movement", middle)
        add("roll-back", middle, hard=True)
    return found


def trace_of(setup: SetUp, rate: str, *, hard: bool = False) -> Trace:
    if rate == ALONE:
        return Trace(ALONE, {})
    return (hard_trace if hard else plain_trace)(rate, seed=setup.seed, steps=setup.steps, stages=STAGES)


def run_parts(
    chosen: Sequence[Part], lines: Path, *, progress: Callable[[str], None], one: bool = False
) -> Iterator[dict[str, Any]]:
    """Run what ``lines`` has not yet, and append a line of JSON for each. ``one``: end after the first."""
    done = [json.loads(line) for line in lines.read_text("utf-8").splitlines()] if lines.exists() else []
    for part in chosen:
        key = json.loads(json.dumps(part.key))
        found = next((line for line in done if line["key"] == key), None)
        if found is None:
            progress(str(part))
            found = {"figure": "checkfree", "key": key, **run_part(part, lines.with_suffix(".prefixes"), chosen)}
            with lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            yield found
            if one:
                return
        else:
            yield found


def run_part(part: Part, prefixes: Path | None = None, others: Sequence[Part] = ()) -> dict[str, Any]:
    """The line's figures: losses by step, what was lost and mended, seconds.

    ``prefixes``: a folder in which trainings without a failure leave their state at the steps from which the ``others``
    differ from them, and those take it from there.
    """
    setup, strategy = part.setup, part.strategy
    began = time.monotonic()
    run = Run(part, Pipeline(setup, swaps=strategy.swaps))
    start = first_base(part)
    if prefixes is not None and part.trace.lost and (known := prefix_path(prefixes, part, start)).exists():
        run.go_on_from(known, start)
    kept = {first_base(each) for each in others if each.trace.lost and same_prefix(each, part)}
    while run.pipeline.version < setup.steps:
        if prefixes is not None and not part.trace.lost and run.pipeline.version in kept - {0}:
            run.keep(prefix_path(prefixes, part, run.pipeline.version))
        run.iterate()
    return {**run.figures(), "seconds": round(time.monotonic() - began, 1)}


def same_prefix(one: Part, other: Part) -> bool:
    return one.setup == other.setup and one.strategy.swaps == other.strategy.swaps


def first_base(part: Part) -> int:
    """A step, early enough before a part's first failure, at which all stages have a base: by then the gradients' norms
    and the activations that a recovery looks at are known again."""
    struck = (at for at, lost in part.trace.lost.items() if part.strategy.struck(lost))
    every = part.setup.base_every
    return max(0, min(next(struck, 0), part.setup.steps) - RECORDED) // every * every


def prefix_path(folder: Path, part: Part, step: int) -> Path:
    swaps = "-swaps" if part.strategy.swaps else ""
    return folder / f"{part.setup.name}-{part.setup.seed}{swaps}-{step}.npz"


class Run:
    """A part being run."""

    def __init__(self, part: Part, pipeline: Pipeline) -> None:
        self.part, self.pipeline = part, pipeline
        self.bases: Bases = {}
        self.training: list[float] = []
        self.validation: list[tuple[int, float]] = []
        self.mended: list[dict[str, Any]] = []

    def iterate(self) -> None:
        """A base if one is due, what the trace loses, and a step."""
        part, pipeline = self.part, self.pipeline
        version = pipeline.version
        if version % part.setup.base_every == 0:
            self.bases = {at: (version, pipeline.stage(at)) for at in range(STAGES)}
        if struck := part.strategy.struck(part.trace.lost.get(version, ())):
            made = mend(pipeline, part.strategy, struck, self.bases)
            shares = [[[share.stage, round(share.weight, 4)] for share in each.shares] for each in made]
            self.mended.append({"step": version, "stages": list(struck), "shares": shares})
        self.training.append(pipeline.step())
        if pipeline.version % part.setup.validate_every == 0 or pipeline.version == part.setup.steps:
            self.validation.append((pipeline.version, round(pipeline.validation_loss(), 5)))

    def figures(self) -> dict[str, Any]:
        means = [float(np.mean(self.training[at : at + SMOOTHED])) for at in range(0, len(self.training), SMOOTHED)]
        return {
            "parameters": self.part.setup.parameters,
            "validation": self.validation,
            "training": [round(each, 5) for each in means],
            "mended": self.mended,
        }

    def keep(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {}
        for name, (value, first, second, steps) in self.pipeline.whole().items():
            arrays |= {f"{name}:0": value, f"{name}:1": first, f"{name}:2": second, f"{name}:3": np.array(steps)}
        arrays["training"], arrays["validation"] = np.array(self.training), np.array(self.validation).reshape(-1, 2)
        temporary = path.with_suffix(".partial.npz")
        np.savez(temporary, **arrays)
        temporary.replace(path)

    def go_on_from(self, path: Path, step: int) -> None:
        with np.load(path, allow_pickle=False) as arrays:
            names = [name[:-2] for name in arrays if name.endswith(":0")]
            state: Mapping[str, Held] = {
                name: (*(arrays[f"{name}:{at}"] for at in range(3)), int(arrays[f"{name}:3"]))  # type: ignore[misc]
                for name in names
            }
            self.pipeline.put_whole(step, state)
            self.training = arrays["training"].tolist()
            self.validation = [(int(at), float(loss)) for at, loss in arrays["validation"]]
