"""Training on compressed gradients on real engines: the masters step with what is written into the gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

from tests.cluster.deepspeed.harness import (
    CASES,
    END,
    RESUME,
    Block,
    Case,
    First,
    Last,
    build,
    differences,
    objective,
    train,
)
from tests.cluster.deepspeed.resume import BASE_EVERY, tiers
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import UnsupportedSetup
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.deepspeed import attach
from tiercheck.integrations.deepspeed.partitions import DeepSpeedProvider
from tiercheck.types import Fidelity

KEPT_MAX = 0.013
"""The share of a gradient that the codec ``sparse`` keeps, at most; of a large one."""

CONFIG = CheckpointConfig(codec="sparse", train_on_compressed=True, base_every=BASE_EVERY, batch=2, deadline_s=60)

NAMES = (
    "zero0-fp32",
    "zero1-fp32",
    "zero2-fp32",
    "zero3-fp32",
    "zero0-bf16",
    "zero2-bf16",
    "zero3-bf16",
    "zero1-bf16-accumulate-fp32",
    "pipeline-zero1-bf16",
)


def compressed(directory: Path) -> dict[str, Any]:
    """Pipelines come last: DeepSpeed builds no plain engine after one, and none at all after a tensor-parallel one."""
    # What was applied is seen in the moments, into which no decay must go.
    sparse = {name: replace(CASES[name], decay_in_gradient=False) for name in NAMES}
    cases = {f"{name}-compressed": partial(check, case, "sparse", directory, name) for name, case in sparse.items()}
    feedback = {"zero2-fp32-feedback": partial(check, CASES["zero2-fp32"], "int8+feedback", directory, "feedback")}
    last = {"tied-layers-refused": refuse_tied_layers, "tensor-parallelism-refused": refuse_tensor_parallelism}
    return {**feedback, **cases, **last}


def start(case: Case, seed: int, codec: str, hierarchy: Hierarchy) -> tuple[Any, DeepSpeedProvider, Checkpointer]:
    engine = build(case, seed)
    checkpointer = attach(engine, hierarchy, config=replace(CONFIG, codec=codec))
    return engine, DeepSpeedProvider(engine), checkpointer


def check(case: Case, codec: str, directory: Path, name: str) -> Iterable[str]:
    with tiers(directory, f"{name}-never") as (hierarchy, _):
        engine, provider, checkpointer = start(case, 5, codec, hierarchy)
        yield from check_moments(engine, provider, codec)
        at_failure = train(engine, provider, RESUME)
        reference = train(engine, provider, END)
        checkpointer.close()
    with tiers(directory, f"{name}-failing") as (hierarchy, _):
        engine, provider, checkpointer = start(case, 5, codec, hierarchy)
        train(engine, provider, RESUME)
        checkpointer.abort()
        torch.distributed.barrier()
        engine, provider, checkpointer = start(case, 99, codec, hierarchy)
        recovery = checkpointer.recovery
        if recovery is None or (recovery.point.anchor, recovery.version) != (BASE_EVERY, RESUME):
            checkpointer.abort()
            yield f"recovered {recovery}, not version {RESUME}"
            return
        if recovery.fidelity is not Fidelity.EXACT:
            yield f"the recovery is {recovery.fidelity}: {recovery.notes}"
        found = train(engine, provider, RESUME)  # trains nothing: the state as it was restored
        yield from differences("restored state", at_failure.state, found.state)
        yield from differences("restored parameters", at_failure.parameters, found.parameters)
        outcome = train(engine, provider, END)
        checkpointer.close()
        if not codec.endswith("+feedback"):
            wanted = {version: loss for version, loss in reference.losses.items() if version > RESUME}
            yield from differences("losses", wanted, outcome.losses)
            yield from differences("state", reference.state, outcome.state)
            yield from differences("parameters", reference.parameters, outcome.parameters)
            yield from differences("host", reference.host, outcome.host)


def check_moments(engine: Any, provider: DeepSpeedProvider, codec: str) -> Iterable[str]:
    """After one step Adam's first moment is a multiple of the gradient that was applied."""
    train(engine, provider, 1)
    for name, state in provider.optimizer_state().items():
        if codec != "sparse" or state["exp_avg"].numel() < 1000:
            continue
        kept = float((state["exp_avg"] != 0).float().mean())
        if not 0 < kept <= KEPT_MAX:
            yield f"{kept:.2%} of the gradient of {name} were applied"


def refused(words: str, attached: Any) -> Iterable[str]:
    try:
        attached().abort()
    except UnsupportedSetup as error:
        if words not in str(error):
            yield f"{words!r} is not in {error}"
    else:
        yield f"{words} are not refused"


def refuse_tied_layers() -> Iterable[str]:
    case = CASES["pipeline-zero1-bf16"]
    tied = TiedLayerSpec("block", Block, tied_weight_attr=["expand.weight"])
    layers = [LayerSpec(First), tied, tied, LayerSpec(Last)]
    model = PipelineModule(layers, num_stages=2, loss_fn=objective, base_seed=1)
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    engine = build(case, 1, model=model, model_parameters=groups)
    yield from refused("tied layers", lambda: attach(engine, Hierarchy.of("memory://"), config=CONFIG))


def refuse_tensor_parallelism() -> Iterable[str]:
    engine = build(CASES["tensor-parallel-zero1-bf16"], 1)
    yield from refused("tensor parallelism", lambda: attach(engine, Hierarchy.of("memory://"), config=CONFIG))
