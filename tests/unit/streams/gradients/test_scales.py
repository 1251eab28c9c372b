"""Half-precision gradients that one number has multiplied are stored as what they were: exactly, or as fp32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tiercheck import kernels
from tiercheck.errors import Corruption
from tiercheck.format.container import parse
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.keys import ShardKey
from tiercheck.streams.codecs import Encoding, decode
from tiercheck.streams.codecs.encoding import Part
from tiercheck.streams.codecs.exact import SCALE
from tiercheck.streams.gradients import gathered
from tiercheck.streams.gradients.encoder import Written
from tiercheck.streams.gradients.scales import WAIT_MAX, Scales, candidates, scale_of
from tiercheck.streams.records.differential import DifferentialStream
from tiercheck.streams.records.recorded import read_differentials
from tiercheck.types import Fidelity

SHAPES = [(300, 70), (9,), (), (0,), (64, 64), (5, 3)]
HALVES = [torch.bfloat16, torch.float16]
KINDS = {torch.bfloat16: "BF16", torch.float16: "F16"}

scales = st.floats(2.0**-20, 2.0**20, width=32)
seeds = st.integers(0, 2**32 - 1)


def numbers(seed: int, dtype: torch.dtype, shape: tuple[int, ...] = (500,), largest: float = 2.0**10) -> torch.Tensor:
    """Half-precision numbers of both signs and many magnitudes, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.exp2(-12 * torch.rand(shape, generator=generator))
    values *= largest / 8
    values[torch.rand(shape, generator=generator) < 0.05] = -0.0
    return values.to(dtype)


def products(seed: int, dtype: torch.dtype, scale: float, shape: tuple[int, ...] = (500,)) -> torch.Tensor:
    """As torch multiplies them."""
    return numbers(seed, dtype, shape).float().mul_(scale)


def addressed(array: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.array([array.ctypes.data], np.int64), np.array([array.size], np.int64)


def test_a_scale_fits_all_tensors_whatever_their_size() -> None:
    """Of fp16 the one that was looked at has small numbers, down to the smallest, and another one the largest."""
    search, scale = Scales(), 0.37 * 2.0**-9
    smallest = torch.randint(-2000, 2000, (4000,), generator=torch.Generator().manual_seed(0)).mul(2.0**-24).half()
    each = [smallest, torch.tensor([65504.0, 2.0**-24, -1.0]).half(), torch.tensor([3 * 2.0**-24]).half()]
    tensors = [halves.float().mul_(scale).numpy() for halves in each]
    addresses = np.array([tensor.ctypes.data for tensor in tensors], np.int64)
    sizes = np.array([tensor.size for tensor in tensors], np.int64)
    found = search.find(addresses, sizes)
    assert found is not None and found.dtype == "F16"
    assert kernels.are_scaled(addresses, sizes, found.value, fp16=True).all()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()


# Finding it


@pytest.mark.parametrize("dtype", HALVES)
@settings(max_examples=60, deadline=None)
@given(scale=scales, seed=seeds)
def test_the_scale_is_found_in_the_products(dtype: torch.dtype, scale: float, seed: int) -> None:
    values = products(seed, dtype, scale).numpy()
    found = scale_of(values)
    assert found is not None
    assert kernels.are_scaled.by("reference")(*addressed(values), found.value, found.fp16)[0]


@settings(max_examples=60, deadline=None)
@given(scale=st.integers(2**23, 2**24 - 1), number=st.integers(1, 2**11 - 1))
def test_the_scale_is_among_the_candidates_of_each_product(scale: int, number: int) -> None:
    mantissa, _ = np.frexp(np.float32(number) * np.float32(scale))
    product = int(mantissa * 2.0**24)
    for precision in (8, 11):
        if (number / (number & -number)).is_integer() and (number // (number & -number)) < 1 << precision:
            assert scale in candidates(product, precision)


@given(seed=seeds)
@settings(max_examples=20, deadline=None)
def test_of_other_values_none_is_found_or_none_is_believed(seed: int) -> None:
    values = torch.randn(500, generator=torch.Generator().manual_seed(seed)).numpy()
    found = scale_of(values)
    assert found is None or not kernels.are_scaled(*addressed(values), found.value, found.fp16)[0]


@pytest.mark.parametrize("values", [[], [0.0, -0.0], [1e-45, -1e-40], [np.inf, np.nan]])
def test_what_has_no_normal_number_has_no_scale(values: list[float]) -> None:
    assert scale_of(np.array(values, np.float32)) is None


def test_a_job_in_fp32_is_asked_seldom() -> None:
    search, asked = Scales(), 0
    values = torch.randn(1000).numpy()
    right = products(1, torch.bfloat16, 0.3).numpy()
    for _ in range(200):
        waiting = search._wait
        assert search.find(*addressed(values)) is None
        asked += not waiting
    assert 200 // (WAIT_MAX + 1) <= asked <= 200 // (WAIT_MAX + 1) + 6
    while search._wait:
        assert search.find(*addressed(right)) is None
    assert search.find(*addressed(right)) is not None
    assert search.find(*addressed(values)) is None
    assert search.find(*addressed(right)) is not None, "who had one lately is asked at once"


# What is believed


@pytest.mark.parametrize("by", ["reference", "numba"])
@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
@settings(max_examples=40, deadline=None)
@given(scale=scales, seed=seeds, at=st.integers(0, 4999), change=st.integers(1, 2**32 - 1))
def test_it_is_believed_only_if_each_value_comes_back(
    by: str, dtype: type, scale: float, seed: int, at: int, change: int
) -> None:
    """Any one value is changed in any bits: all forms of the kernel see it, unless it is a product, too."""
    kind = torch.float16 if dtype is np.float16 else torch.bfloat16
    values = products(seed, kind, scale, (5000,)).numpy()
    before = np.zeros(5000, dtype)
    assert kernels.narrow_scaled_into.by(by)(values, scale, before)
    assert kernels.widen_scaled.by(by)(before, scale).tobytes() == values.tobytes()
    values.view(np.uint32)[at] ^= np.uint32(change)
    out = np.zeros(5000, dtype)
    claimed = kernels.narrow_scaled_into.by(by)(values, scale, out)
    assert claimed == bool(kernels.are_scaled.by(by)(*addressed(values), scale, dtype is np.float16)[0])
    comes_back = kernels.widen_scaled.by(by)(out, scale)[at].tobytes() == values[at].tobytes()
    assert comes_back if claimed else (not comes_back or not abs(values[at]) >= 2.0**-126)
    others = np.arange(5000) != at
    assert out[others].tobytes() == before[others].tobytes()


@pytest.mark.parametrize("by", ["reference", "numba"])
@pytest.mark.parametrize("value", [1e-40, -1e-45, np.inf, -np.inf, np.nan])
def test_what_a_processor_may_flush_is_not_believed(by: str, value: float) -> None:
    for dtype in (np.float16, np.uint16):
        out = np.ones(1, dtype)
        assert not kernels.narrow_scaled_into.by(by)(np.array([value], np.float32), 0.5, out)
        assert out.view(np.uint16)[0] == 0
    small = np.array([2.0**-126 * 1.5], np.float32)  # half of it is subnormal in bf16
    assert not kernels.narrow_scaled_into.by(by)(small, 2.0, np.zeros(1, np.uint16))
    assert kernels.narrow_scaled_into.by(by)(small, 1.0, np.zeros(1, np.uint16))


@pytest.mark.parametrize("scale", [0.0, -0.5, np.nan, np.inf, 2.0**97, 2.0**-97, 0.1])
def test_a_scale_is_a_number_of_fp32_whose_inverse_is_normal(scale: float) -> None:
    for by in ("reference", "numba"):
        with pytest.raises(ValueError, match="a scale is"):
            kernels.narrow_scaled_into.by(by)(np.ones(1, np.float32), scale, np.zeros(1, np.uint16))
        with pytest.raises(ValueError, match="a scale is"):
            kernels.widen_scaled.by(by)(np.zeros(1, np.uint16), scale)


# In a record


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for index, shape in enumerate(SHAPES):
            self.register_parameter(f"p{index}", torch.nn.Parameter(torch.zeros(shape)))


def stream_of() -> DifferentialStream:
    model = Model()
    return DifferentialStream(ModuleProvider(model, torch.optim.SGD(model.parameters(), lr=0.1)), "exact", 1)


def record(stream: DifferentialStream, version: int, *calls: dict[str, torch.Tensor]) -> bytes:
    memory = bytearray(b"\xa5") * stream.nbytes_unexpected
    capture = stream.begin(ShardKey.differential(1, version, version, 0), memoryview(memory))
    for each in calls:
        capture.add(each)
    return bytes(memory[: capture.finish(skipped=False)])


def dtypes_in(content: bytes) -> dict[str, str]:
    return {spec.name.rpartition("/")[2]: spec.dtype for spec in parse(content).specs}


@pytest.mark.parametrize("few", [256, 0], ids=["NumPy", "Numba"])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_record_holds_the_numbers_and_reads_as_the_products(
    dtype: torch.dtype, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered, "FEW", few)
    stream = stream_of()
    for version, scale in enumerate((0.3, 0.3, 2.0**-10 / 3, 0.77), start=1):
        gradients = {f"p{index}": products(version + index, dtype, scale, each) for index, each in enumerate(SHAPES)}
        if version == 4:
            gradients["p4"].view(-1)[77] = float(np.nextafter(np.float32(0.7), np.float32(1)))
        content = record(stream, version, gradients)
        (read,) = read_differentials(parse(content), tier="memory://")
        for name, gradient in gradients.items():
            assert same_bits(read.gradient(name), gradient), name
        assert read.fidelity is Fidelity.EXACT
        stored = dtypes_in(content)
        assert stored["p0"] == stored["p1"] == KINDS[dtype]
        assert stored["p4"] == ("F32" if version == 4 else KINDS[dtype])
        assert stored["p3"] == "F32", "nothing is stored as it is"


def test_what_comes_in_later_calls_has_the_scale_of_the_first() -> None:
    stream = stream_of()
    gradients = {f"p{index}": products(index, torch.bfloat16, 0.3, shape) for index, shape in enumerate(SHAPES)}
    gradients["p5"] = torch.randn(5, 3)
    first = {name: gradients.pop(name) for name in ("p0", "p1")}
    content = record(stream, 1, first, gradients)
    stored = dtypes_in(content)
    assert (stored["p0"], stored["p4"], stored["p5"]) == ("BF16", "BF16", "F32")
    (read,) = read_differentials(parse(content), tier="memory://")
    for name, gradient in {**first, **gradients}.items():
        assert same_bits(read.gradient(name), gradient), name


def test_unscaled_gradients_keep_no_scale() -> None:
    stream = stream_of()
    gradients = {f"p{index}": numbers(index, torch.bfloat16, shape).float() for index, shape in enumerate(SHAPES)}
    (read,) = read_differentials(parse(record(stream, 1, gradients)), tier="memory://")
    assert not any(encoding["scalars"] for encoding in read.encodings.values())


@pytest.mark.parametrize(
    ("dtype", "pattern", "why"),
    [
        ("F32", 0x3F000000, "BF16 or F16"),
        ("BF16", -1, "positive"),
        ("BF16", 2**31, "positive"),
        ("BF16", 0, "malformed"),
        ("F16", 0x7F800000, "malformed"),
        ("F16", 1, "malformed"),
    ],
)
def test_a_scale_that_nobody_writes_is_corrupt(dtype: str, pattern: int, why: str) -> None:
    part = Part("", dtype, (4,))
    description = Encoding("exact", "F32", (4,), ("",), {SCALE: pattern}).to_object()
    with pytest.raises(Corruption, match=why):
        decode(description, {"": Written(dtype, (4,), memoryview(bytes(part.nbytes)))})


def test_no_other_dtype_has_a_scale() -> None:
    description = Encoding("exact", "BF16", (4,), ("",), {SCALE: 0x3F000000}).to_object()
    with pytest.raises(Corruption, match="scalars"):
        decode(description, {"": Written("BF16", (4,), memoryview(bytes(8)))})
