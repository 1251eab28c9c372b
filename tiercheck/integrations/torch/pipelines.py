"""Pipelines of torch (``torch.distributed.pipelining``), of which the model is a stage.

Unless it is told the forms of what a stage takes and gives, the first step of each process runs the stage once more, to
learn them. Torch keeps that pass from the random generators. It changes buffers such as batch norm's statistics, and
leaves DDP in another state. Of a job that goes on, the uninterrupted run had that pass long before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tiercheck.integrations.callers import callers
from tiercheck.integrations.holders import holders

__all__ = ["FormPass", "rounds_otherwise"]

PIPELINES = "torch.distributed.pipelining.stage"
FORM_PASS = "_forward_metadata_inference"
"""What runs that pass. torch has no public name for it."""


class FormPass:
    """Puts back the buffers that this pass changes."""

    def __init__(self, buffers: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """``buffers``: those of the model by name, live."""
        self._buffers = buffers
        self._kept: dict[str, torch.Tensor] = {}

    def forward(self) -> None:
        """A forward pass begins."""
        if PIPELINES not in sys.modules:
            return
        if is_form_pass():
            self._kept = self._kept or {name: each.clone() for name, each in self._buffers().items()}
            return
        live = self._buffers()
        for name, kept in self._kept.items():
            if not torch.equal(live[name], kept):
                live[name].copy_(kept)
        self._kept = {}


def is_form_pass() -> bool:
    return any(
        frame.f_code.co_name == FORM_PASS and frame.f_globals.get("__name__") == PIPELINES for frame in callers()
    )


def rounds_otherwise(model: torch.nn.Module) -> list[str]:
    """Why the first step of a process that resumes has not the bits of an uninterrupted run, if it has not."""
    summed = any(
        isinstance(each, DistributedDataParallel) and dist.get_world_size(each.process_group) > 1
        for each in model.modules()
    )
    if not summed or not is_stage(model):
        return []
    return [
        "the model is a stage of a pipeline of torch's, which runs it once more in the first step of each process, and "
        "DDP rounds the gradients of that step otherwise: use fully_shard in the stage instead"
    ]


def is_stage(model: torch.nn.Module) -> bool:
    """Whether the model is what a stage that this process has made runs."""
    if PIPELINES not in sys.modules:
        return False
    stage = sys.modules[PIPELINES].PipelineStage
    return any(issubclass(type(each), stage) and getattr(each, "submod", None) is model for each in holders([model]))
