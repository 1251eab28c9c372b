"""A finished job of two ranks and two generations in a directory, made once; tests damage copies of it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.unit.runtime.test_group import on_all_ranks
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.policy.compose.retention import KeepLast
from tiercheck.policy.policies import Policies
from tiercheck.runtime.group import SimulatedGroup
from tiercheck.tiers.memory import MemoryDriver

WORLD, FIRST_LIFE, LAST = 2, 7, 13


@dataclass
class Left:
    """What the job left in ``root``. ``weights[rank, version]``: the bits that rank had after that version."""

    root: Path
    weights: dict[tuple[int, int], bytes] = field(default_factory=dict, repr=False)

    @property
    def url(self) -> str:
        return f"nvme://{self.root}?survives=rack"

    def files(self, pattern: str) -> list[Path]:
        found = sorted(self.root.glob(pattern))
        assert found, pattern
        return found

    def flip(self, pattern: str) -> None:
        """One bit of each file, behind the header."""
        for path in self.files(pattern):
            content = bytearray(path.read_bytes())
            content[len(content) * 3 // 4] ^= 1
            path.write_bytes(content)

    def remove(self, pattern: str) -> None:
        for path in self.files(pattern):
            path.unlink()


def live(left: Left, memory: str, last: int) -> None:
    """A life of the job up to version ``last``; it ends in order, so that everything is in the directory."""

    def act(group: SimulatedGroup) -> None:
        generator = torch.Generator().manual_seed(group.rank)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        groups = [{"params": model[0].parameters(), "lr": 3e-2}, {"params": model[2].parameters()}]
        model[1].requires_grad_(False)
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        config = CheckpointConfig(base_every=4, batch=2, deadline_s=30)
        with attach(
            model,
            optimizer,
            Hierarchy.of(f"memory://{memory}-{group.rank}", left.url),
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
            group=group,
            config=config,
            policies=Policies(retention=KeepLast(9)),
        ) as checkpointer:
            left.weights.setdefault((group.rank, 0), bits(model.state_dict()))
            for version in range(checkpointer.version + 1, last + 1):
                batch = torch.randn(8, 3, generator=torch.Generator().manual_seed(version))
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                checkpointer.end_iteration()
                left.weights[group.rank, version] = bits(model.state_dict())

    outcomes = on_all_ranks(WORLD, act)
    assert outcomes == [None] * WORLD


def bits(tensors: dict[str, Any]) -> bytes:
    return b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))


def finish(root: Path) -> Left:
    """Both lives of the job, in the directory ``root``."""
    left = Left(root)
    for last in (FIRST_LIFE, LAST):
        memory = f"archive-{uuid.uuid4().hex}"
        live(left, memory, last)
        for rank in range(WORLD):
            MemoryDriver.forget(f"{memory}-{rank}")
    return left
