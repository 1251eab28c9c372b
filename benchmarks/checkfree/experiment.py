"""The trainings, each a *part*: one model, seed, strategy and trace. A part whose line is there is not run again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.checkfree.mending import BASELINES, ENDS_KEPT, STRATEGIES, Bases, Strategy, mend
from benchmarks.checkfree.one_failure import SMOOTHED
from benchmarks.checkfree.pipeline import STAGES, Held, Pipeline, SetUp
from benchmarks.checkfree.trace import ALONE, RATES, Trace, hard_trace, one_loss, plain_trace
from tiercheck.policy.neighbours import Method

__all__ = ["MODELS", "Part", "parts", "run_parts", "single_parts", "undisturbed_parts"]

MODELS = {
    "3M": SetUp("3M", width=204, heads=6, seed=0, steps=1500),
    "20M": SetUp("20M", width=528, heads=8, seed=0, steps=1500, lr=6e-4),
    "tiny": SetUp(
        "tiny",
        width=16,
        heads=2,
        seed=0,
        steps=24,
        sequence=16,
        micro_batch=1,
        warmup_steps=4,
        validation_windows=4,
        validate_every=6,
        base_every=8,
    ),
}

AT_ALL_RATES = ("checkfree", "checkfree+", "roll-back")
MIDDLE = "10%"
AT_THE_MIDDLE_RATE = ("copy", "random", "exponent 0", "exponent 1", "moments", "by layer", "fitted", "distilled")
LOSSES = ((2,), (0,), (2, 3))
"""What is lost at once where there is one failure alone, each in a training of its own."""
SINGLE_AT = 4 / 5
"""Of a training's steps, where that failure is: in the middle between two bases."""
AFTER = (0, 10, 25, 50)
"""Steps after that failure at which the loss is validated."""


@dataclass(frozen=True)
class Part:
    """One training."""

    setup: SetUp
    strategy: Strategy
    trace: Trace

    @property
    def end(self) -> int:
        """After which step the training ends."""
        return min(self.setup.steps, self.trace.until or self.setup.steps)

    @property
    def validated(self) -> set[int]:
        """The steps after which the loss is validated."""
        if self.trace.until is not None:
            return {at + after for at in self.trace.lost for after in AFTER}
        return {*range(0, self.setup.steps, self.setup.validate_every), self.setup.steps}

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

    Only the 3M model runs more than what is measured at all rates.
    """
    middle = MIDDLE if MIDDLE in rates else rates[0]
    more = AT_THE_MIDDLE_RATE if model == "3M" else ()
    found: list[Part] = []
    setups = [replace(MODELS[model], seed=seed) for seed in seeds]

    def add(strategy: Strategy, rate: str, *, hard: bool = False) -> None:
        found.extend(Part(setup, strategy, trace_of(setup, rate, hard=hard)) for setup in setups)

    for name in AT_ALL_RATES:
        add(STRATEGIES[name], middle)
    for rate in rates:
        for name in AT_ALL_RATES if rate != middle else more:
            add(STRATEGIES[name], rate)
    if more:
        add(ENDS_KEPT, middle)
        add(STRATEGIES["roll-back+movement"], middle)
        add(STRATEGIES["roll-back"], middle, hard=True)
    return [*undisturbed_parts(model, seeds), *found]


def undisturbed_parts(model: str, seeds: Sequence[int]) -> list[Part]:
    """Without a failure to the end, and the same with swaps."""
    setups = [replace(MODELS[model], seed=seed) for seed in seeds]
    return [Part(setup, each, trace_of(setup, ALONE)) for each in BASELINES for setup in setups]


def trace_of(setup: SetUp, rate: str, *, hard: bool = False) -> Trace:
    if rate == ALONE:
        return Trace(ALONE, {})
    return (hard_trace if hard else plain_trace)(rate, seed=setup.seed, steps=setup.steps, stages=STAGES)


def single_parts(model: str, seeds: Sequence[int]) -> list[Part]:
    """One failure alone, late in the training, by each strategy that has an answer to it, and none beside them."""
    found = []
    for seed in seeds:
        setup = replace(MODELS[model], seed=seed)
        at = int(setup.steps * SINGLE_AT) // setup.base_every * setup.base_every + setup.base_every // 2
        for lost in ((), *LOSSES):
            trace = one_loss(lost, at=at, later=min(AFTER[-1], setup.steps - at))
            candidates = STRATEGIES.values() if lost else BASELINES
            found += [Part(setup, each, trace) for each in candidates if not lost or mends(each, lost)]
    return found


def mends(strategy: Strategy, lost: tuple[int, ...]) -> bool:
    """Whether a strategy has an answer to the loss of these stages."""
    if strategy in BASELINES or strategy.struck(lost) != lost:
        return False
    return Method.ROLL_BACK in strategy.methods or len(lost) == 1


def run_parts(
    chosen: Sequence[Part], lines: Path, *, progress: Callable[[str], None], one: bool = False
) -> Iterator[dict[str, Any]]:
    """The lines that ``lines`` has of these parts, then those of the parts that it lacks, each appended when it is run.

    ``one``: end after the first training; its branches are run with it.
    """
    done = [json.loads(line) for line in lines.read_text("utf-8").splitlines()] if lines.exists() else []
    keys = [line["key"] for line in done]
    wanted = [(part, json.loads(json.dumps(part.key))) for part in chosen]
    yield from (line for line in done if line["key"] in [key for _, key in wanted])
    for group in groups([part for part, key in wanted if key not in keys]):
        for part, figures in run_group(group, progress):
            line = {"figure": "checkfree", "key": json.loads(json.dumps(part.key)), **figures}
            with lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            yield line
        if one:
            return


def groups(missing: Sequence[Part]) -> list[list[Part]]:
    """The trainings to be run. Where one failure alone is a branch of an undisturbed training, both are one group."""
    found: dict[Any, list[Part]] = {}
    for number, part in enumerate(missing):
        undisturbed = part.trace.until is not None or part.strategy in BASELINES
        key = (part.setup, part.strategy.swaps) if undisturbed else number
        found.setdefault(key, []).append(part)
    return list(found.values())


def run_group(group: Sequence[Part], progress: Callable[[str], None]) -> Iterator[tuple[Part, dict[str, Any]]]:
    """Each part with its figures: a training alone, or an undisturbed one with its branches."""
    branches = [part for part in group if part.trace.until is not None]
    trunks = [part for part in group if part.trace.until is None]
    undisturbed = Part(group[0].setup, BASELINES[group[0].strategy.swaps], trace_of(group[0].setup, ALONE))
    run = Run(trunks[0] if trunks else undisturbed)
    if branches:
        progress(f"{run.part}: to where {len(branches)} others branch off")
        run.train(min(branches[0].trace.lost))
        fork = run.fork()
        for part in branches:
            progress(str(part))
            branch = Run(part, run.pipeline, fork)
            branch.train(part.end)
            yield part, branch.figures()
        run = Run(run.part, run.pipeline, fork)
    if trunks:
        progress(str(run.part))
        run.train(run.part.end)
        yield run.part, run.figures()


@dataclass(frozen=True)
class Fork:
    """All that a training is made of, at a step: others go on from it."""

    version: int
    state: Mapping[str, Held]
    bases: Bases
    layer_norms: Mapping[int, tuple[float, ...]]
    activations: Sequence[tuple[torch.Tensor, ...]]
    training: Sequence[float]
    validation: Sequence[tuple[int, float]]


class Run:
    """A part being run, from its beginning or from a fork; the pipeline is then another one's, and taken over."""

    def __init__(self, part: Part, pipeline: Pipeline | None = None, fork: Fork | None = None) -> None:
        self.part = part
        self.pipeline = pipeline or Pipeline(part.setup, swaps=part.strategy.swaps)
        self.bases: Bases = fork.bases if fork else {}
        self.training = [] if fork is None or part.trace.until else list(fork.training)
        self.validation = [] if fork is None or part.trace.until else list(fork.validation)
        self.mended: list[dict[str, Any]] = []
        self.seconds = 0.0
        if fork is not None:
            self.pipeline.put_whole(fork.version, fork.state)
            self.pipeline.layer_norms = dict(fork.layer_norms)
            self.pipeline.raised_at.clear()
            self.pipeline.activations.clear()
            self.pipeline.activations.extend(fork.activations)

    def fork(self) -> Fork:
        pipeline = self.pipeline
        return Fork(
            pipeline.version,
            pipeline.whole(),
            self.bases,
            dict(pipeline.layer_norms),
            list(pipeline.activations),
            list(self.training),
            list(self.validation),
        )

    def train(self, end: int) -> None:
        began = time.monotonic()
        if self.part.trace.until and not self.part.trace.lost.get(self.pipeline.version):
            self.validate()
        while self.pipeline.version < end:
            self.iterate()
        self.seconds += time.monotonic() - began

    def iterate(self) -> None:
        """A base if one is due, what the trace loses, and a step."""
        part, pipeline = self.part, self.pipeline
        version = pipeline.version
        if version % part.setup.base_every == 0:
            self.bases = {at: (version, pipeline.stage(at)) for at in range(STAGES)}
        struck = part.strategy.struck(part.trace.lost.get(version, ()))
        if struck:
            made = mend(pipeline, part.strategy, struck, self.bases)
            shares = [[[share.stage, round(share.weight, 4)] for share in each.shares] for each in made]
            self.mended.append({"step": version, "stages": list(struck), "shares": shares})
            self.validate()
        self.training.append(pipeline.step())
        self.validate()

    def validate(self) -> None:
        version = self.pipeline.version
        if version in self.part.validated:
            self.validation = [each for each in self.validation if each[0] != version]
            self.validation.append((version, round(self.pipeline.validation_loss(), 5)))

    def figures(self) -> dict[str, Any]:
        means = [float(np.mean(self.training[at : at + SMOOTHED])) for at in range(0, len(self.training), SMOOTHED)]
        return {
            "parameters": self.part.setup.parameters,
            "validation": self.validation,
            "training": [round(each, 5) for each in means],
            "mended": self.mended,
            "seconds": round(self.seconds, 1),
        }
