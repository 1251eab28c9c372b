"""Which stages a lost pipeline stage is made from, and with what weights, if no copy of it is left.

The methods are those of "All is Not Lost: LLM Recovery without Checkpoints" (CheckFree and CheckFree+, Blagoev, Ersoy
and Chen, arXiv 2506.15461) and one of our own, partial roll-back. What they make is **approximate**: it is not the
stage that was lost. Optimizer state begins anew unless the caller averages it too.

A list of methods is tried in order for each lost stage, and the first one that applies is taken:

- :data:`CHECKFREE`: an inner stage is the weighted average of its two neighbours;
- :data:`CHECKFREE_PLUS`: an end stage is a copy of its neighbour as well, which is worth something only if training
  swapped the first two and the last two stages for half of the micro-batches;
- ``(Method.ROLL_BACK,)``: each lost stage goes back to an older base of its own; its survivors keep their state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import frexp, isfinite, ldexp
from typing import Final

from tiercheck.errors import ConfigurationError, RecoveryError

__all__ = [
    "ALIKE",
    "CHECKFREE",
    "CHECKFREE_PLUS",
    "EXPONENT",
    "Layer",
    "Method",
    "RaisedRate",
    "Share",
    "Substitute",
    "check_layers",
    "moment_share",
    "substitutes",
    "weigh",
]

ALIKE: Final = (
    "only stages of the same layers can be made of each other (DeepSpeed splits a model by its blocks with "
    'partition_method="type:..."), any other takes "older-base"'
)
"""What to do about stages that differ."""
EXPONENT: Final = 2.0
"""The paper's: a neighbour weighs as much as the square of its gradient's norm."""


class Method(StrEnum):
    """How a lost stage is made."""

    AVERAGE = "average"
    """The weighted average of both neighbours (CheckFree). An inner stage only, and both neighbours must be left."""
    COPY_END = "copy-end"
    """A copy of the only neighbour (CheckFree+). An end stage only."""
    COPY = "copy"
    """A copy of the stage before it, or of the one after it if the one before is lost too, or none is before it."""
    ROLL_BACK = "roll-back"
    """Its own newest older base. Any number of stages, ends and neighbours included."""


CHECKFREE: Final = (Method.AVERAGE,)
CHECKFREE_PLUS: Final = (Method.AVERAGE, Method.COPY_END)


@dataclass(frozen=True)
class Share:
    """A surviving stage, and how much of it goes into a lost one."""

    stage: int
    weight: float
    """In [0, 1]. The weights of a substitute's shares sum to 1."""
    norm: float | None = None
    """The gradient norm that gave the weight; ``None`` if no norm was looked at."""


@dataclass(frozen=True)
class Substitute:
    """Of what a lost stage is made.

    Without a ``base``, its weights are the weighted sum of the shares' weights. With one, they are those of the base,
    plus ``movement`` times the weighted sum of what each share has moved since its own base of that version.
    """

    stage: int
    method: Method
    shares: tuple[Share, ...]
    base: int | None = None
    """The version of the stage's own base that it goes back to."""
    movement: float = 0.0

    def by_layer(
        self, norms: Mapping[int, Sequence[float | None]], exponent: float = EXPONENT
    ) -> tuple[tuple[Share, ...], ...]:
        """The shares of each layer apart, weighed by the layer's own norms.

        ``norms``: by stage, the last gradient norm of each of its layers, in order. Raises
        :class:`~tiercheck.errors.RecoveryError` as :func:`weigh` does, or if the stages have not as many layers.
        """
        columns = [norms.get(share.stage, ()) for share in self.shares]
        if len({len(each) for each in columns}) > 1:
            told = ", ".join(f"stage {s.stage}: {len(c)}" for s, c in zip(self.shares, columns, strict=True))
            raise RecoveryError(f"not as many layers' gradient norms of each neighbour of stage {self.stage} ({told})")
        return tuple(
            _shares({s.stage: norm for s, norm in zip(self.shares, layer, strict=True)}, exponent)
            for layer in zip(*columns, strict=True)
        )


@dataclass(frozen=True)
class Layer:
    """A layer as far as an average is concerned: its parameters' names within the layer, and their shapes."""

    name: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class RaisedRate:
    """The learning rate after a lost stage was made anew (the paper's section on recovery: raised by a factor of 1.1).

    The paper ends it nowhere; ``steps`` ends it here.
    """

    factor: float = 1.1
    steps: int = 100

    def __post_init__(self) -> None:
        if not (isfinite(self.factor) and self.factor > 0 and self.steps >= 0):
            raise ConfigurationError(f"a raised learning rate needs a factor above 0 and steps of 0 or more: {self}")

    def at(self, steps_since: int) -> float:
        """By what the learning rate is multiplied ``steps_since`` the recovery: 0 is the first step after it."""
        return self.factor if 0 <= steps_since < self.steps else 1.0


def weigh(norms: Sequence[float | None], exponent: float = EXPONENT) -> tuple[float, ...]:
    """Weights proportional to ``norm ** exponent``, which sum to 1 (CheckFree: w = |g|^2).

    - A norm of 0 weighs nothing. If all are 0, they say nothing apart, and all weigh alike.
    - A norm that is not known (``None``), NaN or infinite is refused with :class:`~tiercheck.errors.RecoveryError`:
      such a gradient made no step, so it does not tell how far its stage has converged. Pass the norm of the last step
      that was taken.
    - With exponent 0 no norm is looked at, and all weigh alike.

    Norms of any scale are weighed without overflow. Raises :class:`~tiercheck.errors.ConfigurationError` for an
    exponent that is negative or not finite, and for a negative norm.
    """
    if not (isfinite(exponent) and exponent >= 0):
        raise ConfigurationError(f"the exponent of gradient norms must be finite and 0 or more, and is {exponent}")
    if exponent == 0:
        return _alike(len(norms))
    known = [_usable(norm) for norm in norms]
    largest = max(known, default=0.0)
    if largest == 0:
        return _alike(len(norms))
    scale = frexp(largest)[1]
    powers = [ldexp(norm, -scale) ** exponent for norm in known]
    total = sum(powers)
    return tuple(power / total for power in powers)


def _alike(count: int) -> tuple[float, ...]:
    return tuple(1.0 / count for _ in range(count))


def _usable(norm: float | None) -> float:
    if norm is None or not isfinite(norm):
        raise RecoveryError(f"a gradient norm is {'not known' if norm is None else norm}")
    if norm < 0:
        raise ConfigurationError(f"a gradient norm is negative: {norm}")
    return norm


def substitutes(
    stages: int,
    lost: Collection[int],
    norms: Mapping[int, float | None],
    *,
    methods: Sequence[Method] = CHECKFREE,
    exponent: float = EXPONENT,
    bases: Mapping[int, Collection[int]] | None = None,
    movement: float = 0.0,
) -> tuple[Substitute, ...]:
    """Of what each lost stage is made, in order of the stages.

    ``stages``: how many the pipeline has; stages are numbered from 0. ``norms``: by surviving stage, the norm (not
    squared) of its gradient at the last step taken. ``bases``: by stage, lost or not, the versions of its older bases
    that can be read. ``movement``: what part of the neighbours' mean movement since then is added to a stage that is
    rolled back; 0 adds none and needs no base of theirs.

    Raises :class:`~tiercheck.errors.RecoveryError` if a lost stage cannot be made; the message says why not for each
    method and each such stage. Raises :class:`~tiercheck.errors.ConfigurationError` if the request contradicts itself.
    """
    strange = sorted(stage for stage in lost if not 0 <= stage < stages)
    if strange or not methods or not isfinite(movement):
        raise ConfigurationError(
            f"lost stages {sorted(lost)} of {stages}, methods {list(methods)}, movement {movement}: stages are "
            "numbered from 0, at least one method is needed, and the movement is finite"
        )
    asked = _Asked(stages, frozenset(lost), norms, exponent, bases or {}, movement)
    made, refused = [], []
    for stage in sorted(asked.lost):
        reasons = []
        for method in methods:
            try:
                made.append(asked.make(stage, method))
                break
            except RecoveryError as error:
                reasons.append(f"{method}: {error}")
        else:
            refused.append(f"stage {stage} ({'; '.join(reasons)})")
    if refused:
        raise RecoveryError(f"lost and not to be made from what is left: {', '.join(refused)}")
    return tuple(made)


@dataclass(frozen=True)
class _Asked:
    """What :func:`substitutes` was asked."""

    stages: int
    lost: frozenset[int]
    norms: Mapping[int, float | None]
    exponent: float
    bases: Mapping[int, Collection[int]]
    movement: float

    def make(self, stage: int, method: Method) -> Substitute:
        match method:
            case Method.AVERAGE:
                return self.averaged(stage)
            case Method.COPY_END:
                if len(self.beside(stage)) > 1:
                    raise RecoveryError("it has two neighbours, and only an end stage is copied")
                return self.copied(stage, method)
            case Method.COPY:
                return self.copied(stage, method)
            case Method.ROLL_BACK:
                return self.rolled_back(stage)

    def beside(self, stage: int) -> list[int]:
        return [each for each in (stage - 1, stage + 1) if 0 <= each < self.stages]

    def averaged(self, stage: int) -> Substitute:
        beside = self.beside(stage)
        if len(beside) < 2:
            raise RecoveryError(
                f'it is an end stage of {self.stages} and has not two neighbours; that takes "neighbours-and-ends" '
                '(CheckFree+) or "older-base"'
            )
        gone = [each for each in beside if each in self.lost]
        if gone:
            raise RecoveryError(
                f'its neighbour {gone[0]} is lost too; two in a row take "older-base", if both have one'
            )
        return Substitute(
            stage, Method.AVERAGE, _shares({each: self.norms.get(each) for each in beside}, self.exponent)
        )

    def copied(self, stage: int, method: Method) -> Substitute:
        left = [each for each in self.beside(stage) if each not in self.lost]
        if not left:
            raise RecoveryError('no neighbour of it is left; that takes "older-base"')
        return Substitute(stage, method, (Share(left[0], 1.0),))

    def rolled_back(self, stage: int) -> Substitute:
        versions = self.bases.get(stage, ())
        if not versions:
            raise RecoveryError("no older base of it is at hand")
        base = max(versions)
        if self.movement == 0:
            return Substitute(stage, Method.ROLL_BACK, (), base)
        near = [each for each in self.nearest_left(stage) if base in self.bases.get(each, ())]
        if not near:
            raise RecoveryError(
                f"no surviving neighbour has a base of version {base}, which its movement since then needs"
            )
        return Substitute(stage, Method.ROLL_BACK, _shares(dict.fromkeys(near), 0), base, self.movement)

    def nearest_left(self, stage: int) -> Iterator[int]:
        """The nearest survivor before it, and the nearest after it."""
        for row in (range(stage - 1, -1, -1), range(stage + 1, self.stages)):
            yield from [each for each in row if each not in self.lost][:1]


def moment_share(weight: float, beta: float, steps: int, made_steps: int) -> float:
    """By what a share's moment is multiplied, so that the sum of all is the moment of ``made_steps`` steps.

    A moment is the mean of gradients (or of their squares) times ``1 - beta ** steps``: Adam corrects that bias
    (Kingma and Ba, arXiv 1412.6980, section 3). A stage that was made anew has seen fewer steps than others. So each
    moment is corrected for its own ``steps`` before it is averaged, and the average is biased as after ``made_steps``,
    of which the lost stage's own count of steps is to be.

    A moment of 0 steps holds nothing, and gets 0. Raises :class:`~tiercheck.errors.ConfigurationError` for a beta
    outside of [0, 1).
    """
    if not 0 <= beta < 1:
        raise ConfigurationError(f"a moment's beta must be in [0, 1), and is {beta}")
    return weight * (1 - beta**made_steps) / (1 - beta**steps) if steps > 0 else 0.0


def _shares(norms: Mapping[int, float | None], exponent: float) -> tuple[Share, ...]:
    try:
        weights = weigh(list(norms.values()), exponent)
    except RecoveryError as error:
        told = ", ".join(f"stage {stage}: {norm}" for stage, norm in norms.items())
        raise RecoveryError(f"{error} ({told}); exponent 0 weighs all neighbours alike and looks at no norm") from None
    looked_at = exponent != 0
    return tuple(
        Share(stage, weight, norm if looked_at else None)
        for (stage, norm), weight in zip(norms.items(), weights, strict=True)
    )


def check_layers(substitute: Substitute, layers: Mapping[int, Sequence[Layer]]) -> None:
    """Check that the k-th layer of every share has the parameters and shapes of the lost stage's k-th layer.

    ``layers``: by stage, the layers that are averaged, in order: no embedding, and no layer of an end that the others
    have not. Raises :class:`~tiercheck.errors.RecoveryError`; the message names the first layer that differs.
    """
    own = layers[substitute.stage]
    for share in substitute.shares:
        other = layers[share.stage]
        made = f"stage {substitute.stage} cannot be made from stage {share.stage}"
        if len(own) != len(other):
            raise RecoveryError(f"{made}: they have {len(own)} and {len(other)} layers; {ALIKE}")
        for ours, theirs in zip(own, other, strict=True):
            if ours.shapes != theirs.shapes:
                raise RecoveryError(f"{made}: {_difference(ours, theirs)}; {ALIKE}")


def _difference(ours: Layer, theirs: Layer) -> str:
    mine, its = dict(ours.shapes), dict(theirs.shapes)
    names = [name for name in (*mine, *its) if mine.get(name) != its.get(name)]
    if not names:
        return f"the parameters of {ours.name!r} and {theirs.name!r} have another order"
    told = [f"no {names[0]!r}" if names[0] not in each else str(each[names[0]]) for each in (mine, its)]
    return f"{names[0]!r} differs in {ours.name!r} ({told[0]}) and {theirs.name!r} ({told[1]})"
