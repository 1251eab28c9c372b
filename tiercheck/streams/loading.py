"""What a start does with a checkpoint of another model, or of another number of ranks: a value that a user composes.

It counts if what was saved does not fit as it is. Then it is converted, once: from there on the job saves what it has
itself, under its own names and ranks. So a restart with the same value loads what was saved as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from tiercheck.config import refuse_unknown
from tiercheck.errors import ConfigurationError
from tiercheck.types import shown

__all__ = ["CarryOver", "Loading"]

REFUSE = "refuse"

CarryOver = Callable[[Sequence[Mapping[str, Any] | None], int, int], Mapping[str, Any]]
"""Asked on each rank of a job that goes on with another number of ranks. Arguments: by rank of those that saved, what
``state_dict`` returned of each of ``stateful=`` by name, or ``None`` for a rank of which that is lost; this rank's
number; and how many ranks there are now. Returns, by name, what ``load_state_dict`` gets here."""


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a checkpoint of another model or number of ranks is loaded. The same on every rank. By default another model
    is refused, by the names of what differs. Errors: ``ConfigurationError``."""

    rename: Callable[[str], str] | None = None
    """By the name of a parameter or buffer that was saved, its name in this model. It is asked only if the checkpoint
    does not fit as it is."""
    missing: str = REFUSE
    """``keep``: what this model has and was not saved keeps what the script made. So does the optimizer's state of a
    parameter that was frozen and is trained."""
    unexpected: str = REFUSE
    """``drop``: what was saved and this model does not have is left out. So is the optimizer's state of a parameter
    that was trained and is frozen."""
    carry_over: CarryOver | None = None
    """What batches are drawn from, if the number of ranks is another one. By default each rank gets what the rank of
    its number had, and ranks beyond those that saved begin as the script makes them."""

    def __post_init__(self) -> None:
        if self.rename is not None and not callable(self.rename):
            raise ConfigurationError(f"rename must be a function of a tensor's name, not {shown(self.rename)}")
        if self.carry_over is not None and not callable(self.carry_over):
            raise ConfigurationError(
                "carry_over must be a function of the saved states, a rank and the number of ranks, not "
                f"{shown(self.carry_over)}"
            )
        for name, allowed in (("missing", "keep"), ("unexpected", "drop")):
            if getattr(self, name) not in (REFUSE, allowed):
                raise ConfigurationError(f"{name} must be {REFUSE!r} or {allowed!r}, not {shown(getattr(self, name))}")

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Self:
        """Of plain values. Errors: ``ConfigurationError``, also for an unknown key."""
        refuse_unknown(options, [each.name for each in fields(cls)])
        return cls(**options)

    @property
    def options(self) -> frozenset[str]:
        """What is allowed, as a user writes it."""
        told = {f'{name}="{value}"' for name, value in (("missing", self.missing), ("unexpected", self.unexpected))}
        return frozenset(told - {f'missing="{REFUSE}"', f'unexpected="{REFUSE}"'})

    def __str__(self) -> str:
        """The same for all ranks that load in the same way, as far as a function can be told."""
        functions = [f"{name}=..." for name in ("rename", "carry_over") if getattr(self, name) is not None]
        return ", ".join([*functions, *sorted(self.options)]) or "nothing"
