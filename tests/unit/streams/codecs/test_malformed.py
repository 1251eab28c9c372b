"""Nothing that a shard says is believed before it was checked."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.encoding import Stored, encode, gradient
from tiercheck.errors import ConfigurationError, Corruption
from tiercheck.streams.codecs import decode, decode_sparse
from tiercheck.streams.codecs.sparse import EXPONENT_MAX

BLOCKS = ("int8", "nf4", "onebit")


def test_a_codec_of_another_version_is_not_called_corruption() -> None:
    encoding, parts = encode("exact", gradient(5), "F32")
    for read in (decode, decode_sparse):
        with pytest.raises(ConfigurationError, match=r"encoded by 'nf5'.*no codec 'nf5'.*an entry point 'nf5'"):
            read({**encoding.to_object(), "codec": "nf5"}, parts)


def test_things_that_are_no_description() -> None:
    things: list[object] = [None, 3, [], {}, "exact", {"codec": "exact"}]
    for read, value in itertools.product((decode, decode_sparse), things):
        with pytest.raises(Corruption):
            read(value, {})


class TestSparse:
    @pytest.mark.parametrize("name", ["sparse", "nonzero"])
    def test_indices_that_repeat_descend_or_leave_the_tensor(self, name: str) -> None:
        array = gradient(300)
        if name == "nonzero":
            array[3:] = 0
        encoding, parts = encode(name, array, "F32")
        assert parts["indices"].shape == (3,)
        for indices in ([1, 1, 2], [2, 1, 3], [0, 1, 300], [0, 1, 2**32 - 1], [2**32 - 1, 0, 1]):
            parts["indices"].data[:] = np.array(indices, np.uint32).tobytes()
            for read in (decode, decode_sparse):
                with pytest.raises(Corruption, match="ascend"):
                    read(encoding.to_object(), parts)

    @pytest.mark.parametrize(("name", "count"), [("sparse", 200), ("nonzero", 151)])
    def test_more_indices_than_the_codec_would_keep(self, name: str, count: int) -> None:
        encoding, stored = encode(name, np.where(np.arange(300) < 2, np.float32(1), np.float32(0)), "F32")
        parts = {
            "indices": Stored("U32", (count,), memoryview(np.arange(count, dtype=np.uint32).tobytes())),
            "values": Stored(stored["values"].dtype, (count,), memoryview(bytes(4 * count))),
        }
        with pytest.raises(Corruption, match="not of a tensor"):
            decode(encoding.to_object(), parts)

    @pytest.mark.parametrize("exponent", [10**9, -(10**9), EXPONENT_MAX + 1])
    def test_an_exponent_out_of_range(self, exponent: int) -> None:
        encoding, parts = encode("sparse", gradient(300), "F32")
        description = {**encoding.to_object(), "scalars": {"exponent": exponent, "nonfinite": 0}}
        with pytest.raises(Corruption, match="exponent"):
            decode(description, parts)

    @pytest.mark.parametrize("name", ["sparse", "nonzero"])
    def test_a_tensor_that_says_it_is_huge_allocates_nothing(self, name: str) -> None:
        encoding, parts = encode(name, np.zeros(300, np.float32), "F32")
        with pytest.raises(Corruption, match="32-bit"):
            decode({**encoding.to_object(), "shape": [2**33]}, parts)

    @pytest.mark.parametrize("name", ["sparse", "nonzero"])
    def test_a_chunked_tensor_that_no_memory_holds(self, name: str) -> None:
        encoding, parts = encode(name, np.zeros(300, np.float32), "F32")
        description = encoding.to_object()
        description["parts"].append("counts")
        description["scalars"]["chunk_elements"] = 2**32
        counts = Stored("U32", (2**16,), memoryview(bytes(4 * 2**16)))
        with pytest.raises(Corruption, match="no memory"):
            decode({**description, "shape": [2**48]}, {**parts, "counts": counts})


@pytest.mark.parametrize("name", BLOCKS)
def test_a_scale_that_is_none(name: str) -> None:
    encoding, parts = encode(name, gradient(300), "F32")
    scales = parts["scales"]
    for scale in (-1.0, float("inf"), -float("inf"), -float("nan")):
        stored = np.float32(scale).tobytes()
        scales.data[: scales.data.nbytes // scales.shape[0]] = stored[2:] if scales.dtype == "BF16" else stored
        with pytest.raises(Corruption, match="scale"):
            decode(encoding.to_object(), parts)


def test_int8_has_no_scale_that_is_nan() -> None:
    encoding, parts = encode("int8", gradient(300), "F32")
    parts["scales"].data[:4] = np.float32(np.nan).tobytes()
    with pytest.raises(Corruption, match="scale"):
        decode(encoding.to_object(), parts)
