"""Plain PyTorch: any ``torch.optim.Optimizer``, on one process or under DDP, through public step hooks.

::

    checkpointer = attach(model, optimizer, Hierarchy.of("shm://my-run", "nvme:///shared/my-run?survives=rack"))
    for step in range(checkpointer.version, steps):
        ...                      # the loop stays as it is

``attach`` restores the newest version there is, and from then on every ``optimizer.step()`` is a version.

A version is published before ``optimizer.step()`` returns. Where a ``scheduler`` or a ``GradScaler`` is passed, which
the loop steps after that, it is published at the next forward pass instead, with both as of then: a failure in
between costs that one iteration, and the resumed run is exact all the same. Random generators and ``stateful``
are saved as of the end of ``optimizer.step()``, before the next batch is drawn from them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import ConfigurationError, UnsupportedSetup
from tiercheck.group import Group, SingleProcess, TorchGroup
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.all_reduce import Compression, compressed_all_reduce
from tiercheck.integrations.bucket_order import BucketOrder
from tiercheck.integrations.hooks import StepHooks, attach_hooks
from tiercheck.integrations.wrapped import bare_optimizer
from tiercheck.streams.providers import ModuleProvider

__all__ = ["Compression", "attach", "compressed_all_reduce"]


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    hierarchy: Hierarchy,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    stateful: Mapping[str, Any] | None = None,
    config: CheckpointConfig | None = None,
    group: Group | None = None,
) -> Checkpointer:
    """Restore the newest version, then save every one that follows. Collective where ``torch.distributed`` runs.

    ``scheduler``, ``scaler`` and each of ``stateful`` have ``state_dict`` and ``load_state_dict``. Batches must be
    a function of the version, or come from one of ``stateful``, for the resumed run to be the same one. (A step that
    a ``GradScaler`` skips is no version: then choose the batch by ``checkpointer.version``, not by a counter.)
    What the loop writes to parameters besides (clamping, averaging) is saved with the next version, as a base.
    Errors: ``UnsupportedSetup`` for a set-up that cannot be saved whole, and those of :class:`Checkpointer`.
    """
    distributed = dist.is_available() and dist.is_initialized()
    if group is None and not distributed and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigurationError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() before attach()"
        )
    ranks = group or (TorchGroup() if distributed else SingleProcess())
    named = {"scheduler": scheduler, "scaler": scaler}
    stepped_after = {name: each for name, each in named.items() if each is not None}

    def hook() -> _Hooks:
        if clash := stepped_after.keys() & (stateful or {}).keys():
            raise ConfigurationError(f"stateful= has the name {clash.pop()!r}, which an argument of its own stands for")
        bare = bare_optimizer(optimizer)
        order = BucketOrder(model)
        provider = ModuleProvider(
            model,
            bare,
            world_size=ranks.world_size,
            stepped_after=stepped_after,
            stateful={**(stateful or {}), **order.stateful},
        )
        return _Hooks(provider, model, bare, order, deferred=bool(stepped_after))

    return attach_hooks(hook, hierarchy, ranks, config)


class _Hooks:
    """From the optimizer's hooks to the checkpointer, once there is one."""

    def __init__(
        self,
        provider: ModuleProvider,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        order: BucketOrder,
        *,
        deferred: bool,
    ) -> None:
        self.provider = provider
        self.caveats = order.caveats
        self._order = order
        self._checkpointer: Checkpointer | None = None
        self._deferred = deferred
        self._pending = False
        """A step is done whose iteration has not ended yet."""
        self._step_hooks = StepHooks(optimizer, self._before_step, self._after_step)
        self._forward_hooks = [
            module.register_forward_pre_hook(self._before_forward) for module in called_modules(model)
        ]

    def serve(self, checkpointer: Checkpointer) -> None:
        self._order.prime()
        checkpointer.on_close(self._end_iteration)
        checkpointer.on_end(self.remove)
        self._checkpointer = checkpointer

    def remove(self) -> None:
        self._order.remove()
        self._step_hooks.remove()
        for hook in self._forward_hooks:
            hook.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._checkpointer is None:
            return  # a step that is replayed
        if any(each is not None for each in (*args[1:], *kwargs.values())):
            raise UnsupportedSetup(
                "optimizer.step(closure) computes gradients inside the step, where they cannot be seen; supported is "
                "loss.backward() followed by optimizer.step()"
            )
        if getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None:
            raise UnsupportedSetup(
                "under a GradScaler a fused optimizer unscales gradients, and skips, inside its step, where neither "
                "can be seen; supported is an optimizer with fused=False"
            )
        self._step_hooks.check()
        self._end_iteration()
        self._checkpointer.capture(self._checkpointer.version + 1, self.provider.gradients())

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._checkpointer is None:
            return
        self._pending = True
        self.provider.end_of_step()
        self._checkpointer.stepped(self._checkpointer.version + 1)
        if not self._deferred:
            self._end_iteration()

    def _before_forward(self, model: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self._step_hooks.stand_next_to_the_step()
        if model.training:
            self._end_iteration()

    def _end_iteration(self) -> None:
        if self._pending and self._checkpointer is not None:
            self._pending = False
            self._checkpointer.complete(self._checkpointer.version + 1)


def called_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules whose call begins a forward pass: the model, or where it is a mere container, those in it."""
    if hasattr(type(model), "forward") and type(model).forward is not torch.nn.Module.forward:
        yield model
    else:
        for child in model.children():
            yield from called_modules(child)
