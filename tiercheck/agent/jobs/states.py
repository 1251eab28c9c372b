"""The life of a rank's replicator: its states, what may happen in each, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from tiercheck.runtime.machine import Machine

__all__ = ["FINAL", "TRANSITIONS", "Event", "State", "life"]


class State(StrEnum):
    OPENING = "opening"
    """Its tiers are being opened, or are tried again."""
    MOVING = "moving"
    PAUSED = "paused"
    """Its trainer recovers: nothing moves."""
    RESTING = "resting"
    """Its trainer is gone and nothing is left to move, or not within any reasonable time: the tiers are closed until
    somebody asks for it."""
    SUPERSEDED = "superseded"
    GONE = "gone"
    """The memory that it was to move from was removed: nothing is left to do."""


class Event(StrEnum):
    OPENED = "its tiers are open"
    CLOSED = "its tiers are closed"
    RECOVERING = "its trainer recovers"
    RECOVERED = "its trainer has recovered, or is gone"
    LEFT = "its trainer is gone, and nothing is left to wait for"
    HEARD = "somebody asks for it"
    CONFLICT = "a newer generation has opened"
    REMOVED = "its memory was removed"


FINAL = frozenset({State.SUPERSEDED, State.GONE})

TRANSITIONS: Mapping[tuple[State, Event], State] = MappingProxyType(
    {
        (State.OPENING, Event.OPENED): State.MOVING,
        (State.OPENING, Event.RECOVERING): State.PAUSED,
        (State.OPENING, Event.LEFT): State.RESTING,
        (State.MOVING, Event.CLOSED): State.OPENING,
        (State.MOVING, Event.RECOVERING): State.PAUSED,
        (State.MOVING, Event.LEFT): State.RESTING,
        (State.PAUSED, Event.RECOVERED): State.OPENING,
        (State.RESTING, Event.HEARD): State.OPENING,
        (State.RESTING, Event.RECOVERING): State.PAUSED,
        **{
            (state, event): final
            for state in State
            if state not in FINAL
            for event, final in ((Event.CONFLICT, State.SUPERSEDED), (Event.REMOVED, State.GONE))
        },
    }
)
"""Whatever is not here is illegal. The tiers of a paused replicator may be open: then it opens at once."""


def life() -> Machine[State, Event]:
    """Of a replicator that begins."""
    return Machine(TRANSITIONS, State.OPENING)
