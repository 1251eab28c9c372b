"""``optimizer.step(closure)``: gradients that are computed within the step, as by Lightning's automatic optimisation.

What computes them is called by the optimizer. If it is called once, before the optimizer changes anything, the step is
one on the gradients that it leaves, as after ``loss.backward()``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from tiercheck.errors import UnsupportedSetup
from tiercheck.integrations.hooks import Arguments

__all__ = ["Closure"]

SUPPORTED = (
    "supported is loss.backward() followed by optimizer.step(), and a closure that the optimizer calls once, first"
)


class Closure:
    """What the optimizer calls in place of the closure that it was given: ``take`` comes right behind that.

    An optimizer that has written to the parameters by then is found by ``take``, as any write that is no step.
    """

    def __init__(self, compute: Callable[[], Any], take: Callable[[], None]) -> None:
        self._compute = compute
        self._take = take
        self._called = False

    @classmethod
    def of(
        cls, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], take: Callable[[], None]
    ) -> Closure | None:
        """The one of a step with these arguments, the first of which is the optimizer; ``None`` if it has none.
        Errors: ``UnsupportedSetup`` for other arguments, and for an optimizer that cannot step without a closure: a
        replay has none."""
        if not (given := [each for each in (*args[1:], *kwargs.values()) if each is not None]):
            return None
        compute = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(compute) or len(given) > 1:
            raise UnsupportedSetup(f"optimizer.step() was given more than a closure, which a replay lacks; {SUPPORTED}")
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise UnsupportedSetup(
                f"{type(optimizer).__name__} cannot step without a closure, and calls it as often as it likes, so that "
                f"no record leads from one step to the next; {SUPPORTED}"
            )
        return cls(compute, take)

    def instead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments of the step with this closure, in place of the given one."""
        if len(args) > 1:
            return (args[0], self, *args[2:]), kwargs
        return args, {name: each if each is None else self for name, each in kwargs.items()}

    def __call__(self) -> Any:
        """Errors: ``UnsupportedSetup`` for a second call."""
        if self._called:
            raise UnsupportedSetup(f"the optimizer calls its closure twice within one step; {SUPPORTED}")
        self._called = True
        loss = self._compute()
        self._take()
        return loss

    def check_called(self) -> None:
        """The step is done. Errors: ``UnsupportedSetup`` if it was not called, so that nothing was taken."""
        if not self._called:
            raise UnsupportedSetup(f"the optimizer has stepped without calling its closure; {SUPPORTED}")
