"""The CUDA kernels' own sources on the host, thread by thread: the reference's bits, whatever order threads run in."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.machine import Machine, need_cupy

need_cupy()

# What follows imports CuPy, which was just asked for.
from tests.gpu.emulation import Emulator, OnDevice, compile_for_host, compile_text  # noqa: E402
from tests.gpu.inputs import exponent_planes, gradient, identical  # noqa: E402
from tests.gpu.kernel_tests import CudaKernelTests  # noqa: E402
from tiercheck.kernels.cuda import module  # noqa: E402
from tiercheck.streams.codecs import codec as codec_of  # noqa: E402
from tiercheck.streams.device.cuda import Cuda  # noqa: E402
from tiercheck.streams.gradients.compaction import sparse_codec  # noqa: E402
from tiercheck.streams.gradients.encoder import scratch  # noqa: E402
from tiercheck.streams.tensors.as_bytes import NAMES, array_of  # noqa: E402


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_for_host(tmp_path_factory.mktemp("kernels"))


class TestEmulatedKernels(CudaKernelTests):
    @pytest.fixture
    def machine(self, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Machine:
        emulator = Emulator(library)
        monkeypatch.setattr(module, "launch", emulator.launch)
        return emulator

    def test_compaction_does_not_depend_on_the_order_of_blocks(self, machine: Emulator) -> None:
        """More tiles than a look-back sees at once, under several schedules."""
        size = 37 * 4096 + 5
        values, residual = gradient(size), gradient(size, 1, special=False)
        for machine.resident, slack in ((1, 0), (2, -1), (5, 1), (40, 0)):
            self.compact_and_compare(machine, values, 0.05, residual, slack=slack)

    def test_exponents_do_not_depend_on_the_order_of_blocks(self, machine: Emulator) -> None:
        _, many, few, *_ = exponent_planes(37 * 2048 + 5)
        for machine.resident, plane in ((1, few), (5, many), (40, few)):
            self.pack_and_compare(machine, plane)

    def test_threshold_and_replay_do_not_depend_on_the_order_of_threads(self, machine: Emulator) -> None:
        for machine.seed in range(0, 30, 10):
            self.test_threshold(machine, 300, np.uint16, 0.5, True)
            self.test_more_steps_than_a_launch_takes(machine)


class Lent(Cuda):
    """Torch's tensors on the host, lent to kernels that run there."""

    def __init__(self, machine: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(0)
        monkeypatch.setattr(module, "launch", machine.launch)
        monkeypatch.setattr(module, "borrow", lambda tensor, stream: tensor.numpy().view(OnDevice))
        monkeypatch.setattr(Cuda, "_stream", lambda self: nullcontext())

    def memory(self, nbytes: int, purpose: str) -> torch.Tensor:
        return torch.full((nbytes,), 0xA5, dtype=torch.uint8)


@pytest.mark.parametrize("text", ["sparse?ratio=0.05", "sparse+feedback?ratio=0.05"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_a_device_stores_the_bits_of_the_codec_sparse(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, text: str, dtype: torch.dtype
) -> None:
    """Also of a tensor in which more elements are equally large than are stored."""
    device, codec = Lent(Emulator(library), monkeypatch), codec_of(text)
    sparse = sparse_codec(codec)
    assert sparse is not None
    workspace = device.workspace(70_001, sparse.capacity(70_001))
    few = torch.zeros(1500).index_fill_(0, torch.arange(0, 1500, 7), -0.25)
    for number, values in enumerate((torch.from_numpy(gradient(size)) for size in (1, 300, 5000, 70_001)), 1):
        for given in (values, few):
            tensor = given.to(dtype)
            size, kept = tensor.numel(), sparse.capacity(tensor.numel())
            places = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in (4 * kept, 2 * kept, 16)]
            start = gradient(size, seed=number, special=False)
            lost = torch.from_numpy(start.copy()) if codec is not sparse else None
            there = lost if lost is None else lost.clone()
            device.compact(tensor, sparse.ratio, number, *places, workspace, there)

            stored: dict[str, memoryview] = {}

            def slot(suffix: str, name: str, shape: tuple[int, ...], stored: Any = stored) -> memoryview:
                stored[suffix] = scratch(suffix, name, shape)
                return stored[suffix]

            residual = None if lost is None else lost.numpy()
            encoding = codec.encode(array_of(tensor), NAMES[dtype], seed=number, slot=slot, residual=residual)
            count, exponent, nonfinite, _ = places[2].view(torch.int32).tolist()
            assert {"exponent": exponent, "nonfinite": nonfinite} == encoding.scalars
            assert 4 * count == stored["indices"].nbytes
            assert bytes(places[0].numpy()[: 4 * count]) == bytes(stored["indices"])
            assert bytes(places[1].numpy()[: 2 * count]) == bytes(stored["values"])
            if lost is not None and there is not None:
                assert identical(there.numpy(), lost.numpy())


def test_guards_tell_a_write_beyond_the_end(library: ctypes.CDLL) -> None:
    machine = Emulator(library)
    array = machine.put(np.zeros(10, np.float32))
    assert machine.intact(array)
    ctypes.c_float.from_address(array.__array_interface__["data"][0] + 40).value = 1.0
    assert not machine.intact(array)


WAITING = """
extern "C" __global__ void wait_for_the_next(unsigned *words) {
    while (const_cast<volatile unsigned &>(words[blockIdx.x + 1]) == 0) __nanosleep(1);
    words[blockIdx.x] = 1;
}
ON_HOST(wait_for_the_next)
"""


def test_a_kernel_that_would_hang_fails(tmp_path: Path) -> None:
    """What the compaction relies on is not taken for granted: waiting for a block that has not started ends."""
    machine = Emulator(compile_text(WAITING, tmp_path))
    words = machine.put(np.array([0, 0, 1], np.uint32))
    function = machine.function("wait_for_the_next")
    machine.resident = 2
    assert machine.call(function, 2, 1, (words,)) == 0
    assert machine.get(words).tolist() == [1, 1, 1]
    words[:] = [0, 0, 0]
    assert machine.call(function, 2, 1, (words,)) == 1
