"""What one rank stores of what all hold alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.runtime.group import SingleProcess
from tiercheck.streams.tensors.owned import OwnedProvider, Owners


def test_a_provider_is_given_the_whole_state_also_if_the_rank_stores_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """An integration may refuse names that are not those of its optimizer's state."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    whole = ModuleProvider(model, optimizer)
    owned = OwnedProvider(whole, Owners(SingleProcess(), {"weight": 0, "bias": 1}, {}, deadline_s=5.0))
    given: dict[str, Any] = {}
    monkeypatch.setattr(whole, "load", given.update)
    state = {"weight": {"step": torch.tensor(7.0)}}
    owned.load(masters=owned.masters(), optimizer_state=state, extras={}, hyperparameters=owned.hyperparameters())
    assert given["masters"].keys() == given["optimizer_state"].keys() == {"weight", "bias"}
    assert given["optimizer_state"]["weight"] is state["weight"]
    assert given["optimizer_state"]["bias"].keys() == whole.optimizer_state()["bias"].keys()
