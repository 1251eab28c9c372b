"""A folded base is, to the last byte, the base that the job captured at that version, and its audit says so; or it is
refused."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch

from tests.simulated_gpu import simulate, simulated
from tests.training import memory
from tests.unit.streams.rebuilding.test_stored import OPTIMIZERS
from tiercheck.config import CheckpointConfig
from tiercheck.errors import ConfigurationError
from tiercheck.format import container
from tiercheck.format.container import Shard
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.integrations.torch import attach
from tiercheck.kernels.gpu_adam import FUSED
from tiercheck.recording.bases import Bases
from tiercheck.streams.errors import NotExact
from tiercheck.streams.optimizers.stand_in import known_stand_in
from tiercheck.streams.rebuilding import folding
from tiercheck.streams.rebuilding.folding import TensorFolding, check_foldable, fold
from tiercheck.streams.rebuilding.stored import StoredState
from tiercheck.streams.records.audit import read_audit
from tiercheck.streams.tensors.provider import Identity, OptimizerIdentity
from tiercheck.tiers.wrappers.base import WrappingDriver

LAST = 9


class KeepsAll(WrappingDriver):
    """Deletes nothing."""

    async def delete(self, keys: Iterable[str]) -> None:
        del keys


class Saved:
    """A job with a base and an audited differential of every version: two groups, a schedule, clipping, buffers, a
    frozen parameter, a step without some of the gradients and one that is skipped."""

    def __init__(
        self,
        root: Path,
        make: Callable[[Any], torch.optim.Optimizer],
        between: Callable[..., None] = lambda *_: None,
        **options: Any,
    ) -> None:
        """``between`` is called before each step."""
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
        audited = patch.object(Bases, "audits", lambda *_: True)
        with audited, attach(model, optimizer, hierarchy, scheduler=scheduler, config=config) as checkpointer:
            for version in range(1, LAST + 1):
                optimizer.zero_grad()
                batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(version))
                (model(batch.to(model[0].weight.dtype)).square().mean() * 100).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                if version == LAST - 1:
                    model[1].bias.grad = None
                between(model, optimizer, version)
                optimizer.step()
                scheduler.step()
                checkpointer.end_iteration()
                checkpointer.flush()

    def bytes_of(self, stem: str) -> bytes:
        (path,) = self.root.glob(f"r00000/g000001/{stem}*.safetensors")
        return path.read_bytes()

    def shard(self, stem: str, *, flip: str = "") -> Shard:
        (path,) = self.root.glob(f"r00000/g000001/{stem}*.safetensors")
        content = bytearray(path.read_bytes())
        shard = container.parse(memoryview(content), key=str(path.relative_to(self.root)), tier="nvme")
        shard.verify()
        if flip in shard:
            memoryview(shard.entry(flip).data)[2] ^= 1
        return shard

    def folded(self, start: int, stop: int, *, differing: tuple[str, ...] = (), flip: str = "") -> bytes:
        """``flip``: a bit of this tensor is flipped once its shard was verified."""
        stems = [f"base/{start:012}", *(f"differential/{version:012}" for version in range(start + 1, stop + 1))]
        base, *steps = (self.shard(stem, flip=flip if stem == stems[-1] or "base" in stem else "") for stem in stems)
        made = fold(base, steps, tier="nvme", check=lambda: None)
        content = bytearray(made.nbytes_max)
        made.copy(memoryview(content))
        nbytes = made.finish()
        assert (made.audited, made.unexpected) == (True, differing)
        return bytes(content[:nbytes])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fold_has_the_bytes_of_the_captured_base(name: str, tmp_path: Path) -> None:
    saved = Saved(tmp_path, OPTIMIZERS[name])
    for start, stop in [(0, 1), (0, LAST), *((version, version + 1) for version in range(1, LAST)), (3, 7)]:
        assert saved.folded(start, stop) == saved.bytes_of(f"base/{stop:012}"), f"{start}..{stop}"


def test_a_kernel_replays_where_the_base_will_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that folds has no copy of the state. Only the first step, which makes the moments, is called."""
    saved, copied = Saved(tmp_path, OPTIMIZERS["adamw-fused"]), []
    copy_all = StoredState.copy_all
    monkeypatch.setattr(StoredState, "copy_all", lambda self: copied.append(self) or copy_all(self))
    assert saved.folded(1, LAST) == saved.bytes_of(f"base/{LAST:012}")
    monkeypatch.setattr(folding, "LARGE_NBYTES", 0)  # fewer versions at a time
    assert saved.folded(1, LAST) == saved.bytes_of(f"base/{LAST:012}")
    assert not copied
    saved.folded(0, 1)
    assert len(copied) == 1


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


def test_a_bit_that_flips_past_its_checksum_is_found(tmp_path: Path) -> None:
    saved = Saved(tmp_path, torch.optim.AdamW)
    moments = ("state/0.weight/exp_avg", "state/0.weight/exp_avg_sq")
    saved.folded(5, 7, flip="master/1.weight", differing=("1.weight",))
    saved.folded(5, 7, flip=f"{7:012}/gradient/0.weight", differing=("0.weight", *moments))
    saved.folded(5, 7, flip="extra/2.bias", differing=("extra/2.bias",))


def past_torchs_counters(model: torch.nn.Sequential, optimizer: torch.optim.Optimizer, version: int) -> None:
    """Writes to elements that no sample is of."""
    if version == 5:
        model[0].weight.data[0, 0] += 1
        optimizer.state[model[1].weight]["exp_avg"].data[0] += 1


def test_a_write_that_no_differential_holds_is_found_by_name(tmp_path: Path) -> None:
    saved = Saved(tmp_path, torch.optim.AdamW, past_torchs_counters)
    assert saved.folded(3, 4) == saved.bytes_of(f"base/{4:012}")
    saved.folded(3, 5, differing=("0.weight", "1.weight", "state/1.weight/exp_avg"))
    saved.folded(3, LAST, differing=("0.weight", "1.weight", "state/1.weight/exp_avg"))
    assert saved.folded(5, LAST) == saved.bytes_of(f"base/{LAST:012}")


def test_of_other_tensors_none_agrees(tmp_path: Path) -> None:
    saved = Saved(tmp_path, torch.optim.AdamW)
    shard = saved.shard(f"differential/{LAST:012}")
    assert read_audit(shard, LAST, ["master/0.weight"]) == {"host": "", "master/0.weight": "", "optimizer": ""}
    assert read_audit(shard, LAST - 1, ["master/0.weight"]) == {}


def checked(saved: Saved, optimizer: str, check: Callable[[], None]) -> None:
    made = fold(saved.shard(f"base/{1:012}"), [saved.shard(f"differential/{2:012}")], tier="nvme", check=check)
    assert optimizer != "rmsprop", "it is called, and not when the base is copied"
    made.copy(memoryview(bytearray(made.nbytes_max)))


@pytest.mark.parametrize("optimizer", ["adamw-fused", "rmsprop"])
def test_a_fold_is_broken_off_between_steps(optimizer: str, tmp_path: Path) -> None:
    def check() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        checked(Saved(tmp_path, OPTIMIZERS[optimizer]), optimizer, check)


@pytest.mark.parametrize("optimizer", ["adamw-fused", "rmsprop"])
def test_a_lack_of_memory_speaks_against_no_state(optimizer: str, tmp_path: Path) -> None:
    def check() -> None:
        torch.empty(1 << 50)

    with pytest.raises(MemoryError, match="you tried to allocate"):
        checked(Saved(tmp_path, OPTIMIZERS[optimizer]), optimizer, check)


@pytest.mark.parametrize("optimizer", ["adamw-fused", "rmsprop"])
def test_nothing_keeps_the_memory_of_what_was_folded(optimizer: str, tmp_path: Path) -> None:
    """Without waiting for the garbage collector: a tier gets back the memory of what it has deleted."""
    saved = Saved(tmp_path, OPTIMIZERS[optimizer])
    read = [bytearray(saved.bytes_of(stem)) for stem in (f"base/{1:012}", f"differential/{2:012}")]
    gc.collect()
    gc.disable()
    try:
        shards = [container.parse(memoryview(each), tier="nvme") for each in read]
        made = fold(shards[0], shards[1:], tier="nvme", check=lambda: None)
        read.append(bytearray(made.nbytes_max))
        made.copy(memoryview(read[-1]))
        made.finish()
        del made, shards
        for each in read:
            each.clear()  # raises if anybody has a view of it
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("identity", "config", "why"),
    [
        ({}, {"codec": "snapshot"}, "makes snapshots"),
        ({}, {"codec": "nf4"}, "do not lead to the bits of the state"),
        ({}, {"codec": "nf4+feedback", "train_on_compressed": True}, "has left out"),
        ({"device": "cuda"}, {}, "steps on cuda, bases are folded on the host, and the optimizer could not be tried"),
        ({"kind": "mine.Odd"}, {}, "neither torch's nor registered"),
        ({"memory_order": True}, {}, "parameters that are not contiguous"),
    ],
)
def test_what_cannot_be_exact_is_refused_at_the_start(
    identity: dict[str, Any], config: dict[str, Any], why: str
) -> None:
    optimizer = replace(
        OptimizerIdentity("torch.optim.adam.Adam", "single_tensor", torch.__version__, "", "cpu"), **identity
    )
    with pytest.raises(ConfigurationError, match=why) as refused:
        check_foldable(Identity("torch", "", "", optimizer), CheckpointConfig(**config), [], certified=False)
    assert 'leave bases at "capture"' in str(refused.value)
    check_foldable(
        Identity("torch", "", "", OptimizerIdentity("torch.optim.adam.Adam", "", "", "", "cpu")),
        CheckpointConfig(codec="nf4", train_on_compressed=True),
        [],
        certified=False,
    )


class TestOfAGpu:
    """An optimizer that steps on a GPU is simulated; the process that folds has none."""

    OPTIONS: ClassVar[dict[str, Any]] = {"betas": (0.9, 0.99), "weight_decay": 0.1, "fused": True}

    @pytest.fixture
    def make(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], torch.optim.Optimizer]:
        simulate(monkeypatch, "torch.optim.adamw.AdamW", FUSED[0])
        made = simulated("torch.optim.adamw.AdamW", FUSED[0])
        real = OptimizerIdentity.of

        def there(optimizer: torch.optim.Optimizer, device: torch.device) -> OptimizerIdentity:
            found = real(optimizer, device)
            if type(optimizer) is not made:
                return found
            known = known_stand_in(found.kind, "fused")
            return replace(found, implementation="fused", device="cuda", instruction_set="Simulated", stand_in=known)

        monkeypatch.setattr(OptimizerIdentity, "of", there)
        return lambda groups: made(groups, **self.OPTIONS)

    def test_a_fold_has_the_bytes_of_the_captured_base(
        self, make: Callable[[Any], torch.optim.Optimizer], tmp_path: Path
    ) -> None:
        """From before the first step, too: the kernel begins with moments of zeros."""
        identity = OptimizerIdentity("torch.optim.adamw.AdamW", "fused", torch.__version__, "Simulated", "cuda")
        options = [{"lr": 1e-3, "eps": 1e-8, **self.OPTIONS}]
        check_foldable(Identity("torch", "", "", identity), CheckpointConfig(), options, certified=True)
        saved = Saved(tmp_path, make)
        TensorFolding(certified=True).prepare(saved.shard("base/000000000000"))
        for start, stop in [(0, 1), (0, LAST), (1, 2), (3, 7)]:
            assert saved.folded(start, stop) == saved.bytes_of(f"base/{stop:012}"), f"{start}..{stop}"

    def test_without_a_stand_in_it_is_refused(
        self, make: Callable[[Any], torch.optim.Optimizer], tmp_path: Path
    ) -> None:
        saved = Saved(tmp_path, make)
        with pytest.raises(NotExact, match="no kernel is certified in this process"):
            TensorFolding(certified=False).prepare(saved.shard("base/000000000000"))
        for start in (0, 3):
            with pytest.raises(NotExact, match="another implementation"):
                saved.folded(start, LAST)

    def test_a_beta_that_was_not_there_at_the_start_is_refused(
        self, make: Callable[[Any], torch.optim.Optimizer], tmp_path: Path
    ) -> None:
        identity = OptimizerIdentity("torch.optim.adamw.AdamW", "fused", torch.__version__, "Simulated", "cuda")
        options = [{"lr": 1e-3, "eps": 1e-8, **self.OPTIONS, "betas": (0.7, 0.97)}]
        check_foldable(Identity("torch", "", "", identity), CheckpointConfig(), options, certified=True)
        saved = Saved(tmp_path, make)
        for start in (0, 3):
            with pytest.raises(NotExact, match="another implementation"):
                saved.folded(start, LAST)
