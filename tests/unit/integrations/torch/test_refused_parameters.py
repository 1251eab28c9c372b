"""What no replay would repeat is refused at attach, or gets a base: never other bits that are called exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.training import memory
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import UnsupportedSetup
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.streams.tensors import tensor_state

LAST = 6


class Loop:
    """Two layers. ``kind``: of the optimizer, which has these options."""

    def __init__(self, kind: type[torch.optim.AdamW] = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 8, bias=False))
        self.optimizer = kind(self.model.parameters(), **{"lr": 1e-2, "weight_decay": 0.1, **options})

    def attach(self, url: str) -> Checkpointer:
        config = CheckpointConfig(base_every=100, bases="capture")
        return attach(self.model, self.optimizer, Hierarchy.of(url), config=config)

    def iterate(self, version: int, gradients: Callable[[Loop, int], None]) -> None:
        """``gradients`` makes those of the iteration's step."""
        torch.manual_seed(version)
        self.optimizer.zero_grad()
        gradients(self, version)
        self.optimizer.step()

    def loss(self) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.model(torch.randn(4, 8)), torch.randn(4, 8))

    def state(self) -> list[torch.Tensor]:
        held = [each for state in self.optimizer.state.values() for each in state.values()]
        return [each.detach().clone() for each in (*self.model.parameters(), *held)]


class Raising(torch.optim.AdamW):
    raises = False

    def step(self, closure: Any = None) -> Any:
        if self.raises:
            raise FloatingPointError("not now")
        return super().step(closure)


def of_backward(loop: Loop, version: int) -> None:
    loop.loss().backward()


def in_another_order(loop: Loop, version: int) -> None:
    parameters = list(loop.model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loop.loss(), parameters), strict=True):
        parameter.grad = gradient.t().contiguous().t()


def after_one_that_raised(loop: Loop, version: int) -> None:
    """In the third iteration: the first layer's step is broken off, and the second one's is made instead."""
    loop.loss().backward()
    if version == 3:
        first, last = loop.model.parameters()
        gradient, last.grad = last.grad, None
        with pytest.MonkeyPatch.context() as patched, pytest.raises(FloatingPointError):
            patched.setattr(Raising, "raises", True)
            loop.optimizer.step()
        first.grad, last.grad = None, gradient


def by_a_float32_schedule(loop: Loop, version: int) -> None:
    loop.optimizer.param_groups[0]["lr"] = np.float32(0.01) / np.float32(version + 2)
    loop.loss().backward()


@pytest.mark.parametrize(
    ("gradients", "options", "differentials"),
    [
        (of_backward, {"fused": True}, LAST),
        (in_another_order, {"fused": True}, 0),
        (in_another_order, {"foreach": True}, LAST),
        (after_one_that_raised, {"kind": Raising}, LAST - 1),
        (by_a_float32_schedule, {}, LAST),
    ],
)
def test_what_is_called_exact_has_the_bits_of_training(
    gradients: Callable[[Loop, int], None],
    options: dict[str, Any],
    differentials: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_state, "CALLED_ELEMENTS_MAX", 0)  # a large model is replayed by kernels
    url, loop = memory(), Loop(**options)
    checkpointer = loop.attach(url)
    for version in range(1, LAST + 1):
        loop.iterate(version, gradients)
        checkpointer.end_iteration()
    assert checkpointer.stats.differentials == differentials
    checkpointer.abort()
    again = Loop(**options)
    checkpointer = again.attach(url)
    assert checkpointer.recovery is not None
    assert (checkpointer.version, checkpointer.recovery.fidelity) == (LAST, "exact")
    assert all(map(torch.equal, again.state(), loop.state()))
    checkpointer.abort()


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default")
def test_another_default_dtype_costs_no_differential() -> None:
    loop = Loop()
    checkpointer = loop.attach(memory())
    for version in range(1, 4):
        loop.iterate(version, of_backward)
        checkpointer.end_iteration()
    assert checkpointer.stats.differentials == 3
    checkpointer.abort()


def twice(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["params"].append(loop.model[0].weight)


def in_one_memory(loop: Loop) -> None:
    loop.model[1].weight.data = loop.model[0].weight.data.view(8, 16)


def of_gradients_in_half(loop: Loop) -> None:
    loop.model[1].weight.grad_dtype = torch.bfloat16


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (twice, r"the optimizer has 0\.weight twice in one parameter group"),
        (in_one_memory, r"0\.weight and 1\.weight are two parameters in one memory"),
        (of_gradients_in_half, r"1\.weight is torch\.float32 and takes gradients of another dtype"),
    ],
)
def test_parameters_that_no_replay_would_step_as_training_does_are_refused(
    change: Callable[[Loop], None], said: str
) -> None:
    loop = Loop()
    change(loop)
    with pytest.raises(UnsupportedSetup, match=said):
        loop.attach(memory())
