"""What a start does if no copy of a pipeline stage is left: a value that a user composes.

By default nothing: the start is refused, since the bits of the stage are gone. With a :class:`LostStage` the other
ranks recover as always, and the lost stage is made anew (:mod:`tiercheck.policy.neighbours` says of what). What comes
of it is approximate, and stays so in all that is trained from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from tiercheck.errors import ConfigurationError
from tiercheck.policy.neighbours import CHECKFREE, CHECKFREE_PLUS, EXPONENT, Method, RaisedRate, weigh
from tiercheck.policy.recovery.consensus import Reachable, admitted, meeting
from tiercheck.policy.recovery.lineage import Lineage
from tiercheck.types import shown

__all__ = ["METHODS", "MOMENTS", "WEIGHTS", "LostStage", "lost_ranks", "within_reach"]

METHODS: Mapping[str, tuple[Method, ...]] = {
    "neighbours": CHECKFREE,
    "neighbours-and-ends": CHECKFREE_PLUS,
    "older-base": (Method.ROLL_BACK,),
    "older-base-or-neighbours": (Method.ROLL_BACK, *CHECKFREE),
}
"""By the name that a user writes, what is tried for each lost stage, in order."""
MOMENTS = ("new", "averaged")
WEIGHTS = ("by-stage", "by-layer")
RATE = 1.1
"""The paper's factor for the learning rate."""
BEHIND = 20


@dataclass(frozen=True, kw_only=True)
class LostStage:
    """How a pipeline stage is made of which no copy is left. The same on every rank. Errors: ``ConfigurationError``.

    The methods are those of "All is Not Lost: LLM Recovery without Checkpoints" (CheckFree and CheckFree+, arXiv
    2506.15461), and one of our own. ``weights`` and ``moments`` are ours too, and are of stages that are averaged or
    copied.
    """

    method: str = "neighbours"
    """``neighbours``: an inner stage is the average of its two neighbours. ``neighbours-and-ends``: also an end stage
    is made, a copy of its neighbour; that is worth something only if training has swapped the first two and the last
    two stages. ``older-base``: the stage alone goes back to the newest version that it can come to; its optimizer state
    is of that version. ``older-base-or-neighbours``: the first of the two that can be had."""
    exponent: float = EXPONENT
    """A neighbour weighs as the norm of its last gradient to this power. 0: both weigh alike. They do so, too, if the
    version does not hold the norms, since it was saved without this option."""
    weights: str = "by-stage"
    """Which norms weigh a neighbour. ``by-stage``: that of all its layers together. ``by-layer``: for each layer of the
    lost stage, those of the two layers that it is made of."""
    moments: str = "new"
    """``new``: the optimizer's state begins anew. ``averaged``: its moments are made as the weights are, each corrected
    for its bias. It must be an optimizer whose moments are known: torch's Adam or AdamW without amsgrad, DeepSpeed's
    ``FusedAdam``."""
    learning_rate: float | None = None
    """By what the learning rate is multiplied for the next ``steps`` steps. By default 1.1, as in the paper, and 1 if a
    schedule is attached."""
    steps: int = 100
    behind_max: int | None = None
    """A stage is lost as well if it would take the others back by more than so many versions. By default a stage that
    can be made from an older base is lost when it is more than 20 versions behind, and any other one only if it can
    come to no version at all."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigurationError(f"method must be one of {', '.join(METHODS)}, not {shown(self.method)}")
        for name, known in (("weights", WEIGHTS), ("moments", MOMENTS)):
            if getattr(self, name) not in known:
                raise ConfigurationError(f"{name} must be {' or '.join(known)}, not {shown(getattr(self, name))}")
        if type(self.exponent) not in (int, float):
            raise ConfigurationError(f"exponent must be a number, not {shown(self.exponent)}")
        weigh((), self.exponent)
        for name in ("steps", "behind_max"):
            value = getattr(self, name)
            if (value is not None or name == "steps") and (type(value) is not int or value < 0):
                raise ConfigurationError(f"{name} must be a whole number from 0, not {shown(value)}")
        self.rate(scheduled=False)

    @classmethod
    def of(cls, given: Any) -> Self:
        """Of what a user may pass: one of these, a method's name, or a mapping of fields."""
        if isinstance(given, cls):
            return given
        if isinstance(given, str):
            return cls(method=given)
        if isinstance(given, Mapping):
            if unknown := sorted(given.keys() - {each.name for each in fields(cls)}):
                raise ConfigurationError(f"on_lost_stage has no field {shown(unknown[0])}")
            return cls(**given)
        raise ConfigurationError(
            f"on_lost_stage must be a LostStage, or one of {', '.join(METHODS)}, not {shown(given)}"
        )

    @property
    def methods(self) -> tuple[Method, ...]:
        return METHODS[self.method]

    @property
    def by_layer(self) -> bool:
        return self.weights == "by-layer"

    @property
    def averages_moments(self) -> bool:
        return self.moments == "averaged"

    @property
    def threshold(self) -> int | None:
        """By how many versions a stage that is not lost may take the others back; ``None``: by any number."""
        return BEHIND if self.behind_max is None and Method.ROLL_BACK in self.methods else self.behind_max

    def rate(self, *, scheduled: bool) -> RaisedRate:
        """What becomes of the learning rate. ``scheduled``: a schedule is attached."""
        factor = self.learning_rate
        if factor is None:
            factor = 1.0 if scheduled else RATE
        if type(factor) not in (int, float):
            raise ConfigurationError(f"learning_rate must be a number, not {shown(factor)}")
        return RaisedRate(float(factor), self.steps)


def within_reach(reach: Reachable, lineage: Lineage) -> int | None:
    """The newest version that a rank can come to; ``None`` if there is none."""
    spans = admitted(reach, lineage)
    return spans[-1][1] if spans else None


def lost_ranks(reaches: Mapping[int, Reachable], lineage: Lineage, behind_max: int | None) -> frozenset[int]:
    """The ranks that the others go on without, and the others can meet at a version. ``reaches``: by rank.
    ``behind_max``: as :attr:`LostStage.threshold`."""
    newest = {rank: within_reach(reach, lineage) for rank, reach in reaches.items()}
    most = max((each for each in newest.values() if each is not None), default=None)
    if most is None:
        return frozenset()
    least = 0 if behind_max is None else most - behind_max
    lost = frozenset(rank for rank, each in newest.items() if each is None or each < least)
    left = [reach for rank, reach in reaches.items() if rank not in lost]
    together, apart = meeting(reaches.values(), lineage), meeting(left, lineage)
    if apart is None or (together is not None and (behind_max is None or apart - together <= behind_max)):
        return frozenset()
    return lost
