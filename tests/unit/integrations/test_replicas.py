"""What all ranks hold alike is stored by one of them, and after any failure all have it again, bit for bit."""

from __future__ import annotations

import hashlib
import itertools
import logging
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiercheck
from tests.training import life
from tests.unit.runtime.test_group import on_all_ranks
from tiercheck.config import CheckpointConfig
from tiercheck.errors import UnsupportedSetup
from tiercheck.format import container
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations import replicas
from tiercheck.integrations.replicas import Alike
from tiercheck.integrations.torch import attach
from tiercheck.integrations.torch.replicated import DataParallel
from tiercheck.runtime.group import SimulatedGroup
from tiercheck.streams.tensors import owned
from tiercheck.tiers.memory import MemoryDriver

CONFIG = CheckpointConfig(base_every=4, batch=2, deadline_s=30)
FAILED_AT = 7
TRAINED = ["0.bias", "0.weight", "1.bias", "1.weight", "3.bias", "3.weight"]

Disturb = Callable[[int, int, torch.nn.Module], None]
"""By rank and version, what a loop does after its step."""


@pytest.fixture(autouse=True)
def kept_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by DDP, which threads cannot have."""
    monkeypatch.setattr(
        DataParallel, "alike", lambda self, masters, frozen: Alike(frozenset(masters), frozenset(frozen))
    )


@dataclass
class Job:
    """Ranks as threads, each with a memory as if it were a node, and a directory that all see. Gradients are the same
    on all ranks; buffers and random generators are each rank's own."""

    directory: Path
    name: str
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    disturb: Disturb = lambda rank, version, model: None
    seed_of: Callable[[int], int] = lambda rank: 0
    """By rank, of its parameters."""
    gradient_of: Callable[[int, torch.Tensor], torch.Tensor] = lambda rank, gradient: gradient

    def run(self, ranks: int, last: int, *, closed: bool = False, **config: Any) -> list[Any]:
        """A life up to version ``last``, ended as by a crash unless it is ``closed``. By rank: what it recovered, and
        the bits of each version, the one recovered included."""

        def act(group: SimulatedGroup) -> Any:
            model = network(self.seed_of(group.rank))
            trained = [each for each in model.parameters() if each.requires_grad]
            optimizer = self.optimizer(trained, lr=1e-2)
            tiers = f"memory://{self.name}-{{rank}}", f"nvme://{self.directory}/durable?survives=rack"
            counter = Counter()
            checkpointer = attach(
                model,
                optimizer,
                Hierarchy.of(*tiers),
                group=group,
                after_step={"counter": counter},
                config=replace(CONFIG, **config),
            )
            bits = {checkpointer.version: state(model, optimizer, counter)}
            with life(checkpointer, closed=closed):
                while checkpointer.version < last:
                    version = checkpointer.version + 1
                    batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * version + group.rank))
                    model(batch)
                    for number, each in enumerate(trained):
                        of = torch.Generator().manual_seed(1000 * version + number)
                        gradient = self.gradient_of(group.rank, torch.randn(each.shape, generator=of))
                        each.grad = None if (version, number) == (2, 1) else gradient
                    optimizer.step()
                    self.disturb(group.rank, version, model)
                    counter.count += 1
                    checkpointer.end_iteration()
                    bits[version] = state(model, optimizer, counter)
            return checkpointer.recovery, bits

        return on_all_ranks(ranks, act)

    def lose(self, *ranks: int) -> None:
        for rank in ranks:
            MemoryDriver.forget(f"{self.name}-{rank}")

    def bases(self, rank: int) -> list[container.Shard]:
        """In the rank's memory, oldest first."""
        objects = MemoryDriver(f"{self.name}-{rank}").store.objects
        keys = sorted(key for key in objects if key.startswith(f"r{rank:05d}") and "/base/" in key)
        return [container.parse(memoryview(objects[key].content), key=key, tier="memory") for key in keys]


def clamp(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for each in model.parameters():
            each.clamp_(-0.2, 0.2)


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def network(seed: int) -> torch.nn.Module:
    """The threads have torch's generator in common."""
    norm, frozen = torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 5)
    frozen.requires_grad_(False)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), norm, frozen, torch.nn.Linear(5, 2))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape, generator=generator))
    return model


def state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, counter: Counter) -> dict[str, str]:
    tensors = dict(model.state_dict())
    for index, held in optimizer.state_dict()["state"].items():
        tensors |= {f"{key} of {index}": torch.as_tensor(each) for key, each in held.items()}
    found = {name: hashlib.sha256(each.numpy().tobytes()).hexdigest() for name, each in tensors.items()}
    options = [{**group, "params": None} for group in optimizer.param_groups]
    return {**found, "options": str(options), "count": str(counter.count)}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path, f"replicas-{uuid.uuid4().hex}")
    yield made
    made.lose(*range(9))


def succeeded(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def reached(outcomes: list[Any]) -> set[tuple[int, str]]:
    return {(recovery.version, str(recovery.fidelity)) for recovery, _ in succeeded(outcomes)}


def masters(shard: container.Shard) -> list[str]:
    return sorted(name.removeprefix("master/") for name in shard.names if name.startswith("master/"))


def test_each_tensor_is_captured_by_one_rank_and_buffers_by_each(job: Job) -> None:
    succeeded(job.run(3, FAILED_AT))
    shards = [job.bases(rank)[-1] for rank in range(3)]
    assert sorted(name for each in shards for name in masters(each)) == TRAINED
    assert sorted(n for each in shards for n in each.names if n.startswith("extra/2.")) == [
        "extra/2.bias",
        "extra/2.weight",
    ]
    for each in shards:
        assert "extra/1.running_mean" in each.names
        states = {name.split("/")[1] for name in each.names if name.startswith("state/")}
        assert states == set(masters(each))


@pytest.mark.parametrize("lost", [(), (1,), (0, 1, 2)])
def test_every_rank_has_the_whole_again(job: Job, lost: tuple[int, ...]) -> None:
    """From the memories of all; without that of a node, whose part comes from the tier that all share; from that."""
    saved = succeeded(job.run(3, FAILED_AT))
    job.lose(*lost)
    resumed = job.run(3, 11, closed=True)
    assert reached(resumed) == {(FAILED_AT, "exact")}
    uninterrupted = Job(job.directory / "other", job.name + "-other").run(3, 11)
    for rank in range(3):
        assert resumed[rank][1][FAILED_AT] == saved[rank][1][FAILED_AT]
        assert resumed[rank][1][11] == succeeded(uninterrupted)[rank][1][11]
    assert saved[0][1][FAILED_AT] != saved[1][1][FAILED_AT], "buffers are each rank's own"
    Job(job.directory, job.name + "-other").lose(0, 1, 2)


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, amsgrad=True),
        torch.optim.Adafactor,
        torch.optim.RMSprop,
    ],
)
def test_whatever_steps_one_tensor_at_a_time(job: Job, optimizer: Any) -> None:
    """Also by ranks of which some have no tensor to store."""
    job.optimizer = optimizer
    saved = succeeded(job.run(8, FAILED_AT))
    resumed = job.run(8, FAILED_AT)
    assert reached(resumed) == {(FAILED_AT, "exact")}
    assert [bits[FAILED_AT] for _, bits in resumed] == [bits[FAILED_AT] for _, bits in saved]
    assert [len(masters(job.bases(rank)[-1])) for rank in range(8)].count(0) == 2


def alike(bits: dict[str, str]) -> dict[str, str]:
    """Without the buffers, which differ between ranks."""
    return {name: each for name, each in bits.items() if not name.startswith("1.running")}


@pytest.mark.parametrize(
    ("before", "after"),
    [((3, "auto"), (2, "auto")), ((2, "each"), (2, "auto")), ((2, "auto"), (2, "each")), ((3, "auto"), (1, "auto"))],
)
def test_another_number_of_ranks_or_of_copies_resumes_at_the_same_bits(
    job: Job, before: tuple[int, str], after: tuple[int, str]
) -> None:
    saved = succeeded(job.run(before[0], FAILED_AT, replicas=before[1]))
    job.lose(0, 1, 2)
    resumed = job.run(after[0], 9, closed=True, replicas=after[1])
    assert reached(resumed) == {(FAILED_AT, "exact")}
    for _, bits in resumed:
        assert alike(bits[FAILED_AT]) == alike(saved[0][1][FAILED_AT])
    again = job.run(*before[:1], 9, replicas=before[1])
    assert {version for version, _ in reached(again)} == {9}
    for _, bits in again:
        assert alike(bits[9]) == alike(resumed[0][1][9])


def test_the_ranks_of_a_column_share_out_what_they_hold_alike(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under HSDP: ranks 0 and 2 hold the same, and 1 and 3. Also without the memory of one of them."""
    monkeypatch.setattr(
        DataParallel,
        "alike",
        lambda self, masters, frozen: Alike(frozenset(masters), frozenset(frozen), parts=((0, 2), (1, 3))),
    )
    job.seed_of = lambda rank: rank % 2
    saved = succeeded(job.run(4, FAILED_AT))
    for column in (0, 1):
        held = [masters(job.bases(rank)[-1]) for rank in (column, column + 2)]
        assert sorted(held[0] + held[1]) == TRAINED
        assert all(held)
    job.lose(2)
    resumed = job.run(4, FAILED_AT)
    assert reached(resumed) == {(FAILED_AT, "exact")}
    assert [bits[FAILED_AT] for _, bits in resumed] == [bits[FAILED_AT] for _, bits in saved]
    assert alike(saved[0][1][FAILED_AT]) != alike(saved[1][1][FAILED_AT])


def test_from_outside_the_whole_is_seen(job: Job, tmp_path: Path) -> None:
    saved = succeeded(job.run(3, FAILED_AT))
    with tiercheck.open(f"nvme://{job.directory}/durable?survives=rack") as archive:
        verified = archive.verify()
        assert (verified.newest, verified.healthy) == (FAILED_AT, True)
        archive.export(tmp_path / "model.safetensors", format="safetensors", version=FAILED_AT)
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "model.safetensors")
    wanted = alike(saved[0][1][FAILED_AT])
    for name in (*TRAINED, "2.weight", "2.bias"):
        assert hashlib.sha256(exported[name].numpy().tobytes()).hexdigest() == wanted[name]


def test_a_write_on_all_ranks_costs_no_bit(job: Job) -> None:
    """Its owner sees it and makes a base; and at the end of the iteration the ranks have compared."""
    job.disturb = lambda rank, version, model: clamp(model)
    saved = succeeded(job.run(2, 13))
    resumed = job.run(2, 13)
    assert reached(resumed) == {(13, "exact")}
    assert [bits[13] for _, bits in resumed] == [bits[13] for _, bits in saved]


def test_a_write_that_comes_late_is_a_doubt_until_the_next_base(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No rank knows whether the owner saw it as well."""
    monkeypatch.setattr(owned, "MEETINGS", 0)
    job.disturb = lambda rank, version, model: clamp(model) if version == 5 else None
    with caplog.at_level(logging.WARNING):
        saved = succeeded(job.run(2, FAILED_AT))
    assert "which one rank stores for all" in caplog.text
    resumed = job.run(2, 9)
    assert reached(resumed) == {(FAILED_AT, "approximate")}
    assert "may differ between the ranks" in "".join(resumed[1][0].notes)
    assert [bits[FAILED_AT] for _, bits in resumed] == [bits[FAILED_AT] for _, bits in saved]
    job.lose(0, 1)
    compared = Job(job.directory / "compared", job.name, disturb=job.disturb)
    succeeded(compared.run(2, 9))
    assert reached(compared.run(2, 9)) == {(9, "exact")}


def test_a_write_on_one_rank_is_told(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    def disturb(rank: int, version: int, model: torch.nn.Module) -> None:
        if (rank, version) == (0, 5):
            with torch.no_grad():
                for each in model.parameters():
                    each.mul_(1.5)

    job.disturb = disturb
    with caplog.at_level(logging.WARNING):
        succeeded(job.run(2, 9))
    assert "the ranks hold different values of" in caplog.text
    resumed = job.run(2, 9)
    assert reached(resumed) == {(9, "approximate")}
    assert "may differ between the ranks" in "".join(resumed[1][0].notes)
    assert alike(resumed[0][1][9]) == alike(resumed[1][1][9]), "all have what the owners had"


@pytest.mark.parametrize("owner", [0, 1])
def test_a_write_that_only_the_owner_has_made_is_told(job: Job, owner: int) -> None:
    """Nobody else watches what it has stored; the others cannot have seen it."""

    def disturb(rank: int, version: int, model: torch.nn.Module) -> None:
        if (rank, version) == (owner, 3):
            with torch.no_grad():
                for each in checkpointed[rank]:
                    each.mul_(1.5)

    checkpointed = dict[int, list[torch.Tensor]]()
    succeeded(job.run(2, 1))
    own = [set(masters(job.bases(rank)[-1])) for rank in (0, 1)]
    assert not own[0] & own[1]

    def parts(rank: int, version: int, model: torch.nn.Module) -> None:
        checkpointed[rank] = [each for name, each in model.named_parameters() if name in own[rank]]
        disturb(rank, version, model)

    job.disturb = parts
    succeeded(job.run(2, FAILED_AT))
    resumed = job.run(2, FAILED_AT)
    assert reached(resumed) == {(FAILED_AT, "approximate")}
    assert "may differ between the ranks" in "".join(resumed[owner][0].notes)


def test_gradients_that_are_not_the_same_on_all_ranks_are_found_in_the_first_iteration(job: Job) -> None:
    """Such a step writes to nothing that it should not have written to."""
    job.gradient_of = lambda rank, gradient: gradient + rank * 1e-3
    succeeded(job.run(2, 2))
    resumed = job.run(2, 2)
    assert reached(resumed) == {(2, "approximate")}
    assert "each rank stepped with gradients of its own" in "".join(resumed[0][0].notes)


def test_ranks_that_differ_keep_their_own(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.seed_of = lambda rank: rank
    with caplog.at_level(logging.INFO):
        saved = succeeded(job.run(2, FAILED_AT))
    assert "every rank stores the whole of what all of them hold alike: the ranks hold different values" in caplog.text
    assert masters(job.bases(1)[-1]) == TRAINED
    resumed = job.run(2, FAILED_AT)
    assert reached(resumed) == {(FAILED_AT, "exact")}
    assert [bits[FAILED_AT] for _, bits in resumed] == [bits[FAILED_AT] for _, bits in saved]
    alone = job.run(1, FAILED_AT)
    assert reached(alone) == {(FAILED_AT, "approximate")}, "nobody says which one's the job is to go on with"
    assert "held different values of 0.bias, 0.weight, 1.bias, 1.weight, 3.bias, ..." in "".join(alone[0][0].notes)
    job.lose(0, 1)
    other = Job(job.directory / "other", job.name, seed_of=job.seed_of)
    for outcome in other.run(2, FAILED_AT, replicas="owner"):
        assert isinstance(outcome, UnsupportedSetup)
        assert "replicas='owner' cannot be had: the ranks hold different values of it" in str(outcome)


def test_ranks_that_step_with_other_options_are_found_apart(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing but the step has written to anything, and no base comes before the failure."""
    drawn = itertools.count(1)
    job.optimizer = lambda trained, lr: torch.optim.AdamW(trained, lr=lr * next(drawn))
    succeeded(job.run(2, 3, base_every=100))
    assert "the ranks hold different values of 0.weight, 0.bias" in caplog.text
    assert reached(job.run(2, 3, base_every=100)) == {(3, "approximate")}


class Global(torch.optim.SGD):
    """Its step may depend on all tensors together."""


def test_an_optimizer_that_nobody_knows_has_every_rank_store_the_whole(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.optimizer = Global
    with caplog.at_level(logging.INFO):
        succeeded(job.run(2, 2))
    assert "Global may step one tensor by what it knows of others" in caplog.text
    assert masters(job.bases(1)[-1]) == TRAINED


def test_nodes_that_keep_nothing_for_each_other_store_the_whole(
    job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = iter("abcdef")
    monkeypatch.setattr(replicas.socket, "gethostname", lambda: next(nodes))
    monkeypatch.setattr(Hierarchy, "promises", lambda self, **places: tiercheck.Survives.PROCESS)
    with caplog.at_level(logging.INFO):
        succeeded(job.run(2, 2))
    assert "no tier outlives a node, and the ranks are on several" in caplog.text
    assert masters(job.bases(1)[-1]) == TRAINED


def test_parts_are_folded_and_compared_all_the_same(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """Also if one rank captures its base: no rank waits for the others there."""

    def disturb(rank: int, version: int, model: torch.nn.Module) -> None:
        if (rank, version) == (0, 7):
            with torch.no_grad():
                for each in model.parameters():
                    each.mul_(1.5)

    saved = succeeded(job.run(2, 9, bases="fold", audit_every=1))
    assert reached(job.run(2, 9, bases="fold")) == {(9, "exact")}
    other = Job(job.directory / "other", job.name, disturb=disturb)
    job.lose(0, 1)
    with caplog.at_level(logging.WARNING):
        parted = succeeded(other.run(2, 9, bases="fold"))
    assert "the ranks hold different values of" in caplog.text
    assert parted[0][1][6] == saved[0][1][6]
