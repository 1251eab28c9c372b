"""Who but the optimizer's step has written to what the optimizer holds: moments, counts, whatever it keeps."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch

from tiercheck.format import host_state
from tiercheck.streams.tensors.as_bytes import wrappers_of, writes_to
from tiercheck.streams.tensors.provider import StateProvider

__all__ = ["OptimizerWatch"]


class _Seen(NamedTuple):
    held: Sequence[Any]
    """The objects themselves, so that none is taken for another one that came into its memory."""
    contents: Sequence[Any]
    """Of tensors, how often torch has counted a write."""

    def is_same(self, other: _Seen) -> bool:
        same = len(self.held) == len(other.held) and all(map(is_, self.held, other.held))
        return same and self.contents == other.contents


class OptimizerWatch:
    """Remembers which objects the optimizer holds, and how often torch has counted a write to each tensor. A write
    through ``.data`` is not seen: the audit of folded bases finds it (:mod:`tiercheck.streams.records.audit`). Nothing
    of a tensor is read, so that nothing waits for a device. Errors of each look:
    :class:`tiercheck.format.host_state.Unstorable`.
    """

    def __init__(self, provider: StateProvider) -> None:
        self._provider = provider
        self.mark()

    def mark(self) -> None:
        """From here on, what is written counts."""
        self._marked = self._seen = self._look()

    def mark_seen(self) -> None:
        """The same from the last look on, :meth:`mark` or :meth:`written`. It looks no more."""
        self._marked = self._seen

    def written(self) -> bool:
        """Whether anything was written to, replaced, added or taken away since the last mark."""
        self._seen = self._look()
        return not self._seen.is_same(self._marked)

    def _look(self) -> _Seen:
        if (held := self._provider.held_by_optimizer()) is not None:
            return _Seen(held, [getattr(each, "_version", each) for each in held])
        state = self._provider.optimizer_state()
        tensors = [each for held in state.values() for each in held.values() if isinstance(each, torch.Tensor)]
        values = [
            (name, key, content_of(each, f"the optimizer's state of {name}.{key}"))
            for name, held in state.items()
            for key, each in held.items()
            if not isinstance(each, torch.Tensor)
        ]
        places = [each.data_ptr() for each in tensors]
        return _Seen((), [*state, *values, *places, *writes_to(tensors, wrappers_of(tensors))])


def content_of(held: Any, what: str) -> Any:
    """Errors: :class:`tiercheck.format.host_state.Unstorable` naming ``what``, which no base could hold."""
    return held if isinstance(held, numbers.Number | str | bytes | None) else host_state.pack(held, name=what)
