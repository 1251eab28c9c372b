"""Compiling every kernel before training waits for one."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np

from tiercheck.kernels import registry
from tiercheck.kernels.adam import AdamStep
from tiercheck.kernels.gradients import Gradient, SparseGradient
from tiercheck.kernels.sgd import SgdStep

__all__ = ["warm_up"]


def warm_up() -> None:
    """Compile (or load from the cache) every kernel, so that none compiles while training waits."""
    registry.warm_up()
    warm_up_replay()


def warm_up_replay() -> None:
    if not registry.has_numba():
        return
    from tiercheck.kernels.cpu.replay import adam, closed_form, sgd

    size = 8
    p, m, v = (np.zeros(size, np.float32) for _ in range(3))
    values = np.linspace(-1, 1, size, dtype=np.float32)
    gradients: list[Gradient] = [values, SparseGradient(np.arange(1, dtype=np.uint32), values[:1])]
    steps = [
        AdamStep(step, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True) for step in (1, 2)
    ]
    adam.replay_fused_adam(p, m, v, gradients, steps, contracted=True)
    closed_form.replay_sparse_adam(p, m, v, gradients, steps)
    sgd.replay_sgd(p, m, gradients, [SgdStep(lr=1e-3, momentum=0.9)] * 2, fused=True, contracted=True)
    if importlib.util.find_spec("torch") is not None:
        from tiercheck.kernels import torch_tiles

        torch_tiles.replay_adam_with_numba(
            p, m, v, gradients, [replace(each, decoupled=False) for each in steps], contracted=True
        )
