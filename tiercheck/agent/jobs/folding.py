"""Folding in the agent: how many folds at a time, and on which processors.

All jobs of the agent share its threads for folding. So no more folds than threads take the memory of a base at a time,
and the others wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

from tiercheck.config import THREADS_MAX
from tiercheck.errors import ConfigurationError
from tiercheck.format.container import Shard
from tiercheck.streams.state import FoldShards, NotExact, StateCapture

__all__ = ["AgentFolding", "FoldThreads"]

CPUS_A_THREAD = 8
CPUS_CHARS_MAX = 4096


@dataclass(frozen=True)
class FoldThreads:
    """What folds run on."""

    count: int
    """Folds at a time."""
    cpus: frozenset[int]
    """The processors that they may use."""

    @classmethod
    def of(cls, threads: int | None, cpus_text: str, allowed: set[int]) -> FoldThreads:
        """As the agent's settings say, on some of the ``allowed`` processors. Errors: ``ConfigurationError``."""
        cpus = frozenset(cpus_of(cpus_text) or allowed)
        if not cpus <= allowed:
            raise ConfigurationError(
                f"fold_cpus names processors that the agent may not use ({sorted(cpus - allowed)}): it may use "
                f"{sorted(allowed)}"
            )
        count = max(1, len(cpus) // CPUS_A_THREAD) if threads is None else threads
        if not 1 <= count <= THREADS_MAX:
            raise ConfigurationError(f"fold_threads must be at least 1 and at most {THREADS_MAX}, not {count}")
        return cls(count, cpus)

    def executor(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.count, thread_name_prefix="fold", initializer=self._begin)

    def _begin(self) -> None:
        os.sched_setaffinity(0, self.cpus)  # of the calling thread


def cpus_of(text: str) -> set[int]:
    """``0-3,8`` as numbers. Errors: ``ConfigurationError``."""
    found: set[int] = set()
    try:
        if len(text) > CPUS_CHARS_MAX:
            raise ValueError("too long")
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            low, high = int(first), int(last or first)
            if not 0 <= low <= high <= THREADS_MAX:
                raise ValueError("no range")
            found.update(range(low, high + 1))
    except ValueError:
        raise ConfigurationError(f"fold_cpus must be a list such as 0-3,8, not {text[:80]!r}") from None
    return found


@dataclass(frozen=True)
class AgentFolding:
    """See :class:`~tiercheck.streams.state.FoldShards`. An agent imports no torch before a job registers that folds."""

    certified: bool
    executor: Executor

    def prepare(self, base: Shard) -> None:
        self._folding().prepare(base)

    def __call__(
        self, base: Shard, differentials: Sequence[Shard], *, tier: str, check: Callable[[], None]
    ) -> StateCapture:
        return self._folding()(base, differentials, tier=tier, check=check)

    def _folding(self) -> FoldShards:
        try:
            from tiercheck.streams.tensors.folding import TensorFolding, on_one_thread
        except ImportError as error:
            raise NotExact(f"the agent cannot fold: {error}; install torch in its environment") from error
        on_one_thread()
        return TensorFolding(certified=self.certified)
