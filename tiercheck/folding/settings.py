"""What the process that folds may use: how many folds at a time, on which processors, and how far it gives way."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from typing import Any, Self

from msgspec import Struct

from tiercheck.config import THREADS_MAX, int_of
from tiercheck.errors import ConfigurationError
from tiercheck.runtime.priority import NICE, stand_back

__all__ = ["FoldSettings", "given_by"]

log = logging.getLogger(__name__)

CPUS_A_THREAD = 8
CPUS_CHARS_MAX = 4096
NICE_MAX = 19


class FoldSettings(Struct, frozen=True):
    """No more folds than threads run at a time, and the others wait."""

    threads: int
    """Folds at a time."""
    cpus: tuple[int, ...]
    """The processors that the process may use."""
    nice: int = NICE

    @classmethod
    def of(
        cls, threads: int | None, cpus_text: str, nice: int | None = None, *, allowed: Collection[int], ranks: int = 0
    ) -> Self:
        """As they are given, on some of the ``allowed`` processors. ``ranks``: how many it folds for; 0: nobody knows.
        Errors: ``ConfigurationError``."""
        cpus = cpus_of(cpus_text) or set(allowed)
        if not cpus <= set(allowed):
            raise ConfigurationError(
                f"fold_cpus names processors that this process may not use ({sorted(cpus.difference(allowed))}): it "
                f"may use {sorted(allowed)}"
            )
        count = max(1, len(cpus) // CPUS_A_THREAD) if threads is None else threads
        count = min(count, ranks or count)
        if not 1 <= count <= THREADS_MAX:
            raise ConfigurationError(f"fold_threads must be at least 1 and at most {THREADS_MAX}, not {count}")
        nice = NICE if nice is None else nice
        if not 0 <= nice <= NICE_MAX:
            raise ConfigurationError(f"fold_nice must be at least 0 and at most {NICE_MAX}, not {nice}")
        return cls(count, tuple(sorted(cpus)), nice)

    def bind(self) -> None:
        """This process to its processors, before it starts a thread. What the system refuses does no harm."""
        try:
            os.sched_setaffinity(0, self.cpus)
        except OSError as error:
            log.warning(
                "folds are not bound to the processors %s, and may use %s: %s; name processors that this process may "
                "use (--fold-cpus, TIERCHECK_FOLD_CPUS)",
                list(self.cpus),
                sorted(os.sched_getaffinity(0)),
                error,
            )

    def stand_back(self) -> None:
        """This process, before it starts a thread that folds. What the system refuses does no harm."""
        log.info("the process that folds stands back: %s", stand_back(self.nice))


def given_by(environment: Mapping[str, str]) -> dict[str, Any]:
    """What the environment says of it, as :class:`~tiercheck.agent.protocol.settings.AgentSettings` takes it. Errors:
    ``ConfigurationError``."""

    def number(variable: str) -> int | None:
        return int_of(variable, 0, environment) if environment.get(variable) else None

    return {
        "fold_threads": number("TIERCHECK_FOLD_THREADS"),
        "fold_cpus": environment.get("TIERCHECK_FOLD_CPUS", ""),
        "fold_nice": number("TIERCHECK_FOLD_NICE"),
    }


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
