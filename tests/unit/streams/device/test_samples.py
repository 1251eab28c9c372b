"""A few elements of tensors on a device: of any dtype, and wherever they lie."""

from __future__ import annotations

import pytest
import torch

from tests.reordering import Reordering
from tiercheck.streams.device.samples import Comparison, DeviceSamples

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int16, torch.uint8, torch.uint16, torch.bool, torch.complex64, torch.complex128),
]


def tensors_of(device: Reordering) -> dict[str, torch.Tensor]:
    found = {str(dtype): torch.zeros(67, dtype=dtype) for dtype in DTYPES}
    found |= {"none": torch.zeros(0), "one": torch.zeros(()), "turned": torch.zeros(5, 9).t()}
    found["many"] = torch.zeros(3, 1000)
    return {name: device.put(each) for name, each in found.items()}


def test_what_was_not_written_to_does_not_differ() -> None:
    device = Reordering(1)
    tensors = tensors_of(device)
    samples = DeviceSamples(list(tensors), list(tensors.values()), device)
    before, after = samples.take(device.current()), samples.take(device.current())
    assert Comparison(before, after).differing() == ()
    lengths = {name: len(taken) for name, taken in before.by_name().items()}
    assert lengths == {name: min(4, each.numel()) * each.element_size() for name, each in tensors.items()}


@pytest.mark.parametrize("name", [*map(str, DTYPES), "one", "turned", "many"])
def test_what_was_written_to_is_named(name: str) -> None:
    device = Reordering(2)
    tensors = tensors_of(device)
    samples = DeviceSamples(list(tensors), list(tensors.values()), device)
    before = samples.take(device.current())
    before.by_name()  # it has arrived
    tensors[name].view(-1 if tensors[name].is_contiguous() else tensors[name].shape).copy_(torch.ones(()))
    after = samples.take(device.current())
    assert Comparison(before, after).differing() == (name,)
    assert Comparison(before, after, known=[name]).differing() == ()
