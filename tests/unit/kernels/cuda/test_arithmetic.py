"""The CUDA kernels' own sources on the host, thread by thread: the reference's bits, whatever order threads run in."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from tests.gpu.machine import Machine, need_cupy

need_cupy()

# What follows imports CuPy, which was just asked for.
from tests.gpu.emulation import Emulator, compile_for_host, compile_text  # noqa: E402
from tests.gpu.inputs import exponent_planes, gradient  # noqa: E402
from tests.gpu.kernel_tests import CudaKernelTests  # noqa: E402
from tiercheck.kernels.cuda import module  # noqa: E402


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
