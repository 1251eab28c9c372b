"""Memory for a record is what the gradients of the last one took; one that takes more goes on in longer memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercheck.errors import CapacityExceeded, SaveError
from tiercheck.format.container import parse
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.keys import ShardKey
from tiercheck.streams.records.differential import DifferentialStream

SIZES = (60_000, 1, 0, 90_000, 33, 70_000)
SPARE = 1 << 18
"""Beside its gradients a record needs less than this."""

Calls = Sequence[Mapping[str, torch.Tensor]]


class Expecting(ModuleProvider):
    """Of fp32 parameters whose gradients should be of ``dtype``."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        model = torch.nn.ParameterDict({f"p{index}": torch.zeros(size) for index, size in enumerate(SIZES)})
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self._dtype = dtype

    def gradient_dtypes(self) -> Mapping[str, torch.dtype]:
        return {} if self._dtype is None else dict.fromkeys(self.masters(), self._dtype)


def stream_of(dtype: torch.dtype | None = None, codec: str = "exact") -> DifferentialStream:
    return DifferentialStream(Expecting(dtype), codec, 1)


def gradients(wide: Sequence[int]) -> dict[str, torch.Tensor]:
    """Those of ``wide`` have values that bf16 does not hold."""
    values = {index: torch.linspace(-3, 5, size) for index, size in enumerate(SIZES)}
    return {f"p{index}": each if index in wide else each.bfloat16().float() for index, each in values.items()}


def record(stream: DifferentialStream, version: int, calls: Calls, *, ample: bool = False) -> tuple[bytes, int]:
    """The record as the recorder makes it, and how often it had to move."""
    memory = bytearray(b"\xa5") * (stream.nbytes_unexpected if ample else stream.nbytes_max)
    capture, moves = stream.begin(ShardKey.differential(1, version, version, 0), memoryview(memory)), 0
    for each in calls:
        try:
            capture.add(each)
        except CapacityExceeded:
            memory = bytearray(b"\x5a") * stream.nbytes_unexpected
            capture.move(memoryview(memory))
            capture.add(each)
            moves += 1
    return bytes(memory[: capture.finish(skipped=False)]), moves


def held(content: bytes) -> dict[str, tuple[str, str, bytes]]:
    """By name the dtype, the checksum and the bytes of each tensor, which were verified."""
    shard = parse(content)
    shard.verify()
    return {each.name: (each.dtype, str(each.checksum), bytes(each.data)) for each in shard.entries()}


def least(wide: Sequence[int]) -> int:
    return sum((4 if index in wide else 2) * size for index, size in enumerate(SIZES))


def test_before_the_first_gradient_the_provider_s_word_counts() -> None:
    everything = range(len(SIZES))
    assert least(()) < stream_of(torch.bfloat16).nbytes_max < least(()) + SPARE
    assert least(()) < stream_of(torch.bfloat16).nbytes_expected < least(()) + SPARE
    for unknown in (None, torch.float32, torch.float64, torch.int8):
        assert least(everything) < stream_of(unknown).nbytes_max < least(everything) + SPARE
    assert stream_of(torch.bfloat16).nbytes_unexpected == stream_of().nbytes_max == stream_of().nbytes_unexpected


@pytest.mark.parametrize("codec", ["exact+entropy", "int8"])
def test_other_codecs_plan_by_the_master(codec: str) -> None:
    stream = stream_of(torch.bfloat16, codec)
    before = stream.nbytes_max
    assert before == stream_of(None, codec).nbytes_max == stream.nbytes_unexpected
    record(stream, 1, [gradients(())])
    assert stream.nbytes_max == before


patterns = st.frozensets(st.integers(0, len(SIZES) - 1))


@settings(max_examples=30, deadline=None)
@given(
    expected=st.sampled_from([None, torch.bfloat16]),
    versions=st.lists(st.tuples(patterns, st.integers(0, len(SIZES)), st.booleans()), min_size=1, max_size=4),
)
def test_whatever_comes_is_recorded_and_then_reserved_for(
    expected: torch.dtype | None, versions: list[tuple[frozenset[int], int, bool]]
) -> None:
    stream, reference = stream_of(expected), stream_of()
    for version, (wide, split, one_by_one) in enumerate(versions, start=1):
        if one_by_one:
            stream.gathered = None
        found = list(gradients(sorted(wide)).items())
        calls = [dict(part) for part in (found[:split], found[split:]) if part]
        content, moves = record(stream, version, calls)
        assert held(content) == held(record(reference, version, calls, ample=True)[0])
        assert moves <= 1
        assert record(stream, version + 1, calls)[1] == 0, "the next reservation is right"
        assert least(sorted(wide)) < stream.nbytes_max < least(sorted(wide)) + SPARE


def test_a_gradient_that_did_not_come_is_expected_as_before() -> None:
    stream = stream_of(torch.bfloat16)
    record(stream, 1, [{"p0": gradients([0])["p0"]}])
    assert least([0]) < stream.nbytes_max < least([0]) + SPARE


def test_what_came_is_not_taken_twice_when_the_call_is_made_again() -> None:
    stream = stream_of(torch.bfloat16)
    stream.gathered = None
    capture = stream.begin(ShardKey.differential(1, 1, 1, 0), memoryview(bytearray(stream.nbytes_max)))
    with pytest.raises(CapacityExceeded):
        capture.add(gradients([0, 3, 5]))
    capture.move(memoryview(bytearray(stream.nbytes_unexpected)))
    capture.add(gradients([0, 3, 5]))
    with pytest.raises(SaveError, match="came twice"):
        capture.add({"p1": gradients([])["p1"]})


def test_a_shard_does_not_move_into_less_than_it_holds() -> None:
    stream = stream_of()
    capture = stream.begin(ShardKey.differential(1, 1, 1, 0), memoryview(bytearray(stream.nbytes_max)))
    capture.add(gradients([0]))
    with pytest.raises(CapacityExceeded, match="so far"):
        capture.move(memoryview(bytearray(1000)))
