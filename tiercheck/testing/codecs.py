"""The kit for codecs: what every codec is held to, by the same tests.

A codec's own test file names it::

    class TestMine(CodecTests):
        text = "mine?level=3"

The codec is made through its entry point, as a job makes it. Of a codec with options, certify one class for each text
that you promise. Needs pytest and Hypothesis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import tiercheck.testing.plugin  # noqa: F401  (registers the kit's assertions for rewriting)
from tiercheck.errors import ConfigurationError, Corruption
from tiercheck.format.container import (
    ShardMetadata,
    ShardWriter,
    TensorSpec,
    header_room,
    parse,
    shard_nbytes,
)
from tiercheck.kernels import Kernel
from tiercheck.keys import Stream
from tiercheck.streams.codecs import DTYPES, FLOATS, Codec, Encoding, codec, decode, decode_sparse, fidelity_of
from tiercheck.testing.contents import difference
from tiercheck.testing.gradients import (
    EDGES,
    Memory,
    Stored,
    as_stored,
    encoded,
    gradient,
    hold,
    raw,
    read,
    tensors,
)
from tiercheck.types import Fidelity

__all__ = ["CodecTests", "Memory", "Stored", "as_stored", "encoded", "gradient", "hold", "raw", "read"]

DESCRIPTION_NBYTES_MAX = 512
"""Room that is kept in a shard for what describes one tensor."""

UNITS = {"F32": (2.0**-23, 2.0**-149), "BF16": (2.0**-8, 2.0**-133), "F16": (2.0**-10, 2.0**-24)}
"""Of each float, a unit in the last place, relative; and the smallest denormal."""

LARGE = ((200_003,), (1, 70_001), (1_031, 1_033))

EXAMPLES = settings(max_examples=60, deadline=None)

WRONG_DESCRIPTIONS: tuple[dict[str, Any], ...] = (
    *({"dtype": dtype} for dtype in ("F12", "C128", ["F32"])),
    *({"shape": shape} for shape in ([-1], [True], [2**40, 2**40], [2**40], [1] * 100, "300")),
    *({"parts": parts} for parts in (["no such part"], None, [3])),
    *({"scalars": scalars} for scalars in ({"no such scalar": 1}, {"nonfinite": 1.5})),
    {"codec": 3},
    {"trained_on": 1},
    {"no such field": 1},
)
"""What a description of 300 floats may not say."""


class CodecTests:
    """The whole kit: subclass it, set :attr:`text`, name it ``Test...``."""

    text: str
    """The codec, with options if it has some: what a job's configuration says."""

    @property
    def codec(self) -> Codec:
        return codec(self.text)

    @property
    def exact(self) -> bool:
        return self.codec.fidelity is Fidelity.EXACT

    def floats(self) -> list[str]:
        return [dtype for dtype in FLOATS if dtype in self.codec.dtypes]

    def edges(self) -> Iterator[tuple[str, str, NDArray[Any]]]:
        for dtype in self.floats():
            for kind, values in EDGES.items():
                yield f"{kind} {dtype}", dtype, hold(values, dtype)

    def fresh(self, array: NDArray[Any], dtype: str) -> tuple[Any, dict[str, Stored]]:
        """The description, as a shard holds it, and the parts."""
        encoding, parts = encoded(self.codec, array, dtype)
        return as_stored(encoding), parts

    # its name and its options

    def test_its_text_makes_the_same_codec(self) -> None:
        made = self.codec
        assert codec(made.text) == made
        assert made.text.partition("?")[0] == made.name
        assert hash(made) == hash(codec(made.text)), "a codec is a frozen dataclass"

    def test_an_option_that_it_does_not_know_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="does not know the option 'no_such_option'"):
            codec(f"{self.codec.name}?no_such_option=1")

    def test_its_description_says_what_it_is_worth(self) -> None:
        for dtype in self.floats():
            encoding, _ = encoded(self.codec, hold(gradient(500), dtype), dtype)
            assert fidelity_of(as_stored(encoding)) is self.codec.fidelity
            assert fidelity_of(as_stored(replace(encoding, trained_on=True))) is Fidelity.EXACT
            unknown = {**encoding.to_object(), "codec": "no_such_codec", "trained_on": True}
            assert fidelity_of(unknown) is Fidelity.APPROXIMATE
            assert codec(encoding.codec).text == encoding.codec, "a description names a codec by its text"
            assert len(msgpack.packb(encoding.to_object())) <= DESCRIPTION_NBYTES_MAX

    # a round trip

    def comes_back(self, array: NDArray[Any], dtype: str, what: str) -> None:
        """In its dtype and shape, with the stated exactness; and the tensor was not written to."""
        before = raw(array)
        encoding, parts = encoded(self.codec, array, dtype)
        assert tuple(parts) == encoding.parts, what
        decoded = decode(as_stored(encoding), parts)
        assert (decoded.dtype, decoded.shape) == (array.dtype, array.shape), what
        off = difference(raw(array), before)
        assert not off, f"{what}: the tensor was written to: {off}"
        if self.exact:
            off = difference(raw(decoded), before)
            assert not off, f"{what}: {off}"
        elif encoding.codec != "exact":
            self.is_within_its_bound(encoding, array, decoded, dtype, what)

    def is_within_its_bound(
        self, encoding: Encoding, array: NDArray[Any], decoded: NDArray[Any], dtype: str, what: str
    ) -> None:
        values, found = (read(each, dtype).reshape(-1) for each in (array, decoded))
        finite = np.isfinite(values)
        with np.errstate(all="ignore"):
            bound = self.codec.bound(values)
            promised = ~finite & np.isfinite(bound)
            assert not np.any(np.isfinite(found[promised])), f"{what}: a value that is not finite came back finite"
            bound = bound[finite]
            error = np.abs(found[finite].astype(np.float64) - values[finite])
            # The value itself is rounded into the dtype: half a unit in the last place, a denormal's at least.
            ulp, least = UNITS[dtype]
            rounding = np.maximum((np.abs(values[finite].astype(np.float64)) + bound) * ulp, least)
        promised = np.isfinite(bound)
        overflows = np.abs(values[finite].astype(np.float64)) + bound > float(largest_of(dtype))
        off = promised & ~(error <= bound + rounding) & ~overflows
        assert not np.any(off), f"{what}: off by {error[off][:3]}, bound {bound[off][:3]}"
        nonfinite = encoding.scalars.get("nonfinite")
        if nonfinite is not None and not np.any(overflows):
            kept = int(np.count_nonzero(~np.isfinite(found)))
            assert nonfinite >= kept, f"{what}: {kept} values are not finite, and the description says {nonfinite}"

    def test_any_array_comes_back_in_its_dtype_and_shape(self) -> None:
        for what, dtype, array in self.edges():
            self.comes_back(array, dtype, what)

    def test_large_tensors_come_back(self) -> None:
        """As most of a model are: in several blocks, and in the parts that threads take."""
        for dtype in self.floats():
            for shape in LARGE:
                values = gradient(math.prod(shape))
                values[1000:3000] = 0
                self.comes_back(hold(values, dtype).reshape(shape), dtype, f"{shape} {dtype}")

    def test_any_bits_come_back(self) -> None:
        @EXAMPLES
        @given(tensors(), st.sampled_from(self.floats()))
        def check(values: NDArray[np.float32], dtype: str) -> None:
            self.comes_back(hold(values, dtype), dtype, "drawn")

        check()

    def test_every_dtype_comes_back_or_is_refused(self) -> None:
        for dtype in DTYPES:
            if dtype in FLOATS and dtype in self.codec.dtypes:
                continue
            array = (np.arange(48) % (2 if dtype == "BOOL" else 48)).astype(np.uint8).view(DTYPES[dtype])
            if dtype not in self.codec.dtypes:
                with pytest.raises(ConfigurationError, match=dtype):
                    self.codec.plan(dtype, array.shape)
                with pytest.raises(ConfigurationError, match=dtype):
                    self.codec.encode(array, dtype, seed=0, slot=Memory().slot)
                continue
            encoding, parts = encoded(self.codec, array, dtype)
            decoded = decode(as_stored(encoding), parts)
            assert raw(decoded) == raw(array), f"{dtype} is no float, and must come back as it is"
            assert self.codec.residual_size(dtype, array.shape) == 0

    def test_what_is_not_finite_is_reported_or_comes_back(self) -> None:
        values = np.linspace(-1, 1, 60_000, dtype=np.float32)
        bad = [0, 300, 59_999]
        values[bad] = np.nan, np.inf, -np.inf
        for dtype in self.floats():
            encoding, parts = encoded(self.codec, hold(values, dtype), dtype)
            found = read(decode(as_stored(encoding), parts), dtype)
            assert not np.any(np.isfinite(found[bad]))
            if not self.exact:
                assert encoding.scalars["nonfinite"] == np.count_nonzero(~np.isfinite(found)) >= len(bad)
            assert np.count_nonzero(~np.isfinite(found)) <= len(bad) * 256

    def test_stored_elements_are_those_of_the_dense_tensor(self) -> None:
        for dtype in self.floats():
            description, parts = self.fresh(hold(EDGES["sparse"], dtype), dtype)
            sparse = decode_sparse(description, parts)
            if sparse is None:
                continue
            values = np.zeros(EDGES["sparse"].size, np.float32)
            values[sparse.indices] = sparse.values
            assert sparse.indices.dtype == np.dtype(np.uint32)
            assert sparse.values.dtype == np.dtype(np.float32)
            assert not difference(raw(values), raw(read(decode(description, parts), dtype)))

    # the room it takes

    def test_it_takes_no_more_room_than_planned(self) -> None:
        """In a real shard, whose memory was reserved for the plan and ends with it."""
        for what, dtype, array in self.edges():
            planned = self.codec.plan(dtype, array.shape)
            specs = [TensorSpec(f"w#{part.suffix}", part.dtype, part.shape) for part in planned]
            memory = bytearray(shard_nbytes(specs))
            writer = ShardWriter(memoryview(memory), header_room(specs))
            size = self.codec.residual_size(dtype, array.shape)
            encoding = self.codec.encode(
                array,
                dtype,
                seed=1,
                slot=lambda suffix, kind, shape, into=writer: into.slot(f"w#{suffix}", kind, shape),  # type: ignore[misc]  # bound now
                residual=np.zeros(size, np.float32) if size else None,
            )
            nbytes = writer.finish(ShardMetadata(Stream.DIFFERENTIAL, 0, 1, 1, 0, 1))
            shard = parse(memoryview(memory)[:nbytes])
            decoded = decode(as_stored(encoding), {each: shard.entry(f"w#{each}") for each in encoding.parts})
            again, parts = encoded(self.codec, array, dtype)
            off = difference(raw(decoded), raw(decode(as_stored(again), parts)))
            assert not off, f"{what}: {off}"

    def test_a_plan_costs_no_memory(self) -> None:
        for dtype in self.floats():
            planned = sum(part.nbytes for part in self.codec.plan(dtype, (2**20, 2**12)))
            assert 0 < planned < 5 * 2**32

    # the same bytes, always

    def test_encoding_is_deterministic_and_knows_no_threads(self) -> None:
        for dtype in self.floats():
            array = hold(gradient(200_003), dtype)
            array[1000:3000] = 0
            results = []
            for threads in (1, 1, 2, 3):
                residual = gradient(200_003, 9) if self.codec.feedback else None
                encoding, parts = encoded(self.codec, array, dtype, residual=residual, threads=threads)
                content = {suffix: bytes(part.data) for suffix, part in parts.items()}
                decoded = raw(decode(encoding.to_object(), parts, threads=threads))
                results.append((encoding, content, decoded, None if residual is None else raw(residual)))
            assert all(each == results[0] for each in results), dtype

    def test_it_says_which_kernels_it_calls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """They are compiled before the first step; any other compiles while a step of training waits."""
        called: set[str] = set()
        call = Kernel.__call__

        def noted(kernel: Kernel[..., Any], *args: Any, **named: Any) -> Any:
            called.add(kernel.name)
            return call(kernel, *args, **named)

        monkeypatch.setattr(Kernel, "__call__", noted)
        bits = np.random.default_rng(0).integers(0, 2**32, 3000, dtype=np.uint32).view(np.float32)
        anything = [(dtype, hold(np.nan_to_num(bits), dtype)) for dtype in self.floats()]
        for dtype, array in [*anything, *((dtype, array) for _, dtype, array in self.edges())]:
            for residual in (None, np.zeros(array.size, np.float32)) if self.codec.feedback else (None,):
                encoding, parts = encoded(self.codec, array, dtype, residual=residual)
                decode(as_stored(encoding), parts)
                decode_sparse(as_stored(encoding), parts)
        assert called <= {kernel.name for kernel in self.codec.kernels_used()}

    def test_threads_may_share_one(self) -> None:
        arrays = [gradient(30_000, seed) for seed in range(4)]

        def work(array: NDArray[np.float32]) -> bytes:
            made = [self.fresh(hold(array, dtype), dtype) for dtype in self.floats()]
            return b"".join(raw(decode(*each)) for each in made)

        with ThreadPoolExecutor(4) as pool:
            for found, expected in zip(pool.map(work, arrays * 3), [work(array) for array in arrays] * 3, strict=True):
                assert not difference(found, expected)

    def test_what_may_only_be_read_is_read_and_what_is_not_aligned_too(self) -> None:
        for dtype in self.floats():
            array = hold(gradient(2000), dtype)
            description, parts = self.fresh(array, dtype)
            expected = raw(decode(description, parts))
            array.flags.writeable = False
            shifted = np.frombuffer(b"x" + array.tobytes(), np.uint8)[1:].view(array.dtype)
            for given_array in (array, shifted):
                again, stored = self.fresh(given_array, dtype)
                locked = {key: replace(part, data=memoryview(bytes(part.data))) for key, part in stored.items()}
                moved = {key: replace(part, data=memoryview(b"x" + part.data)[1:]) for key, part in stored.items()}
                assert not difference(raw(decode(again, locked)), expected)
                found = decode(again, moved)
                assert found.flags.aligned
                assert not difference(raw(found), expected)

    # what is refused

    def test_what_it_cannot_encode_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="F12"):
            self.codec.plan("F12", (3,))
        if "BF16" in self.codec.dtypes:
            with pytest.raises(ValueError, match="uint16, not float32"):
                encoded(self.codec, gradient(4), "BF16")

    def test_memory_of_another_size_is_refused(self) -> None:
        for dtype in self.floats():
            with pytest.raises(ValueError, match="memory"):
                self.codec.encode(
                    hold(gradient(4), dtype), dtype, seed=0, slot=lambda *_: memoryview(bytearray(3)), residual=None
                )

    # damage: Corruption, or values within the format

    def is_refused_or_decodes(self, description: Any, parts: dict[str, Stored], array: NDArray[Any] | None) -> None:
        try:
            decoded, sparse = decode(description, parts), decode_sparse(description, parts)
        except Corruption:
            return
        except ConfigurationError as error:
            assert "was encoded by" in str(error)
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

    def test_every_byte_of_every_part_may_be_another_one(self) -> None:
        for dtype in self.floats():
            for kind in ("odd", "sparse"):
                array = hold(EDGES[kind][:700], dtype)
                description, parts = self.fresh(array, dtype)
                for part in parts.values():
                    for position in range(len(part.data)):
                        before = part.data[position]
                        for flipped in (0x01, 0x80, 0xFF) if dtype == "F32" else (0xFF,):
                            part.data[position] = before ^ flipped
                            self.is_refused_or_decodes(description, parts, array)
                        part.data[position] = before

    def test_every_byte_of_the_description_may_be_another_one(self) -> None:
        dtype = self.floats()[0]
        encoding, parts = encoded(self.codec, hold(EDGES["sparse"], dtype), dtype)
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

    def test_every_length_of_every_part_but_its_own_is_refused(self) -> None:
        for dtype in self.floats():
            description, parts = self.fresh(hold(EDGES["odd"], dtype), dtype)
            for suffix, part in parts.items():
                for length in range(len(part.data)):
                    with pytest.raises(Corruption):
                        decode(description, {**parts, suffix: replace(part, data=part.data[:length])})
                longer = replace(part, data=memoryview(bytes(part.data) + b"\0"))
                with pytest.raises(Corruption):
                    decode(description, {**parts, suffix: longer})

    def test_parts_that_are_missing_unknown_or_of_another_kind_are_refused(self) -> None:
        dtype = self.floats()[0]
        description, parts = self.fresh(hold(EDGES["odd"], dtype), dtype)
        for suffix, part in parts.items():
            others = {key: value for key, value in parts.items() if key != suffix}
            for broken in (
                others,
                {**parts, "no such part": part},
                *({**others, suffix: replace(part, dtype=wrong)} for wrong in ("U64", "F12")),
                *(
                    {**others, suffix: replace(part, shape=shape)}
                    for shape in ((part.shape[0] + 1,), (2**60,), (), (*part.shape, 1))
                ),
            ):
                with pytest.raises(Corruption):
                    decode(description, broken)

    def test_a_description_of_another_tensor_is_refused(self) -> None:
        dtype = self.floats()[0]
        description, parts = self.fresh(hold(EDGES["sparse"][:300], dtype), dtype)
        for change in WRONG_DESCRIPTIONS:
            for reader in (decode,) if decode_sparse(description, parts) is None else (decode, decode_sparse):
                try:
                    reader({**description, **change}, parts)
                except Corruption:
                    continue
                pytest.fail(f"{reader.__name__} takes a description with {change}")

    # error feedback

    def test_it_takes_a_residual_if_it_says_so(self) -> None:
        if not self.codec.feedback:
            with pytest.raises(ConfigurationError, match="no error feedback"):
                codec(f"{self.codec.name}+feedback")
            dtype = self.floats()[0]
            with pytest.raises(ValueError, match="residual"):
                encoded(self.codec, hold(gradient(4), dtype), dtype, residual=np.zeros(4, np.float32))
            return
        name, question, options = self.text.partition("?")
        fed = codec(f"{name}+feedback{question}{options}")
        assert (fed.residual_size("F32", (3, 5)), self.codec.residual_size("F32", (3, 5))) == (15, 0)
        assert fed.plan("F32", (3, 5)) == self.codec.plan("F32", (3, 5))
        with pytest.raises(ValueError, match="needs a residual"):
            fed.encode(gradient(4), "F32", seed=0, slot=Memory().slot)
        encoding, parts = encoded(fed, gradient(4), "F32")
        assert not encoding.codec.partition("?")[0].endswith("+feedback"), "an encoding names the codec itself"
        with pytest.raises(Corruption, match="feedback"):
            decode({**encoding.to_object(), "codec": fed.text}, parts)
        locked = np.zeros(100, np.float32)
        locked.flags.writeable = False
        residuals: list[Any] = [np.zeros(99, np.float32), np.zeros(100), np.zeros((10, 10), np.float32), locked]
        for wrong in residuals:
            with pytest.raises(ValueError, match="residual"):
                encoded(self.codec, gradient(100), "F32", residual=wrong)

    def lost_is_left(self, array: NDArray[Any], dtype: str, owed: NDArray[np.float32], what: str) -> None:
        """What is encoded is the sum, and the residual becomes what that loses."""
        residual = owed.copy()
        encoding, parts = encoded(self.codec, array, dtype, residual=residual)
        with np.errstate(all="ignore"):
            x = read(array, dtype).reshape(-1) + owed
            found = read(decode(as_stored(encoding), parts), dtype).reshape(-1)
            lost = np.where(np.isfinite(x - found), x - found, np.float32(0))
        assert np.all(np.isfinite(residual)), what
        if dtype == "F32":
            finite = np.isfinite(x) & np.isfinite(found)
            off = difference(raw(lost[finite]), raw(residual[finite]))
            assert not off, f"{what}: {off}"
        else:  # in two steps, each rounded: what the codec loses, and what its result loses in the tensor's dtype
            with np.errstate(all="ignore"):
                close = np.abs(lost - residual) <= np.abs(x) * 2.0**-22
            assert np.all(close | ~np.isfinite(x) | ~np.isfinite(found)), what

    def test_a_residual_becomes_what_was_lost(self) -> None:
        if not self.codec.feedback:
            return
        for what, dtype, array in self.edges():
            self.lost_is_left(array, dtype, gradient(array.size, 3) * np.float32(0.1), what)

    def test_any_residual_becomes_what_was_lost(self) -> None:
        @EXAMPLES
        @given(tensors(), st.integers(0, 2**32 - 1))
        def check(values: NDArray[np.float32], seed: int) -> None:
            self.lost_is_left(values, "F32", gradient(values.size, seed), "drawn")

        if self.codec.feedback:
            check()

    def test_nothing_is_lost_in_the_long_run(self) -> None:
        if not self.codec.feedback:
            return
        for dtype in self.floats():
            residual, given_sum, sent = np.zeros(3000, np.float32), np.zeros(3000), np.zeros(3000)
            for step in range(8):
                array = hold(gradient(3000, step), dtype)
                encoding, parts = encoded(self.codec, array, dtype, residual=residual)
                given_sum += read(array, dtype)
                sent += read(decode(as_stored(encoding), parts), dtype)
            most = 8 * 3e-8 * np.abs(given_sum).max()
            assert np.allclose(given_sum, sent + residual, rtol=0, atol=most), dtype


def largest_of(dtype: str) -> np.float32:
    """A little under the largest number, past which rounding may reach infinity."""
    return np.float32({"F32": 3.39e38, "BF16": 3.38e38, "F16": 65_000}[dtype])
