"""What changes between steps and was not passed to ``attach``: it would begin anew after a failure."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from tiercheck.errors import UnsupportedSetup
from tiercheck.integrations.wrapped import WRAPPERS_MAX
from tiercheck.streams.tensors.beside import Beside

__all__ = ["refuse_forgotten_scaler", "refuse_forgotten_scheduler", "scheduled_wrappers"]


def refuse_forgotten_scheduler(optimizers: Iterable[Any], scheduler: Any, beside: Beside) -> None:
    """Torch's learning-rate schedulers wrap the ``step`` of their optimizer. Errors: ``UnsupportedSetup`` if one has
    done so and none was passed: it would begin anew after a failure. ``optimizers``: one, and what it is wrapped in."""
    if scheduler is not None:
        return
    scheduled = [each for each in optimizers if hasattr(each.step, "_wrapped_by_lr_sched")]
    if not scheduled:
        return
    given = [getattr(part, "optimizer", None) for each in beside.given() for part in (each, *_parts(each))]
    if not any(one is each for one in given for each in scheduled):
        raise UnsupportedSetup(
            "a learning-rate scheduler was made for the optimizer and is not attached, so that it would begin anew "
            "after a failure: make it before attach, and pass it as scheduler= (under DeepSpeed, after_step=) or, if "
            "another object saves it, that"
        )


def scheduled_wrappers(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """What wraps the optimizer and has a learning-rate scheduler of its own. The optimizer does not know its wrappers,
    such as Hugging Face Accelerate's, so that all objects there are have to be asked (0.1 s a million)."""
    for each in gc.get_objects():
        if issubclass(type(each), LRScheduler):  # not isinstance: that asks the object, and some answer with code
            wrapper = getattr(each, "optimizer", None)
            if wrapper is not optimizer and _is_behind(optimizer, wrapper):
                yield wrapper


def refuse_forgotten_scaler(beside: Beside) -> None:
    """Called in the optimizer's step. Nothing but the call itself tells that a ``GradScaler`` makes it. Errors:
    ``UnsupportedSetup`` if one does and was not passed: its scale would begin anew after a failure."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not torch.amp.GradScaler.step.__code__:
        frame = frame.f_back
    scaler = None if frame is None else frame.f_locals["self"]
    if scaler is None or not scaler.is_enabled():
        return
    for each in beside.given():
        if each is scaler or any(part is scaler for part in _parts(each)):
            return
    raise UnsupportedSetup(
        "a GradScaler makes the optimizer's step and is not attached, so that its scale would begin anew after a "
        "failure: pass it as scaler= (or, if another object saves it, that)"
    )


def _is_behind(optimizer: torch.optim.Optimizer, wrapper: Any) -> bool:
    for _ in range(WRAPPERS_MAX):
        if wrapper is optimizer or wrapper is None:
            break
        wrapper = getattr(wrapper, "optimizer", None)
    return wrapper is optimizer


def _parts(holder: Any) -> Iterable[Any]:
    return getattr(holder, "__dict__", {}).values()
