"""From the name of an optimizer's class to what replays it, through the entry-point group ``tiercheck.optimizers``."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from tiercheck.errors import ConfigurationError
from tiercheck.named import NamedGroup
from tiercheck.streams.optimizers.optimizer import ReplayableOptimizer

__all__ = ["GROUP", "find_optimizer", "optimizer_of"]

GROUP = NamedGroup("tiercheck.optimizers", "replayable optimizer")

logger = logging.getLogger(__name__)


@lru_cache(maxsize=64)
def optimizer_of(kind: str) -> ReplayableOptimizer[Any]:
    """What replays the optimizer of this qualified name. Errors: ``ConfigurationError``."""
    made = GROUP.make(kind)
    if not isinstance(made, ReplayableOptimizer) or made.kind != kind:
        raise ConfigurationError(f"the entry point {kind!r} in the group {GROUP.group!r} does not replay {kind}")
    return made


@lru_cache(maxsize=64)
def find_optimizer(kind: str) -> ReplayableOptimizer[Any] | None:
    """The same, or ``None``: call the optimizer. One that is broken is passed over, and a warning says why."""
    if kind not in GROUP.names():
        return None
    try:
        return optimizer_of(kind)
    except ConfigurationError as error:
        logger.warning("the steps of %s are replayed by calling it: %s", kind, error)
        return None
