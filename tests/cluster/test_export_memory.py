"""An export takes memory for one rank's state, or for one stored tensor, however large the model is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.runtime.test_group import on_all_ranks
from tiercheck.archive.export.write import Format
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.format.index.logical import LogicalIndex, LogicalTensor, Range
from tiercheck.hierarchy import Hierarchy
from tiercheck.runtime.group import SimulatedGroup
from tiercheck.streams.tensors.provider import Identity, OptimizerIdentity, StateProvider, copy_into
from tiercheck.tiers.memory import MemoryDriver

pytestmark = pytest.mark.cluster

WORLD = 16
BASE, LAST = 2, 3
"""Of one version there is a base; to the other a differential leads."""
TENSORS = 4
"""Of each rank."""
MIB = 1 << 20


class Part(StateProvider):
    """A rank's part of a model: a few whole tensors, which are flattened into one."""

    def __init__(self, rank: int, nbytes: int) -> None:
        self.rank = rank
        self.flat = torch.nn.Parameter(torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(rank)))
        self.optimizer = torch.optim.AdamW([self.flat], lr=1e-2)

    def identity(self) -> Identity:
        return Identity.of("parts", self, OptimizerIdentity.of(self.optimizer, torch.device("cpu")))

    def masters(self) -> Mapping[str, torch.Tensor]:
        return {"part": self.flat.detach()}

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return {}

    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        state = self.optimizer.state.get(self.flat)
        return {"part": dict(state)} if state else {}

    def hyperparameters(self) -> list[dict[str, Any]]:
        return [{name: value for name, value in self.optimizer.param_groups[0].items() if name != "params"}]

    def host_state(self) -> dict[str, Any]:
        return {}

    @property
    def names(self) -> list[str]:
        return [f"layer{self.rank * TENSORS + each:03d}.weight" for each in range(TENSORS)]

    def index(self) -> LogicalIndex:
        elements = self.flat.numel() // TENSORS
        tensors = {name: LogicalTensor(name, "F32", (elements,), trained=True) for name in self.names}
        return LogicalIndex(tensors, {"master/part": tuple(Range(name, 0, elements) for name in self.names)}, {})

    def load(self, *, masters: Any, optimizer_state: Any, extras: Any, hyperparameters: Any) -> None:
        copy_into(self.masters(), masters)

    def apply(self, gradients: Any, hyperparameters: Any) -> None:
        raise AssertionError("nothing is replayed here")

    def restore_host_state(self, state: Mapping[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class Run:
    """What a job has left, each rank of which trains so many bytes of the model."""

    url: str
    rank_nbytes: int

    @property
    def model_nbytes(self) -> int:
        return WORLD * self.rank_nbytes

    @property
    def state_nbytes(self) -> int:
        """Of one rank: the parameters and Adam's two moments."""
        return 3 * self.rank_nbytes


def trained(url: str, rank_nbytes: int) -> Run:
    memory = f"parts-{uuid.uuid4().hex}"

    def act(group: SimulatedGroup) -> None:
        part = Part(group.rank, rank_nbytes)
        config = CheckpointConfig(base_every=BASE, batch=1, deadline_s=60)
        hierarchy = Hierarchy.of(f"memory://{memory}-{group.rank}", url)
        with Checkpointer(part, hierarchy, group=group, config=config) as checkpointer:
            for version in range(1, LAST + 1):
                part.flat.grad = torch.full_like(part.flat, 0.25 * version)
                checkpointer.capture(version, {"part": part.flat.grad})
                part.optimizer.step()
                checkpointer.stepped(version)
                checkpointer.complete(version)
                checkpointer.begin_iteration()

    try:
        assert on_all_ranks(WORLD, act) == [None] * WORLD
    finally:
        for rank in range(WORLD):
            MemoryDriver.forget(f"{memory}-{rank}")
    return Run(url, rank_nbytes)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(f"nvme://{tmp_path_factory.mktemp('small')}/run?survives=rack", 1 << 10)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(f"nvme://{tmp_path_factory.mktemp('large')}/run?survives=rack", 4 * MIB)


def exported(small: Run, large: Run, bounds: list[str], target: Path) -> dict[str, str]:
    """By bound, what a process of its own says of the export under it."""
    command = [sys.executable, "-m", "tests.cluster.exporting", small.url, large.url, str(target), *bounds]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=300, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def nbytes_max(run: Run, version: int, format: Format) -> int:
    """The stated memory: of a version that is a base, one stored tensor; else, and for ``deepspeed``, one rank's state
    twice and its gradient. Beside that a few MiB, for stacks of threads and the allocator."""
    if version == BASE and format is not Format.DEEPSPEED:
        return run.rank_nbytes + 12 * MIB
    return 2 * run.state_nbytes + run.rank_nbytes + 8 * MIB


def test_an_export_needs_no_more_memory_than_it_says(small: Run, large: Run, tmp_path: Path) -> None:
    """Whatever the format. Under a limit that one rank's state does not fit into, it fails: so the limit is one."""
    bounds = {f"{each}:{version}": nbytes_max(large, version, each) for version in (BASE, LAST) for each in Format}
    assert max(bounds.values()) < large.model_nbytes, "the model does not fit"
    too_small = f"{Format.SAFETENSORS}:{LAST}:{large.state_nbytes}"
    asked = [f"{what}:{nbytes}" for what, nbytes in bounds.items()]
    said = exported(small, large, [*asked, too_small], tmp_path)
    assert re.search(r"(annot|can't|nable to) allocate|MemoryError", said.pop(too_small))
    assert said == dict.fromkeys(asked, "done")
    whole = load_file(tmp_path / f"large-{Format.SAFETENSORS}:{LAST}:{bounds[f'{Format.SAFETENSORS}:{LAST}']}")
    assert sum(tensor.nbytes for tensor in whole.values()) == large.model_nbytes
