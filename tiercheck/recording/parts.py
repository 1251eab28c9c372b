"""A version's step that several optimizers take, one after the other."""

from __future__ import annotations

from tiercheck.streams.state import StateStream

__all__ = ["StepParts"]


class StepParts:
    """Whether something else wrote to the parameters between two of them: no replay of the gradients has that write."""

    def __init__(self, stream: StateStream) -> None:
        self._stream = stream
        self._begun = False
        """One of them has stepped, and the step is not done."""
        self._written = False
        self.told = False
        """Who has seen that a step cannot be replayed has said why."""

    def stepped(self) -> None:
        """One of them has: what is written from here to :meth:`look` is no part of the step."""
        self._stream.mark_stepped()
        self._begun = True

    def cannot_be_replayed(self) -> None:
        """One of them has done what no replay of the gradients does."""
        self._written = self.told = True

    def look(self) -> None:
        """The next one is about to step, or all have."""
        if self._begun and self._stream.trained_written():
            self._written = True

    def end(self) -> bool:
        """The version is complete. Returns whether there was such a write."""
        written, self._begun, self._written = self._written, False, False
        return written
