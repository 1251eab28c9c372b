"""What batches are drawn from when the number of ranks changes: by the rule, or as the user's function says."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.runtime.test_group import on_all_ranks
from tiercheck.config import CheckpointConfig
from tiercheck.errors import ConfigurationError, RecoveryError
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.runtime.group import SimulatedGroup
from tiercheck.streams.loading import Loading
from tiercheck.streams.rebuilding.carry_over import carried_over
from tiercheck.tiers.memory import MemoryDriver

CONFIG = CheckpointConfig(base_every=4, batch=1, deadline_s=30)
SAMPLES, FAILED_AT = 24, 3
Saved = Sequence[Mapping[str, Any] | None]


@dataclass
class Sampler:
    """A rank's share of the data, and how much of it was drawn."""

    share: torch.Tensor
    drawn: int = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.drawn += 1
        return int(self.share[self.drawn - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"share": self.share, "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.share, self.drawn = state["share"], state["drawn"]


def dealt_anew(saved: Saved, rank: int, world_size: int) -> dict[str, Any]:
    """What nobody has drawn, to all ranks in turn."""
    held = [each["sampler"] for each in saved if each is not None]
    left = torch.cat([each["share"][each["drawn"] :] for each in held]).sort().values
    return {"sampler": {"share": left[rank::world_size], "drawn": 0}}


@dataclass
class Job:
    """Ranks as threads, each with a memory as if it were a node, and a directory that all see."""

    directory: Path
    name: str
    drawn: list[int] = field(default_factory=list)

    def run(self, ranks: int, last: int, carry_over: Callable[[Saved, int, int], Any] | None = None) -> list[Any]:
        """A life up to version ``last``, ended as by a crash. By rank: what it recovered, and where its sampler was."""

        def act(group: SimulatedGroup) -> Any:
            model = torch.nn.Linear(2, 1)
            for parameter in model.parameters():  # threads share torch's generator, and ranks are alike
                torch.nn.init.ones_(parameter)
            optimizer = torch.optim.AdamW(model.parameters())
            tiers = Hierarchy.of(f"memory://{self.name}-{{rank}}", f"nvme://{self.directory}/run?survives=rack")
            sampler = Sampler(torch.arange(SAMPLES)[group.rank :: group.world_size])
            loading = Loading(carry_over=carry_over)
            checkpointer = attach(
                model, optimizer, tiers, stateful={"sampler": sampler}, group=group, config=CONFIG, loading=loading
            )
            try:
                begun = sampler.state_dict()
                while checkpointer.version < last:
                    self.drawn.append(next(sampler))
                    model(torch.ones(1, 2)).sum().backward()
                    optimizer.step()
                    checkpointer.end_iteration()
                checkpointer.flush()
                return checkpointer.recovery, begun
            finally:
                checkpointer.abort()

        outcomes = on_all_ranks(ranks, act)
        for rank in range(ranks):
            MemoryDriver.forget(f"{self.name}-{rank}")
        return outcomes


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path, f"carry-over-{uuid.uuid4().hex}")


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 4)])
def test_each_sample_is_drawn_once_whatever_the_number_of_ranks(job: Job, before: int, after: int) -> None:
    job.run(before, FAILED_AT)
    left = SAMPLES - before * FAILED_AT
    resumed = job.run(after, FAILED_AT + left // after, dealt_anew)
    for rank, (recovery, begun) in enumerate(resumed):
        assert (recovery.version, str(recovery.fidelity)) == (FAILED_AT, "exact")
        assert "as carry_over gave it, of what all ranks had that saved: sampler" in recovery.notes
        assert (begun["drawn"], len(begun["share"])) == (0, len(range(rank, left, after)))
    assert len(set(job.drawn)) == len(job.drawn) >= SAMPLES - after
    for recovery, begun in job.run(after, 0, dealt_anew):
        assert (recovery.version, begun["drawn"]) == (FAILED_AT + left // after, left // after), "asked once alone"


def test_by_the_rule_it_goes_to_the_rank_of_the_same_number(job: Job) -> None:
    job.run(2, FAILED_AT)
    (first, one), (_, two), (third, three) = job.run(3, 0)
    assert [each["drawn"] for each in (one, two, three)] == [FAILED_AT, FAILED_AT, 0]
    assert len(one["share"]) == len(two["share"]) == SAMPLES // 2
    assert not any("carry_over" in note for note in first.notes)
    assert any("begin as the script made them" in note for note in third.notes)


@pytest.mark.parametrize("after", [1, 2, 3])
def test_what_ranks_that_are_gone_had_is_told_by_one(job: Job, after: int) -> None:
    job.run(3, FAILED_AT)
    gone = {1: "what ranks 1 to 2 had in stateful= (sampler) is", 2: "what rank 2 had in stateful= (sampler) is", 3: ""}
    for rank, (recovery, _) in enumerate(job.run(after, 0)):
        notes = "; ".join(recovery.notes)
        assert ("nobody's now" in notes) == (rank == 0 and after < 3)
        assert rank or gone[after] in notes


def test_who_goes_on_with_it_is_not_asked_again(job: Job) -> None:
    job.run(3, FAILED_AT)
    for recovery, _ in job.run(2, 0, dealt_anew):
        assert "nobody's now" not in "; ".join(recovery.notes)


def test_a_rank_whose_position_is_lost_is_told_and_costs_the_fidelity(job: Job) -> None:
    job.run(3, FAILED_AT)
    shutil.rmtree(job.directory / "run" / "r00002")
    asked: list[list[bool]] = []

    def function(saved: Saved, rank: int, world_size: int) -> dict[str, Any]:
        asked.append([each is None for each in saved])
        return dealt_anew(saved, rank, world_size)

    for recovery, _ in job.run(2, 0, function):
        assert str(recovery.fidelity) == "approximate"
        assert "carry_over got nothing of what batches were drawn from on rank 2: it is lost" in recovery.notes
    assert asked == [[False, False, True]] * 2


def raising(saved: Saved, rank: int, world_size: int) -> dict[str, Any]:
    raise KeyError("epoch")


REFUSED: tuple[tuple[Any, str], ...] = (
    (raising, "carry_over raised KeyError: 'epoch'"),
    (lambda *_: [1], "carry_over must return states by name, not [1]"),
    (lambda *_: {"loader": {}}, "a state of 'loader'; what batches are drawn from in stateful= is sampler"),
    (lambda saved, rank, _: raising(saved, rank, _) if rank else {}, "carry_over raised KeyError"),
)
"""A function, and what the refusal says."""


def test_a_function_that_fails_on_any_rank_is_refused_on_all(job: Job) -> None:
    job.run(3, FAILED_AT)
    for function, said in REFUSED:
        for error in job.run(2, 0, function):
            assert isinstance(error, ConfigurationError | RecoveryError)
            assert said in str(error)
    assert job.run(3, 0)[0][0].version == FAILED_AT, "the tiers are as they were"


class Constant:
    """A provider whose host state is this."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def host_state(self) -> dict[str, Any]:
        return self.state

    def translated_host_state(self, state: Mapping[str, Any], version: int) -> dict[str, Any]:
        return dict(state)


def scheduled(groups: int, steps: int) -> tuple[Any, dict[str, Any]]:
    """A scheduler of so many groups, and the host state of its job."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(groups)]
    optimizer = torch.optim.SGD([{"params": [each], "lr": 10.0**-n} for n, each in enumerate(parameters)])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    options = [{"lr": group["lr"]} for group in optimizer.param_groups]
    return scheduler, {"options": options, "after_step": {"scheduler": scheduler.state_dict()}}


@pytest.mark.parametrize(("before", "now"), [(1, 2), (3, 2)])
def test_a_schedule_goes_on_though_parameter_groups_were_added_or_merged(before: int, now: int) -> None:
    _, saved = scheduled(before, 3)
    scheduler, here = scheduled(now, 0)
    provider: Any = Constant(here)
    state, lost, _ = carried_over(provider, saved, options=here["options"], version=3, own=True)
    scheduler.load_state_dict(state["after_step"]["scheduler"])
    scheduler.optimizer.step()
    scheduler.step()
    assert scheduler.last_epoch == 4
    assert scheduler.get_last_lr() == [10.0**-n * 0.5**4 for n in range(now)]
    assert f"there were {before} parameter groups, and are {now}" in lost[0]
    _, same = scheduled(now, 3)
    assert carried_over(provider, same, options=here["options"], version=3, own=True)[1] == ()
