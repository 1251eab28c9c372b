"""What a strategy does when stages are lost. The product's policy says what is made from what."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.checkfree.pipeline import STAGES, Held, Pipeline, Stage
from tiercheck import kernels
from tiercheck.policy.neighbours import (
    CHECKFREE,
    CHECKFREE_PLUS,
    EXPONENT,
    Method,
    Share,
    Substitute,
    check_layers,
    moment_share,
    substitutes,
)

__all__ = ["BASELINES", "STRATEGIES", "Bases", "Strategy", "mend", "recorded_error"]

RANDOM_STD = 0.02
"""Of the demo's initialisation."""

MIXES = np.linspace(0, 1, 11)
"""What share of the first neighbour is tried when the weights of an average are fitted."""

DISTIL_STEPS, DISTIL_LR = 30, 1e-3
"""A lost stage is trained so many steps of Adam to give back what was recorded on both of its sides."""


@dataclass(frozen=True)
class Strategy:
    """How lost stages are made anew while training goes on. ``ends_kept``: a loss of the first or the last stage does
    not happen to this one, since it could not mend it."""

    name: str
    meaning: str
    methods: Sequence[Method] = ()
    """Empty: the stage is drawn at random."""
    exponent: float = EXPONENT
    movement: float = 0.0
    moments: bool = False
    by_layer: bool = False
    fitted: bool = False
    distilled: bool = False
    swaps: bool = False
    ends_kept: bool = True

    @property
    def raises(self) -> bool:
        """Whether the learning rate of a stage that was made anew is raised: the paper's rule, for its ways alone."""
        return Method.ROLL_BACK not in self.methods

    def struck(self, lost: Collection[int]) -> tuple[int, ...]:
        """Of the stages that a trace loses, those that this strategy has to mend."""
        return tuple(stage for stage in lost if not (self.ends_kept and stage in (0, STAGES - 1)))


BASELINES = (Strategy("none", "no failure"), Strategy("none, swaps", "no failure, trained as CheckFree+", swaps=True))

STRATEGIES = {
    each.name: each
    for each in (
        *BASELINES,
        Strategy("checkfree", "average of both neighbours, by |g|^2", CHECKFREE),
        Strategy("checkfree+", "with swaps; an end is a copy", CHECKFREE_PLUS, swaps=True, ends_kept=False),
        Strategy("copy", "copy of a neighbour", (Method.COPY,)),
        Strategy("random", "drawn at random"),
        Strategy("exponent 0", "average of both neighbours, alike", CHECKFREE, exponent=0),
        Strategy("exponent 1", "average of both neighbours, by |g|", CHECKFREE, exponent=1),
        Strategy("roll-back", "ours 1: its own base, up to 100 steps old", (Method.ROLL_BACK,), ends_kept=False),
        Strategy(
            "roll-back+movement",
            "ours 1: its own base, and half of the neighbours' movement since",
            (Method.ROLL_BACK,),
            movement=0.5,
            ends_kept=False,
        ),
        Strategy("moments", "ours 2: CheckFree, moments averaged as well", CHECKFREE, moments=True),
        Strategy("by layer", "ours 3: CheckFree, each layer by its own norms", CHECKFREE, by_layer=True),
        Strategy("fitted", "ours 3: an average, its weights fitted on recorded activations", CHECKFREE, fitted=True),
        Strategy("distilled", "ours 3: CheckFree, then fitted to recorded activations", CHECKFREE, distilled=True),
    )
}
ENDS_KEPT = Strategy("roll-back, ends kept", "ours 1, as often as an average has to mend", (Method.ROLL_BACK,))
"""Beside ``roll-back``, which loses more: what the losses of end stages do, and what a base does."""


Bases = Mapping[int, tuple[int, Stage]]
"""By stage, its newest base: the version, and the state."""


def mend(pipeline: Pipeline, strategy: Strategy, lost: Sequence[int], bases: Bases) -> Sequence[Substitute]:
    """Make the lost stages anew, from the survivors and the bases alone. Returns what was made of what."""
    before = {at: pipeline.stage(at) for at in range(STAGES) if at not in lost}
    if not strategy.methods:
        for at in lost:
            pipeline.put(at, random_stage(pipeline, at))
            pipeline.raised_at[at] = pipeline.version
        return []
    made = substitutes(
        STAGES,
        lost,
        {at: norm for at, norm in pipeline.norms.items() if at not in lost},
        methods=strategy.methods,
        exponent=strategy.exponent,
        bases={at: [version] for at, (version, _) in bases.items()},
        movement=strategy.movement,
    )
    layers = pipeline.layers()
    if strategy.fitted:
        made = tuple(fitted(pipeline, strategy, each, before) for each in made)
    for each in made:
        check_layers(each, layers)
        if each.base is not None:
            pipeline.put(each.stage, moved(each, before, bases))
            continue
        pipeline.put(each.stage, averaged(pipeline, strategy, each, before))
        if strategy.distilled:
            distil(pipeline, each.stage)
        pipeline.raised_at[each.stage] = pipeline.version
    return made


def moved(made: Substitute, before: Mapping[int, Stage], bases: Bases) -> Stage:
    """The base, plus what part of the neighbours' mean movement since then is asked for. Its moments are its own."""
    _, base = bases[made.stage]
    found: dict[str, Held] = {}
    for name, (value, first, second, steps) in base.items():
        total = value.copy()
        for share in made.shares:
            weight = made.movement * share.weight
            kernels.accumulate(before[share.stage][name][0], weight, total)
            kernels.accumulate(bases[share.stage][1][name][0], -weight, total)
        found[name] = (total, first, second, steps)
    return found


def averaged(pipeline: Pipeline, strategy: Strategy, made: Substitute, before: Mapping[int, Stage]) -> Stage:
    """The weighted sum of the shares' parameters, and of their moments if asked for. With ``by_layer``, each layer's
    own norms weigh it: a linear layer or a norm."""
    names = pipeline.layer_names(made.stage)
    shares = dict.fromkeys(names, made.shares)
    if strategy.by_layer and len(made.shares) > 1:
        norms = {share.stage: pipeline.layer_norms[share.stage] for share in made.shares}
        shares = dict(zip(names, made.by_layer(norms, strategy.exponent), strict=True))
    found: dict[str, Held] = {}
    for name, (like, *_) in before[made.shares[0].stage].items():
        own = shares[name.rpartition(".")[0]]
        held = [before[share.stage][name] for share in own]
        steps = max(each[3] for each in held) if strategy.moments else 0
        total = [np.zeros_like(like) for _ in range(3)]
        for share, each in zip(own, held, strict=True):
            kernels.accumulate(each[0], share.weight, total[0])
            for moment, beta, sums in zip(each[1:3], pipeline.setup.betas, total[1:], strict=True):
                kernels.accumulate(moment, moment_share(share.weight, beta, each[3], steps), sums)
        found[name] = (total[0], total[1], total[2], steps)
    return found


def fitted(pipeline: Pipeline, strategy: Strategy, made: Substitute, before: Mapping[int, Stage]) -> Substitute:
    """The mix of both neighbours that best gives back what was recorded on both sides of the lost stage."""
    one, two = (share.stage for share in made.shares)
    mixes = [(Share(one, float(mix)), Share(two, 1 - float(mix))) for mix in MIXES]
    tried = [replace(made, shares=mix) for mix in mixes]
    errors = []
    for each in tried:
        pipeline.put(made.stage, averaged(pipeline, strategy, each, before))
        with torch.no_grad():
            errors.append(float(recorded_error(pipeline, made.stage).item()))
    return tried[int(np.argmin(errors))]


def distil(pipeline: Pipeline, at: int) -> None:
    stage = pipeline.stages[at]
    optimizer = torch.optim.Adam(stage.parameters(), lr=DISTIL_LR)
    for _ in range(DISTIL_STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(recorded_error(pipeline, at))
        optimizer.step()


def recorded_error(pipeline: Pipeline, at: int) -> torch.Tensor:
    """The mean squared difference from what the next stage was given, by what the one before gave."""
    hidden = torch.cat([each[at] for each in pipeline.activations])
    for layer in pipeline.stages[at]:
        hidden = layer(hidden)
    return torch.nn.functional.mse_loss(hidden, torch.cat([each[at + 1] for each in pipeline.activations]))


def random_stage(pipeline: Pipeline, at: int) -> Stage:
    """As the demo's model is initialised, seeded by the step."""
    generator = np.random.default_rng([pipeline.setup.seed, pipeline.version, at])
    narrow = RANDOM_STD / np.sqrt(2 * STAGES * pipeline.setup.layers_per_stage)
    found: dict[str, Held] = {}
    for name, parameter in pipeline.stages[at].named_parameters():
        size = parameter.numel()
        if parameter.dim() > 1:
            std = narrow if name.endswith("_out.weight") else RANDOM_STD
            value = (std * generator.standard_normal(size)).astype(np.float32)
        else:
            value = np.full(size, 1.0 if name.endswith("norm.weight") else 0.0, np.float32)
        found[name] = (value, np.zeros_like(value), np.zeros_like(value), 0)
    return found
