"""The learning-rate scheduler of a DeepSpeed engine, which the engine steps behind each update."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from tiercheck.errors import Mismatch, SaveError
from tiercheck.streams.tensors.storable import to_plain

__all__ = ["EngineScheduler"]


class EngineScheduler:
    """Saved together with whether the engine has still to step it for the version at hand."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._after: tuple[int, float] | None = None
        """At the last version: the updates so far, and the scheduler's position."""

    def state(self, *, inside: bool, counters: Mapping[str, int]) -> dict[str, Any] | None:
        """``inside``: the engine's step goes on, and the scheduler has not moved yet for this update.

        Errors: ``SaveError`` if the scheduler was not stepped exactly once an iteration, by the engine.
        """
        scheduler = self._engine.lr_scheduler
        if scheduler is None:
            return None
        state = to_plain(scheduler.state_dict(), "lr_scheduler")
        position = state.get("last_batch_iteration", state.get("last_epoch"))
        updates = counters["global_steps"] - counters["skipped_steps"]
        if isinstance(position, int | float):
            position = position + 1 if inside else position
            before = self._after
            if before is not None and position - before[1] != updates - before[0]:
                raise SaveError(
                    f"the learning-rate scheduler moved by {position - before[1]} in {updates - before[0]} updates: "
                    "let engine.step() alone step it, without lr_kwargs, or keep it out of deepspeed.initialize"
                )
            self._after = (updates, position)
        return {"kind": _kind(scheduler), "state": state, "steps": inside}

    def of_a_loop(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """As :meth:`state`, of what a loop of its own has saved of such a scheduler."""
        return {"kind": _kind(self._engine.lr_scheduler), "state": state, "steps": False}

    def check(self, saved: Mapping[str, Any] | None) -> None:
        """Errors: ``Mismatch`` if the job has another scheduler than the checkpoint."""
        scheduler = self._engine.lr_scheduler
        before, now = None if saved is None else saved["kind"], None if scheduler is None else _kind(scheduler)
        if before != now:
            raise Mismatch(f"the checkpoint was trained with the scheduler {before}, this job has {now}")

    def restore(self, saved: Mapping[str, Any] | None, groups: list[dict[str, Any]]) -> None:
        """Put back what :meth:`state` returned, and step if the engine had still to do so. ``groups`` are the
        optimizer's, with the options that were saved beside it."""
        scheduler = self._engine.lr_scheduler
        self._after = None
        if saved is None:
            return
        scheduler.load_state_dict(saved["state"])
        if saved["steps"]:
            self._step()
        elif hasattr(scheduler, "_last_lr"):
            scheduler._last_lr = [group["lr"] for group in groups]

    def _step(self) -> None:
        """As ``DeepSpeedEngine`` does after an update, for schedulers that want a count of samples too."""
        step = self._engine.lr_scheduler.step
        try:
            inspect.signature(step).bind()
        except TypeError:
            step(self._engine.train_batch_size())
        else:
            step()


def _kind(scheduler: Any) -> str:
    return f"{type(scheduler).__module__}.{type(scheduler).__qualname__}"
