"""What each tier was said to hold before the first step, and what it has held at most."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shared_memory import name as name
from tests.shared_memory import root_of
from tiercheck.config import CheckpointConfig
from tiercheck.demo.nodes import occupied
from tiercheck.diagnostics.doctor import Diagnosis
from tiercheck.diagnostics.fit import JobSize, fit
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.opening.startup import _OpenTiers, _Startup
from tiercheck.policy import first_tier
from tiercheck.replication.fold_executor import FoldExecutor, LocalFoldExecutor
from tiercheck.replication.mover import Mover
from tiercheck.types import Capabilities, Survives

WIDTH = 384
STEPS = 160
"""Three intervals, and a few."""
TOLERANCE = 0.1


@pytest.fixture(autouse=True)
def folds_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bases are folded in this process, and no differential is too small to count."""

    def here(_: _Startup, opened: _OpenTiers) -> FoldExecutor:
        assert opened.folds is not None
        return LocalFoldExecutor(opened.folds, opened.tiers.first)

    monkeypatch.setattr(_Startup, "folds_of", here)
    monkeypatch.setattr(first_tier, "UNFOLDED_NBYTES", 0)


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory, where a file takes whole pages and nothing else, whatever tmp_path's file system does."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tiercheck-test-") as made:
        yield Path(made)


def after_each_action(look: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the newest base is there and the one before has not gone yet."""
    act = Mover._try

    async def acted(self: Mover, *action: Any) -> bool:
        done = await act(self, *action)
        look()
        return done

    monkeypatch.setattr(Mover, "_try", acted)


@pytest.mark.parametrize("gradient_nbytes", [2, 4], ids=["bf16", "fp32"])
def test_each_tier_holds_what_was_said(
    folder: Path, name: str, gradient_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Own memory, a neighbour's, and a directory that all share."""
    if gradient_nbytes == 2:  # as FSDP2 and ZeRO tell before the first step
        monkeypatch.setattr(
            ModuleProvider, "gradient_dtypes", lambda self: dict.fromkeys(self.masters(), torch.bfloat16)
        )
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tiers = {
        f"shm://{name}": (Survives.PROCESS, root_of(name)),
        f"nvme://{folder}/near?survives=node": (Survives.NODE, folder / "near"),
        f"nvme://{folder}/far?survives=rack": (Survives.RACK, folder / "far"),
    }
    said = [Diagnosis(url, capabilities=Capabilities(survives)) for url, (survives, _) in tiers.items()]
    rooms = fit(JobSize(WIDTH**2, gradient_nbytes=gradient_nbytes, folds=True), said)
    held: Counter[str] = Counter()

    def look() -> None:
        for url, (_, root) in tiers.items():
            held[url] = max(held[url], occupied(root))

    after_each_action(look, monkeypatch)
    checkpointer: Any = attach(model, optimizer, Hierarchy.of(*tiers), config=CheckpointConfig(bases="fold"))
    for _ in range(STEPS):
        model.weight.grad = torch.randn(WIDTH, WIDTH)
        if gradient_nbytes == 2:
            model.weight.grad = model.weight.grad.bfloat16().float()
        optimizer.step()
        checkpointer.end_iteration()
        look()
        checkpointer.flush()  # the tiers keep up
    assert checkpointer.stats.bases == 1
    checkpointer.close()
    told = {url: room.usual_nbytes for url, room in zip(tiers, rooms, strict=True)}
    shares = {url: held[url] / told[url] for url in tiers}
    assert all(abs(share - 1) <= TOLERANCE for share in shares.values()), list(shares.values())
