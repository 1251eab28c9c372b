"""What DDP keeps alike on all ranks, and what would make it differ: in one process, over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tiercheck.errors import UnsupportedSetup
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.integrations.torch.replicated import DataParallel


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Model(torch.nn.Module):
    """A part under DDP, in which a layer is frozen and another is left out, and a part outside of it."""

    def __init__(self) -> None:
        super().__init__()
        inner = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
        inner[1].requires_grad_(False)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["2.weight", "2.bias"])
        self.inner = DistributedDataParallel(inner)
        self.head = torch.nn.Linear(2, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.inner(batch))
        return result


def alike(model: torch.nn.Module) -> Any:
    trained = [each for each in model.parameters() if each.requires_grad]
    provider = ModuleProvider(model, torch.optim.SGD(trained, lr=0.1))
    return DataParallel(model).alike(provider.masters(), provider.frozen())


def test_what_ddp_manages_is_alike_and_nothing_else() -> None:
    found = alike(Model())
    assert found.masters == {"inner.module.0.weight", "inner.module.0.bias"}
    assert found.frozen == {"inner.module.1.weight", "inner.module.1.bias"}
    assert not found.obstacle
    assert alike(torch.nn.Linear(2, 2)) == type(found)()


@pytest.mark.parametrize(
    ("hook", "known"),
    [
        (default_hooks.allreduce_hook, True),
        (default_hooks.fp16_compress_hook, True),
        (powerSGD_hook.powerSGD_hook, False),
    ],
)
def test_a_hook_that_nobody_knows_is_an_obstacle(hook: Any, known: bool) -> None:
    model = Model()
    model.inner.register_comm_hook(None, hook)
    assert alike(model).obstacle == (
        "" if known else "nobody knows whether the communication hook powerSGD_hook leaves all ranks with the same bits"
    )


def test_a_process_group_of_its_own_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert "has a process group in which not all ranks are" in alike(model).obstacle


def test_a_step_on_gradients_that_were_not_summed_is_refused() -> None:
    model = Model()
    parallel = DataParallel(model)

    def forward(within: AbstractContextManager[Any]) -> None:
        with within:
            parallel.forward()

    forward(model.inner.no_sync())
    with pytest.raises(UnsupportedSetup, match=r"under no_sync\(\).*replicas='each'"):
        parallel.check_step()
    forward(nullcontext())  # sums what was accumulated before
    parallel.check_step()
    with torch.no_grad():
        forward(model.inner.no_sync())  # has no backward pass
    parallel.check_step()


def test_a_step_within_join_is_refused() -> None:
    model = Model()
    model.inner._join_config = model.inner._join_config._replace(enable=True)
    with pytest.raises(UnsupportedSetup, match=r"within join\(\)"):
        DataParallel(model).check_step()


def test_a_hook_that_is_registered_later_is_refused_at_the_step() -> None:
    model = Model()
    parallel = DataParallel(model)
    parallel.check_step()
    model.inner.register_comm_hook(None, powerSGD_hook.powerSGD_hook)
    with pytest.raises(UnsupportedSetup, match="powerSGD_hook"):
        parallel.check_step()


def test_a_model_that_ddp_runs_around_it_is_refused_at_its_forward_pass() -> None:
    """Its order of summation and what ranks hold alike are the wrapper's."""
    inner = torch.nn.Linear(2, 2)
    wrapper = DistributedDataParallel(inner)
    looks = DataParallel(inner)
    looks.forward()
    hook = inner.register_forward_pre_hook(lambda module, args: looks.forward())
    with pytest.raises(UnsupportedSetup, match="attach the DistributedDataParallel"):
        wrapper(torch.ones(1, 2))
    hook.remove()
    within = DataParallel(wrapper)
    inner.register_forward_pre_hook(lambda module, args: within.forward())
    wrapper(torch.ones(1, 2))
