"""The loss scale of fp16, which DeepSpeed updates before the inner optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

__all__ = ["LossScale"]

SAVED = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class LossScale:
    """Of an engine that scales no loss there is nothing to save."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self._scaler()).items() if name in SAVED}

    def restore(self, saved: Mapping[str, Any]) -> None:
        for name, value in saved.items():
            setattr(self._scaler(), name, value)

    def _scaler(self) -> Any:
        optimizer = self._engine.optimizer
        return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", SimpleNamespace())
