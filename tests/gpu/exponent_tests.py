"""What the CUDA kernels that pack exponents must do wherever they run.

A subclass gives the fixture ``machine``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.gpu.inputs import exponent_planes, identical
from tests.gpu.machine import Machine, need_cupy
from tiercheck.kernels.reference import exponents

need_cupy()

from tiercheck.kernels import cuda  # noqa: E402  it imports CuPy, which was just asked for

__all__ = ["CudaExponentTests"]


class CudaExponentTests:
    """Packed as by the reference, and unpacked from any bytes."""

    def test_exponents(self, machine: Machine) -> None:
        for size in machine.sizes:
            for plane in exponent_planes(size):
                self.pack_and_compare(machine, plane)

    def pack_and_compare(self, machine: Machine, plane: NDArray[np.uint8]) -> None:
        expected = np.full(exponents.packed_bytes_max(plane.size), 0xA5, np.uint8)
        packed, length = machine.put(expected), machine.put(np.full(1, 2**63 + 5, np.uint64))
        workspace = machine.put(np.full(cuda.exponents_workspace(plane.size), 2**63 + 5, np.uint64))
        nbytes = exponents.pack_exponents(plane, expected)
        cuda.pack_exponents(machine.put(plane), packed, length, workspace, stream=machine.stream)
        assert machine.get(length)[0] == nbytes
        assert identical(machine.get(packed), expected), "what lies behind the length included"
        for array in (packed, length, workspace):
            assert machine.intact(array)
        for again in (packed, machine.put(expected[:nbytes])):
            self.unpack_and_compare(machine, again, plane)

    def unpack_and_compare(self, machine: Machine, packed: Any, expected: NDArray[np.uint8]) -> None:
        out, stored = machine.put(np.full(expected.size, 0xA5, np.uint8)), machine.put(np.full(1, 99, np.uint32))
        workspace = machine.put(np.full(cuda.exponents_workspace(expected.size), 2**63 + 5, np.uint64))
        cuda.unpack_exponents(packed, out, stored, workspace, stream=machine.stream)
        assert machine.get(stored)[0] == np.count_nonzero(
            self.codes_in(machine.get(packed), expected.size) == exponents.STORED
        )
        assert identical(machine.get(out), expected)
        for array in (packed, out, stored, workspace):
            assert machine.intact(array)

    def codes_in(self, packed: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
        highest = exponents.blocks_of(size)
        behind = highest * (1 + exponents.CODE_BYTES)
        return exponents.unpacked_codes(packed[highest:behind].reshape(highest, exponents.CODE_BYTES))

    def test_any_bytes_unpack(self, machine: Machine) -> None:
        """Whatever is stored where there are more codes for it; what there is of it goes to the first of them."""
        generator = np.random.default_rng(6)
        for size in (1, 255, 2049, 5000):
            count = exponents.blocks_of(size)
            behind = count * (1 + exponents.CODE_BYTES)
            for room in (0, 1, 40 * count, 300 * count):
                packed = generator.integers(0, 256, behind + room, dtype=np.uint8)
                packed[behind // 2 : behind] |= generator.choice(np.array([0, 255], np.uint8), behind - behind // 2)
                codes = self.codes_in(packed, size)
                expected = (packed[:count, None] - codes).reshape(-1)
                places = np.flatnonzero(codes == exponents.STORED)[:room]
                expected[places] = packed[behind:][: places.size]
                self.unpack_and_compare(machine, machine.put(packed), expected[:size])
