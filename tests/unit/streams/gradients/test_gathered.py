"""Gradients that are put into a record together: the bytes are those of each encoded by itself."""

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from tiercheck.errors import CapacityExceeded, SaveError
from tiercheck.format.container import ShardWriter, parse
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.keys import ShardKey
from tiercheck.streams.gradients import gathered, pieces
from tiercheck.streams.records.differential import DifferentialStream
from tiercheck.streams.records.recorded import read_differentials

SMALL: list[tuple[int, ...]] = [(3,), (), (0,), (64, 32), (7, 5), (1,), (419,)]
SHAPES = [*SMALL, (300, 300), (1200, 1000), (2, 0, 3), (33,)]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kinds = [torch.float32, torch.bfloat16, torch.float64, torch.float32]
        for index, shape in enumerate(SHAPES * 2):
            tensor = torch.zeros(shape, dtype=kinds[index % len(kinds)])
            self.register_parameter(f"ümlaut{index}", torch.nn.Parameter(tensor))


def stream_of(model: torch.nn.Module, *, threads: int = 1) -> DifferentialStream:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return DifferentialStream(ModuleProvider(model, optimizer), "exact", 1, encode_threads=threads)


def gradients_of(model: torch.nn.Module, seed: int, *, narrow: frozenset[int] = frozenset()) -> dict[str, torch.Tensor]:
    """Values of fp32 that bf16 does not hold, but for those of ``narrow``."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for index, (name, each) in enumerate(model.named_parameters()):
        values = torch.randn(each.shape, generator=generator)
        found[name] = (values.bfloat16() if index in narrow else values).to(each.dtype)
    return found


def record(stream: DifferentialStream, version: int, *calls: Mapping[str, torch.Tensor]) -> bytes:
    key = ShardKey.differential(1, version, version, 0)
    memory = bytearray(b"\xa5") * stream.nbytes_unexpected  # recycled memory holds anything
    capture = stream.begin(key, memoryview(memory))
    for gradients in calls:
        capture.add(gradients)
    return bytes(memory[: capture.finish(skipped=False)])


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(params=["NumPy", "Numba", "threads"])
def together(model: Model, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DifferentialStream:
    """Of few tensors, and of many; by one thread, and by several."""
    if request.param != "NumPy":
        monkeypatch.setattr(gathered, "FEW", 0)
    if request.param == "threads":
        monkeypatch.setattr(pieces, "THREAD_NBYTES_MIN", 1 << 10)
    return stream_of(model, threads=3 if request.param == "threads" else 1)


@pytest.fixture
def one_by_one(model: Model) -> DifferentialStream:
    stream = stream_of(model)
    stream.gathered = None
    return stream


def test_a_record_has_the_same_bytes_at_every_version(
    model: Model, together: DifferentialStream, one_by_one: DifferentialStream
) -> None:
    narrow = frozenset({0, 3, 7, 8})
    for version, seed in ((8, 1), (9, 1), (10, 2), (99_999_999, 3), (100_000_000, 4)):
        gradients = gradients_of(model, seed, narrow=narrow if seed == 2 else frozenset())
        assert record(together, version, gradients) == record(one_by_one, version, gradients), version


def test_it_is_read_as_what_was_put(model: Model, together: DifferentialStream) -> None:
    gradients = gradients_of(model, 5, narrow=frozenset({3, 8}))
    content = record(together, 7, gradients)
    (read,) = read_differentials(parse(content), tier="memory://")
    for name, found in read.gradients().items():
        assert found.dtype is gradients[name].dtype
        assert torch.equal(found, gradients[name])
    assert read.is_whole()
    assert len(safetensors.torch.load(content)) > len(gradients)


def test_some_may_have_no_gradient_and_others_may_come_later(
    model: Model, together: DifferentialStream, one_by_one: DifferentialStream
) -> None:
    gradients = gradients_of(model, 6)
    names = list(gradients)
    first = {name: gradients[name] for name in names[2:9]}
    second = {name: gradients[name] for name in names[12:]}
    for calls in ((first, second), (first,), (second, first), ({},), (gradients,)):
        assert record(together, 3, *calls) == record(one_by_one, 3, *calls)


def test_a_gradient_that_is_not_contiguous_is_stored_in_its_order() -> None:
    model = torch.nn.Linear(9, 5, bias=False)
    gradient = {"weight": torch.randn(9, 5).t()}
    content = record(stream_of(model), 1, gradient)
    (read,) = read_differentials(parse(content), tier="memory://")
    assert torch.equal(read.gradient("weight"), gradient["weight"])


@pytest.mark.parametrize("gradients", [{"weight": torch.zeros(3)}, {"other": torch.zeros(5, 9)}])
def test_a_gradient_of_no_trained_tensor_is_refused(gradients: dict[str, torch.Tensor]) -> None:
    with pytest.raises(SaveError, match="no trained tensor"):
        record(stream_of(torch.nn.Linear(9, 5, bias=False)), 1, gradients)


def test_a_gradient_whose_memory_holds_other_values_is_not_copied_from_there() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    negated = torch.tensor([[1 + 2j, 3 + 4j]]).conj().imag
    assert negated.is_neg()
    gathering = stream_of(model).gathered
    assert gathering is not None
    memory = memoryview(bytearray(1 << 16))
    assert gathering.put({"weight": negated}, ShardWriter(memory, 1 << 12), 1) is None


@pytest.mark.parametrize("scale", [None, 0.731])
@pytest.mark.parametrize("threads", [1, 4])
def test_the_blocks_of_long_gradients_are_copied_by_several_threads(
    monkeypatch: pytest.MonkeyPatch, threads: int, scale: float | None
) -> None:
    """Each is longer than a block of its checksum, in each way that it may be stored."""
    sizes = (3_000_001, 1_048_577, 2_097_152, 5, 2_500_000)
    model = torch.nn.ParameterDict({f"weight{index}": torch.zeros(size) for index, size in enumerate(sizes)})
    gradients = gradients_of(model, 3, narrow=frozenset({0, 4}))  # type: ignore[arg-type]
    if scale is not None:
        gradients = {name: each * torch.tensor(scale) for name, each in gradients.items()}
    names: list[set[str]] = []
    copied = pieces.copied

    def noting(*args: Any) -> Any:
        names[-1].add(threading.current_thread().name)
        return copied(*args)

    monkeypatch.setattr(pieces, "copied", noting)
    streams = [stream_of(model), stream_of(model, threads=threads)]
    streams[0].gathered = None
    contents = []
    for stream in streams:
        names.append(set())
        contents.append(record(stream, 1, gradients))
    shard = parse(contents[1])
    shard.verify()
    (read,) = read_differentials(shard, tier="memory://")
    for name, each in gradients.items():
        assert torch.equal(read.gradient(name), each), name
    assert (len(names[1]) > 1) == (threads > 1)
    if scale is None:  # a scale is looked for among all gradients of a call, and the two calls differ in that
        assert contents[0] == contents[1]
    else:
        assert {spec.dtype for spec in shard.specs if "gradient/weight0" in spec.name} == {"BF16"}


def test_gradients_that_are_not_like_the_last_ones_are_looked_at_anew() -> None:
    """Of the same names: none is copied as if it were laid out as the one before."""
    model = torch.nn.ParameterDict({"weight": torch.zeros(4, 6, dtype=torch.float64), "other": torch.zeros(3)})
    stream = stream_of(model)
    values = torch.randn(4, 6, dtype=torch.float64)
    kinds = [
        values.float(),
        values.float().t().contiguous().t(),
        values,
        values.bfloat16(),
        torch.randn(4, 12)[:, ::2],
        torch.view_as_complex(torch.randn(4, 6, 2)).conj().imag,
        values.float(),
    ]
    for version, each in enumerate(kinds, start=1):
        content = record(stream, version, {"weight": each, "other": torch.ones(3)})
        (read,) = read_differentials(parse(content), tier="memory://")
        assert read.is_whole()
        assert read.gradient("weight").dtype is each.dtype
        assert torch.equal(read.gradient("weight"), each)


def test_the_same_gradient_does_not_come_twice(model: Model, together: DifferentialStream) -> None:
    gradients = gradients_of(model, 7)
    with pytest.raises(SaveError, match="twice"):
        record(together, 1, gradients, gradients)


def test_memory_that_is_too_short_is_refused(model: Model, together: DifferentialStream) -> None:
    key = ShardKey.differential(1, 1, 1, 0)
    capture = together.begin(key, memoryview(bytearray(1 << 20)))
    with pytest.raises(CapacityExceeded, match="tensors that recur"):
        capture.add(gradients_of(model, 8))


def test_a_gradient_is_bf16_only_if_every_value_of_it_is(together: DifferentialStream, model: Model) -> None:
    gradients = gradients_of(model, 9, narrow=frozenset(range(len(SHAPES) * 2)))
    for name in ("ümlaut8", "ümlaut19"):
        if gradients[name].numel():
            gradients[name].view(-1)[-1] = float(np.float32(1) + np.float32(2**-20))
    shard = parse(record(together, 1, gradients))
    stored = {spec.name: spec.dtype for spec in shard.specs}
    assert stored["000000000001/gradient/ümlaut8"] == "F32"
    assert stored["000000000001/gradient/ümlaut0"] == "BF16"


def test_the_garbage_collector_gets_nothing_to_look_at_for_a_tensor() -> None:
    model = torch.nn.ParameterList(torch.zeros(7) for _ in range(400))
    stream = stream_of(model)
    assert stream.gathered is not None
    gradients, memory = gradients_of(model, 1), memoryview(bytearray(stream.nbytes_max))
    for version in (1, 2):
        before = gc.get_count()[0]
        stream.gathered.put(gradients, ShardWriter(memory, 1 << 17), version)
        tracked = gc.get_count()[0] - before
    assert tracked < 100
