"""The states of a replicator: whatever the table does not name is illegal, and changes nothing."""

from __future__ import annotations

import itertools

import pytest

from tiercheck.agent.jobs.states import FINAL, TRANSITIONS, Event, State, life
from tiercheck.runtime.machine import IllegalTransition, Machine


def test_every_event_in_every_state() -> None:
    for state, event in itertools.product(State, Event):
        replicator = Machine(TRANSITIONS, state)
        if (state, event) in TRANSITIONS:
            assert replicator.on(event) is replicator.state is TRANSITIONS[state, event] is not state, (state, event)
        else:
            with pytest.raises(IllegalTransition, match=f"{event}: impossible while {state}"):
                replicator.on(event)
            assert replicator.state is state, event


def test_nothing_leaves_the_end_and_all_states_are_reached() -> None:
    assert not any(state in FINAL for state, _ in TRANSITIONS)
    reached = {life().state}
    while more := {to for (state, _), to in TRANSITIONS.items() if state in reached} - reached:
        reached |= more
    assert reached == set(State)


def test_a_life() -> None:
    replicator = life()
    story = [
        (Event.OPENED, State.MOVING),
        (Event.RECOVERING, State.PAUSED),
        (Event.RECOVERED, State.OPENING),
        (Event.OPENED, State.MOVING),
        (Event.LEFT, State.RESTING),
        (Event.HEARD, State.OPENING),
        (Event.OPENED, State.MOVING),
        (Event.CLOSED, State.OPENING),
        (Event.CONFLICT, State.SUPERSEDED),
    ]
    for event, state in story:
        assert replicator.on(event) is state
