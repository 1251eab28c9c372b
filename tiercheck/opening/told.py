"""What the ranks of a job tell one another before any tier is opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tiercheck.recovery.stages.places import StageTold

__all__ = ["Told"]


class Told(NamedTuple):
    """It travels as a plain tuple."""

    layout: str
    """What the rank holds."""
    asked: str
    """Which version it asks for, and what is to become of a lost stage."""
    settings: Mapping[str, str]
    """Those that all ranks must have."""
    sizes: Sequence[Any]
    """The fields of :class:`~tiercheck.policy.first_tier.Sizes`."""
    processors: list[int]
    """Those that it is bound to."""
    start: str
    """A name for its start."""
    stage: StageTold | None
    """Which one it is, if a lost one is to be made anew."""
