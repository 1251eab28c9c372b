"""What changes between steps and was not passed to ``attach``: it would begin anew after a failure."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
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
CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, torch.Tensor)
"""What does not hold a scheduler, though names lead on from there to everything."""
CONTAINERS = (dict, list, tuple, set, frozenset)
ELEMENTS_MAX, LOOKED_AT_MAX = 1000, 100_000
"""What has more elements is data; of so many objects a scheduler may be one."""
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
    known = [scheduler, *beside.given()]
    if _forgotten_of(optimizers, known) is None:
        return
    gc.collect()  # one that a script has made and dropped may lie in a cycle
    if (forgotten := _forgotten_of(optimizers, known)) is not None:
        raise UnsupportedSetup(f"a {forgotten} was made for the optimizer and {FORGOTTEN}")


def _forgotten_of(optimizers: Sequence[Any], known: Sequence[Any]) -> str | None:
    """The class of a scheduler that holds one of the optimizers, and that nothing known leads to."""
    schedulers = (each for each in holders(optimizers) if issubclass(type(each), LRScheduler))
    made = (each for each in schedulers if any(vars(each).get("optimizer") is one for one in optimizers))
    return next((type(each).__name__ for each in made if not _leads_to(each, known)), None)


def _leads_to(wanted: object, known: Sequence[Any]) -> bool:
    """Whether it is one of these, or of what they refer to: attributes and elements. If that is too much to be looked
    through, it may be."""
    seen: dict[int, Any] = {}
    left = deque(known)
    while left:
        each = left.popleft()
        if each is wanted or len(seen) > LOOKED_AT_MAX:
            return True
        if id(each) in seen or issubclass(type(each), CODE):
            continue
        seen[id(each)] = each
        if not issubclass(type(each), CONTAINERS) or len(each) <= ELEMENTS_MAX:
            left.extend(gc.get_referents(each))
    return False


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
