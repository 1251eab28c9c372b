"""The snapshot stream, from the training loop to the resumed run."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.training import FULL, Training, faulty
from tiercheck import keys
from tiercheck.checkpointer import Checkpointer
from tiercheck.errors import ConfigurationError, Corruption
from tiercheck.format.container import ShardMetadata, ShardWriter, TensorSpec, header_room, parse, shard_nbytes
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.keys import ShardKey, Stream
from tiercheck.runtime.front import run
from tiercheck.streams.codecs import codec as codec_of
from tiercheck.streams.records.base import read_base
from tiercheck.streams.records.snapshot import SMALLEST_ROOT, SNAPSHOT_CODECS, SnapshotStream, advanced, squared
from tiercheck.streams.records.stream_factory import stream_of
from tiercheck.streams.tensors.as_bytes import dtype_name, tensor_in
from tiercheck.streams.tensors.provider import StateProvider
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.types import Fidelity

OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
}


def values(content: bytes) -> NDArray[np.float32]:
    return np.frombuffer(content, np.float32)


def error(training: Training, version: int, there: bytes, base: int) -> float:
    """The distance to the truth as a share of the way the parameters have come since the base."""
    start, true = values(training.states[base]), values(training.states[version])
    return float(np.linalg.norm(values(there) - true) / np.linalg.norm(true - start))


def places(tmp_path: Path) -> tuple[str, str]:
    return f"memory://snapshot-{uuid.uuid4().hex}", f"nvme://{tmp_path}/durable?survives=rack"


def shards(checkpointer: Checkpointer, tier: int) -> list[ShardKey]:
    opened = checkpointer._job.tiers.tiers[tier]

    async def held() -> list[ShardKey]:
        found = [keys.parse(info.key) async for info in opened.driver.list()]
        return [key for key in found if isinstance(key, ShardKey)]

    return run(checkpointer._job.ranks.call(held(), "listing"))


def snapshots(found: list[ShardKey]) -> list[tuple[int, int]]:
    return [(key.first - 1, key.last) for key in found if key.stream is Stream.SNAPSHOT]


@pytest.mark.parametrize(
    ("optimizer", "codec"), [*((optimizer, "snapshot") for optimizer in OPTIMIZERS), ("AdamW", "snapshot+nf4")]
)
def test_what_is_restored_is_near_the_truth(tmp_path: Path, optimizer: str, codec: str) -> None:
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    first, durable = places(tmp_path)
    training = Training(OPTIMIZERS[optimizer], **options)
    checkpointer = training.attach(Hierarchy.of(first, durable), codec=codec, base_every=10, batch=4)
    for version in range(1, 18):
        training.step(version)
    assert snapshots(shards(checkpointer, 0))[-1] == (10, 17)
    checkpointer.abort()

    after = Training(OPTIMIZERS[optimizer], **options)
    resumed = after.attach(Hierarchy.of(first, durable), codec=codec, base_every=10, batch=4)
    recovery = resumed.recovery
    assert recovery is not None
    assert (recovery.version, recovery.point.anchor, recovery.replayed) == (17, 10, 0)
    assert recovery.fidelity is Fidelity.APPROXIMATE
    assert "snapshot" in recovery.notes[0]
    assert error(training, 17, after.parameters(), 10) < (0.02 if codec == "snapshot" else 0.3)
    for parameter, other in zip(training.model.parameters(), after.model.parameters(), strict=True):
        state, restored = training.optimizer.state[parameter], after.optimizer.state[other]
        assert state.keys() == restored.keys()
        for key in state.keys() & {"step"}:
            assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(restored[key]))
    for version in range(18, 22):  # and it trains on
        after.step(version)
    resumed.close()
    assert resumed.version == 21


def test_each_supersedes_the_last(tmp_path: Path) -> None:
    training = Training()
    checkpointer = training.attach(Hierarchy.of(*places(tmp_path)), codec="snapshot", base_every=20, batch=4)
    for version in range(1, 36):
        training.step(version)
        run(checkpointer._job.ranks.call(checkpointer._job.mover.cycle(), "moving"))
        held = snapshots(shards(checkpointer, 0))
        assert len(held) <= 2 * 2 + 1, "those that are superseded go, also before there is a second base"
    checkpointer.flush()
    # The newest two, and the newest two of every fourth version.
    assert snapshots(shards(checkpointer, 0)) == [(20, 28), (20, 32), (20, 34), (20, 35)]
    assert snapshots(shards(checkpointer, 1))[-1] == (20, 35)
    checkpointer.close()


def test_a_base_that_was_damaged_and_has_gone_is_made_anew(tmp_path: Path) -> None:
    training = Training()
    checkpointer = training.attach(Hierarchy.of(*places(tmp_path)), codec="snapshot", base_every=10, batch=4)
    for version in range(1, 11):
        training.step(version)
    run(checkpointer._job.recorder.finish_base())
    driver = checkpointer._job.tiers.tiers[0].driver
    run(checkpointer._job.ranks.call(driver.delete([str(ShardKey.base(1, 10, 0))]), "deleting"))
    for version in range(11, 14):
        training.step(version)
    assert snapshots(shards(checkpointer, 0))[-1] == (11, 13)
    checkpointer.close()


def test_the_durable_tier_alone_is_enough(tmp_path: Path) -> None:
    first, durable = places(tmp_path)
    training = Training()
    checkpointer = training.attach(Hierarchy.of(first, durable), codec="snapshot", base_every=10, batch=4)
    for version in range(1, 16):
        training.step(version)
    checkpointer.close()
    MemoryDriver.forget(first.removeprefix("memory://"))
    after = Training()
    resumed = after.attach(Hierarchy.of(first, durable), codec="snapshot", base_every=10, batch=4)
    assert (resumed.version, resumed.recovery.point.anchor) == (15, 10)  # type: ignore[union-attr]
    assert error(training, 15, after.parameters(), 10) < 0.02
    resumed.abort()


def test_parameters_that_the_loop_writes_to_are_in_the_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A differential could not hold them, and would need a base."""
    first, _ = places(tmp_path)
    training = Training()
    checkpointer = training.attach(Hierarchy.of(first), codec="snapshot", base_every=100)
    with caplog.at_level(logging.WARNING):
        for version in range(1, 6):
            with torch.no_grad():
                for parameter in training.model.parameters():
                    parameter.add_(1.0)
            training.step(version)
    assert "something other than" not in caplog.text
    checkpointer.abort()
    after = Training()
    resumed = after.attach(Hierarchy.of(first), codec="snapshot")
    assert resumed.version == 5
    assert error(training, 5, after.parameters(), 0) < 0.02
    resumed.abort()


def test_a_base_that_failed_is_made_up_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without its base a snapshot is nothing, so until there is one bases are tried instead."""
    struck = faulty(
        f"memory://snapshot-{uuid.uuid4().hex}",
        lambda point: point.call == "reserve" and "base/000000000004" in str(point.key),
    )
    training = Training()
    checkpointer = training.attach(Hierarchy.of(struck), codec="snapshot", base_every=4, on_save_error="warn")
    for version in range(1, 8):
        training.step(version)
    assert FULL in caplog.text
    checkpointer.abort()
    after = Training()
    resumed = after.attach(Hierarchy.of(struck), codec="snapshot")
    assert resumed.version == 7
    assert error(training, 7, after.parameters(), 0) < 0.05
    resumed.abort()


def test_buffers_come_along() -> None:
    def job() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = job()
    stream, base = stream_and_base(model, optimizer)
    for _ in range(3):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    state = advanced(base, snapshot_of(stream, 3), tier="here")
    buffers = dict(model.named_buffers())
    assert {name for name, tensor in state.extras.items() if torch.equal(tensor, buffers[name])} == set(buffers)


def stream_and_base(model: torch.nn.Module, optimizer: torch.optim.Optimizer, name: str = "snapshot") -> Any:
    """A stream that rests on a base of the present state, and that base."""
    from tiercheck.streams.records.base import BaseCapture

    provider = ModuleProvider(model, optimizer)
    capture = BaseCapture(provider, ShardKey.base(1, 0, 0), 1)
    memory = memoryview(bytearray(capture.nbytes_max))
    capture.copy(memory)
    shard = parse(memory[: capture.finish()])
    stream = SnapshotStream(provider, name, 1)
    stream.set_reference_base(shard)
    return stream, read_base(shard, tier="here")


def snapshot_of(stream: SnapshotStream, version: int) -> Any:
    return parse(snapshot_bytes(stream, version))


def snapshot_bytes(stream: SnapshotStream, version: int) -> bytearray:
    memory = bytearray(stream.nbytes_max)
    nbytes = stream.begin(stream.key(1, version, 0), memoryview(memory)).finish(skipped=False)
    return memory[:nbytes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_come_back(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    model = torch.nn.Linear(40, 40).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stream, base = stream_and_base(model, optimizer)
    before = model.weight.detach().clone()
    for _ in range(3):
        model(torch.randn(5, 40, dtype=dtype)).pow(2).mean().backward()
        optimizer.step()
    state = advanced(base, snapshot_of(stream, 3), tier="here")
    assert state.masters["weight"].dtype is dtype
    moved = (model.weight - before).float().norm()
    assert (state.masters["weight"].float() - model.weight.float()).norm() < 0.05 * moved + 1e-6
    assert state.optimizer_state["weight"]["momentum_buffer"].dtype is dtype
    if dtype is torch.float64:
        assert torch.equal(state.masters["weight"], model.weight), "what no codec takes is stored whole"


class State:
    """Of a provider what a snapshot reads: one master, what the optimizer holds for it, and no more."""

    def __init__(self, master: torch.Tensor, held: dict[str, torch.Tensor]) -> None:
        self.master, self.held = master, held

    def masters(self) -> dict[str, torch.Tensor]:
        return {"w": self.master}

    def optimizer_state(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"w": dict(self.held)} if self.held else {}

    def held_by_optimizer(self) -> list[torch.Tensor]:
        return list(self.held.values())

    def buffers(self) -> dict[str, torch.Tensor]:
        return {}

    frozen = buffers
    host_state = buffers
    index = StateProvider.index

    def hyperparameters(self) -> list[dict[str, Any]]:
        return []


def based_on(state: State, before: torch.Tensor, name: str) -> SnapshotStream:
    specs = [TensorSpec("master/w", dtype_name(before, "w"), tuple(before.shape))]
    memory = memoryview(bytearray(shard_nbytes(specs)))
    writer = ShardWriter(memory, header_room(specs))
    slot = writer.slot(specs[0].name, specs[0].dtype, specs[0].shape)
    tensor_in(slot, specs[0].dtype, specs[0].shape, what="before").copy_(before)
    length = writer.finish(ShardMetadata(Stream.BASE, 1, 0, 0, 0, 1))
    stream = SnapshotStream(state, name, 1)
    stream.set_reference_base(parse(memory[:length]))
    return stream


def awkward(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Ordinary numbers, zeros, denormals and what is not finite; non-negative."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.rand(shape, generator=generator).to(dtype)
    flat = tensor.view(-1)
    for position, value in enumerate((0.0, 1e-45, 1e-40, 1e-6, 6e4, torch.inf, torch.nan)):
        flat[position::97] = value
    flat[flat.numel() // 2 : flat.numel() // 2 + 600] = 0
    return tensor


@pytest.mark.parametrize("name", SNAPSHOT_CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_pass_encodes_what_three_would(name: str, dtype: torch.dtype) -> None:
    """The master's change, the first moment, the roots of the second: as if each were computed first, then encoded."""
    for shape in ((0,), (1,), (255,), (257,), (33, 79), (4, 3, 1001)):
        for turned in (False, True) if len(shape) > 1 else (False,):
            check_one_pass(name, dtype, shape, turned)


def check_one_pass(name: str, dtype: torch.dtype, shape: tuple[int, ...], turned: bool) -> None:
    before, after, mean, square = (awkward(shape, dtype, seed) for seed in range(4))
    if turned:  # not contiguous in memory
        before, after, mean, square = (tensor.mT for tensor in (before, after, mean, square))
    state = State(after, {"exp_avg": mean, "exp_avg_sq": square})
    shard = snapshot_of(based_on(state, before, name), 3)
    with np.errstate(invalid="ignore"):
        expected = {
            "master/w": (after.float() - before.float()).numpy(),
            "state/w/exp_avg": mean.float().numpy(),
            "state/w/exp_avg_sq": np.sqrt(square.float().numpy()),
        }
    for tensor, plain in expected.items():
        memory: dict[str, memoryview] = {}

        def slot(suffix: str, kind: str, size: tuple[int, ...], memory: dict[str, memoryview] = memory) -> memoryview:
            memory[suffix] = memoryview(bytearray(TensorSpec("x", kind, size).nbytes))
            return memory[suffix]

        encoding = SNAPSHOT_CODECS[name].encode(plain, "F32", seed=0, slot=slot)
        assert shard.object("snapshot")["encodings"][tensor] == encoding.to_object(), (tensor, shape, turned)
        assert {suffix: bytes(shard.entry(f"{tensor}#{suffix}").data) for suffix in memory} == {
            suffix: bytes(content) for suffix, content in memory.items()
        }, (tensor, shape, turned)


def test_room_is_found_anew_when_the_optimizer_makes_its_state() -> None:
    before = torch.zeros(700)
    state = State(torch.ones(700), {})
    stream = based_on(state, before, "snapshot")
    assumed = stream.nbytes_max
    assert len(snapshot_bytes(stream, 1)) <= assumed
    state.held = {"exp_avg": torch.ones(700)}
    made = stream.nbytes_max
    assert len(snapshot_bytes(stream, 2)) <= made < assumed
    state.held["exp_avg_sq"] = torch.ones(700)
    assert len(snapshot_bytes(stream, 3)) <= stream.nbytes_max
    assert stream.nbytes_max > made


def test_every_flipped_byte_is_noticed() -> None:
    torch.manual_seed(3)
    model = torch.nn.Linear(5, 3, bias=False)  # one master and two moments, in codes and in scales
    optimizer = torch.optim.AdamW(model.parameters())
    stream, base = stream_and_base(model, optimizer)
    model(torch.randn(5, 5)).sum().backward()
    optimizer.step()
    content = snapshot_bytes(stream, 1)
    whole = advanced(base, parse(content), tier="here")
    # The last object, the host state, has two thirds of the bytes under one checksum: of its middle, every 16th.
    middle = range(4096, len(content) - 64)
    for position in (each for each in range(len(content)) if each not in middle or each % 16 == 0):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        try:
            state = advanced(base, parse(damaged), tier="here")
        except Corruption:
            continue
        # Padding between tensors belongs to nothing.
        assert content[position] == 0, f"the byte at {position}"
        assert all(torch.equal(state.masters[name], tensor) for name, tensor in whole.masters.items())


def test_a_snapshot_of_another_model_is_refused() -> None:
    torch.manual_seed(4)
    model, other = torch.nn.Linear(5, 3), torch.nn.Linear(5, 4)
    stream, _ = stream_and_base(model, torch.optim.AdamW(model.parameters()))
    _, base = stream_and_base(other, torch.optim.AdamW(other.parameters()))
    with pytest.raises(Corruption, match="has no tensor 'master/"):
        advanced(base, snapshot_of(stream, 1), tier="here")


@pytest.mark.parametrize("codec", ["int8", "nf4"])
def test_a_small_second_moment_does_not_become_zero(codec: str) -> None:
    """The optimizer divides by its root: a zero there would throw the parameter out of the world."""
    roots = np.zeros(600, np.float32)
    roots[:256] = np.linspace(1e-9, 1, 256)
    roots[256:512] = 0
    memory: dict[str, Any] = {}

    def slot(suffix: str, dtype: str, shape: tuple[int, ...]) -> memoryview:
        memory[suffix] = type("Stored", (), {"dtype": dtype, "shape": shape})
        memory[suffix].data = memoryview(bytearray(TensorSpec("x", dtype, shape).nbytes))
        return memory[suffix].data  # type: ignore[no-any-return]

    encoding = codec_of(codec).encode(roots, "F32", seed=0, slot=slot)
    decoded = codec_of(codec).decode(encoding, memory)
    squares = squared(decoded, memory, codec)
    assert np.all(squares[:256] > 0)
    assert squares[0] == np.square(
        np.float32(SMALLEST_ROOT[codec]) * np.frombuffer(memory["scales"].data, np.float32)[0]
    )
    assert np.all(squares[256:] == 0)
    assert np.allclose(np.sqrt(squares[128:256]), roots[128:256], rtol=0.01 if codec == "int8" else 0.25)


def test_unknown_names_are_refused_with_all_that_there_are() -> None:
    model = torch.nn.Linear(2, 2)
    provider = ModuleProvider(model, torch.optim.SGD(model.parameters(), lr=1))
    with pytest.raises(ConfigurationError, match=r"int8, .*snapshot, snapshot\+nf4, sparse\); did you mean 'snapshot'"):
        stream_of(provider, "snapshots", 1)
    with pytest.raises(ConfigurationError, match="train_on_compressed=True needs a codec of gradients"):
        stream_of(provider, "snapshot", 1, train_on_compressed=True)
