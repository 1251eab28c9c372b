"""A state made of what a base holds, and replayed on: the bits that the job had, whatever optimizer took the steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiercheck
from tests.training import memory
from tiercheck.config import CheckpointConfig
from tiercheck.errors import ConfigurationError
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.streams.rebuilding.stored import StoredState, optimizer_class
from tiercheck.streams.tensors.group_options import plain_options
from tiercheck.streams.tensors.provider import Identity, OptimizerIdentity
from tiercheck.types import Fidelity

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda groups: torch.optim.Adam(groups, amsgrad=True),
    "adamw-foreach": lambda groups: torch.optim.AdamW(groups, foreach=True),
    "adamw-fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "sgd-momentum": lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.1, centered=True),  # no kernel: it is called
    "adagrad": torch.optim.Adagrad,
}
LAST = 7


@pytest.fixture
def state() -> StoredState:
    """Of one tensor, stepped by Adam."""
    adam = OptimizerIdentity("torch.optim.adam.Adam", "single_tensor", torch.__version__, "", "cuda")
    return StoredState(Identity("torch", "", "", adam), {"weight": 0})


class Odd(torch.optim.SGD):
    """Nobody has registered it."""


def train(optimizer_of: Callable[[Any], torch.optim.Optimizer], url: str) -> dict[int, dict[str, bytes]]:
    """Two groups, a schedule, clipping, buffers, steps without some of the gradients; what the job held by version."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 33), torch.nn.BatchNorm1d(33), torch.nn.Linear(33, 1))
    groups = [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[1:].parameters(), "lr": 3e-3}]
    optimizer = optimizer_of(groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    held = {}
    config = CheckpointConfig(base_every=4, batch=2, deadline_s=30)
    with attach(model, optimizer, Hierarchy.of(memory(), url), scheduler=scheduler, config=config) as checkpointer:
        for version in range(1, LAST + 1):
            optimizer.zero_grad()
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(version))
            (model(batch).square().mean() * 100).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if version == LAST - 1:
                model[2].bias.grad = None
            optimizer.step()
            scheduler.step()
            checkpointer.end_iteration()
            names = {parameter: name for name, parameter in model.named_parameters()}
            held[version] = {name: each.numpy().tobytes() for name, each in model.state_dict().items()}
            for parameter, state in optimizer.state.items():
                held[version] |= {
                    f"{names[parameter]}.{key}": each.numpy().tobytes()
                    for key, each in state.items()
                    if isinstance(each, torch.Tensor)
                }
    return held


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_of_torch_is_replayed_bit_for_bit(name: str, tmp_path: Path) -> None:
    url = f"nvme://{tmp_path}/run"
    held = train(OPTIMIZERS[name], url)
    with tiercheck.open(url) as archive:
        for version in (4, 5, LAST):
            found = archive.rebuild(0, version)
            assert (found.fidelity, found.notes) == (Fidelity.EXACT, ())
            tensors = {**found.state.masters(), **found.state.buffers()}
            for master, state in found.state.optimizer_state().items():
                tensors |= {f"{master}.{key}": each for key, each in state.items() if isinstance(each, torch.Tensor)}
            assert {key: each.detach().numpy().tobytes() for key, each in tensors.items()} == held[version]
            assert [group["lr"] for group in found.hyperparameters] == [
                rate * 0.5 ** (version // 2) for rate in (1e-2, 3e-3)
            ]


def test_of_an_optimizer_that_nobody_has_registered_the_bases_alone_are_read(tmp_path: Path) -> None:
    url = f"nvme://{tmp_path}/run"
    held = train(lambda groups: Odd(groups, lr=1e-2), url)
    with tiercheck.open(url) as archive:
        with pytest.raises(ConfigurationError, match=r"Odd, which is neither torch's nor registered.*only bases"):
            archive.rebuild(0, LAST)
        found = archive.rebuild(0, 4)
        assert found.fidelity is Fidelity.EXACT
        assert {key: each.numpy().tobytes() for key, each in found.state.masters().items()}.items() <= held[4].items()


def test_a_class_is_not_imported_because_a_file_names_it() -> None:
    with pytest.raises(ConfigurationError, match="neither torch's nor registered"):
        optimizer_class("antigravity.Optimizer")


def test_steps_that_a_graph_could_capture_are_taken_on_the_host(state: StoredState) -> None:
    options = {"lr": 0.5, "capturable": True}
    state.load(
        masters={"weight": torch.ones(3)}, optimizer_state={}, extras={}, hyperparameters=[{"lr": 1.0, **options}]
    )
    state.apply({"weight": torch.ones(3)}, [options])
    assert torch.allclose(state.masters()["weight"], torch.full((3,), 0.5), atol=0.01)
    assert state.hyperparameters() == [options], "as they were saved"


def test_so_are_those_of_a_rate_that_is_a_tensor(state: StoredState) -> None:
    """torch takes it on the host for one tensor at a time alone."""
    options = plain_options({"params": [], "lr": torch.tensor(0.5), "capturable": True, "foreach": True})
    state.load(masters={"weight": torch.ones(3)}, optimizer_state={}, extras={}, hyperparameters=[options])
    state.apply({"weight": torch.ones(3)}, [options])
    assert torch.allclose(state.masters()["weight"], torch.full((3,), 0.5), atol=0.01)
