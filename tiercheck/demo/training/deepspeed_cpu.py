"""DeepSpeed on CPUs: what must be set before ``deepspeed.init_distributed``."""

from __future__ import annotations

import os

__all__ = ["prepare_cpu"]


def prepare_cpu() -> None:
    """Let DeepSpeed run on CPU and gloo without a compiler.

    Call it before DeepSpeed is used at all. It selects the CPU accelerator, and has ``init_distributed``
    leave out the shared-memory collectives, which it would otherwise compile (a minute, and a C++ compiler).
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False
