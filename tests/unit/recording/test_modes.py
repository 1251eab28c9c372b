"""A recorder's modes: every row of its tables is taken, and whatever is in none of them raises and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from itertools import product

import pytest

from tests.training import Training, memory
from tiercheck.errors import SaveError
from tiercheck.hierarchy import Hierarchy
from tiercheck.recording.modes import (
    BASE,
    CHAIN,
    COPYING,
    RECORD,
    ROOM,
    Base,
    BaseEvent,
    Chain,
    ChainEvent,
    Copying,
    CopyingEvent,
    Modes,
    Record,
    RecordEvent,
    Room,
    RoomEvent,
)
from tiercheck.recording.waits import asking
from tiercheck.runtime.machine import IllegalTransition, Machine

Table = Mapping[tuple[StrEnum, StrEnum], StrEnum]

TABLES: list[tuple[Table, StrEnum, type[StrEnum], type[StrEnum]]] = [
    (RECORD, Modes().record.state, Record, RecordEvent),
    (CHAIN, Modes().chain.state, Chain, ChainEvent),
    (BASE, Modes().base.state, Base, BaseEvent),
    (COPYING, Modes().copying.state, Copying, CopyingEvent),
    (ROOM, Modes().room.state, Room, RoomEvent),
]


def named(value: object) -> str:
    return value.name if isinstance(value, StrEnum) else getattr(value, "__name__", "")


@pytest.mark.parametrize(("table", "start", "states", "events"), TABLES, ids=named)
def test_a_legal_event_leads_where_the_table_says_and_an_illegal_one_raises_and_changes_nothing(
    table: Table, start: StrEnum, states: type[StrEnum], events: type[StrEnum]
) -> None:
    for state, event in product(states, events):
        machine = Machine(table, state)
        if (state, event) in table:
            assert machine.on(event) is machine.state is table[state, event], (state, event)
        else:
            with pytest.raises(IllegalTransition, match=f"{event}: impossible while {state}"):
                machine.on(event)
            assert machine.state is state, event


@pytest.mark.parametrize(("table", "start", "states", "events"), TABLES, ids=named)
def test_every_state_is_reached_and_none_is_a_dead_end(
    table: Table, start: StrEnum, states: type[StrEnum], events: type[StrEnum]
) -> None:
    reached = {start}
    while more := {to for (state, _), to in table.items() if state in reached} - reached:
        reached |= more
    assert reached == set(states)
    assert {state for state, _ in table} == set(states)
    assert {event for _, event in table} == set(events)


def test_an_iteration_that_nothing_was_captured_of_cannot_be_completed() -> None:
    """It would leave a gap that nothing tells of."""
    training = Training()
    with training.attach(Hierarchy.of(memory())) as checkpointer:
        training.step(1)
        with pytest.raises(ValueError, match=r"version 2 cannot be completed: capture\(\) takes its gradients"):
            checkpointer.complete(2)
        training.step(2)
        assert checkpointer.version == 2


@pytest.mark.parametrize(
    ("error", "next_s"), [(None, 60.0), (SaveError("no room"), 0.0), (KeyboardInterrupt(), 60.0), (ValueError(), 60.0)]
)
def test_who_has_waited_for_room_in_vain_does_not_wait_again_and_an_interrupt_is_no_answer(
    error: BaseException | None, next_s: float
) -> None:
    room = Modes().room
    with suppress(SaveError, KeyboardInterrupt, ValueError), asking(room, 60.0) as waits_s:
        assert waits_s == 60.0
        if error is not None:
            raise error
    with suppress(KeyboardInterrupt), asking(room, 60.0) as waits_s:
        assert waits_s == next_s
        raise KeyboardInterrupt
    with asking(room, 60.0) as waits_s:
        assert waits_s == next_s, "nor does one take a doubt away"
    with asking(room, 60.0) as waits_s:
        assert waits_s == 60.0, "there was room"
