"""Whether a job's bases are folded, and if not, why."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from tiercheck.agent.client.node_agent import NodeAgent
from tiercheck.config import CheckpointConfig, int_of
from tiercheck.errors import ConfigurationError
from tiercheck.policy.folding import no_processor_to_fold
from tiercheck.runtime.runtime import Runtime
from tiercheck.streams.state import FoldShards, TrainingState
from tiercheck.types import Survives

__all__ = ["NOT_SHARED", "foldable", "no_free_processor", "opens_elsewhere", "settle_folding", "tell_folding"]

log = logging.getLogger(__name__)

NOT_SHARED = (
    "no other process can open the first tier, and in the training process a fold would take more from training than "
    'the copy of a base does (bases="fold" folds there, too)'
)


def settle_folding(
    trained: TrainingState,
    config: CheckpointConfig,
    rank: int,
    bound: Sequence[Collection[int]],
    runtime: Runtime,
    *,
    agent: NodeAgent | None,
    apart: bool,
) -> tuple[FoldShards | None, str]:
    """What folds the bases that are due; ``None`` if they are captured, and why, if folding was wanted. ``bound``: the
    processors that each rank of the job is bound to. ``agent``: the node's, if it has the mover. ``apart``: another
    process can fold. Errors: ``ConfigurationError`` if they must be folded, and cannot."""
    if config.bases == "capture":
        return None, ""
    try:
        if agent is not None and agent.lacks_to_fold:
            raise ConfigurationError(
                f"{agent.lacks_to_fold} is not installed where the agent of node {agent.node!r} runs: install it "
                "there, and start the agent anew"
            )
        if config.bases == "fold":
            return trained.folding(certified=False), ""
        trained.check_foldable()  # first: what cannot be folded at all is not to be advised
        if not apart:
            raise ConfigurationError(NOT_SHARED)
        if agent is None and (lacking := no_free_processor(rank, bound, runtime.quota, runtime.environment)):
            raise ConfigurationError(lacking)
        return trained.folding(certified=True), ""
    except ConfigurationError as error:
        if config.bases == "fold":
            raise
        return None, str(error)


def no_free_processor(
    rank: int, bound: Sequence[Collection[int]], quota: int | None, environment: Mapping[str, str]
) -> str:
    """Why a process that this rank starts would take a processor from training; empty if one is free. The ranks of its
    node are as many in a row as ``LOCAL_WORLD_SIZE`` says, or all. Those of them count that may use a processor of this
    rank's: a launcher may have bound each rank to its own. All share the ``quota`` of their control groups."""
    local = max(1, int_of("LOCAL_WORLD_SIZE", len(bound), environment))
    first = rank // local * local
    node = [frozenset(each) for each in bound[first : first + local]]
    own = frozenset(bound[rank])
    sharing = [each for each in node if each & own]
    lacking = no_processor_to_fold(len(frozenset().union(*sharing)), len(sharing))
    if not lacking and quota is not None:
        lacking = no_processor_to_fold(quota, len(node))
    return lacking


def opens_elsewhere(survives: Survives, *, wrapped: bool = False) -> bool:
    """Whether another process can open the first tier."""
    return not wrapped and survives >= Survives.PROCESS


def tell_folding(rank: int, reasons: Sequence[str]) -> None:
    """Log why bases are captured, though folding was wanted: rank 0, and whoever differs from it. ``reasons``: each
    rank's, empty if it does as was wanted."""
    own, first = reasons[rank], reasons[0]
    if own and (rank == 0 or own != first):
        log.info("bases of rank %d are captured, and not folded: %s", rank, own)
    elif first and not own:
        log.info("bases of rank %d are folded, and those of rank 0 captured", rank)


def foldable(trained: TrainingState) -> bool:
    """Whether ``bases="fold"`` would not be refused. Takes seconds, once a process, if the optimizer steps on a GPU."""
    try:
        trained.folding(certified=False)
    except ConfigurationError:
        return False
    return True
