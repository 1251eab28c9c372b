"""The modes of a recorder, as tables: what may follow what. An event that a mode does not allow raises, and changes
nothing.

Each is a small machine, because each has its own reason to change: the record of the coming version, the chain of
versions behind it, the next base, the way bases are copied, the room that the durable tier has for them, the room that
the first tier has for records, and how far the other tiers may lag.
"""

from __future__ import annotations

from enum import StrEnum

from tiercheck.runtime.machine import Machine

__all__ = [
    "BASE",
    "CHAIN",
    "COPYING",
    "DUE",
    "IN_FLIGHT",
    "RECORD",
    "ROOM",
    "Base",
    "BaseEvent",
    "Chain",
    "ChainEvent",
    "Copying",
    "CopyingEvent",
    "Modes",
    "Record",
    "RecordEvent",
    "Room",
    "RoomEvent",
]


class Record(StrEnum):
    """The record of the coming version."""

    NONE = "no record is open"
    OPEN = "a record is open"
    LEFT_OUT = "the version is left out"
    """The other parts of the version are not recorded either."""


class RecordEvent(StrEnum):
    BEGUN = "a record is begun"
    GIVEN_UP = "the version is given up"
    ENDED = "the iteration ends"


RECORD = {
    (Record.NONE, RecordEvent.BEGUN): Record.OPEN,
    (Record.NONE, RecordEvent.GIVEN_UP): Record.LEFT_OUT,
    (Record.OPEN, RecordEvent.GIVEN_UP): Record.LEFT_OUT,
    (Record.OPEN, RecordEvent.ENDED): Record.NONE,
    (Record.LEFT_OUT, RecordEvent.GIVEN_UP): Record.LEFT_OUT,
    (Record.LEFT_OUT, RecordEvent.ENDED): Record.NONE,
}


class Chain(StrEnum):
    """Whether the newest version can be recovered from the first tier."""

    BARE = "no base is in the first tier"
    WHOLE = "the newest version can be reached from a base"
    BROKEN = "a version is missing, and no base after it is in the first tier"


class ChainEvent(StrEnum):
    BASE = "a base leads on"
    """It is in the first tier, and no version after it is missing."""
    GAP = "a version is missing"


CHAIN = {
    (Chain.BARE, ChainEvent.BASE): Chain.WHOLE,
    (Chain.BARE, ChainEvent.GAP): Chain.BROKEN,
    (Chain.WHOLE, ChainEvent.BASE): Chain.WHOLE,
    (Chain.WHOLE, ChainEvent.GAP): Chain.BROKEN,
    (Chain.BROKEN, ChainEvent.BASE): Chain.WHOLE,
    (Chain.BROKEN, ChainEvent.GAP): Chain.BROKEN,
}


class Base(StrEnum):
    """The next base."""

    NOT_DUE = "no base is due"
    """But at the versions at which all ranks make one."""
    DUE = "a base is due"
    IN_FLIGHT = "a base is on its way"
    IN_FLIGHT_AND_DUE = "a base is on its way, and another one is due"


DUE = frozenset((Base.DUE, Base.IN_FLIGHT_AND_DUE))
IN_FLIGHT = frozenset((Base.IN_FLIGHT, Base.IN_FLIGHT_AND_DUE))


class BaseEvent(StrEnum):
    NEEDED = "a base is needed"
    BEGUN = "a base is begun"
    ARRIVED = "the base is in the first tier"
    FAILED = "the base has failed"


BASE = {
    (Base.NOT_DUE, BaseEvent.NEEDED): Base.DUE,
    (Base.NOT_DUE, BaseEvent.BEGUN): Base.IN_FLIGHT,
    (Base.DUE, BaseEvent.NEEDED): Base.DUE,
    (Base.DUE, BaseEvent.BEGUN): Base.IN_FLIGHT,
    (Base.IN_FLIGHT, BaseEvent.NEEDED): Base.IN_FLIGHT_AND_DUE,
    (Base.IN_FLIGHT, BaseEvent.ARRIVED): Base.NOT_DUE,
    (Base.IN_FLIGHT, BaseEvent.FAILED): Base.DUE,
    (Base.IN_FLIGHT_AND_DUE, BaseEvent.NEEDED): Base.IN_FLIGHT_AND_DUE,
    (Base.IN_FLIGHT_AND_DUE, BaseEvent.ARRIVED): Base.DUE,
    (Base.IN_FLIGHT_AND_DUE, BaseEvent.FAILED): Base.DUE,
}


class Copying(StrEnum):
    """The way bases are copied."""

    LAZY = "during the next forward and backward pass"
    AT_ONCE = "before the step returns"
    """Something other than the optimizer writes to what it trains."""


class CopyingEvent(StrEnum):
    WRITTEN = "something other than the optimizer has written to the state"


COPYING = {
    (Copying.LAZY, CopyingEvent.WRITTEN): Copying.AT_ONCE,
    (Copying.AT_ONCE, CopyingEvent.WRITTEN): Copying.AT_ONCE,
}


class Room(StrEnum):
    """The durable tier's room for bases, the first tier's for records, or what other tiers may lack."""

    EXPECTED = "the tier keeps up"
    IN_DOUBT = "a base or a record waits for room, or has waited in vain"
    """Until there is room, nothing else waits for it again."""


class RoomEvent(StrEnum):
    ASKED = "room is asked for"
    FOUND = "there is room"


ROOM = {
    (Room.EXPECTED, RoomEvent.ASKED): Room.IN_DOUBT,
    (Room.IN_DOUBT, RoomEvent.ASKED): Room.IN_DOUBT,
    (Room.IN_DOUBT, RoomEvent.FOUND): Room.EXPECTED,
}


class Modes:
    """Where a recorder stands, when its generation begins."""

    def __init__(self) -> None:
        self.record = Machine(RECORD, Record.NONE)
        self.chain = Machine(CHAIN, Chain.BARE)
        self.base = Machine(BASE, Base.NOT_DUE)
        self.copying = Machine(COPYING, Copying.LAZY)
        self.room = Machine(ROOM, Room.EXPECTED)
        self.record_room = Machine(ROOM, Room.EXPECTED)
        self.lag_room = Machine(ROOM, Room.EXPECTED)
