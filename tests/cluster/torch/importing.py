"""Trains and saves, and prints what a step has imported: ``python -m tests.cluster.torch.importing NAME DIRECTORY``."""

from __future__ import annotations

import json
import sys
import threading

import torch

from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.streams.gradients.gathered import FEW as FEW_TENSORS
from tiercheck.tiers.shm.namespaces import remove_namespace

STEPS = 5
FEW, MANY = 4, FEW_TENSORS // 2
"""Layers, of two tensors each. More are copied by kernels, and the first step imports Numba."""


def trained(name: str, directory: str, *, layers: int, codec: str) -> list[str]:
    """What training's thread imported while it made the steps, but for the first: that one's gradients are not saved,
    and torch imports what it needs itself."""
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(2, 16)).sum().backward()
        optimizer.step()

    step()
    tiers = Hierarchy.of(f"shm://{name}", f"nvme://{directory}/{layers}-{codec}")
    checkpointer = attach(model, optimizer, tiers, config=CheckpointConfig(codec=codec, base_every=3))
    imported.clear()
    for _ in range(STEPS):
        step()
        checkpointer.end_iteration()
    found = list(imported)
    checkpointer.abort()
    remove_namespace(name)
    return found


imported: list[str] = []


def note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "import" and threading.current_thread() is threading.main_thread():
        imported.append(str(arguments[0]))


if __name__ == "__main__":
    sys.addaudithook(note)
    cases = [(FEW, "exact"), (MANY, "exact"), (FEW, "nf4")]
    found = {f"{layers} layers, {codec}": trained(*sys.argv[1:], layers=layers, codec=codec) for layers, codec in cases}
    print(json.dumps(found))
