"""A checkpoint of another model is loaded once, as far as the user allows, and the recovery tells what became of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.runtime.test_group import on_all_ranks
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import ConfigurationError, Mismatch, RecoveryError, TierCheckError
from tiercheck.format.index.logical import LogicalIndex, LogicalTensor, Padding, Range
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.runtime.group import SimulatedGroup
from tiercheck.streams.loading import Loading
from tiercheck.streams.tensors.provider import Identity
from tiercheck.tiers.memory import MemoryDriver

CONFIG = CheckpointConfig(base_every=4, batch=2, deadline_s=30)
FAILED_AT = 7
ADDED_PREFIX = Loading(rename=lambda name: f"model.{name}")
FITTING = Loading(missing="keep", unexpected="drop")


def body() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))


def with_head(outputs: int) -> Callable[[], torch.nn.Module]:
    return lambda: torch.nn.ModuleDict({"body": body(), f"head{outputs}": torch.nn.Linear(4, outputs)})


def head_of(outputs: int) -> Callable[[], torch.nn.Module]:
    """The head has the same name, however many outputs it has."""
    return lambda: torch.nn.ModuleDict({"body": body(), "head": torch.nn.Linear(4, outputs)})


def wrapped() -> torch.nn.Module:
    return torch.nn.ModuleDict({"model": body()})


def frozen(part: str) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        model = body()
        model.get_submodule(part).requires_grad_(False)
        return model

    return make


@dataclass
class Job:
    """Ranks as threads, each with a memory as if it were a node, and a directory that all see."""

    directory: Path
    name: str
    ranks_ever: int = 0

    def run(
        self,
        make: Callable[[], torch.nn.Module],
        last: int = 0,
        *,
        ranks: int = 2,
        loading: Loading | Callable[[int], Loading] | None = None,
        closed: bool = False,
        **request: int,
    ) -> list[Any]:
        """A life up to version ``last``, ended as by a crash unless it is ``closed``. By rank: what it recovered, what
        the script had made, and the state as it was recovered and at the end."""
        self.ranks_ever = max(self.ranks_ever, ranks)

        def act(group: SimulatedGroup) -> Any:
            model = make()
            seeded = torch.Generator().manual_seed(last)  # all ranks begin alike, and each life otherwise
            with torch.no_grad():
                for each in model.parameters():
                    each.copy_(torch.randn(each.shape, generator=seeded))
            trained = [each for each in model.parameters() if each.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=3e-2)
            made = state(model, optimizer)
            tiers = Hierarchy.of(f"memory://{self.name}-{{rank}}", f"nvme://{self.directory}/durable?survives=rack")
            allowed = loading(group.rank) if callable(loading) else loading
            checkpointer = attach(model, optimizer, tiers, group=group, config=CONFIG, loading=allowed, **request)
            try:
                begun = state(model, optimizer)
                while checkpointer.version < last:
                    draw = torch.Generator().manual_seed(checkpointer.version)
                    for each in trained:
                        each.grad = torch.randn(each.shape, generator=draw)
                    optimizer.step()
                    checkpointer.end_iteration()
                checkpointer.flush()
                if closed:
                    checkpointer.close()
                return checkpointer.recovery, made, begun, state(model, optimizer)
            finally:
                checkpointer.abort()

        outcomes = on_all_ranks(ranks, act)
        for rank in range(self.ranks_ever):
            MemoryDriver.forget(f"{self.name}-{rank}")
        for outcome in outcomes:
            if isinstance(outcome, Exception) and not isinstance(outcome, TierCheckError):
                raise outcome
        return outcomes


def state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[float]]:
    """Parameters and buffers by name, and what the optimizer holds of each."""
    found = {name: each.flatten().tolist() for name, each in model.state_dict().items()}
    for name, each in model.named_parameters():
        for key, value in optimizer.state.get(each, {}).items():
            found[f"{name} {key}"] = value.flatten().tolist()
    return found


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path, f"matching-{uuid.uuid4().hex}")
    yield made
    for rank in range(made.ranks_ever):
        MemoryDriver.forget(f"{made.name}-{rank}")


def test_new_names_alone_cost_no_bit_and_a_rename_that_is_repeated_does_no_harm(job: Job) -> None:
    (_, _, _, saved), *_ = job.run(body, FAILED_AT)
    for recovery, _, begun, _ in job.run(wrapped, 9, loading=ADDED_PREFIX):
        assert begun == {f"model.{name}": each for name, each in saved.items()}
        assert (recovery.version, str(recovery.fidelity)) == (FAILED_AT, "exact")
        assert ("0.weight", "model.0.weight") in recovery.fit.renamed
        assert "loaded under other names: 7 tensors, 0.bias as model.0.bias" in str(recovery.notes)
        assert recovery.to_object()["fit"]["kept"] == []
    for ranks in (2, 1, 2):  # the second one is a conversion, too
        for recovery, _, _, _ in job.run(wrapped, 9, ranks=ranks, loading=ADDED_PREFIX):
            assert (recovery.version, str(recovery.fidelity), recovery.fit) == (9, "exact", None)


@pytest.mark.parametrize(("before", "after"), [(with_head(2), with_head(5)), (head_of(2), head_of(5))])
def test_what_fits_is_loaded_with_its_moments_and_what_is_new_begins_anew(
    job: Job, before: Callable[[], torch.nn.Module], after: Callable[[], torch.nn.Module]
) -> None:
    (_, _, _, saved), *_ = job.run(before, FAILED_AT)
    for error in job.run(after):
        assert isinstance(error, Mismatch)
        assert '; attach(..., loading=Loading(missing="keep", unexpected="drop")) loads what fits' in str(error)
    outcomes = job.run(after, 9, loading=FITTING)
    for recovery, made, begun, _ in outcomes:
        common = {name for name in saved if name.startswith("body.")}
        assert {name: begun[name] for name in common} == {name: saved[name] for name in common}
        new = begun.keys() - common
        assert {name: begun[name] for name in new} == {name: made[name] for name in new}, "no moments among them"
        assert (recovery.version, str(recovery.fidelity)) == (FAILED_AT, "approximate")
        kept, dropped = recovery.fit.kept, recovery.fit.dropped
        assert [name.rpartition(".")[2] for name in (*kept, *dropped)] == ["bias", "weight"] * 2
        assert any("so that the script's values are kept: 2 tensors" in each for each in recovery.notes)
    for recovery, _, begun, _ in job.run(after, loading=FITTING):
        assert (recovery.version, str(recovery.fidelity), recovery.fit) == (9, "exact", None)
        assert begun == outcomes[0][3]


def test_what_was_frozen_or_is_frozen_begins_or_ends_without_moments(job: Job) -> None:
    (_, _, _, saved), *_ = job.run(frozen("0"), FAILED_AT)
    for error in job.run(frozen("1"), loading=Loading(missing="keep")):
        assert "1.weight was trained, and is frozen here" in str(error)
        assert 'loading=Loading(missing="keep", unexpected="drop")' in str(error)
    for recovery, _, begun, end in job.run(frozen("1"), 8, loading=FITTING):
        assert begun == {name: each for name, each in saved.items() if " " not in name}
        assert (recovery.fit.restarted, recovery.fit.stopped) == (("0.bias", "0.weight"), ("1.bias", "1.weight"))
        assert str(recovery.fidelity) == "approximate"
        assert "the optimizer's state begins anew: 2 tensors, 0.bias, 0.weight" in " ".join(recovery.notes)
        assert end["0.weight step"] == [1.0]


def raising(name: str) -> str:
    raise KeyError(name)


REFUSED = (
    (None, "is of another model: 1.weight was not there, and is (4,) here; 1.bias was not"),
    (Loading(missing="keep"), "0.weight was saved, and is not there here"),
    (Loading(unexpected="drop"), 'attach(..., loading=Loading(missing="keep", unexpected="drop"))'),
    (FITTING, "nothing of it would be loaded; rename=... gives what was saved other names"),
    (Loading(rename=raising), "rename('0.bias') raised KeyError: '0.bias'"),
    (Loading(rename=lambda name: name.encode()), "rename('0.bias') must return a name, not b'0.bias'"),
    (Loading(rename=lambda name: "same"), "rename gives 0.bias and 0.weight the same name 'same'"),
    (Loading(rename=lambda name: name + "a" * 70_000), "rename gives a name that no tensor can have"),
    (lambda rank: Loading(rename=lambda name: f"{rank}{name}"), "other names on rank 1 than on rank 0"),
    (lambda rank: (Loading(), FITTING)[rank], 'unexpected="drop" on rank 1, and nothing on rank 0'),
)
"""What is given as ``loading=``, and what the refusal says."""


def test_what_is_not_allowed_is_refused_on_all_ranks_and_changes_nothing(job: Job) -> None:
    """A job of one layer goes on as one of another layer."""

    def saved() -> torch.nn.Module:
        return torch.nn.ModuleDict({"0": torch.nn.Linear(3, 4)})

    def other() -> torch.nn.Module:
        return torch.nn.ModuleDict({"1": torch.nn.BatchNorm1d(4)})

    (_, _, _, before), *_ = job.run(saved, FAILED_AT)
    for loading, said in REFUSED:
        for error in job.run(other, loading=loading):
            assert isinstance(error, ConfigurationError | Mismatch | RecoveryError)
            assert said in str(error)
            assert "\n" not in str(error)
    for recovery, _, begun, _ in job.run(saved):
        assert (recovery.version, begun) == (FAILED_AT, before)


def test_a_rename_for_another_checkpoint_is_refused(job: Job) -> None:
    """It would leave out what fits as it is."""
    job.run(with_head(2), FAILED_AT)
    loading = Loading(rename=lambda name: f"x{name}", missing="keep", unexpected="drop")
    for error in job.run(with_head(5), loading=loading):
        assert "rename gives, 0 tensors are found, and under those that were saved 14: it is for another" in str(error)


def test_names_may_be_swapped(job: Job) -> None:
    """The weights of an average, saved beside those that were trained, become those that are trained."""

    def of(*names: str) -> Callable[[], torch.nn.Module]:
        return lambda: torch.nn.ModuleDict({name: body() for name in names})

    def swapped(name: str) -> str:
        model, dot, rest = name.partition(".")
        return {"average": "trained", "trained": "former"}[model] + dot + rest

    (_, _, _, saved), *_ = job.run(of("average", "trained"), FAILED_AT, ranks=1)
    loading = Loading(rename=swapped, unexpected="drop")
    (recovery, _, begun, _), *_ = job.run(of("trained"), ranks=1, loading=loading)
    assert begun == {f"trained{name[7:]}": each for name, each in saved.items() if name.startswith("average")}
    assert {name.split(".")[0] for name in recovery.fit.dropped} == {"trained"}


def test_what_is_dropped_stays_where_all_ranks_see_it(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """The model that saved it can go back to it, though the other one has gone on."""
    (_, _, _, saved), *_ = job.run(with_head(2), FAILED_AT)
    job.run(with_head(5), 8, loading=FITTING)
    assert "What nvme holds of generation 1 stays there until a start with keep_left_behind=False" in caplog.text
    for _ in range(2):
        job.run(with_head(5), 20, loading=FITTING, closed=True)
    for error in job.run(with_head(2)):
        assert "head2.bias was not there" in str(error)
    for recovery, _, begun, _ in job.run(with_head(2), version=FAILED_AT, generation=1):
        assert (recovery.version, str(recovery.fidelity), begun) == (FAILED_AT, "exact", saved)


class Flat(ModuleProvider):
    """One master of several tensors of the model, and padding, as under ZeRO."""

    def __init__(self, **lengths: int) -> None:
        self.lengths = lengths
        model = torch.nn.Module()
        model.part = torch.nn.Parameter(torch.arange(sum(lengths.values()) + 3.0))
        super().__init__(model, torch.optim.AdamW(model.parameters(), lr=0.1))

    def index(self) -> LogicalIndex:
        tensors = {name: LogicalTensor(name, "F32", (each,), trained=True) for name, each in self.lengths.items()}
        pieces = [Range(name, 0, each) for name, each in self.lengths.items()]
        return LogicalIndex(tensors, {"master/part": (*pieces, Padding(3))})

    def identity(self) -> Identity:
        return Identity.of("flat", self, self._optimizer_identity(), parameters=[str(self.lengths)])

    def part(self, what: str) -> list[float]:
        return self.optimizer_state()["part"][what].tolist() if what else self.masters()["part"].tolist()


def test_a_partition_may_be_loaded_in_part(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.ranks_ever = 1

    def attached(provider: Flat, loading: Loading | None = None) -> Checkpointer:
        return Checkpointer(provider, Hierarchy.of(f"memory://{job.name}-0"), config=CONFIG, loading=loading)

    before = Flat(a=4, b=2)
    with attached(before) as checkpointer:
        gradients = {"part": torch.linspace(1, 2, 9)}
        checkpointer.capture(1, gradients)
        before.apply(gradients, before.hyperparameters())
        checkpointer.stepped(1)
        checkpointer.complete(1)
    after = Flat(c=3, a=4)
    with attached(after, FITTING) as checkpointer:
        assert after.part("") == [0, 1, 2, *before.part("")[:4], 7, 8, 9]
        assert after.part("exp_avg") == [0, 0, 0, *before.part("exp_avg")[:4], 0, 0, 0]
        recovery = checkpointer.recovery
        assert recovery is not None
        assert "a part of what was saved is dropped, and no tier that all ranks share keeps it" in caplog.text
        assert str(recovery.fidelity) == "approximate"
        assert "part is one tensor here, and the optimizer had a state of only a part of it" in recovery.notes
        assert "not saved, so that the script's values are kept: 1 tensor, c" in recovery.notes
