"""Random stories: how a job of several ranks trains and saves, and how its processes fail, life after life."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch

__all__ = ["LAST", "MOMENTS", "OPTIMIZERS", "Failure", "Story"]

LAST = 12
MOMENTS = ("at its begin", "after the forward pass", "before the step", "before its end", "after its end")
"""Of an iteration."""
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "Adam, amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True, foreach=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
}


@dataclass(frozen=True)
class Failure:
    """How a life ends."""

    ahead: int
    """In that iteration, counted from the version that the life began with."""
    moment: str
    killed: int | None
    """This rank is killed, and then the others are; ``None``: the loop of each rank raises."""
    lost: tuple[int, ...]
    """Ranks whose memory is lost after that, as if each were on a node of its own."""


@dataclass(frozen=True)
class Story:
    """``framework``: ``ddp``, ``fsdp``, or ``hsdp`` with two columns."""

    framework: str
    ranks: int
    optimizer: str
    bf16: bool
    frozen: bool
    scheduled: bool
    clips: bool
    micro_batches: int
    says_end: bool
    """Whether the loop calls ``end_iteration``. One that does not draws nothing between its steps."""
    shared_tier: bool
    failures: tuple[Failure, ...]
    joint: bool
    """Whether an AdamW updates the second half of the model. Then the loop calls ``end_iteration``."""
    config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, seed: int) -> Self:
        drawn = random.Random(seed)

        def chance(share: float) -> bool:
            return drawn.random() < share

        framework = drawn.choice(("ddp", "fsdp", "hsdp"))
        ranks = 4 if framework == "hsdp" else drawn.choice((2, 3))
        shared_tier = chance(0.7)
        base_every = drawn.choice((1, 2, 3, 5))
        joint = (
            random.Random(f"joint {seed}").random() < 0.4
        )  # by itself, so that seeds tell the stories that they told
        return cls(
            framework,
            ranks,
            drawn.choice(sorted(OPTIMIZERS)),
            bf16=chance(0.4),
            frozen=chance(0.4),
            scheduled=chance(0.5),
            clips=chance(0.4),
            micro_batches=drawn.choice((1, 2)),
            says_end=chance(0.7) or joint,
            shared_tier=shared_tier,
            failures=tuple(
                Failure(
                    drawn.randint(1, 4),
                    drawn.choice(MOMENTS),
                    drawn.choice((None, *range(ranks))),
                    tuple(rank for rank in range(ranks) if shared_tier and chance(0.2)),
                )
                for _ in range(drawn.randint(1, 4))
            ),
            joint=joint,
            config={
                "base_every": base_every,
                "batch": drawn.randint(1, min(base_every, 3)),
                "codec": drawn.choice(("exact", "exact+entropy")),
                "replicas": drawn.choice(("auto", "each")),
            },
        )
