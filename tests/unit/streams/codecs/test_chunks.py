"""Sparse tensors past what 32-bit indices reach: cut into chunks, indices counted from the chunk's start."""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Any

import numpy as np
import pytest

from tests.encoding import Stored, as_stored, encode, gradient, hold, raw, read, round_trip
from tiercheck import kernels
from tiercheck.errors import Corruption
from tiercheck.streams.codecs import FLOATS, codec, decode, decode_sparse, indices

CHUNK = 1000

MEMORY_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indices, "CHUNK_ELEMENTS", CHUNK)


def thin(size: int, every: int = 41) -> Any:
    return np.where(np.arange(size) % every == 7, gradient(size), np.float32(0))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", ["sparse", "nonzero"])
class TestChunks:
    @pytest.mark.parametrize(("dtype", "size"), [*zip(FLOATS, (CHUNK + 1, 2 * CHUNK, 5 * CHUNK + 7), strict=True)])
    def test_decode_to_what_one_chunk_decodes_to(
        self, name: str, dtype: str, size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        array = hold(thin(size), dtype)
        encoding, parts = encode(name, array, dtype)
        assert encoding.parts == ("indices", "values", "counts")
        assert encoding.scalars["chunk_elements"] == CHUNK
        assert np.frombuffer(parts["indices"].data, np.uint32).max() < CHUNK
        assert np.frombuffer(parts["counts"].data, np.uint32).sum() == parts["indices"].shape[0]
        monkeypatch.undo()  # whatever the limit is for who reads
        decoded, sparse = decode(as_stored(encoding), parts), decode_sparse(as_stored(encoding), parts)
        assert raw(decoded) == raw(round_trip(name, array, dtype))
        assert sparse is not None
        assert np.array_equal(sparse.indices, np.flatnonzero(read(decoded, dtype)))
        assert raw(sparse.values) == raw(read(decoded, dtype)[sparse.indices])

    def test_what_fits_one_is_stored_as_ever(self, name: str) -> None:
        for size in (1, CHUNK - 1, CHUNK):
            encoding, parts = encode(name, thin(size), "F32")
            assert set(parts) == {"indices", "values"}, size
            assert "chunk_elements" not in encoding.scalars, size
            assert [part.suffix for part in codec(name).plan("F32", (size,))] == ["indices", "values"], size

    def test_empty_chunks(self, name: str) -> None:
        array = np.zeros(3 * CHUNK, np.float32)
        array[[1, 2999]] = 1.0, 2.0
        encoding, parts = encode(name, array, "F32")
        assert np.frombuffer(parts["counts"].data, np.uint32).tolist() == [1, 0, 1]
        assert raw(decode(encoding.to_object(), parts)) == raw(array)

    def test_chunks_of_a_size_that_is_none(self, name: str) -> None:
        encoding, parts = encode(name, thin(3 * CHUNK), "F32")
        for elements in (0, -1, 3 * CHUNK, 2**33, CHUNK - 1):
            description = encoding.to_object()
            description["scalars"]["chunk_elements"] = elements
            with pytest.raises(Corruption):
                decode(description, parts)

    def test_counts_that_are_not_the_indices(self, name: str) -> None:
        encoding, parts = encode(name, thin(3 * CHUNK), "F32")
        for counts in ([0, 0, 0], [2**32 - 1, 1, 0], [74, 0, 0], [1, 2]):
            wrong = Stored("U32", (len(counts),), memoryview(np.array(counts, np.uint32).tobytes()))
            with pytest.raises(Corruption):
                decode(encoding.to_object(), {**parts, "counts": wrong})

    def test_every_byte_may_be_another_one(self, name: str) -> None:
        array = thin(3 * CHUNK + 5)
        encoding, parts = encode(name, array, "F32")
        for part in parts.values():
            for position in range(len(part.data)):
                part.data[position] ^= 0xFF
                with contextlib.suppress(Corruption):
                    assert decode(encoding.to_object(), parts).shape == array.shape
                part.data[position] ^= 0xFF


@pytest.mark.usefixtures("small_chunks")
class TestSparse:
    def test_ties_are_cut_over_the_chunks(self) -> None:
        array = np.full(50 * CHUNK, 0.5, np.float32)
        array[[5, 40_123]] = 1.0, 2.0
        residual = np.zeros(array.size, np.float32)
        encoding, parts = encode("sparse", array, "F32", residual=residual)
        decoded = decode(encoding.to_object(), parts)
        assert np.flatnonzero(decoded).tolist() == [*range(624), 40_123]
        assert np.array_equal(residual, array - decoded)

    def test_residuals_are_settled_in_their_chunks(self) -> None:
        array, residual = gradient(5 * CHUNK), gradient(5 * CHUNK, 4)
        x = array + residual
        encoding, parts = encode("sparse", array, "F32", residual=residual)
        assert raw(residual) == raw(x - decode(encoding.to_object(), parts))

    def test_past_32_bits_the_sample_is_taken_before_the_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels, "ELEMENTS_MAX", 150_000)
        monkeypatch.setattr(indices, "INDEXED_MAX", 150_000)
        array = gradient(200_000)
        encoding, parts = encode("sparse", array, "F32", residual=np.zeros(array.size, np.float32))
        assert 1_700 < parts["indices"].shape[0] < 2_300
        decoded = decode(encoding.to_object(), parts)
        kept = np.flatnonzero(decoded)
        assert np.abs(array[kept]).min() >= np.delete(np.abs(array), kept).max()
        assert decode_sparse(encoding.to_object(), parts) is None


@pytest.mark.skipif(MEMORY_BYTES < 8 << 30, reason="needs 4 GiB of address space that is as good as memory")
@pytest.mark.parametrize("name", ["sparse", "nonzero"])
def test_a_tensor_of_more_than_2_to_the_31_elements(name: str) -> None:
    """Mapped memory, of which only the pages written to take room."""
    pytest.importorskip("numba", reason="the kernels in NumPy take many bytes an element")
    size = 2**31 + 100_000
    with mmap.mmap(-1, 2 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        array = np.frombuffer(memory, np.uint16)
        written = [0, 2**31 - 1, 2**31, size - 1]
        array[written] = 0x3F80, 0xC000, 0x4040, 0xC080  # 1, -2, 3, -4
        encoding, parts = encode(name, array, "BF16")
        assert encoding.scalars["chunk_elements"] == 2**31
        assert np.frombuffer(parts["indices"].data, np.uint32).tolist() == [0, 2**31 - 1, 0, 99_999]
        assert np.frombuffer(parts["counts"].data, np.uint32).tolist() == [2, 2]
        sparse = decode_sparse(encoding.to_object(), parts)
        assert sparse is not None
        assert (sparse.indices.tolist(), sparse.values.tolist()) == (written, [1, -2, 3, -4])
        decoded = decode(encoding.to_object(), parts)
        assert decoded.shape == array.shape
        assert decoded[written].tolist() == array[written].tolist()
        assert not np.any(decoded[[1, 2**31 + 1, size - 2]])
        del array
