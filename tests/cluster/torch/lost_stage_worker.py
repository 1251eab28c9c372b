"""What each rank of ``test_lost_stage`` runs: pipelines of torch that lose a stage with every copy of it.

Arguments: ``DIRECTORY NAME CASE...``; writes ``DIRECTORY/r{rank}.json``: for each case the list of what did not hold.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor

from tests.assembling import assembled
from tests.forks import join
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import ConfigurationError, NotFound, RecoveryError
from tiercheck.format import container
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.integrations.torch.attaching import provider_for
from tiercheck.policy.neighbours import weigh
from tiercheck.policy.recovery.lost_stage import LostStage
from tiercheck.streams.records.recorded import read_differentials
from tiercheck.tiers.shm.namespaces import remove_namespace

WIDTH, BLOCKS = 8, 2
"""A stage has so many blocks, and an end one layer more."""
LOST_AT, CRASHED_AFTER, END = 5, 3, 30
RATE = 3e-3
NORMS_TOLERANCE = 1e-5
"""They are added up in fp32, shard by shard, and here in fp64."""


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 12)
        self.down = torch.nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + added


class Part(torch.nn.Module):
    """One stage's layers, under the names that they have in the whole model, or (``apart``) each stage's from 0."""

    def __init__(self, stage: int, stages: int, *, apart: bool) -> None:
        super().__init__()
        if stage == 0:
            self.embed = torch.nn.Linear(WIDTH, WIDTH)
        first = 0 if apart else stage * BLOCKS
        self.blocks = torch.nn.ModuleDict({str(first + each): Block() for each in range(BLOCKS)})
        if stage == stages - 1:
            self.head = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) if hasattr(self, "embed") else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(x) if hasattr(self, "head") else x


class Job:
    """``kind``: ``plain``, a stage a rank; ``copies`` (the loop sums their gradients) or ``fsdp``: two each."""

    def __init__(self, directory: Path, name: str, case: str, kind: str) -> None:
        self.rank, self.kind = dist.get_rank(), kind
        self.data = 1 if kind == "plain" else 2
        self.stages = dist.get_world_size() // self.data
        self.stage = self.rank // self.data
        self.place = directory / case
        self.namespace = f"{name}-{case}-{self.rank}"
        memory = f"shm://{name}-{case}-{{rank}}?size=16MiB"
        self.hierarchy = Hierarchy.of(memory, f"nvme://{self.place}?survives=rack")
        self.mesh = init_device_mesh("cpu", (self.stages, self.data), mesh_dim_names=("pp", "dp"))

    def build(self, seed: int, *, apart: bool = False) -> None:
        torch.manual_seed(seed + self.stage)
        part: torch.nn.Module = Part(self.stage, self.stages, apart=apart)
        if self.kind == "fsdp":
            fully_shard(part, mesh=self.mesh["dp"])
        self.model = part
        self.optimizer = torch.optim.AdamW(part.parameters(), lr=RATE)
        self.provider = provider_for(part)(part, self.optimizer)
        group = self.mesh["pp"].get_group()
        stage = PipelineStage(part, self.stage, self.stages, torch.device("cpu"), group=group)
        self.place_in_pipeline = stage.stage_index, stage.num_stages
        self.schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)

    def attach(self, lost: LostStage | str | None, **options: Any) -> Checkpointer:
        config = CheckpointConfig(base_every=END, batch=1, deadline_s=60, bases="capture")
        given: dict[str, Any] = {"stage": self.place_in_pipeline, "on_lost_stage": lost, **options}
        self.checkpointer = attach(self.model, self.optimizer, self.hierarchy, config=config, **given)
        return self.checkpointer

    def train(self, last: int) -> list[float]:
        """Returns the losses, on the ranks of the last stage."""
        means: list[float] = []
        for _ in range(self.checkpointer.version, last):
            self.optimizer.zero_grad()
            # Always the same: a model of this size learns it by heart.
            batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(self.rank % self.data))
            losses: list[torch.Tensor] = []
            given: dict[str, Any] = {"target": batch.flip(-1), "losses": losses} if self.is_last else {}
            self.schedule.step(*([batch] if self.stage == 0 else []), **given)
            for each in self.model.parameters() if self.kind == "copies" else ():
                dist.all_reduce(each.grad, group=self.mesh["dp"].get_group())
            self.optimizer.step()
            self.checkpointer.end_iteration()
            means += [float(sum(losses) / len(losses))] if losses else []
        return means

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def squares(self) -> list[float]:
        """By stage, the square of the norm of the blocks' last gradient. Collective."""
        of_own = 0.0
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            if whole is not None and "blocks." in name:
                of_own += float(whole.double().square().sum())
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (self.stage, of_own))
        return [next(square for stage, square in told if stage == each) for each in range(self.stages)]

    def own(self) -> dict[str, torch.Tensor]:
        """What this rank holds."""
        found = {name: each.clone() for name, each in self.provider.masters().items()}
        for name, state in self.provider.optimizer_state().items():
            found |= {f"{name}/{key}": each.clone() for key, each in state.items()}
        return found

    def lose(self, *ranks: int) -> None:
        """Every copy of what these have saved."""
        dist.barrier()
        if self.rank in ranks:
            remove_namespace(self.namespace)
            for where in (".", "done"):
                shutil.rmtree(self.place / where / f"r{self.rank:05d}", ignore_errors=True)
        dist.barrier()

    def end(self) -> None:
        dist.barrier()
        with suppress(NotFound):
            remove_namespace(self.namespace)


def missing(text: str, *words: str) -> Iterator[str]:
    for word in words:
        if word not in text:
            yield f"{word!r} is not in {text!r}"


def differing(what: str, wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> Iterator[str]:
    if wanted.keys() != found.keys():
        yield f"{what}: {sorted(wanted.keys() ^ found.keys())}"
    for name in wanted.keys() & found.keys():
        if not torch.equal(wanted[name], found[name]):
            yield f"{what}: {name} differs"


def refusal(job: Job, kind: type[Exception], lost: LostStage | str | None, **options: Any) -> str:
    try:
        job.attach(lost, **options).abort()
    except kind as error:
        return str(error)
    return "nothing was refused"


def check_made(job: Job, lost: int, option: LostStage) -> Iterator[str]:
    """A stage is lost and made anew: survivors bit for bit, the formula, the rate, and what later starts say."""
    job.build(1)
    checkpointer = job.attach(option)
    job.train(LOST_AT)
    squares, state, whole = job.squares(), job.own(), assembled(job.provider)[0]
    checkpointer.flush()
    checkpointer.abort()
    job.lose(*range(lost * job.data, (lost + 1) * job.data))

    job.build(99)
    yield from missing(refusal(job, RecoveryError, None), 'on_lost_stage="neighbours"', f"up to {LOST_AT} were saved")
    checkpointer = job.attach(option)
    recovery = checkpointer.recovery
    assert recovery is not None
    if (recovery.version, recovery.fidelity, checkpointer.generation) != (LOST_AT, "approximate", 2):
        yield f"recovered {recovery}"
    yield from missing(" ".join(recovery.notes), f"stage {lost} of {job.stages}", f"of stage {lost + 1} (norm")
    if job.stage != lost:
        yield from differing("survivor", state, job.own())
    found = assembled(job.provider)[0]
    weights = weigh([math.sqrt(squares[each]) for each in (lost - 1, lost + 1)], option.exponent)
    for name, _ in whole:
        layer, _, rest = name.removeprefix("blocks.").partition(".")
        if not layer.isdigit() or int(layer) // BLOCKS != lost:
            continue
        before, after = (whole[f"blocks.{int(layer) + by}.{rest}", ""] for by in (-BLOCKS, BLOCKS))
        wanted = weights[0] * before + weights[1] * after
        if not torch.allclose(wanted, found[name, ""], rtol=NORMS_TOLERANCE, atol=NORMS_TOLERANCE):
            yield f"{name} is {found[name, '']}, not {wanted}"

    job.train(LOST_AT + CRASHED_AFTER)
    if job.optimizer.param_groups[0]["lr"] != RATE:
        yield f"the learning rate stays at {job.optimizer.param_groups[0]['lr']}"
    after_crash = job.own()
    checkpointer.flush()
    checkpointer.abort()
    rates = [rate_of(job, version) for version in range(LOST_AT + 1, LOST_AT + CRASHED_AFTER + 1)]
    if rates != [RATE * option.rate(scheduled=False).at(each) for each in range(CRASHED_AFTER)]:
        yield f"the learning rates were {rates}"

    job.build(7)
    recovery = job.attach(option).recovery
    assert recovery is not None
    if (recovery.version, recovery.fidelity) != (LOST_AT + CRASHED_AFTER, "approximate"):
        yield f"then recovered {recovery}"
    yield from missing(" ".join(recovery.notes), f"generation 2: stage {lost} of")
    yield from differing("again", after_crash, job.own())
    losses = job.train(END)
    if job.is_last and not losses[-1] < 0.8 * losses[0]:
        yield f"the loss does not come down: {losses}"
    job.checkpointer.close()


def rate_of(job: Job, version: int) -> float:
    """The learning rate that a version was stepped with, as its differential tells."""
    file = job.place / f"r{job.rank:05d}/g000002/differential/{version:012d}-{version:012d}.safetensors"
    content = memoryview(file.read_bytes())
    (record,) = read_differentials(container.parse(content, key=file.name, tier="nvme"), tier="nvme")
    rate: float = record.hyperparameters[0]["lr"]
    return rate


def check_found(job: Job) -> Iterator[str]:
    """A rank is lost whose data-parallel copy is left: it is found, and nothing is made. Its generators are lost."""
    job.build(1)
    checkpointer = job.attach("neighbours")
    job.train(LOST_AT)
    state = job.own()
    checkpointer.flush()
    checkpointer.abort()
    job.lose(2)
    job.build(99)
    recovery = job.attach("neighbours").recovery
    assert recovery is not None
    if (recovery.version, recovery.fidelity) != (LOST_AT, "approximate"):
        yield f"recovered {recovery}"
    if job.rank == 2:
        yield from missing(" ".join(recovery.notes), "not each rank could read its own; this rank took its part from")
        yield from missing(" ".join(recovery.notes), f"what rank 2 alone had at version {LOST_AT} (random generators")
    yield from differing("state", state, job.own())
    job.checkpointer.abort()


def check_asked_later(job: Job, lost: int) -> Iterator[str]:
    """The option is given for the first time after a crash, and then after the loss: no version holds norms."""
    job.build(1)
    checkpointer = job.attach(None)
    job.train(LOST_AT)
    state = job.own()
    checkpointer.flush()
    checkpointer.abort()

    job.build(99)
    recovery = job.attach("neighbours").recovery
    job.checkpointer.abort()
    assert recovery is not None
    if (recovery.version, recovery.fidelity) != (LOST_AT, "exact"):
        yield f"recovered {recovery}"
    yield from differing("nothing is lost", state, job.own())

    job.lose(lost)
    job.build(98)
    recovery = job.attach("neighbours").recovery
    assert recovery is not None
    if (recovery.version, recovery.fidelity) != (LOST_AT, "approximate"):
        yield f"then recovered {recovery}"
    made = f"0.5 of stage {lost - 1} and 0.5 of stage {lost + 1}, alike, since the version does not hold the gradients'"
    yield from missing(" ".join(recovery.notes), made)
    if job.stage != lost:
        yield from differing("survivor", state, job.own())
    job.train(LOST_AT + 1)
    job.checkpointer.close()


def check_refused(job: Job) -> Iterator[str]:
    """At the start, and not when a stage is lost."""
    job.build(1, apart=True)
    said = refusal(job, ConfigurationError, "neighbours")
    yield from missing(said, "stages 0 and 1 both have blocks.0", "as in the whole model")
    job.build(1)
    said = refusal(job, ConfigurationError, "neighbours", stage=(job.stage, job.stages + 1))
    yield from missing(said, f"none is stage {job.stages} of {job.stages + 1}", "interleaved")
    said = refusal(job, ConfigurationError, "neighbours", stage=None)
    yield from missing(said, "such as stage=(0, 4)")
    said = refusal(job, ConfigurationError, "neighbours", stage=job.stage)
    yield from missing(said, "(stage.stage_index, stage.num_stages)")


CASES: dict[str, tuple[str, Callable[[Job], Iterator[str]]]] = {
    "plain": ("plain", lambda job: check_made(job, 3, LostStage(steps=2))),
    "copies": ("copies", lambda job: check_made(job, 1, LostStage(exponent=1.0, learning_rate=1.25))),
    "one-copy": ("copies", check_found),
    "asked-later": ("plain", lambda job: check_asked_later(job, 2)),
    "fsdp": ("fsdp", lambda job: check_made(job, 1, LostStage(moments="averaged"))),
    "refused": ("plain", check_refused),
}


def main() -> None:
    directory, name, chosen = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    torch.set_num_threads(1)
    join(timeout=timedelta(seconds=60))
    results: dict[str, list[str]] = {}
    for case in chosen:
        kind, check = CASES[case]
        try:
            job = Job(directory, name, case, kind)
            results[case] = list(check(job))
            job.end()
        except BaseException:  # the other ranks may wait for this one in a collective: end all
            results[case] = [traceback.format_exc()]
            raise
        finally:
            (directory / f"r{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
