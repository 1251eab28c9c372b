"""Which tensors DDP keeps alike on all ranks, and what would make them differ.

DDP gives all ranks rank 0's parameters when it is made, and the same sums of gradients before each step. That holds for
the parameters that it manages, as long as no step is taken on gradients that were not summed: under ``no_sync``, in
``join``, or through a communication hook that keeps a part for the rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tiercheck.errors import UnsupportedSetup
from tiercheck.integrations.replicas import Alike
from tiercheck.integrations.torch.all_reduce import compressed_all_reduce
from tiercheck.integrations.torch.communication_hooks import BY_NUMBER, hook_name, hooks_of

__all__ = ["DataParallel"]

SAME_ON_ALL_RANKS = (*BY_NUMBER, compressed_all_reduce)
"""Communication hooks that leave each rank with the same bits."""


class DataParallel:
    """The ``DistributedDataParallel`` wrappers in a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._wrapped = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
        self._summed = True
        """Whether the last backward pass sums gradients."""

    def alike(self, masters: Mapping[str, torch.Tensor], frozen: Mapping[str, torch.Tensor]) -> Alike:
        """Of these tensors of the model, live, those that DDP keeps alike."""
        if not self._wrapped:
            return Alike()
        everyone = list(range(dist.get_world_size()))
        if any(dist.get_process_group_ranks(each.process_group) != everyone for each in self._wrapped):
            return Alike(obstacle="a DistributedDataParallel has a process group in which not all ranks are")
        if obstacle := self._strange_hook():
            return Alike(obstacle=obstacle)
        managed = {
            parameter.data_ptr()
            for each in self._wrapped
            for name, parameter in each.module.named_parameters()
            if name not in each.parameters_to_ignore and parameter.numel()
        }
        return Alike(
            frozenset(name for name, each in masters.items() if each.data_ptr() in managed),
            frozenset(name for name, each in frozen.items() if each.data_ptr() in managed),
        )

    def forward(self) -> None:
        """A forward pass of training begins. Errors: ``UnsupportedSetup`` if DDP runs it, and was not attached."""
        around = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if around is not None and all(each is not around for each in self._wrapped):
            raise UnsupportedSetup(
                "the model that was attached is called by a DistributedDataParallel around it, so that neither the "
                "order in which DDP sums gradients nor what ranks hold alike is known: attach the "
                "DistributedDataParallel (Hugging Face's Trainer has it as model_wrapped)"
            )
        if torch.is_grad_enabled():
            self._summed = all(each.require_backward_grad_sync for each in self._wrapped)

    def check_step(self) -> None:
        """Errors: ``UnsupportedSetup`` if the ranks step on gradients that are not alike."""
        if any(each._join_config.enable for each in self._wrapped):
            why = "the optimizer steps within join(), where ranks end at different versions"
        elif not self._summed:
            why = "the optimizer steps on gradients that DDP has not summed: the last backward pass was under no_sync()"
        else:
            why = self._strange_hook()
        if why:
            raise UnsupportedSetup(
                f"{why}. One rank stores each parameter for all, which takes that they stay alike: start with "
                "CheckpointConfig(replicas='each')"
            )

    def _strange_hook(self) -> str:
        for each in self._wrapped:
            for hook, _ in hooks_of(each):
                if hook not in SAME_ON_ALL_RANKS:
                    name = hook_name(hook)
                    return f"nobody knows whether the communication hook {name} leaves all ranks with the same bits"
        return ""
