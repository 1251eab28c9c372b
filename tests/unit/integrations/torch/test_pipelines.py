"""A stage of torch's own pipelines, which torch runs once more in the first step of each process."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from tests.training import life, memory
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach, pipelines

LAST, KILLED = 5, 3


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Stage:
    """All of a pipeline, with buffers that a forward pass changes."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        stage = PipelineStage(self.model, 0, 1, torch.device("cpu"))
        self.schedule = ScheduleGPipe(
            stage, n_microbatches=2, loss_fn=lambda found, wanted: (found - wanted).square().mean()
        )

    def attach(self, url: str) -> Checkpointer:
        return attach(self.model, self.optimizer, Hierarchy.of(url), config=CheckpointConfig(bases="capture"))

    def step(self, version: int) -> None:
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(version))
        self.schedule.step(batch, target=batch[:, :1])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self) -> bytes:
        return b"".join(each.numpy().tobytes() for each in self.model.state_dict().values())


def test_what_that_pass_changes_is_put_back_in_a_job_that_goes_on() -> None:
    url, undisturbed = memory(), Stage()
    for version in range(1, LAST + 1):
        undisturbed.step(version)
    for first, last in ((1, KILLED), (KILLED + 1, LAST)):
        stage = Stage()
        checkpointer = stage.attach(url)
        with life(checkpointer):
            assert checkpointer.version == first - 1
            if checkpointer.recovery is not None:
                assert (checkpointer.recovery.fidelity, checkpointer.recovery.notes) == ("exact", ())
            for version in range(first, last + 1):
                stage.step(version)
                checkpointer.end_iteration()
    assert stage.bits() == undisturbed.bits()


def test_who_is_a_stage() -> None:
    stage = Stage()
    assert pipelines.is_stage(stage.model)
    assert not pipelines.is_stage(stage.model[0])
    assert not pipelines.is_stage(torch.nn.Linear(1, 1))


def test_sums_of_ranks_are_other_ones_in_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen with torch 2.13 alone: gradients of the first step of a process differ in their last bits."""
    stage = Stage()
    summed = DistributedDataParallel(stage.model)
    held = PipelineStage(summed, 0, 1, torch.device("cpu"))
    assert pipelines.rounds_otherwise(summed) == [], "a rank alone sums nothing"
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    (why,) = pipelines.rounds_otherwise(held.submod)
    assert "use fully_shard in the stage instead" in why
    assert pipelines.rounds_otherwise(DistributedDataParallel(torch.nn.Linear(1, 1))) == [], "it is in no pipeline"


def test_without_pipelines_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, pipelines.PIPELINES)
    assert not pipelines.is_stage(torch.nn.Linear(1, 1))
