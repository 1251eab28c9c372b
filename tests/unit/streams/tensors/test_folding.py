"""A folded base is, to the last byte, the base that the job captured at that version; or it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training import memory
from tests.unit.streams.tensors.test_stored import OPTIMIZERS
from tiercheck.config import CheckpointConfig
from tiercheck.errors import ConfigurationError
from tiercheck.format import container
from tiercheck.format.container import Shard
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.integrations.torch import attach
from tiercheck.streams.state import NotExact
from tiercheck.streams.tensors.folding import check_foldable, fold
from tiercheck.streams.tensors.provider import Identity, OptimizerIdentity
from tiercheck.tiers.wrappers.base import WrappingDriver

LAST = 9


class KeepsAll(WrappingDriver):
    """Deletes nothing."""

    async def delete(self, keys: Iterable[str]) -> None:
        del keys


class Saved:
    """A job with a base and a differential of every version: two groups, a schedule, clipping, buffers, a frozen
    parameter, a step without some of the gradients and one that is skipped."""

    def __init__(self, root: Path, make: Callable[[Any], torch.optim.Optimizer], **options: Any) -> None:
        self.root = root / "run"
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(4, 33), torch.nn.BatchNorm1d(33), torch.nn.Linear(33, 1))
        model.to(options.pop("dtype", torch.float32))
        model[2].bias.requires_grad_(False)
        groups = [{"params": model[0].parameters(), "lr": 1e-2}, {"params": [*model[1].parameters(), model[2].weight]}]
        optimizer = make(groups)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        hierarchy = Hierarchy.of(memory(), Tier(f"nvme://{self.root}?survives=rack", wrap=KeepsAll))
        config = CheckpointConfig(base_every=1, batch=1, deadline_s=30, **options)
        with attach(model, optimizer, hierarchy, scheduler=scheduler, config=config) as checkpointer:
            for version in range(1, LAST + 1):
                optimizer.zero_grad()
                batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(version))
                (model(batch.to(model[0].weight.dtype)).square().mean() * 100).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                if version == LAST - 1:
                    model[1].bias.grad = None
                optimizer.step()
                scheduler.step()
                checkpointer.end_iteration()
                checkpointer.flush()

    def bytes_of(self, stem: str) -> bytes:
        (path,) = self.root.glob(f"r00000/g000001/{stem}*.safetensors")
        return path.read_bytes()

    def shard(self, stem: str) -> Shard:
        (path,) = self.root.glob(f"r00000/g000001/{stem}*.safetensors")
        return container.parse(memoryview(path.read_bytes()), key=str(path.relative_to(self.root)), tier="nvme")

    def folded(self, start: int, stop: int) -> bytes:
        steps = [self.shard(f"differential/{version:012}") for version in range(start + 1, stop + 1)]
        made = fold(self.shard(f"base/{start:012}"), steps, tier="nvme", check=lambda: None)
        content = bytearray(made.nbytes_max)
        made.copy(memoryview(content))
        return bytes(content[: made.finish()])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fold_has_the_bytes_of_the_captured_base(name: str, tmp_path: Path) -> None:
    saved = Saved(tmp_path, OPTIMIZERS[name])
    for start, stop in [(0, 1), (0, LAST), *((version, version + 1) for version in range(1, LAST)), (3, 7)]:
        assert saved.folded(start, stop) == saved.bytes_of(f"base/{stop:012}"), f"{start}..{stop}"


@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"codec": "exact+entropy"}], ids=str)
def test_whatever_the_gradients_are_stored_as(options: dict[str, Any], tmp_path: Path) -> None:
    saved = Saved(tmp_path, torch.optim.AdamW, **options)
    assert saved.folded(2, LAST) == saved.bytes_of(f"base/{LAST:012}")


def test_what_the_optimizer_stepped_with_leads_to_its_bits(tmp_path: Path) -> None:
    saved = Saved(tmp_path, torch.optim.AdamW, codec="int8", train_on_compressed=True)
    assert saved.folded(2, LAST) == saved.bytes_of(f"base/{LAST:012}")


def test_what_may_have_other_bits_is_no_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Saved(tmp_path / "lossy", torch.optim.AdamW, codec="int8")
    with pytest.raises(NotExact, match="were encoded by int8: approximate"):
        saved.folded(2, 4)
    saved = Saved(tmp_path / "feedback", torch.optim.AdamW, codec="int8+feedback", train_on_compressed=True)
    with pytest.raises(NotExact, match="what gradients have left out"):
        saved.folded(2, 4)
    saved = Saved(tmp_path / "exact", torch.optim.AdamW)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "1.0")
        with pytest.raises(NotExact, match=r"1\.0"):
            saved.folded(2, 4)


def test_a_fold_is_broken_off_between_steps(tmp_path: Path) -> None:
    saved = Saved(tmp_path, torch.optim.AdamW)

    def check() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        fold(saved.shard(f"base/{1:012}"), [saved.shard(f"differential/{2:012}")], tier="nvme", check=check)


@pytest.mark.parametrize(
    ("identity", "config", "why"),
    [
        ({}, {"codec": "snapshot"}, "makes snapshots"),
        ({}, {"codec": "nf4"}, "do not lead to the bits of the state"),
        ({}, {"codec": "nf4+feedback", "train_on_compressed": True}, "has left out"),
        ({"device": "cuda"}, {}, "steps on cuda, and bases are folded on the host"),
        ({"kind": "mine.Odd"}, {}, "neither torch's nor registered"),
    ],
)
def test_what_cannot_be_exact_is_refused_at_the_start(
    identity: dict[str, str], config: dict[str, Any], why: str
) -> None:
    adam = {"kind": "torch.optim.adam.Adam", "device": "cpu"} | identity
    optimizer = OptimizerIdentity(adam["kind"], "single_tensor", torch.__version__, "", adam["device"])
    with pytest.raises(ConfigurationError, match=why) as refused:
        check_foldable(Identity("torch", "", "", optimizer), CheckpointConfig(**config))
    assert 'leave bases at "capture"' in str(refused.value)
    check_foldable(
        Identity("torch", "", "", OptimizerIdentity("torch.optim.adam.Adam", "", "", "", "cpu")),
        CheckpointConfig(codec="nf4", train_on_compressed=True),
    )
