"""The whole way on real engines: attach, fail, attach again, go on; every bit compared with a run that never failed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed_harness import CASES, END, RESUME, Case, build, differences, iterate, train

from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import ConfigurationError, NotFound
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.deepspeed import attach, read_block
from tiercheck.streams.deepspeed_partitions import DeepSpeedProvider
from tiercheck.tiers.namespaces import remove_namespace

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
    "pipeline-zero1-bf16",
)


def resumes(directory: Path) -> dict[str, Any]:
    """Every case after a software failure; two of them after the wider ones. Pipelines come last: DeepSpeed builds no
    plain engine after one."""
    chosen = [(name, "software") for name in NAMES]
    chosen[4:4] = [("zero1-fp32", "node"), ("zero3-bf16", "rack")]
    checks = {
        f"{name}-{failure}": partial(check_resume, CASES[name], failure, directory, f"{name}-{failure}")
        for name, failure in chosen
    }
    return {"attached-and-skipping": partial(check_skip, directory), "block": check_block, **checks}


@contextmanager
def tiers(directory: Path, name: str) -> Iterator[tuple[Hierarchy, str]]:
    """A namespace of shared memory for each rank, as if each were a node; and a directory that both see."""
    rank = torch.distributed.get_rank()
    job = hashlib.sha256(f"{os.environ['TORCHELASTIC_RUN_ID']} {directory} {name}".encode()).hexdigest()[:16]
    namespace = f"test-resume-{job}"
    hierarchy = Hierarchy.of(f"shm://{namespace}-{{rank}}?size=64MiB", f"nvme://{directory}/{name}?survives=rack")
    try:
        yield hierarchy, f"{namespace}-{rank}"
    finally:
        with suppress(NotFound):
            remove_namespace(f"{namespace}-{rank}")


def start(case: Case, seed: int, hierarchy: Hierarchy) -> tuple[Any, DeepSpeedProvider, Checkpointer]:
    engine = build(case, seed)
    checkpointer = attach(engine, hierarchy, config=CheckpointConfig(base_every=BASE_EVERY, batch=2, deadline_s=60))
    return engine, DeepSpeedProvider(engine), checkpointer


def check_resume(case: Case, failure: str, directory: Path, name: str) -> Iterable[str]:
    engine = build(case, seed=5)
    reference = train(engine, DeepSpeedProvider(engine), END)
    with tiers(directory, name) as (hierarchy, namespace):
        engine, provider, checkpointer = start(case, 5, hierarchy)
        train(engine, provider, FLUSHED)
        checkpointer.flush()
        train(engine, provider, RESUME)
        checkpointer.abort()
        torch.distributed.barrier()
        if failure == "rack" or (failure == "node" and torch.distributed.get_rank() == 1):
            remove_namespace(namespace)
        torch.distributed.barrier()

        engine, provider, checkpointer = start(case, 99, hierarchy)
        recovery = checkpointer.recovery
        # What was flushed is durable; what came after may have been sent in time or not.
        reachable = (RESUME,) if failure == "software" else (FLUSHED, RESUME)
        if recovery is None or recovery.version not in reachable or recovery.fidelity != "exact":
            checkpointer.abort()
            yield f"recovered {recovery}, not exactly one of the versions {reachable}"
            return
        outcome = train(engine, provider, END)
        checkpointer.close()
        wanted = {version: loss for version, loss in reference.losses.items() if version > recovery.version}
        yield from differences("losses", wanted, outcome.losses)
        yield from differences("state", reference.state, outcome.state)
        yield from differences("parameters", reference.parameters, outcome.parameters)
        yield from differences("host", reference.host, outcome.host)


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
        checkpointer.abort()  # the skipped version 2 was seen by nobody yet
        torch.distributed.barrier()
        engine, provider, checkpointer = start(case, 99, hierarchy)
        if checkpointer.version != 1:
            yield f"recovered version {checkpointer.version}, not 1"
        go(engine, 3)
        checkpointer.abort()
        torch.distributed.barrier()
        engine, provider, checkpointer = start(case, 99, hierarchy)
        if checkpointer.version != 3 or engine.skipped_steps != 1:
            yield f"recovered version {checkpointer.version} with {engine.skipped_steps} skipped steps, not 3 with 1"
        outcome = train(engine, provider, END)
        checkpointer.close()
        yield from differences("state", expected.state, outcome.state)


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
