"""Differentials of gradients on a device: what the record holds is what the step was given, whatever runs when."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.device_state import DeviceState
from tests.reordering import Reordering, uncovered
from tiercheck.errors import CapacityExceeded, SaveError
from tiercheck.format import container
from tiercheck.keys import ShardKey
from tiercheck.streams.codecs import codec as codec_of
from tiercheck.streams.codecs import decode
from tiercheck.streams.device import gate
from tiercheck.streams.errors import OtherwiseStored, WrittenUnseen
from tiercheck.streams.gradients import device as device_gradients
from tiercheck.streams.gradients import staged
from tiercheck.streams.gradients.encoder import scratch
from tiercheck.streams.records import iteration
from tiercheck.streams.records.differential import DifferentialStream
from tiercheck.streams.records.recorded import read_differentials
from tiercheck.streams.tensors.as_bytes import array_of, dtype_name, tensor_of

SEEDS = range(25)
SHAPES = {"one": (7, 9), "two": (2300,), "three": (1,), "none": (0,)}
FED_BACK = ["int8+feedback", "nf4+feedback", "onebit+feedback"]
SPARSE = ["sparse?ratio=0.1", "sparse+feedback?ratio=0.1"]
CODECS = ["exact", "int8", "nf4", "onebit", "sparse", "exact+entropy", *FED_BACK]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "CHUNK_NBYTES", 4096)
    monkeypatch.setattr(iteration, "processors_of_rank", lambda: 64)
    monkeypatch.setattr(gate, "WAIT_S", 0.0)  # what would open it is done by the same thread


class Values(DeviceState):
    """``rough``: values that bf16 does not hold."""

    rough = False
    expected: torch.dtype | None = None

    def true_gradients(self, version: int) -> dict[str, torch.Tensor]:
        found = super().true_gradients(version)
        return {name: each * (1 + 2.0**-12) if self.rough else each for name, each in found.items()}

    def gradient_dtypes(self) -> dict[str, torch.dtype]:
        return {} if self.expected is None else dict.fromkeys(self.masters(), self.expected)


class Waits(Values):
    """Copies wait for the forward pass, as with an engine that waits for the device before."""

    def tell_of_forward(self, begins: Callable[[], None]) -> bool:
        self.begins = begins
        return True

    def forward(self) -> None:
        self.begins()
        super().forward()


class WaitsInVain(Waits):
    """Nobody sees a forward pass."""

    def tell_of_forward(self, begins: Callable[[], None]) -> bool:
        return True

    def forward(self) -> None:
        DeviceState.forward(self)


class Spoiled(Values):
    """The second version has a number that is not finite."""

    def true_gradients(self, version: int) -> dict[str, torch.Tensor]:
        found = super().true_gradients(version)
        if version == 2:
            found["two"][700] = math.inf
        return found


class Rough(Values):
    rough = True


class ExpectsBfloat16(Values):
    expected = torch.bfloat16


class ExpectsScaled(ExpectsBfloat16):
    """bf16 numbers that clipping has multiplied, each version's by another number."""

    def true_gradients(self, version: int) -> dict[str, torch.Tensor]:
        found = super().true_gradients(version)
        return {name: each.bfloat16().float() * (0.7 / version) for name, each in found.items()}


class WaitsScaled(ExpectsScaled, Waits):
    pass


class ExpectsFloat16(Values):
    expected = torch.float16


class ExpectsInVain(ExpectsBfloat16):
    """Numbers that have no scale in common."""

    def true_gradients(self, version: int) -> dict[str, torch.Tensor]:
        found = super().true_gradients(version)
        return {name: (each.double().abs() + 0.1).sqrt().float() for name, each in found.items()}


def records(
    device: Reordering,
    *,
    codec: str = "exact",
    kind: type[DeviceState] = Values,
    dtype: torch.dtype = torch.float32,
    parts: int = 1,
    base_after: int = 0,
    gpu_staging_bytes: int = 1,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    **options: bool,
) -> None:
    """Three records of a loop on a stream of its own, which overwrites each gradient right after the hook, and lets
    others have its memory. ``base_after``: a base is begun after this version."""
    state = kind(device, dtype=dtype, shapes=shapes)
    stream = DifferentialStream(state, codec, 1, device=device, gpu_staging_bytes=gpu_staging_bytes, **options)
    residuals: dict[str, np.ndarray[Any, Any]] = {}
    residuals_later: dict[str, np.ndarray[Any, Any]] = {}
    training, backward = device.side("training"), device.side("backward")
    late: list[Callable[[], bool]] = []
    made: list[bool] = []
    with device.on(training):
        stream.mark_stepped()
        for version in range(1, 4):
            with device.on(backward):  # gradients are allocated and computed in another stream
                gradients = state.backward()
            training.wait(backward.record())
            true = state.true_gradients(version)
            assert not stream.trained_written()
            memory = bytearray(stream.nbytes_max)
            record = stream.begin(ShardKey.differential(1, version, version, 0), memoryview(memory))
            names = list(gradients)
            for at in range(parts):
                add(stream, record, {name: gradients[name] for name in names[at::parts]})
            state.step()
            for gradient in gradients.values():
                device.write(gradient, lambda memory: memory.fill_(float("nan")))
                device.free(training, backward, partial(gradient.data.fill_, 77.0))
            stream.mark_stepped()
            state.forward()
            assert not stream.trained_written()
            close = record.ended(skipped=False)
            stream.mark_published()
            if version == base_after:
                stream.mark_recorded()
            begun = residuals if version <= base_after or not base_after else residuals_later
            late.append(partial(closed, device, stream, record, close, version, codec, true, begun))
            if len(late) == 2:
                made.append(late.pop(0)())
        made += [each() for each in late]
    in_vain = kind is ExpectsInVain
    assert made == ([False, False, True] if in_vain else [True] * 3), "two are on their way before it is known"
    device.finish()
    state.check_now()


def add(stream: DifferentialStream, record: Any, gradients: dict[str, torch.Tensor]) -> None:
    try:
        record.add(gradients)
    except CapacityExceeded:
        record.move(memoryview(bytearray(stream.nbytes_unexpected)))
        record.add(gradients)


def closed(
    device: Reordering,
    stream: DifferentialStream,
    record: Any,
    close: Callable[[], int],
    version: int,
    codec: str,
    true: dict[str, torch.Tensor],
    residuals: dict[str, np.ndarray[Any, Any]],
) -> bool:
    """Close it, as another thread does, and look at what it holds. Whether there is a record."""
    with device.on(device.default):
        try:
            nbytes = close()
        except OtherwiseStored:
            record.abandon()
            return False
        except CapacityExceeded:
            record.move(memoryview(bytearray(stream.nbytes_unexpected)))
            nbytes = close()
    shard = container.parse(bytes(record.given[:nbytes]))
    shard.verify()
    (found,) = read_differentials(shard, tier="test")
    assert set(found.gradients()) == set(true)
    for name, value in true.items():
        expected, scalars = encoded_on_host(codec, name, value, version, residuals)
        decoded = found.gradient(name)
        assert bits(decoded) == bits(expected), f"{name} of version {version} (seed {device.seed})"
        assert codec == "exact" or found.encodings[name]["scalars"] == scalars
    assert torch.equal(found.buffers()["mean"], torch.full((3,), 0.25 * version)), f"seed {device.seed}"
    return True


def encoded_on_host(
    text: str, name: str, value: torch.Tensor, version: int, residuals: dict[str, np.ndarray[Any, Any]]
) -> tuple[torch.Tensor, Mapping[str, int]]:
    """What the codec makes of the gradient in host memory, and says of it."""
    parts: dict[str, Any] = {}

    def slot(suffix: str, dtype: str, shape: tuple[int, ...]) -> memoryview:
        memory = scratch(suffix, dtype, shape)
        parts[suffix] = container.TensorEntry("part", dtype, shape, memory, "")
        return memory

    chosen, dtype = codec_of(text), dtype_name(value, name)
    size = chosen.residual_size(dtype, tuple(value.shape))
    residual = residuals.setdefault(name, np.zeros(size, np.float32)) if size else None
    encoding = chosen.encode(array_of(value), dtype, seed=version, slot=slot, residual=residual)
    return tensor_of(decode(encoding.to_object(), parts), dtype), encoding.scalars


def bits(tensor: torch.Tensor) -> bytes:
    """So that NaN equals NaN."""
    return array_of(tensor).tobytes()


@pytest.fixture(autouse=True)
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record remembers its memory."""
    from tiercheck.streams.records.differential import DifferentialCapture

    init, move = DifferentialCapture.__init__, DifferentialCapture.move

    def begun(self: Any, stream: Any, key: Any, memory: memoryview, *rest: Any) -> None:
        init(self, stream, key, memory, *rest)
        self.given = memory

    def moved(self: Any, memory: memoryview) -> None:
        move(self, memory)
        self.given = memory

    monkeypatch.setattr(DifferentialCapture, "__init__", begun)
    monkeypatch.setattr(DifferentialCapture, "move", moved)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_every_codec_records_what_the_step_was_given(codec: str, dtype: torch.dtype) -> None:
    for seed in range(4):
        records(Reordering(seed), codec=codec, dtype=dtype)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "kind",
    [Values, Rough, ExpectsBfloat16, ExpectsScaled, ExpectsFloat16, ExpectsInVain],
    ids=lambda kind: kind.__name__,
)
def test_a_record_holds_what_the_step_was_given(seed: int, kind: type[DeviceState]) -> None:
    records(Reordering(seed), kind=kind, parts=1 + seed % 2)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("codec", ["exact", "int8", "nf4", "onebit", "nf4+feedback"])
def test_numbers_that_are_not_finite_are_counted_in_the_record_that_has_them(codec: str, seed: int) -> None:
    records(Reordering(seed), codec=codec, kind=Spoiled, parts=1 + seed % 2)


@pytest.mark.parametrize("seed", range(9))
@pytest.mark.parametrize("kind", [Waits, WaitsInVain], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("gpu_staging_bytes", [1, 5 * 4096, 1 << 20])
def test_copies_may_wait_for_the_forward_pass(seed: int, kind: type[DeviceState], gpu_staging_bytes: int) -> None:
    records(
        Reordering(seed, pins=seed % 4 > 0),
        kind=kind,
        parts=1 + seed % 2,
        codec=("exact", "nf4", "sparse")[seed % 3],
        gpu_staging_bytes=gpu_staging_bytes,
    )


class Grows(Values):
    """Its host state is longer than a record has room for, when it is told so."""

    nbytes = 0

    def host_state(self) -> dict[str, Any]:
        return {**super().host_state(), "more": bytes(self.nbytes)}


@pytest.mark.parametrize("seed", range(4))
def test_a_record_that_goes_on_in_longer_memory_keeps_its_own_buffers(seed: int) -> None:
    """While that is waited for, training ends the next record, whose buffers come by the same memory of the host."""
    device = Reordering(seed)
    state = Grows(device, shapes=SHAPES)
    stream = DifferentialStream(state, "exact", 1, device=device, gpu_staging_bytes=1)
    training, backward = device.side("training"), device.side("backward")
    records: list[tuple[Any, Callable[[], int]]] = []
    with device.on(training):
        stream.mark_stepped()
        for version in (1, 2):
            with device.on(backward):
                gradients = state.backward()
            training.wait(backward.record())
            assert not stream.trained_written()
            key = ShardKey.differential(1, version, version, 0)
            record: Any = stream.begin(key, memoryview(bytearray(stream.nbytes_max)))
            add(stream, record, gradients)
            state.step()
            stream.mark_stepped()
            state.forward()
            assert not stream.trained_written()
            state.nbytes = 1 << 20 if version == 1 else 0
            records.append((record, record.ended(skipped=False)))
            stream.mark_published()
            if version == 1:
                with device.on(device.default), pytest.raises(CapacityExceeded, match="what is beside the gradients"):
                    records[0][1]()
    device.finish()
    record, close = records[0]
    with device.on(device.default):
        record.move(memoryview(bytearray(max(record.nbytes_needed, stream.nbytes_unexpected))))
        shard = container.parse(bytes(record.given[: close()]))
    shard.verify()
    (found,) = read_differentials(shard, tier="test")
    assert found.buffers()["mean"].tolist() == [0.25] * 3
    assert len(found.host_state["more"]) == 1 << 20
    records[1][0].abandon()


@pytest.mark.parametrize("opened_by", ["the forward pass", "training that waits"])
def test_nothing_is_copied_before_the_forward_pass(opened_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "WAIT_S", 60.0)
    device = Reordering(0)
    state = Waits(device, shapes=SHAPES)
    stream = DifferentialStream(state, "exact", 1, device=device)
    copies = device.side("copies")
    with device.on(device.side("training")):
        stream.mark_stepped()
        record = stream.begin(ShardKey.differential(1, 1, 1, 0), memoryview(bytearray(stream.nbytes_max)))
        record.add(state.backward())
        state.step()
        stream.mark_stepped()
        close = record.ended(skipped=False)
        stream.mark_published()
    device.finish()  # as torch.cuda.synchronize() does
    with ThreadPoolExecutor(1) as threads:
        closing = threads.submit(close)
        assert not wait([closing], 0.05).done
        assert not copies.steps, "nothing was put there"
        with device.on(device.side("training")):
            if opened_by == "the forward pass":
                state.forward()
            else:
                stream.hurry()
        assert closing.result(60) > 0
    state.true_gradients(1)


@pytest.mark.parametrize("seed", range(8))
def test_memory_that_is_not_pinned_is_gone_round(seed: int) -> None:
    for codec in ("exact", "nf4", "sparse", "int8+feedback"):
        records(Reordering(seed, pins=False), codec=codec)
    for kind in (ExpectsScaled, ExpectsFloat16, ExpectsInVain):
        records(Reordering(seed, pins=False), kind=kind)


@pytest.mark.parametrize("codec", ["exact", "int8", "nf4", "onebit", "nf4+feedback"])
@pytest.mark.parametrize("pins", [True, False])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_tensors_of_several_chunks_of_odd_lengths_and_none(codec: str, pins: bool, parts: int) -> None:
    """Of three calls, one begins with a tensor that has no element."""
    shapes = {"odd": (5,), "none": (0,), "long": (70_001,), "last": (9001,), "nothing": (3, 0), "short": (67,)}
    for seed in range(3):
        for dtype in (torch.float32, torch.bfloat16):
            records(Reordering(seed, pins=pins), codec=codec, kind=Rough, dtype=dtype, parts=parts, shapes=shapes)


def test_what_is_sent_beside_the_gradients_leaves_copies_time_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that is as long as a record may be has room for its scale and its buffers, too."""
    sent: list[bool] = []
    depart = staged.Flight.depart
    device = Reordering(0)
    state = WaitsScaled(device, shapes={"long": (1 << 20,)})
    stream = DifferentialStream(state, "exact", 1, device=device, gpu_staging_bytes=(2 << 20) + (512 << 10))

    def departs(self: staged.Flight) -> None:
        sent.append(self.waits)
        depart(self)

    with device.on(device.side("training")):
        stream.mark_stepped()
        record = stream.begin(ShardKey.differential(1, 1, 1, 0), memoryview(bytearray(stream.nbytes_max)))
        state.forward()
        monkeypatch.setattr(staged.Flight, "depart", departs)
        record.add(state.backward())
        state.step()
        stream.mark_stepped()
        close = record.ended(skipped=False)
        assert not sent, "nothing has departed"
        stream.mark_published()
    close()
    assert sent == [True] * 3, "the gradients, their scale, and a buffer"


@pytest.mark.parametrize("codec", [*FED_BACK, SPARSE[-1]])
@pytest.mark.parametrize("gpu_feedback", [True, False])
@pytest.mark.parametrize("pins", [True, False])
def test_what_is_fed_back_begins_anew_with_a_base(codec: str, gpu_feedback: bool, pins: bool) -> None:
    options = {"gpu_feedback": gpu_feedback, "gpu_staging_bytes": 1 << 20}
    for seed in range(4):
        device = Reordering(seed, pins=pins)
        records(device, codec=codec, base_after=1 + seed % 2, parts=1 + seed % 2, **options)


@pytest.mark.parametrize("codec", SPARSE)
@pytest.mark.parametrize("kind", [Rough, Spoiled, Waits], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_a_device_chooses_the_elements_that_the_host_would(
    codec: str, kind: type[DeviceState], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    compact = Reordering.compact
    monkeypatch.setattr(Reordering, "compact", lambda *given: chosen.append(given[1].numel()) or compact(*given))
    for seed in range(4):
        chosen.clear()
        device = Reordering(seed, pins=seed % 2 > 0)
        records(device, codec=codec, kind=kind, dtype=dtype, parts=1 + seed % 3, gpu_staging_bytes=1 << 20)
        assert sorted(chosen) == sorted([math.prod(shape) for shape in SHAPES.values() if math.prod(shape)] * 3)


def test_a_device_leaves_to_the_host_what_its_ring_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    compact = Reordering.compact
    monkeypatch.setattr(Reordering, "compact", lambda *given: chosen.append(given[1].numel()) or compact(*given))
    for codec in SPARSE:
        chosen.clear()
        records(Reordering(0), codec=codec, shapes={"long": (9001,), "short": (67,)}, gpu_staging_bytes=900)
        assert chosen == [67] * 3


def test_what_a_device_chooses_goes_on_in_longer_memory() -> None:
    device = Reordering(0)
    state = Values(device, shapes=SHAPES)
    stream = DifferentialStream(state, SPARSE[0], 1, device=device, gpu_staging_bytes=1 << 20)
    training = device.side("training")
    with device.on(training):
        stream.mark_stepped()
        gradients = state.backward()
        true = state.true_gradients(1)
        record: Any = stream.begin(ShardKey.differential(1, 1, 1, 0), memoryview(bytearray(4096)))
        add(stream, record, gradients)
        state.step()
        stream.mark_stepped()
        state.forward()
        assert closed(device, stream, record, record.ended(skipped=False), 1, SPARSE[0], true, {})
        assert len(record.given) > 4096
    device.finish()


@pytest.mark.parametrize(
    "options",
    [
        {"kind": Rough},
        {"kind": ExpectsFloat16},
        {"kind": ExpectsScaled},
        {"codec": "nf4"},
        {"codec": "nf4+feedback"},
        {"codec": SPARSE[-1], "gpu_staging_bytes": 1 << 20},
        {"kind": Waits, "gpu_staging_bytes": 5 * 4096},
    ],
    ids=["direct", "by host", "narrowed", "nf4", "feedback", "compacted", "waits"],
)
def test_every_wait_of_a_record_is_needed(options: dict[str, Any]) -> None:
    assert uncovered(partial(records, **options), range(30)) == []


@pytest.mark.parametrize("seed", range(12))
def test_a_write_past_torchs_counters_is_found_when_the_record_is_closed(seed: int) -> None:
    device = Reordering(seed)
    state = Values(device, shapes=SHAPES)
    stream = DifferentialStream(state, "exact", 1, device=device)
    with device.on(device.side("training")):
        stream.mark_stepped()
        stream.mark_published()
        device.write_unseen(state.masters()["two"], lambda master: master.mul_(2))
        gradients = state.backward()
        assert not stream.trained_written(), "torch counts nothing"
        record = stream.begin(ShardKey.differential(1, 1, 1, 0), memoryview(bytearray(stream.nbytes_max)))
        record.add(gradients)
        close = record.ended(skipped=False)
    with pytest.raises(WrittenUnseen, match="two"):
        close()
    record.abandon()


def test_the_ring_is_as_long_as_a_record_needs_and_no_longer_than_is_allowed() -> None:
    device = Reordering(0)
    assert staged.Ring(device, 1 << 30, 10_000).nbytes == 4 * 4096
    assert staged.Ring(device, 1, 1 << 20).nbytes == 2 * 4096
    assert staged.Ring(device, 5 * 4096, 1 << 20).nbytes == 5 * 4096
    assert staged.Ring(device, 1 << 30, 100).nbytes == 2 * 4096


def test_the_ring_takes_a_share_of_the_device_if_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "CHUNK_NBYTES", 64 << 10)
    monkeypatch.setattr(Reordering, "nbytes", 40 << 20)
    device = Reordering(0)
    state = Values(device, shapes={"long": (1 << 20,)})
    rings = [DifferentialStream(state, "exact", 1, device=device, gpu_staging_bytes=each) for each in (0, 2 << 20)]
    assert [each.on_device.ring.nbytes for each in rings if each.on_device] == [1 << 20, 2 << 20]


def test_the_ring_holds_what_the_host_encodes_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "CHUNK_NBYTES", 64 << 10)
    state = Values(Reordering(0), shapes={"long": (1 << 20,)})
    for codec in ("exact", "adaptive"):
        common = DifferentialStream(state, codec, 1, device=state.device, gpu_staging_bytes=1 << 30).on_device
        assert common is not None
        assert common.ring.nbytes >= 4 << 20, codec


def test_what_the_host_encodes_needs_no_kernel_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[str] = []
    monkeypatch.setattr(Reordering, "prepare", lambda self, codec: prepared.append(codec))
    for gpu_feedback, expected in ((False, []), (True, ["nf4"])):
        device = Reordering(0)
        state = Values(device, shapes=SHAPES)
        DifferentialStream(state, "nf4+feedback", 1, device=device, gpu_feedback=gpu_feedback)
        assert prepared == expected


def test_a_gradient_that_comes_on_the_host_is_refused_if_the_device_keeps_its_residual() -> None:
    device = Reordering(0)
    state = Values(device, shapes=SHAPES)
    stream = DifferentialStream(state, "int8+feedback", 1, device=device)
    record = stream.begin(ShardKey.differential(1, 1, 1, 0), memoryview(bytearray(stream.nbytes_max)))
    with pytest.raises(SaveError, match=r"the gradient of 'one' came on the host, .*gpu_feedback=False"):
        record.add({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    record.abandon()


@pytest.mark.parametrize("refused", range(1, 3))
def test_memory_that_cannot_be_page_locked_is_what_is_said(refused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was refused before is tried again as if nothing of it had been sent."""
    device = Reordering(0, pins=False)
    state = ExpectsScaled(device, shapes=SHAPES)
    stream = DifferentialStream(state, "exact", 1, device=device, gpu_staging_bytes=1 << 20)
    asked: list[int] = []
    pinned = Reordering.pinned

    def refusing(self: Reordering, nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        if len(asked) <= refused:
            raise CapacityExceeded("host memory cannot be page-locked")
        return pinned(self, nbytes)

    with device.on(device.side("training")):
        stream.mark_stepped()
        gradients = state.backward()
        true = state.true_gradients(1)
        record: Any = stream.begin(ShardKey.differential(1, 1, 1, 0), memoryview(bytearray(stream.nbytes_max)))
        monkeypatch.setattr(Reordering, "pinned", refusing)
        for _ in range(refused):
            with pytest.raises(CapacityExceeded, match="page-locked"):
                record.add(gradients)
            record.move(memoryview(bytearray(stream.nbytes_unexpected)))
        record.add(gradients)
        state.step()
        stream.mark_stepped()
        state.forward()
        assert closed(device, stream, record, record.ended(skipped=False), 1, "exact", true, {})


@pytest.mark.parametrize("codec", ["exact", "nf4", "sparse"])
def test_gradients_that_come_as_before_are_arranged_once(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    arrange = device_gradients.arrange
    monkeypatch.setattr(device_gradients, "arrange", lambda *given: made.append(1) or arrange(*given))
    records(Reordering(0), codec=codec, kind=Rough)
    assert len(made) == 1
    records(Reordering(0), codec=codec, kind=Rough, parts=2)
    assert len(made) == 1 + 2, "those of each call by themselves"
    records(Reordering(0), kind=ExpectsInVain)
    assert len(made) == 3 + 2, "and anew when they turn out to be none of the numbers that were expected"
