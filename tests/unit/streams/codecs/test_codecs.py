"""What holds of every codec: a new one in ``CODECS`` gets all of these tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.encoding import (
    APPROXIMATE,
    EXACT,
    FEEDBACK,
    Memory,
    Stored,
    as_stored,
    encode,
    gradient,
    hold,
    raw,
    read,
    residual_for,
    round_trip,
    supports,
)
from tiercheck.errors import ConfigurationError, Corruption
from tiercheck.format.container import ShardMetadata, ShardWriter, TensorSpec, header_room, parse, shard_nbytes
from tiercheck.keys import Stream
from tiercheck.streams.codecs import CODECS, DTYPES, FLOATS, Encoding, codec, decode, decode_sparse, fidelity_of
from tiercheck.types import Fidelity

SHAPES: dict[str, NDArray[np.float32]] = {
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.float32(-2.5).reshape(()),
    "one": np.array([1e-3], np.float32),
    "odd": gradient(257),
    "matrix": gradient(12 * 34).reshape(12, 34),
    "transposed": gradient(12 * 34).reshape(12, 34).T,
    "strided": gradient(1000)[::3],
    "reversed": gradient(100)[::-1],
    "constant": np.full(1000, 0.125, np.float32),
    "zero": np.zeros(1000, np.float32),
    "denormal": (np.arange(1, 500) * 2.0**-149).astype(np.float32),
    "sparse": np.where(np.arange(5000) % 97 == 3, gradient(5000), np.float32(0)),
    "negative zeros": np.where(np.arange(999) % 50 == 0, np.float32(-0.0), np.float32(0)),
    "huge": np.full(300, -3.4e38, np.float32),
}

NAMES = pytest.mark.parametrize("name", CODECS)
DTYPE = pytest.mark.parametrize("dtype", FLOATS)


@NAMES
class TestEveryCodec:
    @DTYPE
    @pytest.mark.parametrize("kind", SHAPES)
    def test_any_array_comes_back_in_its_dtype_and_shape(self, name: str, dtype: str, kind: str) -> None:
        array = hold(SHAPES[kind], dtype)
        before = raw(array)
        encoding, parts = encode(name, array, dtype)
        assert tuple(parts) == encoding.parts
        decoded = decode(as_stored(encoding), parts)
        assert (decoded.dtype, decoded.shape) == (array.dtype, array.shape)
        assert raw(array) == before, "the tensor was written to"
        if name in EXACT:
            assert raw(decoded) == before
        values = read(array, dtype)
        if np.all(np.isfinite(values)):
            largest = np.abs(values).max(initial=0).astype(np.float64)
            assert np.all(np.abs(read(decoded, dtype).astype(np.float64) - values) <= largest * (1 + 2.0**-8))

    @DTYPE
    @pytest.mark.parametrize("kind", SHAPES)
    def test_it_takes_no_more_room_than_planned(self, name: str, dtype: str, kind: str) -> None:
        """In a real shard, whose memory was reserved for the plan and ends with it."""
        array = hold(SHAPES[kind], dtype)
        plan = [TensorSpec(f"w#{part.suffix}", part.dtype, part.shape) for part in codec(name).plan(dtype, array.shape)]
        memory = bytearray(shard_nbytes(plan))
        writer = ShardWriter(memoryview(memory), header_room(plan))
        encoding = codec(name).encode(
            array,
            dtype,
            seed=1,
            slot=lambda suffix, kind, shape: writer.slot(f"w#{suffix}", kind, shape),
            residual=residual_for(name, array, dtype),
        )
        nbytes = writer.finish(ShardMetadata(Stream.DIFFERENTIAL, 0, 1, 1, 0, 1))
        shard = parse(memoryview(memory)[:nbytes])
        decoded = decode(as_stored(encoding), {suffix: shard.entry(f"w#{suffix}") for suffix in encoding.parts})
        assert raw(decoded) == raw(round_trip(name, array, dtype))

    def test_a_plan_costs_no_memory(self, name: str) -> None:
        planned = sum(part.nbytes for part in codec(name).plan("F32", (2**20, 2**12)))
        assert 0 < planned < 5 * 2**32

    @DTYPE
    def test_encoding_is_deterministic_and_knows_no_threads(self, name: str, dtype: str) -> None:
        array = hold(gradient(200_003), dtype)
        array[1000:3000] = 0
        residual = gradient(200_003, 9) if name in FEEDBACK else None
        results = []
        for threads in (1, 1, 2, 3):
            mine = None if residual is None else residual.copy()
            encoding, parts = encode(name, array, dtype, residual=mine, threads=threads)
            content = {suffix: bytes(part.data) for suffix, part in parts.items()}
            decoded = raw(decode(encoding.to_object(), parts, threads=threads))
            results.append((encoding, content, decoded, None if mine is None else raw(mine)))
        assert all(each == results[0] for each in results)

    @DTYPE
    def test_what_may_only_be_read_is_read(self, name: str, dtype: str) -> None:
        array = hold(gradient(2000), dtype)
        expected = raw(round_trip(name, array, dtype))
        array.flags.writeable = False
        encoding, parts = encode(name, array, dtype)
        locked = {suffix: replace(part, data=memoryview(bytes(part.data))) for suffix, part in parts.items()}
        assert raw(decode(encoding.to_object(), locked)) == expected

    @DTYPE
    def test_unaligned_arrays_and_parts_are_read(self, name: str, dtype: str) -> None:
        array = hold(gradient(300), dtype)
        shifted = np.frombuffer(b"x" + array.tobytes(), np.uint8)[1:].view(array.dtype)
        encoding, parts = encode(name, shifted, dtype)
        moved = {suffix: replace(part, data=memoryview(b"x" + bytes(part.data))[1:]) for suffix, part in parts.items()}
        decoded = decode(encoding.to_object(), moved)
        assert decoded.flags.aligned
        assert raw(decoded) == raw(round_trip(name, array, dtype))

    @DTYPE
    def test_what_is_not_finite_is_reported_or_comes_back(self, name: str, dtype: str) -> None:
        values = np.linspace(-1, 1, 60_000, dtype=np.float32)
        bad = [0, 300, 59_999]
        values[bad] = np.nan, np.inf, -np.inf
        encoding, parts = encode(name, hold(values, dtype), dtype)
        decoded = read(decode(encoding.to_object(), parts), dtype)
        assert not np.any(np.isfinite(decoded[bad]))
        if name not in EXACT:
            assert encoding.scalars["nonfinite"] == np.count_nonzero(~np.isfinite(decoded)) >= len(bad)
        assert np.count_nonzero(~np.isfinite(decoded)) <= len(bad) * 256

    def test_stored_elements_are_those_of_the_dense_tensor(self, name: str) -> None:
        for dtype in FLOATS:
            array = hold(SHAPES["sparse"], dtype)
            encoding, parts = encode(name, array, dtype)
            sparse = decode_sparse(as_stored(encoding), parts)
            assert (sparse is not None) == (encoding.codec in ("sparse", "nonzero"))
            if sparse is not None:
                values = np.zeros(array.size, np.float32)
                values[sparse.indices] = sparse.values
                assert (sparse.indices.dtype, sparse.values.dtype) == (np.uint32, np.float32)
                assert raw(values) == raw(read(decode(encoding.to_object(), parts), dtype))

    @pytest.mark.parametrize("dtype", [each for each in DTYPES if each not in FLOATS])
    def test_what_is_no_float_is_exact_or_refused(self, name: str, dtype: str) -> None:
        array = np.zeros(48, np.uint8).view(DTYPES[dtype])
        if supports(name, dtype):
            encoding, parts = encode(name, array, dtype)
            assert encoding.codec == "exact"
            assert raw(decode(encoding.to_object(), parts)) == raw(array)
            assert codec(name).residual_size(dtype, array.shape) == 0
        else:
            with pytest.raises(ConfigurationError, match=f"not '{dtype}'"):
                codec(name).encode(array, dtype, seed=0, slot=Memory().slot)

    def test_an_unknown_dtype_is_refused(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match="F12"):
            codec(name).plan("F12", (3,))

    def test_an_array_that_does_not_hold_the_dtype_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match="uint16, not float32"):
            encode(name, gradient(4), "BF16")

    def test_memory_of_another_size_is_refused(self, name: str) -> None:
        array = gradient(4)
        with pytest.raises(ValueError, match="writable memory"):
            codec(name).encode(
                array,
                "F32",
                seed=0,
                slot=lambda *_: memoryview(bytearray(3)),
                residual=residual_for(name, array, "F32"),
            )

    def test_its_name_is_the_one_it_is_known_by(self, name: str) -> None:
        assert CODECS[name].name == name

    def test_its_description_says_what_it_is_worth(self, name: str) -> None:
        encoding, _ = encode(name, gradient(500), "F32")
        assert fidelity_of(as_stored(encoding)) is CODECS[name].fidelity
        assert fidelity_of(as_stored(replace(encoding, trained_on=True))) is Fidelity.EXACT
        assert fidelity_of({**encoding.to_object(), "codec": "nf5", "trained_on": True}) is Fidelity.APPROXIMATE


@NAMES
class TestDamage:
    """Any byte may be another one: ``Corruption``, or values within the format."""

    @DTYPE
    @pytest.mark.parametrize("kind", ["odd", "sparse"])
    def test_every_byte_of_every_part(self, name: str, dtype: str, kind: str) -> None:
        array = hold(SHAPES[kind][:700], dtype)
        encoding, parts = encode(name, array, dtype)
        description = encoding.to_object()
        for part in parts.values():
            for position in range(len(part.data)):
                before = part.data[position]
                for flipped in (0x01, 0x80, 0xFF):
                    part.data[position] = before ^ flipped
                    self.is_refused_or_decodes(description, parts, array)
                part.data[position] = before

    def test_every_byte_of_the_description(self, name: str) -> None:
        array = SHAPES["sparse"]
        encoding, parts = encode(name, array, "F32")
        packed = bytearray(msgpack.packb(replace(encoding, trained_on=True).to_object()))
        for position in range(len(packed)):
            for flipped in (0x01, 0x02, 0x40, 0x80, 0xFF):
                packed[position] ^= flipped
                try:
                    description = msgpack.unpackb(packed, strict_map_key=False)
                except (ValueError, msgpack.exceptions.ExtraData, UnicodeDecodeError, TypeError):
                    description = None
                packed[position] ^= flipped
                if description is not None:
                    self.is_refused_or_decodes(description, parts, None)

    def test_every_length_of_every_part(self, name: str) -> None:
        array = SHAPES["odd"]
        encoding, parts = encode(name, array, "F32")
        for suffix, part in parts.items():
            for length in range(len(part.data)):
                cut = {**parts, suffix: replace(part, data=part.data[:length])}
                with pytest.raises(Corruption):
                    decode(encoding.to_object(), cut)
            longer = {**parts, suffix: replace(part, data=memoryview(bytes(part.data) + b"\0"))}
            with pytest.raises(Corruption):
                decode(encoding.to_object(), longer)

    @staticmethod
    def is_refused_or_decodes(description: Any, parts: dict[str, Stored], array: NDArray[Any] | None) -> None:
        try:
            decoded = decode(description, parts)
            sparse = decode_sparse(description, parts)
        except Corruption:
            return
        except ConfigurationError as error:
            assert "was encoded by" in str(error) and description["codec"] not in CODECS
            return
        if array is not None:
            assert (decoded.shape, decoded.dtype) == (array.shape, array.dtype)
        else:
            assert list(decoded.shape) == list(description["shape"])
            assert decoded.dtype == DTYPES[description["dtype"]]
        if sparse is not None:
            assert sparse.indices.size == sparse.values.size
            assert np.all(sparse.indices[1:] > sparse.indices[:-1])
            assert not sparse.indices.size or sparse.indices[-1] < decoded.size


@pytest.mark.parametrize("name", APPROXIMATE)
class TestResidual:
    """Error feedback: with each approximate codec under the name NAME+feedback, and where a residual is given."""

    def test_has_a_name(self, name: str) -> None:
        assert f"{name}+feedback" in FEEDBACK
        assert codec(f"{name}+feedback").residual_size("F32", (3, 5)) == 15
        assert codec(f"{name}+feedback").plan("F32", (3, 5)) == codec(name).plan("F32", (3, 5))
        assert codec(name).residual_size("F32", (3, 5)) == 0

    @DTYPE
    @pytest.mark.parametrize("kind", SHAPES)
    def test_is_what_was_lost(self, name: str, dtype: str, kind: str) -> None:
        array = hold(SHAPES[kind], dtype)
        owed = gradient(array.size, 3) * np.float32(0.1)
        residual = owed.copy()
        encoding, parts = encode(f"{name}+feedback", array, dtype, residual=residual)
        assert encoding.codec == codec(name).encode(array, dtype, seed=1, slot=Memory().slot).codec
        x = read(array, dtype).reshape(-1) + owed
        decoded = read(decode(encoding.to_object(), parts), dtype).reshape(-1)
        with np.errstate(invalid="ignore"):
            lost = np.where(np.isfinite(decoded), x - decoded, np.float32(0))
        if dtype == "F32":
            assert raw(lost) == raw(residual)
        else:  # in two steps, each rounded: what the codec loses, and what its result loses in the tensor's dtype
            assert np.all(np.abs(lost - residual) <= np.abs(x) * 2.0**-22)

    @DTYPE
    def test_nothing_is_lost_in_the_long_run(self, name: str, dtype: str) -> None:
        residual = np.zeros(3000, np.float32)
        given, sent = np.zeros(3000), np.zeros(3000)
        for step in range(8):
            array = hold(gradient(3000, step), dtype)
            encoding, parts = encode(f"{name}+feedback", array, dtype, residual=residual)
            given += read(array, dtype)
            sent += read(decode(encoding.to_object(), parts), dtype)
        assert np.allclose(given, sent + residual, rtol=0, atol=8 * 3e-8 * np.abs(given).max())

    def test_does_not_keep_what_is_not_finite(self, name: str) -> None:
        array = gradient(5000)
        array[::2] = np.nan
        array[1::4] = np.inf
        residual = np.zeros(5000, np.float32)
        encode(f"{name}+feedback", array, "F32", residual=residual)
        assert np.all(np.isfinite(residual))

    def test_of_another_size_or_kind_is_refused(self, name: str) -> None:
        array = gradient(100)
        locked = np.zeros(100, np.float32)
        locked.flags.writeable = False
        for wrong in (np.zeros(99, np.float32), np.zeros(100), np.zeros((10, 10), np.float32), locked):
            with pytest.raises(ValueError, match="residual"):
                encode(name, array, "F32", residual=wrong)

    def test_is_needed_where_the_name_says_so(self, name: str) -> None:
        with pytest.raises(ValueError, match="needs a residual"):
            codec(f"{name}+feedback").encode(gradient(4), "F32", seed=0, slot=Memory().slot)

    def test_no_tensor_says_it_was_encoded_with_feedback(self, name: str) -> None:
        encoding, parts = encode(name, gradient(5), "F32")
        with pytest.raises(Corruption, match="feedback"):
            decode({**encoding.to_object(), "codec": f"{name}+feedback"}, parts)


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_codec_takes_no_residual(name: str) -> None:
    with pytest.raises(ValueError, match="loses nothing"):
        encode(name, gradient(4), "F32", residual=np.zeros(4, np.float32))


class TestRegistry:
    def test_an_unknown_name_lists_the_names(self) -> None:
        with pytest.raises(ConfigurationError, match=r"choose one of exact, exact\+entropy, .*onebit"):
            codec("zip")

    @pytest.mark.parametrize(
        ("typed", "meant"), [("nf5", "nf4"), ("int-8", "int8"), ("sparse+feedbck", "sparse+feedback")]
    )
    def test_a_near_miss_is_told(self, typed: str, meant: str) -> None:
        with pytest.raises(ConfigurationError, match=f"did you mean '{meant}'".replace("+", r"\+")):
            codec(typed)

    def test_the_names(self) -> None:
        lossy = ["int8", "nf4", "onebit", "sparse", "adaptive"]
        assert EXACT == ["exact", "exact+entropy", "nonzero"]
        assert lossy == APPROXIMATE
        assert [f"{name}+feedback" for name in lossy] == FEEDBACK
        assert all(CODECS[name].fidelity is Fidelity.APPROXIMATE for name in APPROXIMATE + FEEDBACK)


class TestDescription:
    def test_trained_on_is_there_only_where_it_is_true(self) -> None:
        """What was written before there was such a thing is read as ever."""
        encoding, _ = encode("int8", gradient(5), "F32")
        assert "trained_on" not in encoding.to_object()
        assert Encoding.from_object(as_stored(encoding)) == encoding
        trained_on = replace(encoding, trained_on=True)
        assert Encoding.from_object(as_stored(trained_on)) == trained_on != encoding

    @pytest.mark.parametrize("value", [1, None, "yes"])
    def test_trained_on_is_true_or_false(self, value: object) -> None:
        encoding, _ = encode("int8", gradient(5), "F32")
        with pytest.raises(Corruption, match="trained on"):
            Encoding.from_object({**encoding.to_object(), "trained_on": value})
