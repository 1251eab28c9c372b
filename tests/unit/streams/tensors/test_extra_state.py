"""What modules keep by themselves, which no parameter and no buffer is."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from tests.training import memory
from tiercheck.config import CheckpointConfig
from tiercheck.errors import UnsupportedSetup
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.streams.tensors.extra_state import ExtraState


class Scaled(torch.nn.Linear):
    """Scales by the largest values of its last inputs, as layers of low precision do."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.largest = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.largest = torch.cat([self.largest[1:], x.detach().abs().max().reshape(1)])
        return super().forward(x) / self.largest.max()

    def get_extra_state(self) -> Any:
        return {"largest": self.largest, "recipe": ("delayed", 3)}

    def set_extra_state(self, state: Any) -> None:
        assert state["recipe"] == ("delayed", 3)
        self.largest = state["largest"]


def trained(url: str, last: int, *, says_end: bool) -> tuple[list[str], list[bytes]]:
    """The losses, and the state at the end. The life ends as by a crash."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(Scaled(), torch.nn.Tanh(), Scaled())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = CheckpointConfig(deadline_s=30)
    checkpointer = attach(torch.compile(model, backend="eager"), optimizer, Hierarchy.of(url), config=settings)  # type: ignore[arg-type]
    assert checkpointer.recovery is None or checkpointer.recovery.fidelity == "exact"
    losses = []
    for version in range(checkpointer.version + 1, last + 1):
        optimizer.zero_grad()
        batch = version * torch.randn(2, 4, generator=torch.Generator().manual_seed(version))
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        if says_end:
            checkpointer.end_iteration()
    checkpointer.abort()
    return losses, [each.detach().numpy().tobytes() for each in model.parameters()]


@pytest.mark.parametrize("says_end", [True, False])
def test_it_is_resumed_bit_for_bit(says_end: bool) -> None:
    whole, state = trained(memory(), 9, says_end=says_end)
    url = memory()
    trained(url, 5, says_end=says_end)
    losses, resumed = trained(url, 9, says_end=says_end)
    assert losses == whole[5 if says_end else 4 :]
    assert resumed == state


def test_what_a_version_lacks_is_told() -> None:
    model = torch.nn.Sequential(Scaled(), torch.nn.Linear(4, 4))
    found = ExtraState(model)
    state = found.host_state()
    assert list(state["extra_state"]) == ["0"]
    found.restore(state)
    assert found.caveats() == []
    found.restore({})
    assert found.caveats() == ["the version holds no extra state of 0, which begins as the script made it"]
    assert ExtraState(model[1]).host_state() == {}


def test_what_host_state_cannot_hold_is_refused_by_name_at_the_start() -> None:
    class Odd(Scaled):
        def get_extra_state(self) -> Any:
            return {"scales": io.BytesIO(b"1")}

    model = torch.nn.Sequential(Odd())
    with pytest.raises(UnsupportedSetup, match=r"extra_state\['0'\]\.scales is a _io\.BytesIO"):
        attach(model, torch.optim.AdamW(model.parameters()), Hierarchy.of(memory()))
