"""What a loop changes behind the engine's step, when the version is published already.

Writes to parameters and to what the optimizer holds are seen by whoever watches those. Here is the rest of a version:
the optimizer's options, the engine's scheduler and loss scale, buffers, and what modules keep beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tiercheck.format import host_state
from tiercheck.integrations.deepspeed.loss_scale import LossScale
from tiercheck.streams.tensors.as_bytes import wrappers_of, writes_to
from tiercheck.streams.tensors.extra_state import ExtraState
from tiercheck.streams.tensors.group_options import plain_options
from tiercheck.streams.tensors.storable import to_plain

__all__ = ["BehindStep"]


class BehindStep:
    """Remembers it as of the return of ``engine.step()``: within it the engine steps its scheduler. ``groups``: the
    optimizer's parameter groups, ``buffers``: the persistent ones, both live."""

    def __init__(
        self,
        engine: Any,
        groups: Callable[[], list[dict[str, Any]]],
        buffers: Callable[[], Mapping[str, torch.Tensor]],
        loss_scale: LossScale,
        extra_state: ExtraState,
    ) -> None:
        self._engine = engine
        self._groups = groups
        self._buffers = buffers
        self._loss_scale = loss_scale
        self._extra_state = extra_state
        self._marked: bytes | None = None
        self._is_to_mark = False

    def published(self) -> None:
        """A version is, in the step that goes on."""
        self._marked, self._is_to_mark = None, True

    def mark(self) -> None:
        """The engine's step returns. It did something if a version was published in it."""
        if self._is_to_mark:
            self._marked, self._is_to_mark = self._look(), False

    def moved(self) -> bool:
        """Whether any of it is another one since the step returned. A write to a buffer through ``.data`` is not
        seen."""
        return self._marked is not None and self._look() != self._marked

    def _look(self) -> bytes:
        scheduler, held = self._engine.lr_scheduler, self._buffers()
        buffers = [*held.values()]
        return host_state.pack(
            {
                "options": [plain_options(group) for group in self._groups()],
                "scheduler": None if scheduler is None else to_plain(scheduler.state_dict(), "lr_scheduler"),
                "loss_scale": self._loss_scale.state(),
                "buffers": [[*held], [each.data_ptr() for each in buffers], writes_to(buffers, wrappers_of(buffers))],
                **self._extra_state.host_state(),
            }
        )
