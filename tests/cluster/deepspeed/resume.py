"""The whole way on real engines: attach, fail, attach again, go on; every bit compared with a run that never failed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tiercheck
from tests.cluster.deepspeed.harness import CASES, END, RESUME, Case, Outcome, build, differences, iterate, train
from tiercheck.archive.rebuild import RankState
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import ConfigurationError, NotFound
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.integrations.deepspeed import attach, read_block
from tiercheck.integrations.deepspeed.partitions import DeepSpeedProvider
from tiercheck.tiers.shm.namespaces import remove_namespace

BASE_EVERY = 3
FLUSHED = 3
NAMES = (
    "zero0-fp32",
    "zero1-fp32",
    "zero2-fp32",
    "zero3-fp32",
    "zero0-bf16",
    "zero1-bf16",
    "zero1-bf16-accumulate-fp32",
    "zero2-bf16",
    "zero3-bf16",
    "zero3-bf16-offload-cpu-adam",
    "pipeline-zero1-bf16",
)


FOLDED = ("zero0-fp32", "zero1-bf16", "zero2-fp32", "zero3-bf16", "zero1-bf16-accumulate-fp32", "pipeline-zero1-bf16")
"""In these the mover makes the bases that are due."""
FOLDED_APART = "zero1-bf16"
"""There by a process of its own: of each rank's at each start, which takes seconds of a core to import torch. In the
others by the mover itself: no other process can open a tier with a wrapper."""


def resumes(directory: Path) -> dict[str, Any]:
    """Every case after a software failure; two of them after the wider ones. Pipelines come last: DeepSpeed builds no
    plain engine after one."""
    chosen = [(name, "software") for name in NAMES]
    chosen[4:4] = [("zero1-fp32", "node"), ("zero3-bf16", "rack")]
    checks = {
        f"{name}-{failure}": partial(check_resume, CASES[name], failure, directory, f"{name}-{failure}")
        for name, failure in chosen
    }
    beside = {
        f"beside-{name}-{'said' if says_end else 'unsaid'}": partial(check_beside, directory, name, says_end)
        for name, says_end in (("zero1-fp32", True), ("zero0-bf16", False), ("zero3-fp32", True))
    }
    last = "pipeline-zero1-bf16"
    pipeline = {f"beside-{last}-unsaid": partial(check_beside, directory, last, False)}
    return {
        "attached-and-skipping": partial(check_skip, directory),
        "skipping-around-an-epochs-end": partial(check_skip_around_an_epochs_end, directory),
        "written-after-the-step": partial(check_written, directory),
        **{f"set-after-the-step-{what}": partial(check_set, directory, what) for what in SETS},
        "block": check_block,
        **beside,
        **checks,
        **pipeline,
    }


@contextmanager
def tiers(directory: Path, name: str, *, apart: bool = True) -> Iterator[tuple[Hierarchy, str]]:
    """A namespace of shared memory for each rank, as if each were a node; and a directory that both see. ``apart``:
    another process can open that memory."""
    rank = torch.distributed.get_rank()
    job = hashlib.sha256(f"{os.getppid()} {directory} {name}".encode()).hexdigest()[:16]
    namespace = f"test-resume-{job}"
    first = Tier(f"shm://{namespace}-{{rank}}?size=64MiB", wrap=None if apart else lambda driver: driver)
    hierarchy = Hierarchy.of(first, f"nvme://{directory}/{name}?survives=rack")
    try:
        yield hierarchy, f"{namespace}-{rank}"
    finally:
        with suppress(NotFound):
            remove_namespace(f"{namespace}-{rank}")


def start(
    case: Case, seed: int, hierarchy: Hierarchy, bases: str = "capture"
) -> tuple[Any, DeepSpeedProvider, Checkpointer]:
    """If bases are folded, one is due at each version: the first that is due after a start is captured, since it may
    bring new constants."""
    engine = build(case, seed)
    every, batch = (1, 1) if bases == "fold" else (BASE_EVERY, 2)
    config = CheckpointConfig(base_every=every, batch=batch, deadline_s=60, bases=bases, audit_every=1)
    checkpointer = attach(engine, hierarchy, config=config)
    return engine, DeepSpeedProvider(engine), checkpointer


def check_resume(case: Case, failure: str, directory: Path, name: str) -> Iterable[str]:
    engine = build(case, seed=5)
    reference = train(engine, DeepSpeedProvider(engine), END)
    bases = "fold" if case in (CASES[folded] for folded in FOLDED) else "capture"
    with tiers(directory, name, apart=case == CASES[FOLDED_APART]) as (hierarchy, namespace):
        engine, provider, checkpointer = start(case, 5, hierarchy, bases)
        train(engine, provider, FLUSHED)
        checkpointer.flush()
        train(engine, provider, RESUME)
        checkpointer.abort()
        torch.distributed.barrier()
        if failure == "rack" or (failure == "node" and torch.distributed.get_rank() == 1):
            remove_namespace(namespace)
        torch.distributed.barrier()

        engine, provider, checkpointer = start(case, 99, hierarchy, bases)
        recovery = checkpointer.recovery
        # What was flushed is durable; what came after may have been sent in time or not.
        reachable = (RESUME,) if failure == "software" else (FLUSHED, RESUME)
        if recovery is None or recovery.version not in reachable or recovery.fidelity != "exact":
            checkpointer.abort()
            yield f"recovered {recovery}, not exactly one of the versions {reachable}"
            return
        outcome = train(engine, provider, END)
        checkpointer.close()
        mover = checkpointer.stats.mover
        if bool(mover.folded_bases) != (bases == "fold") or mover.audited_bases != mover.folded_bases:
            yield f"{mover.folded_bases} bases were folded, and {mover.audited_bases} audited: {mover}"
        wanted = {version: loss for version, loss in reference.losses.items() if version > recovery.version}
        yield from differences("losses", wanted, outcome.losses)
        yield from differences("state", reference.state, outcome.state)
        yield from differences("parameters", reference.parameters, outcome.parameters)
        yield from differences("host", reference.host, outcome.host)
        torch.distributed.barrier()
        yield from archived(directory / name, outcome, replays=not case.cpu_adam)


def rebuilt(found: RankState, outcome: Outcome, *, replayed: bool) -> Iterable[str]:
    if (found.version, found.fidelity, found.point.replayed > 0) != (END, "exact", replayed):
        yield f"rebuilt {found.version}, {found.fidelity} {found.notes}, by {found.point}"
    state = {
        "masters": dict(found.state.masters()),
        "optimizer_state": dict(found.state.optimizer_state()),
        "extras": dict(found.state.buffers()),
    }
    yield from differences("rebuilt", stored_of(outcome.state, state), state)


def archived(left: Path, outcome: Outcome, *, replays: bool = True) -> Iterable[str]:
    """What the durable tier says of the last version, without engine and model: by the base that holds it, which the
    trainer captured or the mover folded; and by differentials, when that base is taken away. ``replays``: what stepped
    can be called without the training code."""
    rank = torch.distributed.get_rank()
    with tiercheck.open(f"nvme://{left}") as archive:
        yield from rebuilt(archive.rebuild(rank), outcome, replayed=False)
    if not replays:
        return
    torch.distributed.barrier()
    for base in left.glob(f"r{rank:05d}/*/base/{END:012d}.*"):
        base.unlink()
    torch.distributed.barrier()
    with tiercheck.open(f"nvme://{left}") as archive:
        yield from rebuilt(archive.rebuild(rank), outcome, replayed=True)
        target = left.with_name(f"{left.name}-{rank}.pt")
        archive.export(target, "torch", dtype="model")
        exported = torch.load(target)
        yield from differences("exported", outcome.parameters, {name: exported[name] for name in outcome.parameters})


def stored_of(state: Any, stored: Any) -> Any:
    """What this rank stores of its state. All ranks together have all of it."""
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, {kind: list(held) for kind, held in stored.items()})
    there = {kind: {name for each in ranks for name in each[kind]} for kind in stored}
    return {
        kind: {name: each for name, each in state[kind].items() if name in held or name not in there[kind]}
        for kind, held in stored.items()
    }


class Loader:
    """Draws batches: where it is decides what comes next."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> int:
        self.position += 1
        return self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Average:
    """Is updated behind the step."""

    def __init__(self) -> None:
        self.value = torch.zeros(2)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state["value"]


def check_beside(directory: Path, name: str, says_end: bool) -> Iterable[str]:
    """A data loader, an average, and generators that the process uses before its first iteration."""
    case = CASES[name]

    def go(engine: Any, loader: Loader, average: Average, until: int, checkpointer: Checkpointer | None) -> list[Any]:
        torch.rand(3)  # as iter(DataLoader) does: in the middle of an epoch the interrupted run has not
        seen = []
        while engine.global_steps < until:
            next(loader)
            losses = iterate(engine)
            average.value.lerp_(torch.tensor(losses[0] + loader.position), 0.1)
            if checkpointer is not None and says_end:
                checkpointer.end_iteration()
            seen.append((losses, loader.position, average.value.tolist()))
        return seen

    def attached(engine: Any, hierarchy: Hierarchy) -> tuple[Loader, Average, Checkpointer]:
        loader, average = Loader(), Average()
        if case.stage == 3:  # by the block in DeepSpeed's JSON, whose URLs are those of the hierarchy
            block = {"tiers": [tier.url for tier in hierarchy.tiers], "base_every": BASE_EVERY, "batch": 2}
            engine.config = {**engine.config, "tiercheck": block}
            return loader, average, attach(engine, stateful={"loader": loader, "average": average})
        beside = {"stateful": {"loader": loader, "average": average}}
        if not says_end:
            beside = {"stateful": {"loader": loader}, "after_step": {"average": average}}
        config = CheckpointConfig(base_every=BASE_EVERY, batch=2, deadline_s=60)
        return loader, average, attach(engine, hierarchy, **beside, config=config)

    reference = go(build(case, seed=5), Loader(), Average(), END, None)
    with tiers(directory, f"beside-{name}") as (hierarchy, _):
        engine = build(case, seed=5)
        loader, average, checkpointer = attached(engine, hierarchy)
        go(engine, loader, average, RESUME, checkpointer)
        checkpointer.abort()
        torch.distributed.barrier()
        engine = build(case, seed=99)
        loader, average, checkpointer = attached(engine, hierarchy)
        recovery, wanted = checkpointer.recovery, RESUME if says_end else RESUME - 1
        if recovery is None or (recovery.version, recovery.fidelity) != (wanted, "exact"):
            yield f"recovered {recovery}, not exactly version {wanted}"
        outcome = go(engine, loader, average, END, checkpointer)
        checkpointer.close()
        if outcome != reference[wanted:]:
            yield f"the resumed iterations were {outcome}, not {reference[wanted:]}"


def check_written(directory: Path) -> Iterable[str]:
    """A loop that writes to parameters behind the step has them in its versions, from the first one seen on."""

    def go(engine: Any, until: int) -> list[float]:
        while engine.global_steps < until:
            iterate(engine)
            with torch.no_grad():
                for parameter in engine.module.parameters():
                    parameter.clamp_(-0.05, 0.05)
        return [float(parameter.detach().double().sum()) for parameter in engine.module.parameters()]

    case = CASES["zero0-fp32"]
    with tiers(directory, "written") as (hierarchy, _):
        engine, _, checkpointer = start(case, 5, hierarchy)
        go(engine, 1)
        wanted = go(engine, 2)
        iterate(engine)  # version 3: the forward pass has captured version 2 again, or has it published first
        checkpointer.abort()
        torch.distributed.barrier()
        engine, _, checkpointer = start(case, 99, hierarchy)
        recovery = checkpointer.recovery
        if recovery is None or (recovery.version, recovery.fidelity) != (2, "exact"):
            yield f"recovered {recovery}, not exactly version 2"
        found = [float(parameter.detach().double().sum()) for parameter in engine.module.parameters()]
        checkpointer.abort()
        yield from differences("parameters", wanted, found)


def set_option(option: str, value: Any) -> Callable[[Any], Any]:
    def change(engine: Any, *, reads: bool = False) -> Any:
        for group in () if reads else engine.optimizer.param_groups:
            group[option] = value
        return [group[option] for group in engine.optimizer.param_groups]

    return change


def set_buffers(engine: Any, *, reads: bool = False) -> Any:
    found = {name: each for name, each in engine.module.named_buffers() if name.endswith("drift")}
    for each in () if reads else found.values():
        each.mul_(8)
    return {name: each.item() for name, each in found.items()}


def set_loss_scale(engine: Any, *, reads: bool = False) -> Any:
    scaler = (
        engine.optimizer.loss_scaler if hasattr(engine.optimizer, "loss_scaler") else engine.optimizer.loss_scale_config
    )
    if not reads:
        scaler.cur_scale = 64.0
    return scaler.cur_scale


SETS: dict[str, tuple[str, Callable[..., Any]]] = {
    "lr": ("zero3-bf16", set_option("lr", 0.02)),
    "betas": ("zero1-fp32", set_option("betas", (0.8, 0.9))),
    "buffers": ("zero1-fp32", set_buffers),
    "loss-scale": ("zero1-fp16", set_loss_scale),
}
"""What is set behind the step: the rate of an engine without a scheduler, what its scheduler does not set, and what is
no option. And in which case."""


def check_set(directory: Path, what: str) -> Iterable[str]:
    """What a loop sets behind the step is in its versions, from the first one on."""
    name, change = SETS[what]
    case = CASES[name]

    def go(engine: Any, until: int) -> None:
        while engine.global_steps < until:
            iterate(engine)
            change(engine, reads=engine.global_steps != 2)

    engine = build(case, seed=5)
    if what in ("lr", "betas") and (engine.lr_scheduler is None) != (what == "lr"):
        yield f"the scheduler is {engine.lr_scheduler}"
    go(engine, 2)
    reference = train(engine, DeepSpeedProvider(engine), END)
    with tiers(directory, f"set-{what}") as (hierarchy, _):
        engine, _, checkpointer = start(case, 5, hierarchy)
        go(engine, 2)
        wanted = change(engine, reads=True)
        iterate(engine)  # version 3: the forward pass has captured version 2 again
        checkpointer.abort()
        torch.distributed.barrier()
        engine, provider, checkpointer = start(case, 99, hierarchy)
        recovery = checkpointer.recovery
        if recovery is None or (recovery.version, recovery.fidelity) != (2, "exact"):
            yield f"recovered {recovery}, not exactly version 2"
        if (found := change(engine, reads=True)) != wanted:
            yield f"recovered {what} {found}, not {wanted}"
        outcome = train(engine, provider, END)
        checkpointer.close()
        yield from differences("state", reference.state, outcome.state)


def check_skip(directory: Path) -> Iterable[str]:
    """A step with a gradient that is not finite counts as a version and changes nothing."""
    case = CASES["zero1-bf16"]

    def go(engine: Any, until: int) -> None:
        while engine.global_steps < until:
            iterate(engine, poison=engine.global_steps == 1)

    reference = build(case, seed=5)
    go(reference, END)
    expected = train(reference, DeepSpeedProvider(reference), END)
    with tiers(directory, "skip") as (hierarchy, _):
        engine, provider, checkpointer = start(case, 5, hierarchy)
        go(engine, 2)
        checkpointer.abort()  # the step that was skipped has just returned
        torch.distributed.barrier()
        engine, provider, checkpointer = start(case, 99, hierarchy)
        found = checkpointer.version, engine.skipped_steps, checkpointer.recovery.fidelity, checkpointer.recovery.notes
        if found != (2, 1, "exact", ()):
            yield f"recovered {found}"
        go(engine, 3)
        checkpointer.abort()
        torch.distributed.barrier()
        engine, provider, checkpointer = start(case, 99, hierarchy)
        if checkpointer.version != 3 or engine.skipped_steps != 1:
            yield f"recovered version {checkpointer.version} with {engine.skipped_steps} skipped steps, not 3 with 1"
        outcome = train(engine, provider, END)
        checkpointer.close()
        yield from differences("state", expected.state, outcome.state)
        torch.distributed.barrier()
        yield from archived(directory / "skip", outcome)


def check_skip_around_an_epochs_end(directory: Path) -> Iterable[str]:
    """Version 2 is skipped and ends an epoch, version 3 is skipped and ends none: what a process draws as it starts is
    no part of what follows version 3."""
    case = CASES["zero1-bf16"]

    def go(engine: Any, until: int, checkpointer: Checkpointer | None = None) -> list[list[float]]:
        losses = []
        torch.randn(1)  # as iter(DataLoader) draws
        while (version := engine.global_steps + 1) <= until:
            losses.append(iterate(engine, poison=version in (2, 3)))
            if checkpointer is not None:
                checkpointer.end_iteration(ends_epoch=version == 2)
            if version == 2:
                torch.randn(1)
        return losses

    reference = go(build(case, seed=5), END)
    with tiers(directory, "skip-epoch") as (hierarchy, _):
        engine, _, checkpointer = start(case, 5, hierarchy)
        go(engine, 3, checkpointer)
        checkpointer.abort()
        torch.distributed.barrier()
        engine, _, checkpointer = start(case, 99, hierarchy)
        found = checkpointer.version, engine.skipped_steps, checkpointer.recovery.fidelity
        if found != (3, 2, "exact"):
            yield f"recovered {found}"
        losses = go(engine, END, checkpointer)
        checkpointer.close()
        if losses != reference[3:]:
            yield f"losses {losses}, not {reference[3:]}"


def check_block() -> Iterable[str]:
    block = {"tiers": ["shm://a", "nvme:///b?survives=rack"], "base_every": 7, "must_survive": "rack"}
    hierarchy, config = read_block({"tiercheck": block})
    if (len(hierarchy.tiers), config.base_every, hierarchy.must_survive.name) != (2, 7, "RACK"):
        yield f"the block was read as {hierarchy} and {config}"
    for wrong in ({}, {"tiercheck": {}}, {"tiercheck": {**block, "base_evry": 1}}, {"tiercheck": {"tiers": "shm://a"}}):
        try:
            read_block(wrong)
        except ConfigurationError:
            continue
        yield f"{wrong} was accepted"
