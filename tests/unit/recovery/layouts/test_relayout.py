"""What N ranks saved is resumed by M, bit for bit at the version of a differential, and nothing is lost on the way."""

from __future__ import annotations

import hashlib
import math
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.failing import Failing
from tests.training import life
from tests.unit.runtime.test_group import on_all_ranks
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import Mismatch, RecoveryError, Unauthorized
from tiercheck.format.index.logical import LogicalIndex, LogicalTensor, Padding, Range
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.integrations.torch import attach
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.policy.recovery.request import Request
from tiercheck.runtime.group import SimulatedGroup
from tiercheck.streams.tensors.provider import Identity
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.wrappers.base import Call, Operation

CONFIG = CheckpointConfig(base_every=4, batch=2, deadline_s=30)
FAILED_AT = 7


def network(width: int) -> torch.nn.Module:
    layers = torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width, affine=False), torch.nn.Linear(width, 2)
    return torch.nn.Sequential(*layers)


@dataclass
class Job:
    """Ranks as threads, each with a memory as if it were a node, and a directory that all see. As under DDP, every rank
    trains the whole model on the same gradients."""

    directory: Path
    name: str
    ranks_ever: int = 0

    def run(self, ranks: int, last: int, *, closed: bool = False, merged: bool = False) -> list[Any]:
        """A life up to version ``last``, ended as by a crash unless it is ``closed``. By rank: what it recovered, and
        the bits of each version, the one recovered included. ``merged``: into one parameter group."""
        self.ranks_ever = max(self.ranks_ever, ranks)

        def act(group: SimulatedGroup) -> Any:
            torch.manual_seed(group.rank)
            model = network(5)
            groups = [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[2].parameters()}]
            optimizer = torch.optim.AdamW(model.parameters() if merged else groups, lr=3e-2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
            tiers = f"memory://{self.name}-{{rank}}", f"nvme://{self.directory}/durable?survives=rack"
            if last:
                with torch.no_grad():
                    for number, each in enumerate(model.parameters()):
                        each.fill_(0.1 * number)
            checkpointer: Checkpointer = attach(
                model, optimizer, Hierarchy.of(*tiers), scheduler=scheduler, group=group, config=CONFIG
            )
            bits = {checkpointer.version: state(model, optimizer, scheduler)}
            with life(checkpointer, closed=closed):
                while checkpointer.version < last:
                    step(model, optimizer, checkpointer.version + 1)
                    scheduler.step()
                    checkpointer.end_iteration()
                    bits[checkpointer.version] = state(model, optimizer, scheduler)
                for what in ("all is brought", "it is committed") if closed else ():
                    checkpointer.flush()  # then each rank sees what the others have done
                    group.all_gather(b"", what=what, deadline_s=CONFIG.deadline_s)
            return checkpointer.recovery, bits

        return on_all_ranks(ranks, act)

    def lose_memory(self) -> None:
        for rank in range(self.ranks_ever):
            MemoryDriver.forget(f"{self.name}-{rank}")


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, version: int) -> None:
    optimizer.zero_grad()
    batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(version))
    model(batch).pow(2).sum().backward()
    optimizer.step()


def state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, str]:
    tensors = dict(model.state_dict())
    for index, held in optimizer.state_dict()["state"].items():
        tensors |= {f"{key} of {index}": torch.as_tensor(each) for key, each in held.items()}
    found = {name: hashlib.sha256(each.numpy().tobytes()).hexdigest() for name, each in tensors.items()}
    options = [{**group, "params": None} for group in optimizer.param_groups]
    return {**found, "options": str(options), "schedule": str(scheduler.state_dict())}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path, f"relayout-{uuid.uuid4().hex}")
    yield made
    made.lose_memory()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 2)])
def test_another_number_of_ranks_resumes_at_the_same_bits(job: Job, before: int, after: int) -> None:
    """And what ranks left that are no more goes, when the generation has committed bases of its own."""
    saved = job.run(before, FAILED_AT)
    job.lose_memory()
    resumed = succeeded(job.run(after, 13, closed=True))
    for rank, (recovery, bits) in enumerate(resumed):
        assert (recovery.version, str(recovery.fidelity)) == (FAILED_AT, "exact")
        assert bits[FAILED_AT] == saved[min(rank, before - 1)][1][FAILED_AT]
    assert {path.parts[-3] for path in (job.directory / "durable").glob("r*/*/base/*")} == {"g000002"}
    for recovery, bits in succeeded(job.run(before, 13)):
        assert (recovery.version, bits[13]) == (13, resumed[0][1][13])


def test_what_a_rank_alone_knows_of_itself_is_not_made_up(job: Job) -> None:
    """The others have all tensors, but not its random generators, nor its place in the data."""
    job.run(3, FAILED_AT)
    job.lose_memory()
    shutil.rmtree(job.directory / "durable" / "r00001")
    resumed = [recovery for recovery, _ in succeeded(job.run(2, FAILED_AT))]
    assert {(each.version, str(each.fidelity)) for each in resumed} == {(FAILED_AT, "approximate")}
    assert "rank 1 reached approximate; this rank alone would be better" in resumed[0].notes
    lost = "what rank 1 alone had at version 7 (random generators, its place in the data) is lost"
    assert lost in resumed[1].notes


def test_groups_that_were_merged_are_exact_only_if_their_options_were_the_same(job: Job) -> None:
    job.run(2, FAILED_AT)
    job.lose_memory()
    for recovery, _ in succeeded(job.run(1, FAILED_AT, merged=True)):
        assert (recovery.version, str(recovery.fidelity)) == (FAILED_AT, "approximate")
        assert "parameter group 0 is one here, and were several whose options differed" in recovery.notes


class Part(ModuleProvider):
    """A rank's part of one weight, flattened, and padding up to the same size on every rank."""

    def __init__(
        self, group: SimulatedGroup, shape: tuple[int, ...] = (5, 4), name: str = "weight", trained: bool = True
    ) -> None:
        self.rank, each = group.rank, -(-math.prod(shape) // group.world_size)
        self.first = min(math.prod(shape), group.rank * each)
        self.held = min(each, math.prod(shape) - self.first)
        self.shape, self.name, self.trained = shape, name, trained
        self.part = torch.nn.Parameter(torch.full((each,), -1.0))
        model = torch.nn.Module()
        model.part = self.part
        super().__init__(model, torch.optim.AdamW([self.part], lr=0.1))

    def index(self) -> LogicalIndex:
        weight = LogicalTensor(self.name, "F32", self.shape, trained=self.trained)
        pieces = Range(self.name, self.first, self.held), Padding(len(self.part) - self.held)
        return LogicalIndex({self.name: weight}, {"master/part": pieces})

    def identity(self) -> Identity:
        return Identity.of("parts", self, self._optimizer_identity(), parameters=[str(self.index())])

    def whole(self) -> list[float]:
        """What this rank has of the weight, and of both moments."""
        state = self.optimizer_state().get("part", {"exp_avg": self.part, "exp_avg_sq": self.part})
        return torch.stack([self.part.detach(), state["exp_avg"], state["exp_avg_sq"]])[:, : self.held].T.tolist()

    def train_to(self, checkpointer: Checkpointer, last: int) -> dict[int, list[float]]:
        """What this rank has of each version, the one recovered included."""
        held = {checkpointer.version: self.whole()}
        while checkpointer.version < last:
            version = checkpointer.version + 1
            whole = torch.randn(20, generator=torch.Generator().manual_seed(version))
            gradient = torch.zeros_like(self.part)
            gradient[: self.held] = whole[self.first : self.first + self.held]
            checkpointer.capture(version, {"part": gradient})
            self.apply({"part": gradient}, self.hyperparameters())
            checkpointer.stepped(version)
            checkpointer.complete(version)
            held[version] = self.whole()
        return held


def parts(
    job: Job,
    ranks: int,
    last: int,
    *,
    flush: bool = True,
    closed: bool = False,
    trouble: Any = None,
    deadline_s: float = 30,
    memory: str = "{rank}",
    request: Request | None = None,
    keep_last: int = CONFIG.keep_last,
    **options: Any,
) -> list[tuple[Any, dict[int, Any]]] | list[Exception]:
    """As :meth:`Job.run`; of each version what the rank has of the weight."""
    job.ranks_ever = max(job.ranks_ever, ranks)

    def act(group: SimulatedGroup) -> Any:
        provider = Part(group, **options)
        durable = f"nvme://{job.directory}/durable?survives=rack"
        wrap = None if trouble is None else lambda driver: Failing(driver, partial(trouble, group.rank))
        tiers = Hierarchy.of(f"memory://{job.name}-{memory}", Tier(durable, wrap=wrap))
        config = replace(CONFIG, deadline_s=deadline_s, keep_last=keep_last)
        checkpointer = Checkpointer(provider, tiers, group=group, config=config, request=request)
        with life(checkpointer, flush=flush, closed=closed):
            held = provider.train_to(checkpointer, last)
        return checkpointer.recovery, held

    return on_all_ranks(ranks, act)


def succeeded(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def joined(outcomes: list[Any], version: int) -> list[list[float]]:
    return [element for _, held in succeeded(outcomes) for element in held[version]]


def test_pieces_come_from_whoever_has_them(job: Job) -> None:
    saved = parts(job, 3, FAILED_AT)
    job.lose_memory()
    for ranks in (2, 4, 1):
        resumed = parts(job, ranks, FAILED_AT)
        assert joined(resumed, FAILED_AT) == joined(saved, FAILED_AT)
        assert {(recovery.version, str(recovery.fidelity)) for recovery, _ in resumed} == {(FAILED_AT, "exact")}
    assert "saved by 4 ranks under another layout; this rank took its part from 0, 1, 2, 3" in resumed[0][0].notes


def test_a_job_goes_back_to_a_version_that_other_ranks_saved(job: Job) -> None:
    """And what it leaves behind can be returned to, on the ranks that saved it and on others. What is kept is what is
    committed, which a job that is closed has waited for."""
    saved = parts(job, 3, FAILED_AT, keep_last=10, closed=True)
    job.lose_memory()
    later = parts(job, 2, 11, keep_last=10, closed=True)
    job.lose_memory()
    for ranks in (2, 4):
        back = parts(job, ranks, 5, request=Request(version=5), keep_last=10)
        assert {(recovery.version, str(recovery.fidelity)) for recovery, _ in succeeded(back)} == {(5, "exact")}
        assert joined(back, 5) == joined(saved, 5)
        job.lose_memory()
    again = parts(job, 4, 10, request=Request(version=10, generation=2), keep_last=10)
    assert joined(again, 10) == joined(later, 10)
    for outcome in parts(job, 3, 20, request=Request(version=19), keep_last=10):
        assert isinstance(outcome, RecoveryError)
        assert "version=19 was asked for, and not every rank can come to it" in str(outcome)


def test_what_a_lost_rank_alone_had_is_not_made_up(job: Job) -> None:
    parts(job, 3, FAILED_AT)
    job.lose_memory()
    shutil.rmtree(job.directory / "durable" / "r00002")
    for outcome in parts(job, 2, FAILED_AT):
        assert isinstance(outcome, RecoveryError)
        assert "3 ranks have saved up to version 7 under another layout" in str(outcome)
        assert "no base was found of rank 2, and the ranks that were found have not all of weight" in str(outcome)


def test_another_model_is_refused_by_the_names_of_what_differs(job: Job) -> None:
    parts(job, 3, FAILED_AT)
    job.lose_memory()
    for outcome in parts(job, 2, FAILED_AT, shape=(10, 2)):
        assert isinstance(outcome, Mismatch)
        assert "weight was (5, 4), and is (10, 2) here" in str(outcome)
    for outcome in parts(job, 2, FAILED_AT, name="bias"):
        assert isinstance(outcome, Mismatch)
        assert "bias was not there, and is (5, 4) here" in str(outcome)
    for outcome in parts(job, 2, FAILED_AT, trained=False):
        assert isinstance(outcome, Mismatch)
        assert "weight was trained, and is frozen here" in str(outcome)
    assert joined(parts(job, 3, FAILED_AT), FAILED_AT), "the tiers are as they were"


def test_a_damaged_copy_moves_all_ranks_to_an_older_version(job: Job) -> None:
    saved = parts(job, 3, FAILED_AT)
    job.lose_memory()
    for path in (job.directory / "durable" / "r00001").glob("g*/differential/*-000000000006.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    resumed = parts(job, 2, 4)
    assert joined(resumed, 4) == joined(saved, 4)


def test_if_copies_fail_another_rank_that_holds_the_same_is_looked_for(job: Job) -> None:
    """Each of the two first reads the rank of its own number."""
    saved = job.run(3, FAILED_AT)
    job.lose_memory()
    for rank in range(2):
        for path in (job.directory / "durable" / f"r0000{rank}").glob("g*/differential/*"):
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    for recovery, bits in succeeded(job.run(2, FAILED_AT)):
        assert (recovery.version, str(recovery.fidelity)) == (FAILED_AT, "approximate")
        trained = {name for name in bits[FAILED_AT] if name.endswith(("weight", "bias")) or " of " in name}
        assert all(bits[FAILED_AT][name] == saved[2][1][FAILED_AT][name] for name in trained)


def test_a_start_that_fails_in_the_middle_loses_nothing(job: Job) -> None:
    """Nor does a job that is killed before its first base is committed: what was saved before is there still."""
    saved = parts(job, 3, FAILED_AT)
    job.lose_memory()

    def trouble(rank: int, call: Call) -> Exception | None:
        writes = rank == 1 and call.operation is Operation.PUT and "lineage" in str(call.key)
        return Unauthorized("read only") if writes else None

    for outcome in parts(job, 2, FAILED_AT, trouble=trouble):
        assert isinstance(outcome, Exception)
    job.lose_memory()
    held: Any = parts(job, 2, FAILED_AT + 1, flush=False)
    assert joined(held, FAILED_AT) == joined(saved, FAILED_AT)
    MemoryDriver.forget(f"{job.name}-1")
    resumed: Any = parts(job, 2, FAILED_AT)
    version = resumed[0][0].version  # the last one, too, if it had reached the durable tier
    assert version in (FAILED_AT, FAILED_AT + 1)
    assert joined(resumed, version) == joined(held, version)
    again: Any = parts(job, 3, FAILED_AT)
    assert {recovery.version for recovery, _ in succeeded(again)} == {version}
    assert joined(again, version) == joined(held, version)


def test_an_error_that_may_pass_is_no_loss(job: Job) -> None:
    """The start is refused, and not taken back to a version that can be read."""
    parts(job, 3, FAILED_AT)
    job.lose_memory()

    def trouble(rank: int, call: Call) -> Exception | None:
        reads = call.operation is Operation.GET and str(call.key).startswith("r00002/")
        return Unauthorized("403") if reads else None

    for outcome in parts(job, 2, FAILED_AT, trouble=trouble):
        assert isinstance(outcome, RecoveryError)
        assert "what rank 2 has saved cannot be read: 403" in str(outcome)


def test_a_tier_that_is_away_is_told_with_what_was_found_in_the_others(job: Job) -> None:
    parts(job, 3, FAILED_AT)

    def trouble(rank: int, call: Call) -> Exception | None:
        return Unauthorized("403") if call.operation is Operation.LIST else None

    for outcome in parts(job, 2, FAILED_AT, trouble=trouble, deadline_s=3.0):
        assert isinstance(outcome, RecoveryError)
        assert "403" in str(outcome)
        assert "in the others up to version 7 was found, saved by 3 ranks under another layout" in str(outcome)


def test_what_a_start_on_more_ranks_has_left_goes(job: Job) -> None:
    """It was cut short, so that what the others go on from is older. Two of its ranks have brought something."""
    parts(job, 2, FAILED_AT)
    job.lose_memory()

    def trouble(rank: int, call: Call) -> Exception | None:
        fails = call.operation is Operation.PUT and str(call.key).startswith(("r00000/g000002", "r00001/g000002"))
        return Unauthorized("cut short") if fails else None

    parts(job, 4, FAILED_AT + 1, trouble=trouble, deadline_s=3)
    job.lose_memory()
    assert {path.parts[-4] for path in (job.directory / "durable").glob("r*/*/base/*")} > {"r00003"}
    succeeded(parts(job, 2, 13, closed=True))
    assert {path.parts[-4] for path in (job.directory / "durable").glob("r*/*/base/*")} == {"r00000", "r00001"}


def refused(what: str) -> Any:
    """The shared tier takes none of this."""

    def trouble(rank: int, call: Call) -> Exception | None:
        return Unauthorized("not yet") if call.operation is Operation.PUT and what in str(call.key) else None

    return trouble


def in_memory(job: Job, rank: int) -> list[str]:
    objects = MemoryDriver(f"{job.name}-{rank}").store.objects
    return sorted(key for key in objects if key.startswith("r"))


def test_a_layout_that_comes_back_does_not_go_back_behind_the_one_in_between(job: Job) -> None:
    parts(job, 3, FAILED_AT)
    job.lose_memory()
    between = parts(job, 2, 11)
    job.lose_memory()
    succeeded(parts(job, 3, 12, flush=False, trouble=refused("/g000003/")))
    MemoryDriver.forget(f"{job.name}-2")  # with it goes what this generation alone has
    again = parts(job, 3, 11)
    assert {recovery.version for recovery, _ in succeeded(again)} == {11}
    assert joined(again, 11) == joined(between, 11)


def test_what_another_layout_saved_stays_until_something_newer_outlives_the_node(job: Job) -> None:
    """And a start that fails again and again leaves no more than the last one has."""
    saved = parts(job, 3, FAILED_AT)
    held: list[tuple[int, int]] = []
    for _ in range(3):
        resumed = parts(job, 2, FAILED_AT, flush=False, trouble=refused("r0"))
        assert joined(resumed, FAILED_AT) == joined(saved, FAILED_AT)
        MemoryDriver.forget(f"{job.name}-1")
        keys = in_memory(job, 0)
        held.append((sum("/g000001/" in key for key in keys), sum("/base/" in key for key in keys)))
    assert held[0] == held[1] == held[2]
