"""A training small enough to fail in every way, that remembers its parameters after each step."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import CapacityExceeded
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.integrations.torch import attach
from tiercheck.policy.policies import Policies
from tiercheck.runtime.group import Group
from tiercheck.testing.faults import Fault, FaultPlan, FaultyDriver, Moment, Point

FULL = "no room"


class Training:
    """A model, its optimizer and, if attached, its checkpointer; remembers the parameters after each step."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        self.optimizer = optimizer(self.model.parameters(), lr=1e-2, **options)
        self.states = {0: self.parameters()}
        self.checkpointer: Checkpointer | None = None
        self.says_end = True
        """Whether its loop calls ``end_iteration``."""
        self.after_step: Callable[[], None] = lambda: None
        """What its loop does after the optimizer's step."""

    def attach(
        self,
        hierarchy: Hierarchy,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        stateful: dict[str, Any] | None = None,
        after_step: dict[str, Any] | None = None,
        group: Group | None = None,
        policies: Policies | None = None,
        version: int | None = None,
        generation: int | None = None,
        fresh: bool = False,
        **config: Any,
    ) -> Checkpointer:
        beside = {"scheduler": scheduler, "scaler": scaler, "stateful": stateful, "after_step": after_step}
        # A fresh clone compiles its kernels within the first wait.
        settings = CheckpointConfig(**{"deadline_s": 30.0, **config})
        self.checkpointer = attach(
            self.model,
            self.optimizer,
            hierarchy,
            **beside,
            group=group,
            config=settings,
            policies=policies,
            version=version,
            generation=generation,
            fresh=fresh,
        )
        return self.checkpointer

    def parameters(self) -> bytes:
        return torch.cat([each.detach().flatten() for each in self.model.parameters()]).numpy().tobytes()

    def backward(self, version: int) -> None:
        self.optimizer.zero_grad()
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(version))
        self.model(batch).pow(2).mean().backward()

    def step(self, version: int) -> None:
        self.backward(version)
        try:
            self.optimizer.step()
            self.after_step()
            if self.checkpointer is not None and self.says_end:
                self.checkpointer.end_iteration()
        finally:
            self.states[version] = self.parameters()


@contextmanager
def life(checkpointer: Checkpointer, *, flush: bool = True, closed: bool = False) -> Iterator[None]:
    """What a trainer does while it lives. It ends as by a crash, unless it is ``closed``."""
    try:
        yield
        if flush:
            checkpointer.flush()
        if closed:
            checkpointer.close()
    finally:
        checkpointer.abort()


def memory() -> str:
    return f"memory://training-{uuid.uuid4().hex}"


def faulty(url: str, where: Callable[[Point], bool], times: int = 2**30) -> Tier:
    """The tier at ``url``, full where ``where`` says so."""

    def strikes(point: Point) -> bool:
        return point.moment is Moment.BEFORE and where(point)

    plan = FaultPlan((Fault(strikes, lambda: CapacityExceeded(FULL), times),))
    return Tier(url, wrap=lambda driver: FaultyDriver(driver, plan))


def recovered(url: str) -> tuple[int, bytes]:
    """The version and the parameters that a new job finds."""
    after = Training()
    checkpointer = after.attach(Hierarchy.of(url))
    checkpointer.abort()
    return checkpointer.version, after.parameters()
