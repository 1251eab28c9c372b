"""Steps that are not all alike: skipped by a loss scaler, with groups of their own options, without some gradients."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.types import Fidelity

LAST = 14
OVERFLOWS = {1, 6, 7, 11}
"""Batches whose loss is infinite: the first one too, before there is any state of the optimizer."""


class Batches:
    """Where in the data the job is."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> torch.Tensor:
        self.position += 1
        return torch.randn(8, 6, generator=torch.Generator().manual_seed(self.position))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = torch.nn.Linear(6, 5), torch.nn.Linear(5, 5), torch.nn.Linear(5, 1)

    def forward(self, batch: torch.Tensor, deep: bool) -> torch.Tensor:
        hidden = self.first(batch).tanh()
        if deep:
            hidden = self.second(hidden).tanh()
        return self.head(hidden).pow(2).mean()


class Job:
    """Two groups that differ in every option, a layer that some batches do not pass, dynamic loss scaling."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
        torch.manual_seed(3)
        self.model = model = Model()
        groups = [
            {"params": [*model.first.parameters(), *model.head.parameters()], "lr": 1e-2, "weight_decay": 0.1},
            {"params": list(model.second.parameters()), "lr": 3e-2, "weight_decay": 0.0},
        ]
        if optimizer is not torch.optim.SGD:
            groups[1]["betas"] = (0.4, 0.9)
        self.optimizer = optimizer(groups, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        self.batches = Batches()
        self.seen: dict[int, tuple[str, float]] = {}
        self.checkpointer: Checkpointer | None = None
        self.says_end = True

    def attach(self, url: str) -> Checkpointer:
        self.checkpointer = attach(
            self.model,
            self.optimizer,
            Hierarchy.of(url),
            scaler=self.scaler,
            stateful={"batches": self.batches},
            config=CheckpointConfig(base_every=6, batch=2, deadline_s=30),
        )
        return self.checkpointer

    def train(self, last: int) -> None:
        while self.batches.position < last:
            batch = self.batches.next()
            position = self.batches.position
            loss = self.model(batch, bool(position % 3)) * (float("inf") if position in OVERFLOWS else 1.0)
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.checkpointer is not None and self.says_end:
                self.checkpointer.end_iteration()
            self.seen[position] = (loss.item().hex(), self.scaler.get_scale())

    def state(self) -> list[bytes]:
        tensors = list(self.model.state_dict().values())
        for state in self.optimizer.state_dict()["state"].values():
            tensors += [each for each in state.values() if isinstance(each, torch.Tensor)]
        return [tensor.numpy().tobytes() for tensor in tensors]


ADAMW = (torch.optim.AdamW, {})
OTHERS = [
    (torch.optim.Adam, {"foreach": True, "amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {}),
]
FAILURES = [(3, True), (7, True), (8, True), (8, False), (12, True)]


@pytest.mark.parametrize(
    ("optimizer", "options", "failed_after", "says_end"),
    [*((*ADAMW, *failure) for failure in FAILURES), *((*other, 7, True) for other in OTHERS)],
)
def test_the_resumed_run_is_the_uninterrupted_one(
    optimizer: Any, options: dict[str, Any], failed_after: int, says_end: bool
) -> None:
    """Also where nobody says when iterations end; but then nothing tells what ``Batches`` is, and so nobody calls it
    exact."""
    reference = Job(optimizer, **options)
    reference.train(LAST)
    assert {position for position, (loss, _) in reference.seen.items() if loss == "inf"} == OVERFLOWS

    url = f"memory://steps-{uuid.uuid4().hex}"
    before = Job(optimizer, **options)
    checkpointer = before.attach(url)
    before.says_end = says_end
    before.train(failed_after)
    checkpointer.abort()

    after = Job(optimizer, **options)
    checkpointer = after.attach(url)
    assert checkpointer.recovery is not None
    assert checkpointer.recovery.fidelity is (Fidelity.EXACT if says_end else Fidelity.APPROXIMATE)
    assert [note.partition(" moved ")[0] for note in checkpointer.recovery.notes] == ["batches"] * (not says_end)
    assert 0 < after.batches.position <= failed_after
    after.train(LAST)
    checkpointer.abort()
    assert {**before.seen, **after.seen} == reference.seen
    assert after.state() == reference.state()


def test_a_container_whose_modules_are_called_ends_its_iterations_too() -> None:
    """With a scheduler a version ends where the next forward pass begins; a container has none of its own."""
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.ModuleDict({"out": torch.nn.Linear(2, 1)})])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    checkpointer = attach(model, optimizer, Hierarchy.of(f"memory://resumed-{uuid.uuid4().hex}"), scheduler=scheduler)
    for version in range(1, 4):
        hidden = model[0](torch.ones(1, 2))
        assert checkpointer.version == version - 1
        model[1]["out"](hidden).sum().backward()
        optimizer.step()
        scheduler.step()
    checkpointer.close()
    assert checkpointer.version == 3
