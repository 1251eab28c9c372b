"""A state that changes by a table, and in no other way."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

__all__ = ["IllegalTransition", "Machine"]

State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)


class IllegalTransition(AssertionError):
    """An event in a state that does not allow it: that is an error of the program."""


class Machine(Generic[State, Event]):
    """``table``: which state follows an event in a state. What is not there is illegal."""

    def __init__(self, table: Mapping[tuple[State, Event], State], state: State) -> None:
        self.state = state
        self._table = table

    def on(self, event: Event) -> State:
        """Go on to the state after the event. Errors: :class:`IllegalTransition`, and nothing is changed."""
        following = self._table.get((self.state, event))
        if following is None:
            raise IllegalTransition(f"{event}: impossible while {self.state}")
        self.state = following
        return following
