"""What DDP's communication hooks keep is in the versions, or recoveries are approximate and say so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.training import memory
from tiercheck.checkpointer import Checkpointer
from tiercheck.errors import UnsupportedSetup
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import Compression, attach, compressed_all_reduce
from tiercheck.integrations.torch.communication_hooks import unsaved_states


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(hook: Any = None, state: Any = None) -> DistributedDataParallel:
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    return ddp


def test_a_recovery_names_the_hook_whose_state_was_lost() -> None:
    def job(url: str) -> tuple[DistributedDataParallel, torch.optim.Optimizer, Checkpointer]:
        ddp = wrapped(powerSGD_hook, PowerSGDState(None, start_powerSGD_iter=2))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        return ddp, optimizer, attach(ddp, optimizer, Hierarchy.of(url))

    url = memory()
    ddp, optimizer, checkpointer = job(url)
    assert checkpointer.recovery is None
    ddp(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    checkpointer.close()
    *_, checkpointer = job(url)
    assert checkpointer.recovery is not None
    assert checkpointer.recovery.fidelity == "approximate"
    buckets, note = checkpointer.recovery.notes
    assert "into other buckets, which the communication hook powerSGD_hook, whose state is not in stateful=" in buckets
    assert "DDP's communication hook powerSGD_hook (PowerSGDState) is in no version, and begins anew" in note
    checkpointer.abort()


def test_a_hooks_state_that_cannot_be_saved_is_refused_by_name() -> None:
    state = PowerSGDState(None, start_powerSGD_iter=2)
    ddp = wrapped(powerSGD_hook, state)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(UnsupportedSetup, match=r"hook \(PowerSGDState\) has no state_dict and load_state_dict"):
        attach(ddp, optimizer, Hierarchy.of(memory()), stateful={"hook": state})


def test_a_state_that_is_saved_and_hooks_without_one_are_none_of_them() -> None:
    plain = wrapped(allreduce_hook), wrapped(allreduce_hook, dist.group.WORLD), wrapped()
    assert [unsaved_states(torch.nn.ModuleList([each]), ()) for each in plain] == [[], [], []]
    for codec_name, lost in (("int8", 0), ("int8+feedback", 1)):
        ddp = wrapped()
        compression = Compression(ddp, codec_name=codec_name)
        ddp.register_comm_hook(compression, compressed_all_reduce)
        assert len(unsaved_states(ddp, ())) == lost
        assert not unsaved_states(ddp, [compression])


def test_a_hook_that_is_registered_after_attach_is_refused_at_the_next_step() -> None:
    def step(hook: Any, state: Any) -> int:
        ddp = wrapped()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        checkpointer = attach(ddp, optimizer, Hierarchy.of(memory()))
        ddp.register_comm_hook(state, hook)
        try:
            ddp(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            return checkpointer.version
        finally:
            checkpointer.abort()

    with pytest.raises(UnsupportedSetup, match=r"powerSGD_hook was registered after attach\(\).*before attach\(\)$"):
        step(powerSGD_hook, PowerSGDState(None, start_powerSGD_iter=2))
    assert step(allreduce_hook, None) == 1, "it treats each number for itself"
