"""Whether a job's bases are folded, and if not, why."""

from __future__ import annotations

import logging

from tiercheck.config import CheckpointConfig, int_of
from tiercheck.errors import ConfigurationError
from tiercheck.policy.folding import no_processor_to_fold
from tiercheck.recovery.ranks import Ranks
from tiercheck.runtime.runtime import Runtime
from tiercheck.streams.state import FoldShards, TrainingState

__all__ = ["foldable", "settle_folding"]

log = logging.getLogger(__name__)

NOT_SHARED = (
    "no other process can open the first tier, and in the training process a fold would take more from training than "
    'the copy of a base does (bases="fold" folds there, too)'
)


def settle_folding(
    trained: TrainingState, config: CheckpointConfig, ranks: Ranks, runtime: Runtime, *, has_agent: bool, apart: bool
) -> tuple[FoldShards | None, str]:
    """What folds the bases that are due; ``None`` if they are captured, and why, if folding was wanted. ``has_agent``:
    the node's agent has the mover. ``apart``: another process can fold. Errors: ``ConfigurationError`` if they must be
    folded, and cannot."""
    if config.bases == "capture":
        return None, ""
    if config.bases == "fold":
        return trained.folding(certified=False), ""
    try:
        if not apart:
            raise ConfigurationError(NOT_SHARED)
        local = int_of("LOCAL_WORLD_SIZE", ranks.world_size, runtime.environment)
        if not has_agent and (lacking := no_processor_to_fold(runtime.processors, local)):
            raise ConfigurationError(lacking)
        return trained.folding(certified=True), ""
    except ConfigurationError as error:
        if ranks.rank == 0:
            log.info("bases are captured, and not folded: %s", error)
        return None, str(error)


def foldable(trained: TrainingState) -> bool:
    """Whether ``bases="fold"`` would not be refused."""
    try:
        trained.folding(certified=False)
    except ConfigurationError:
        return False
    return True
