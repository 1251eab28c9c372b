"""What each rank of ``test_lost_stage`` runs: pipelines that lose stages with every copy of them.

Arguments: ``DIRECTORY CHECK...``; writes ``DIRECTORY/r{rank}.json``: for each check the list of what did not hold.
"""

from __future__ import annotations

import json
import shutil
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

import tiercheck
from tests.assembling import assembled
from tests.cluster.deepspeed.harness import Case, cloned, deepspeed, differences, snapshot
from tests.cluster.deepspeed.lost_stage_job import BASE, Job, iterate
from tests.forks import join
from tiercheck.errors import NotFound, RecoveryError
from tiercheck.format import container
from tiercheck.integrations.deepspeed.partitions import DeepSpeedProvider
from tiercheck.policy.neighbours import weigh
from tiercheck.policy.recovery.lost_stage import LostStage
from tiercheck.streams.records.recorded import read_differentials
from tiercheck.tiers.shm.namespaces import remove_namespace

LOST_AT, CRASHED_AFTER, END = 5, 4, 24
MOMENTS = ("exp_avg", "exp_avg_sq")
FP32 = Case(0, False, accumulation=2, pipeline=True, scheduler=None)
BF16 = Case(1, True, accumulation=2, clipping=0.3, pipeline=True)
Whole = dict[tuple[str, str], torch.Tensor]
"""All tensors of the model, or a moment of each that is trained."""


def trained(engine: Any, until: int) -> list[float]:
    losses = []
    while engine.global_steps < until:
        losses.append(iterate(engine))
    return losses


def refusal(job: Job, engine: Any, lost: Any = None) -> str:
    try:
        job.attach(engine, lost).abort()
    except RecoveryError as error:
        return str(error)
    return "nothing was refused"


def missing(text: str, *words: str) -> Iterator[str]:
    for word in words:
        if word not in text:
            yield f"{word!r} is not in {text!r}"


def life(job: Job, lost: Any, *, seed: int = 5) -> tuple[dict[str, Any], Whole, dict[str, Whole], dict[str, float]]:
    """Train to :data:`LOST_AT`, and end as by a crash. Returns the rank's state, all tensors of the model and their
    moments, and by layer the squares of the norms of the last step's gradients of all ranks."""
    engine = job.build(seed)
    checkpointer = job.attach(engine, lost)
    trained(engine, LOST_AT)
    checkpointer.flush()
    provider = DeepSpeedProvider(engine)
    state = {**snapshot(provider), "counters": provider.host_state()["counters"]}
    squares: list[Any] = [None] * dist.get_world_size()
    named = {} if lost is None else checkpointer_norms(job)
    dist.all_gather_object(squares, named)
    whole, _ = assembled(provider)
    moments = {kept: assembled(provider, kept)[0] for kept in MOMENTS}
    checkpointer.abort()
    return state, whole, moments, {layer: square for each in squares for layer, square in each.items()}


def checkpointer_norms(job: Job) -> Mapping[str, float]:
    """By layer of this rank's stage, as the version's host state in the durable tier tells."""
    dist.barrier()
    with tiercheck.open(f"nvme://{job.place}") as archive:
        found: Mapping[str, float] = archive.show(LOST_AT, rank=dist.get_rank()).host_state["gradient_norms"]
    dist.barrier()
    return found


def averaged(whole: Whole, sources: Collection[tuple[float, int]], layer: int) -> dict[str, torch.Tensor]:
    """The weighted sum of layers, in fp32: ``sources`` are (weight, layer)."""
    found: dict[str, torch.Tensor] = {}
    for name, _ in whole:
        if name.startswith(f"{layer}."):
            rest = name.removeprefix(f"{layer}.")
            parts = [np.float32(weight) * whole[f"{other}.{rest}", ""].numpy() for weight, other in sources]
            found[name] = torch.from_numpy(np.sum(parts, axis=0, dtype=np.float32))
    return found


def made_from_both(
    job: Job, stage: int, whole: Whole, squares: Mapping[str, float], option: LostStage
) -> dict[str, torch.Tensor]:
    """What the layers of an inner stage are to be."""
    beside = stage - 1, stage + 1
    layers = {each: range(1 + each * job.blocks, 1 + (each + 1) * job.blocks) for each in (*beside, stage)}
    found: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(layers[stage]):
        counted = [index] if option.by_layer else range(job.blocks)
        norms = [sum(squares[str(layers[each][at])] for at in counted) ** 0.5 for each in beside]
        weights = weigh(norms, option.exponent)
        found |= averaged(whole, [(w, layers[each][index]) for w, each in zip(weights, beside, strict=True)], layer)
    return found


def check_made(job: Job, lost: Collection[int], option: LostStage) -> Iterable[str]:
    """Stages are lost and made anew: survivors bit for bit, the formula, the loss, and what later starts say."""
    rank = dist.get_rank()
    state, whole, moments, squares = life(job, option)
    job.lose(*lost)
    engine = job.build(99)
    yield from missing(refusal(job, engine), 'on_lost_stage="neighbours"', "versions up to 5 were saved")
    # No other base: a differential before one may never be copied, and each one's learning rate is looked at.
    checkpointer = job.attach(engine, option, base_every=END)
    provider = DeepSpeedProvider(engine)
    recovery = checkpointer.recovery
    assert recovery is not None
    if (recovery.version, recovery.fidelity, checkpointer.generation) != (LOST_AT, "approximate", 2):
        yield f"recovered {recovery}"
    for stage in lost:
        why = ", each layer by" if option.by_layer else " (norm"
        yield from missing(" ".join(recovery.notes), f"stage {stage} of {job.stages}", f"of stage {stage + 1}{why}")
    found, _ = assembled(provider)
    yield from ill_made(job, lost, whole, found, squares, option)
    if option.averages_moments:
        for kept, before in moments.items():
            yield from ill_made(job, lost, before, assembled(provider, kept)[0], squares, option)
    own = {**snapshot(provider), "counters": provider.host_state()["counters"]}
    if rank not in lost:
        yield from differences("survivor", state, own)
    else:
        yield from differences("counters", state["counters"], own["counters"])
        wanted, counted = ({int(each["step"]) for each in of["optimizer_state"].values()} for of in (state, own))
        if counted != wanted if option.averages_moments else max(counted, default=0) > 1:
            yield f"the optimizer has counted {counted} steps, and had counted {wanted}"
    low = {name: each for name, each in engine.module.named_parameters() if each.requires_grad}
    for name, parameter in low.items():
        yield from differences(f"low {name}", found[name, ""].to(parameter.dtype), parameter.detach())
    rates = {}
    for version in range(LOST_AT + 1, LOST_AT + 1 + CRASHED_AFTER):
        before = provider.groups()[0]["lr"]
        rates[version] = before * option.rate(scheduled=engine.lr_scheduler is not None).at(len(rates))
        iterate(engine)
        if engine.lr_scheduler is None and provider.groups()[0]["lr"] != before:
            yield f"the learning rate stays at {provider.groups()[0]['lr']}"
    after = snapshot(provider)
    checkpointer.flush()
    checkpointer.abort()
    yield from recorded_rates(job, rates)

    engine = job.build(7)
    checkpointer = job.attach(engine, option)
    recovery = checkpointer.recovery
    assert recovery is not None
    if (recovery.version, recovery.fidelity) != (LOST_AT + CRASHED_AFTER, "approximate"):
        yield f"then recovered {recovery}"
    yield from missing(" ".join(recovery.notes), f"generation 2: stage {min(lost)} of")
    yield from differences("again", after, snapshot(DeepSpeedProvider(engine)))
    losses = trained(engine, END)
    if not losses[-1] < 0.8 * losses[0]:
        yield f"the loss does not come down: {losses}"
    checkpointer.close()
    with tiercheck.open(f"nvme://{job.place}") as archive:
        rebuilt = archive.rebuild(rank)
        if rebuilt.fidelity != "approximate" or made_of(archive) != tuple(recovery_notes(recovery)):
            yield f"from outside it is {rebuilt.fidelity} {rebuilt.notes}"
    dist.barrier()


def ill_made(
    job: Job, lost: Iterable[int], before: Whole, found: Whole, squares: Mapping[str, float], option: LostStage
) -> Iterable[str]:
    for stage in lost:
        wanted = made_from_both(job, stage, before, squares, option)
        yield from differences(f"stage {stage}", wanted, {name: found[name, ""] for name in wanted})


def made_of(archive: tiercheck.Archive) -> tuple[str, ...]:
    branch = archive.generations[1].branch
    return () if branch is None else branch.made


def recovery_notes(recovery: Any) -> Iterator[str]:
    for note in recovery.notes:
        if note.startswith("generation 2: "):
            yield note.removeprefix("generation 2: ")


def recorded_rates(job: Job, wanted: Mapping[int, float]) -> Iterable[str]:
    """The learning rate that each version was stepped with, as its differential tells."""
    rank = dist.get_rank()
    for version, rate in wanted.items():
        file = job.place / f"r{rank:05d}/g000002/differential/{version:012d}-{version:012d}.safetensors"
        content = memoryview(file.read_bytes())
        (record,) = read_differentials(container.parse(content, key=file.name, tier="nvme"), tier="nvme")
        if record.hyperparameters[0]["lr"] != rate:
            yield f"version {version} was stepped with {record.hyperparameters[0]['lr']}, not {rate}"


def check_refusals(job: Job) -> Iterable[str]:
    """What cannot be made is refused by name, and nothing is lost by it."""
    life(job, "neighbours")
    last = job.stages - 1
    dist.barrier()
    kept = job.place.with_name(f"{job.place.name}-kept")
    if dist.get_rank() == 0:
        shutil.copytree(job.place, kept)
    dist.barrier()

    def lose(*ranks: int) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(job.place)
            shutil.copytree(kept, job.place)
        with suppress(NotFound):
            remove_namespace(job.namespace)
        dist.barrier()
        if dist.get_rank() in ranks:
            shutil.rmtree(job.place / f"r{dist.get_rank():05d}")
        dist.barrier()

    engine = job.build(1)
    lose(0)
    yield from missing(refusal(job, engine, "neighbours"), "stage 0 (average: it is an end stage")
    yield from missing(refusal(job, engine, "neighbours-and-ends"), "no surviving rank has 0.embed.weight")
    lose(1, 2)
    yield from missing(refusal(job, engine, "neighbours"), "stage 1 (average: its neighbour 2 is lost too")
    yield from missing(refusal(job, engine, "older-base"), "no older base of it is at hand")
    lose(last)
    yield from missing(refusal(job, engine, "neighbours"), f"stage {last} (average: it is an end stage")
    lose(1)
    odd = "stage 1 cannot be made from stage 2", "'expand.weight' differs in '3' ((128, 32)) and '5' ((32, 32))"
    yield from missing(refusal(job, engine, "neighbours"), *odd)
    if LOST_AT not in versions_left(job):
        yield "a refusal has cost something"


def versions_left(job: Job) -> list[int]:
    dist.barrier()
    with tiercheck.open(f"nvme://{job.place}") as archive:
        found = sorted({key.last for tier in archive.inventory.tiers for key in tier.shards if key.rank == 3})
    dist.barrier()
    return found


def check_older_base(job: Job) -> Iterable[str]:
    """Two stages in a row, an end among them, go back to what the durable tier has; the others keep their state."""
    rank, lost = dist.get_rank(), (2, 3)
    option = LostStage(method="older-base", behind_max=1, learning_rate=1.0)
    engine = job.build(5)
    checkpointer = job.attach(engine, option)
    states = {}
    while engine.global_steps < LOST_AT + 3:
        iterate(engine)
        states[engine.global_steps] = snapshot(DeepSpeedProvider(engine))
    counters = DeepSpeedProvider(engine).host_state()["counters"]
    checkpointer.flush()
    checkpointer.abort()
    job.lose(*lost, before=LOST_AT + 1)
    engine = job.build(99)
    checkpointer = job.attach(engine, option)
    recovery = checkpointer.recovery
    assert recovery is not None
    if (recovery.version, recovery.fidelity) != (LOST_AT + 3, "approximate"):
        yield f"recovered {recovery}"
    yield from missing(" ".join(recovery.notes), "it is that of version 5", "stage 2 of", "stage 3 of")
    wanted = states[LOST_AT if rank in lost else LOST_AT + 3]
    found = snapshot(DeepSpeedProvider(engine))
    for what in ("masters", "optimizer_state"):
        yield from differences(what, wanted[what], found[what])
    yield from differences("counters", counters, DeepSpeedProvider(engine).host_state()["counters"])
    trained(engine, LOST_AT + 5)
    checkpointer.close()


def check_tied(job: Job, method: str) -> Iterable[str]:
    """The first stage is lost: its embedding is that of the last one, which ties it, with its moments, so that the two
    stay alike. Its blocks are copies, or of an older version."""
    older = method == "older-base"
    state, whole, *_ = life(job, "neighbours")
    job.lose(0, before=BASE + 1 if older else None)
    engine = job.build(99)
    checkpointer = job.attach(engine, LostStage(method=method, behind_max=1 if older else None))
    recovery = checkpointer.recovery
    assert recovery is not None
    if (recovery.version, recovery.fidelity) != (LOST_AT, "approximate"):
        yield f"recovered {recovery}"
    found, _ = assembled(DeepSpeedProvider(engine))
    own = [key for key in whole if key[0].startswith("tied_modules.")]
    if not own:
        yield f"nothing is tied in {list(whole)}"
    wanted = {key[0]: whole[key] for key in own}
    for index in range(0 if older else job.blocks):
        wanted |= averaged(whole, [(1.0, 1 + job.blocks + index)], 1 + index)
    yield from differences("first", wanted, {name: found[name, ""] for name in wanted})
    if dist.get_rank() == 0:
        yield from differences("tied", tied_state(state["optimizer_state"]), tied_state(optimizer_of(engine)))
    trained(engine, LOST_AT + 3)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, {**tied_state(masters_of(engine)), **tied_state(optimizer_of(engine), "moments of ")})
    yield from differences("tied weights of the first and the last stage", every[0], every[-1])
    if not every[0]:
        yield "the first stage has no tied weight"
    checkpointer.close()


def check_tied_partitions(job: Job) -> Iterable[str]:
    """Under ZeRO 1 a tied embedding lies in a partition with the rest of its stage."""
    life(job, "neighbours")
    job.lose(0)
    engine = job.build(99)
    yield from missing(
        refusal(job, engine, "neighbours-and-ends"), "they would drift apart", "tied layers under ZeRO 0"
    )


def masters_of(engine: Any) -> dict[str, torch.Tensor]:
    return cloned(dict(DeepSpeedProvider(engine).masters()))


def optimizer_of(engine: Any) -> dict[str, Any]:
    return cloned(dict(DeepSpeedProvider(engine).optimizer_state()))


def tied_state(held: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    return {prefix + name: each for name, each in held.items() if name.startswith("tied_modules.")}


def check_copies(job: Job) -> Iterable[str]:
    """A rank is lost whose data-parallel copy is left: it is found, and nothing is made. Its generators are lost."""
    state, whole, *_ = life(job, "neighbours")
    job.lose(1)
    engine = job.build(99)
    checkpointer = job.attach(engine, "neighbours")
    recovery = checkpointer.recovery
    assert recovery is not None
    if (recovery.version, recovery.fidelity) != (LOST_AT, "approximate"):
        yield f"recovered {recovery}"
    if dist.get_rank() == 1:
        yield from missing(" ".join(recovery.notes), "what rank 1 alone had at version 5 (random generators")
    found, _ = assembled(DeepSpeedProvider(engine))
    yield from differences("model", whole, found)
    yield from differences("moments", state["optimizer_state"], snapshot(DeepSpeedProvider(engine))["optimizer_state"])
    checkpointer.abort()


def checks(directory: Path) -> dict[str, Callable[[], tuple[Job, Iterable[str]]]]:
    def of(name: str, check: Callable[..., Iterable[str]], case: Case, *arguments: Any, **options: Any) -> Any:
        def run() -> tuple[Job, Iterable[str]]:
            job = Job(directory / name, case, **options)
            return job, check(job, *arguments)

        return run

    ours = LostStage(exponent=1.0, learning_rate=1.25, steps=2, weights="by-layer", moments="averaged")
    return {
        "zero1-bf16": of("zero1-bf16", check_made, BF16, (1,), ours),
        "zero0-fp32": of("zero0-fp32", check_made, FP32, (2,), LostStage()),
        "refusals": of("refusals", check_refusals, FP32, odd=(2,)),
        "older-base": of("older-base", check_older_base, BF16),
        "tied": of("tied", check_tied, FP32, "neighbours-and-ends", tied=True, blocks=1),
        "tied-older": of("tied-older", check_tied, FP32, "older-base", tied=True, blocks=1),
        "tied-partitions": of("tied-partitions", check_tied_partitions, BF16, tied=True, blocks=1),
        "copies": of("copies", check_copies, FP32, data=2),
        "six-stages": of("six-stages", check_made, FP32, (1, 3), LostStage(steps=3, moments="averaged"), blocks=1),
    }


def main() -> None:
    directory, chosen = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    join(timeout=timedelta(seconds=60))
    deepspeed.init_distributed(dist_backend="gloo")
    results: dict[str, list[str]] = {}
    every = checks(directory)
    for name in chosen:
        try:
            job, found = every[name]()
            results[name] = list(found)
            job.end()
        except BaseException:  # the other ranks may wait for this one in a collective: end all
            results[name] = [traceback.format_exc()]
            raise
        finally:
            (directory / f"r{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
