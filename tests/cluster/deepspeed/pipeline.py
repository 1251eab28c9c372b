"""The stages of a pipeline that must meet at the end of an iteration, while the loop does not say when that is.

The stages wait for each other's activations inside ``train_batch``. A stage that waited for the others at its own
forward pass would wait for a stage that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from tests.cluster.deepspeed.harness import CASES, RESUME, build, iterate
from tests.cluster.deepspeed.resume import Average, Loader, tiers
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.deepspeed import attach
from tiercheck.integrations.deepspeed.calls import before_train_batch
from tiercheck.policy.policies import EverySeconds, Policies

CASE = CASES["pipeline-zero1-bf16"]
DEADLINE_S = 60.0


def meetings(directory: Path) -> dict[str, Callable[[], Iterable[str]]]:
    """By what the ranks meet for: a clock that rank 0 reads, and a mark that ranks without a shared tier agree on."""

    def by_the_clock() -> Iterable[str]:
        cadence = EverySeconds(1e-9, versions_max=50, ask_every=1)
        with tiers(directory, "clock") as (hierarchy, _):
            yield from check_meeting(hierarchy, CheckpointConfig(deadline_s=DEADLINE_S), Policies(cadence=cadence))

    def without_a_shared_tier() -> Iterable[str]:
        with tiers(directory, "apart") as (hierarchy, _):
            alone = Hierarchy.of(hierarchy.tiers[0])
            yield from check_meeting(alone, CheckpointConfig(base_every=2, deadline_s=DEADLINE_S), None)

    return {
        "pipeline-meets-by-the-clock": by_the_clock,
        "pipeline-meets-without-a-shared-tier": without_a_shared_tier,
        "pipeline-wrapped-by-others": check_wrappers,
    }


def check_meeting(hierarchy: Hierarchy, config: CheckpointConfig, policies: Policies | None) -> Iterable[str]:
    """Every version is saved as of the end of its iteration, with a base at each meeting, and resumes exactly."""

    def attached(seed: int) -> tuple[Any, Loader, Average, Any]:
        engine, loader, average = build(CASE, seed), Loader(), Average()
        beside = {"stateful": {"loader": loader}, "after_step": {"average": average}}
        return engine, loader, average, attach(engine, hierarchy, **beside, config=config, policies=policies)

    engine, loader, average, checkpointer = attached(seed=5)
    own = engine.train_batch
    ended = []
    while engine.global_steps < RESUME:
        next(loader)
        loss = iterate(engine)[0]
        average.value.lerp_(torch.tensor(loss + loader.position), 0.1)
        ended.append((engine.global_steps, loader.position, average.value.tolist()))
    if checkpointer.stats.bases < 2:
        yield f"the ranks made {checkpointer.stats.bases} bases: they never met"
    checkpointer.abort()
    if engine.train_batch == own:
        yield "the hook around train_batch stayed"
    torch.distributed.barrier()

    engine, loader, average, checkpointer = attached(seed=99)
    recovery = checkpointer.recovery
    if recovery is None or (recovery.version, recovery.fidelity) != (RESUME - 1, "exact"):
        yield f"recovered {recovery}, not exactly version {RESUME - 1}"
    found = (engine.global_steps, loader.position, average.value.tolist())
    if found != ended[-2]:
        yield f"the resumed job is at {found}, not at {ended[-2]}"
    checkpointer.abort()


def check_wrappers() -> Iterable[str]:
    """Somebody else may wrap ``train_batch``, before and after; what ends is not called again, and theirs stays."""
    engine, called = build(CASE, seed=5), list[str]()
    end_first = before_train_batch(engine, lambda: called.append("first"))
    first = engine.train_batch
    engine.train_batch = theirs = lambda **options: first(**options)
    end_second = before_train_batch(engine, lambda: called.append("second"))
    iterate(engine)
    if called != ["second", "first"]:
        yield f"called were {called}, not both, the outer one first"
    end_second()
    end_first()
    if engine.train_batch is not theirs:
        yield "the wrapper of somebody else has gone"
    iterate(engine)
    if len(called) > 2:
        yield f"called after its end: {called[2:]}"
