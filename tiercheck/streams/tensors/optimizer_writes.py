"""Who but the optimizer's step has written to what the optimizer holds: moments, counts, whatever it keeps."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from tiercheck.format import host_state
from tiercheck.streams.tensors.as_bytes import wrappers_of, writes_to
from tiercheck.streams.tensors.provider import StateProvider

__all__ = ["OptimizerWatch"]


class OptimizerWatch:
    """Remembers which objects the optimizer holds of each master, and how often torch has counted a write to each
    tensor. A write through ``.data`` is not seen: the audit of folded bases finds it
    (:mod:`tiercheck.streams.records.audit`). Nothing of a tensor is read, so that nothing waits for a device. Errors of
    each look: :class:`tiercheck.format.host_state.Unstorable`.
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

    def written(self) -> tuple[str, ...]:
        """Of which masters anything was written to, replaced, added or taken away since the last mark."""
        self._seen = self._look()
        if self._seen == self._marked:
            return ()
        names = dict.fromkeys([*self._marked, *self._seen])
        return tuple(
            f"the optimizer's state of {name}" for name in names if self._marked.get(name) != self._seen.get(name)
        )

    def _look(self) -> dict[str, list[Any]]:
        state = self._provider.optimizer_state()
        tensors = [each for held in state.values() for each in held.values() if isinstance(each, torch.Tensor)]
        counted = iter(writes_to(tensors, wrappers_of(tensors)))
        return {
            name: [
                (key, each.data_ptr(), next(counted))
                if isinstance(each, torch.Tensor)
                else (key, content_of(each, f"the optimizer's state of {name}.{key}"))
                for key, each in held.items()
            ]
            for name, held in state.items()
        }


def content_of(held: Any, what: str) -> Any:
    """Errors: :class:`tiercheck.format.host_state.Unstorable` naming ``what``, which no base could hold."""
    return held if isinstance(held, numbers.Number | str | bytes | None) else host_state.pack(held, name=what)
