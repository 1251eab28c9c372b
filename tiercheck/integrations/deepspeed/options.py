"""The optimizer's options, which a loop may set behind the engine's step, when the version is published already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiercheck.streams.tensors.provider import plain_options

__all__ = ["OptionsWatch"]

SCHEDULED = ("lr", "betas", "momentum")
"""What schedulers set. The engine steps its own one behind the optimizer's step, and a recovery does so, too."""


class OptionsWatch:
    """Remembers the options as the last version holds them. ``groups``: the optimizer's parameter groups, live."""

    def __init__(self, engine: Any, groups: Callable[[], list[dict[str, Any]]]) -> None:
        self._engine = engine
        self._groups = groups
        self._marked: list[dict[str, Any]] | None = None

    def mark(self) -> None:
        """A version was published."""
        self._marked = self._options()

    def moved(self) -> bool:
        """Whether anybody but the engine's scheduler has set one since. A rate is also compared with what the scheduler
        says that it set."""
        if self._marked is None:
            return False
        set_last = getattr(self._engine.lr_scheduler, "_last_lr", None)
        if set_last is not None and [group["lr"] for group in self._groups()] != list(set_last):
            return True
        return self._options() != self._marked

    def _options(self) -> list[dict[str, Any]]:
        options = [plain_options(group) for group in self._groups()]
        if self._engine.lr_scheduler is None:
            return options
        return [{name: value for name, value in each.items() if name not in SCHEDULED} for each in options]
