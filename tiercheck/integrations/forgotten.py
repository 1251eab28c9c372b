"""What changes between steps and was not passed to ``attach``: it would begin anew after a failure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch.optim.lr_scheduler import LRScheduler

from tiercheck.errors import UnsupportedSetup
from tiercheck.integrations.callers import callers
from tiercheck.integrations.holders import holders
from tiercheck.integrations.wrapped import WRAPPERS_MAX
from tiercheck.streams.tensors.beside import Beside

__all__ = [
    "refuse_forgotten_scaler",
    "refuse_forgotten_scheduler",
    "refuse_schedulers_held_elsewhere",
    "scheduled_wrappers",
]

SCHEDULED = "_wrapped_by_lr_sched"
"""What torch's learning-rate schedulers leave at the ``step`` of their optimizer."""
DEPTH_MAX = 5
"""So deep in what was passed a scheduler may lie, such as one of several that take turns."""
ELEMENTS_MAX = 1000
"""What has more is data, and no schedulers."""
FORGOTTEN = (
    "is not attached, so that it would begin anew after a failure: make it before attach, and pass it as scheduler= "
    "(under DeepSpeed, after_step=) or, if another object saves it, that"
)


def refuse_forgotten_scheduler(optimizers: Iterable[Any], scheduler: Any, beside: Beside) -> None:
    """Torch's learning-rate schedulers wrap the ``step`` of their optimizer. Errors: ``UnsupportedSetup`` if one has
    done so and none was passed: it would begin anew after a failure. ``optimizers``: one, and what it is wrapped in;
    looked at only if no scheduler was passed."""
    if scheduler is not None:
        return
    scheduled = [each for each in optimizers if hasattr(each.step, SCHEDULED)]
    if not scheduled:
        return
    given = [getattr(part, "optimizer", None) for each in beside.given() for part in (each, *_parts(each))]
    if not any(one is each for one in given for each in scheduled):
        raise UnsupportedSetup(f"a learning-rate scheduler was made for the optimizer and {FORGOTTEN}")


def refuse_schedulers_held_elsewhere(optimizers: Sequence[Any], scheduler: Any, beside: Beside) -> None:
    """``ReduceLROnPlateau`` leaves nothing at the optimizer's ``step``, and a second scheduler nothing more than the
    first. So this looks for all there are, by who holds the optimizer: called in a job's first step, since that looks
    through all objects. Errors: ``UnsupportedSetup`` for one that was not passed."""
    found = [
        each
        for each in holders(optimizers)
        if issubclass(type(each), LRScheduler) and any(vars(each).get("optimizer") is one for one in optimizers)
    ]
    if not found:
        return
    known = _reached_from([scheduler, *beside.given()])
    for each in found:
        if id(each) not in known:
            raise UnsupportedSetup(f"a {type(each).__name__} was made for the optimizer and {FORGOTTEN}")


def _reached_from(given: Iterable[Any]) -> frozenset[int]:
    """The ids of these, of their attributes and elements, and of theirs."""
    reached: dict[int, Any] = {}
    level = list(given)
    for _ in range(DEPTH_MAX):
        level = [each for each in level if id(each) not in reached]
        reached |= {id(each): each for each in level}
        level = [part for each in level for part in (*_parts(each), *_elements(each))]
    return frozenset(reached)


def _elements(holder: Any) -> Iterable[Any]:
    if type(holder) not in (dict, list, tuple, set, frozenset) or len(holder) > ELEMENTS_MAX:
        return ()
    return holder.values() if type(holder) is dict else holder


def scheduled_wrappers(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """What wraps the optimizer and has a learning-rate scheduler of its own. The optimizer does not know its wrappers,
    such as Hugging Face Accelerate's. Torch's own classes wrap none: if the process has no others, nothing is looked
    for."""
    if not _beyond_torch(torch.optim.Optimizer):
        return
    held: list[torch.optim.Optimizer] = [optimizer]
    for _ in range(WRAPPERS_MAX):
        found = [each for each in holders(held) if _is_optimizer(each)]
        held = [each for each in found if any(getattr(each, "optimizer", None) is one for one in held)]
        if not held:
            break
        yield from (each for each in held if hasattr(each.step, SCHEDULED))


def _beyond_torch(kind: type) -> bool:
    """Whether a class of somebody else's is derived from one of torch's."""
    derived: list[type] = type.__subclasses__(kind)
    return any(each.__module__.partition(".")[0] != "torch" or _beyond_torch(each) for each in derived)


def _is_optimizer(each: object) -> TypeGuard[torch.optim.Optimizer]:
    """By its type, and not by ``isinstance``: that asks the object, and some answer with code."""
    return issubclass(type(each), torch.optim.Optimizer)


def refuse_forgotten_scaler(beside: Beside) -> None:
    """Called in the optimizer's step. Nothing but the call itself tells that a ``GradScaler`` makes it. Errors:
    ``UnsupportedSetup`` if one does and was not passed: its scale would begin anew after a failure."""
    steps = (frame for frame in callers() if frame.f_code is torch.amp.GradScaler.step.__code__)
    scaler = next((frame.f_locals["self"] for frame in steps), None)
    if scaler is None or not scaler.is_enabled():
        return
    for each in beside.given():
        if each is scaler or any(part is scaler for part in _parts(each)):
            return
    raise UnsupportedSetup(
        "a GradScaler makes the optimizer's step and is not attached, so that its scale would begin anew after a "
        "failure: pass it as scaler= (or, if another object saves it, that)"
    )


def _parts(holder: Any) -> Iterable[Any]:
    return getattr(holder, "__dict__", {}).values()
