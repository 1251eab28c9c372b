import math
import struct
from collections import Counter, OrderedDict, deque

import msgpack
import numpy as np
import pytest
import safetensors
import xxhash
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tiercheck.errors import Corruption
from tiercheck.format.container import (
    ALIGNMENT,
    DTYPES,
    ShardMetadata,
    ShardWriter,
    TensorEntry,
    header_room,
    parse,
    parse_header,
    payload,
    shard_nbytes,
)
from tiercheck.format.host_state import pack, unpack
from tiercheck.keys import Stream

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(
    lambda name: not name.startswith("__")
)
notes = st.dictionaries(names, st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=3)
shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@st.composite
def metadatas(draw):
    stream = draw(st.sampled_from(Stream))
    first = draw(st.integers(0, 10**11))
    last = first if stream in (Stream.BASE, Stream.CONSTANT) else first + draw(st.integers(0, 10**11))
    world_size = draw(st.integers(1, 10**5))
    rank = draw(st.integers(0, world_size - 1))
    return ShardMetadata(stream, draw(st.integers(0, 10**6 - 1)), first, last, rank, world_size, draw(notes))


@st.composite
def tensors(draw):
    name, dtype, shape = draw(names), draw(st.sampled_from(sorted(DTYPES))), draw(shapes)
    nbytes = math.prod(shape) * DTYPES[dtype]
    data = np.random.default_rng(draw(st.integers(0, 2**32))).bytes(nbytes)
    return TensorEntry(name, dtype, shape, data)


entries = st.lists(tensors(), max_size=8, unique_by=lambda entry: entry.name)

keys = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(), st.complex_numbers()
).filter(lambda key: key == key)
keys = st.one_of(keys, st.tuples(keys, keys), st.frozensets(keys, max_size=3))
arrays = hnp.arrays(
    st.one_of(
        hnp.boolean_dtypes(),
        hnp.integer_dtypes(),
        hnp.unsigned_integer_dtypes(),
        hnp.floating_dtypes(sizes=(16, 32, 64)),
        hnp.complex_number_dtypes(sizes=(64, 128)),
        hnp.datetime64_dtypes(),
        hnp.timedelta64_dtypes(),
        hnp.unicode_string_dtypes(max_len=5),
        hnp.byte_string_dtypes(max_len=5),
    ),
    hnp.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=3),
)
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.complex_numbers(),
        st.text(),
        st.binary(),
        arrays,
        arrays.filter(lambda array: array.size).map(lambda array: array.flat[0]),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=4).map(lambda items: deque(items, maxlen=7)),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=4).map(Counter),
    ),
    max_leaves=15,
)


def same(one, other):
    """Equal in value, type and bits; shares no code with the codec."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float) and type(one) is float:
        return struct.pack("<d", one) == struct.pack("<d", other)
    if type(one) is complex:
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, np.str_ | np.bytes_):
        return one == other and len(one) == len(other)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype.str == other.dtype.str and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, deque):
        return one.maxlen == other.maxlen and same(list(one), list(other))
    if isinstance(one, set | frozenset):
        return len(one) == len(other) and all(any(same(item, candidate) for candidate in other) for item in one)
    return one == other


@given(values)
@settings(max_examples=300)
def test_objects_come_back_with_their_types_and_bits(value):
    assert same(unpack(pack(value)), value)


@given(values, st.data())
@settings(max_examples=200)
def test_damaged_objects_are_refused_or_are_objects(value, data):
    packed = bytearray(pack(value))
    position = data.draw(st.integers(0, len(packed) - 1))
    packed[position] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(position, len(packed)))
    try:
        found = unpack(packed[:cut])
    except Corruption:
        return
    assert same(unpack(pack(found)), found)


@given(st.binary(max_size=40))
@settings(max_examples=500)
@example(b"\xdd\x00\x00\x00\x01\xc0")
def test_the_bounds_checker_agrees_with_msgpack(data):
    """What msgpack alone can read is refused only for a reason of ours; what it cannot is refused."""
    assume(not any(0xC7 <= byte <= 0xC9 or 0xD4 <= byte <= 0xD8 for byte in data))
    try:
        expected = msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogatepass")
    except (ValueError, TypeError, msgpack.UnpackException):
        with pytest.raises(Corruption):
            unpack(data)
    else:
        try:
            found = unpack(data)
        except Corruption as error:
            assert "twice" in str(error)
        else:
            assert same(found, expected)


def content(shard):
    return shard.metadata, [(entry.spec, bytes(entry.data), entry.checksum) for entry in shard.entries()]


@given(metadatas(), entries, st.dictionaries(names, values, max_size=3))
@settings(max_examples=150)
def test_a_payload_reads_back_here_and_in_safetensors(metadata, entries, objects):
    file = b"".join(payload(metadata, entries, objects))
    shard = parse(file, key=str(metadata.key))
    shard.verify()
    assert shard.metadata == metadata and shard.names == tuple(entry.name for entry in entries)
    for entry in entries:
        back = shard.entry(entry.name)
        assert (back.dtype, back.shape, back.data) == (entry.dtype, entry.shape, entry.data)
    assert shard.object_names == tuple(objects)
    assert all(same(shard.object(name), value) for name, value in objects.items())
    elsewhere = dict(safetensors.deserialize(file))
    assert all(bytes(elsewhere[entry.name]["data"]) == entry.data for entry in entries)
    ranges = parse_header(file, len(file)).ranges
    assert all(ranges[entry.name].start % ALIGNMENT == 0 for entry in entries if len(entry.data))


@given(metadatas(), entries, st.dictionaries(names, values, max_size=3), st.data())
@settings(max_examples=150)
def test_the_writer_never_outgrows_its_reservation_and_agrees_with_the_payload(metadata, entries, objects, data):
    """Slots and objects in any order, filled in any order."""
    sizes = {name: len(pack(value)) + data.draw(st.integers(0, 99)) for name, value in objects.items()}
    specs = [entry.spec for entry in entries]
    memory = bytearray(b"\xff") * shard_nbytes(specs, sizes, metadata.notes)
    writer = ShardWriter(memoryview(memory), header_room(specs, sizes, metadata.notes))
    fills, expected = [], []
    for step in data.draw(st.permutations([*entries, *objects])):
        if isinstance(step, str):
            writer.add_object(step, objects[step])
            continue
        fills.append((writer.slot(step.name, step.dtype, step.shape), step.data))
        expected.append(step)
    for slot, filling in data.draw(st.permutations(fills)):
        slot[:] = filling
    file = bytes(memory[: writer.finish(metadata)])
    shard = parse(file)
    shard.verify()
    assert content(shard) == content(parse(b"".join(payload(metadata, expected))))
    assert all(same(shard.object(name), value) for name, value in objects.items())
    assert len(safetensors.deserialize(file)) >= len(entries) + len(objects)


@given(metadatas(), entries, st.data())
@settings(max_examples=200)
def test_any_damage_is_refused(metadata, entries, data):
    file = bytearray(b"".join(payload(metadata, entries, {"host": list(range(50))})))
    original = bytes(file)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(file) - 1))
        length = data.draw(st.integers(1, 40))
        operation = data.draw(st.sampled_from(["flip", "zero", "delete", "repeat"]))
        if operation == "flip":
            file[start] ^= data.draw(st.integers(1, 255))
        elif operation == "zero":
            file[start : start + length] = bytes(len(file[start : start + length]))
        elif operation == "delete":
            del file[start : start + length]
        else:
            file[start:start] = file[start : start + length]
        assume(file)
    assume(bytes(file) != original)
    with pytest.raises(Corruption):
        parse(file).verify()


@given(metadatas(), entries.filter(len), st.data())
@settings(max_examples=200)
def test_a_header_forged_at_random_is_refused_or_consistent(metadata, entries, data):
    """Edits under a recomputed checksum: whatever is accepted is in bounds and safetensors agrees with it."""
    file = b"".join(payload(metadata, entries))
    length = int.from_bytes(file[:8], "little")
    text = bytearray(file[8 : 8 + length])
    digest = text.index(b'"xxh3_64":"') + 11
    pieces = [b"0", b"9", b"-", b",", b"[", b"]", b"{", b"}", b'"', b"\\", b":", b" ", b"[]", b"null", b"1e9", b"U8"]
    for _ in range(data.draw(st.integers(1, 2))):
        position = data.draw(st.integers(digest + 16, len(text)))
        removed = data.draw(st.integers(0, 3))
        text[position : position + removed] = data.draw(st.sampled_from(pieces))
    forged = bytearray(len(text).to_bytes(8, "little") + text)
    forged[8 + digest : 24 + digest] = b"0" * 16
    forged[8 + digest : 24 + digest] = xxhash.xxh3_64_hexdigest(forged).encode()
    forged += file[8 + length :]
    try:
        shard = parse(forged)
    except Corruption:
        return
    elsewhere = dict(safetensors.deserialize(bytes(forged)))
    for entry in shard.raw_entries():
        assert len(entry.data) == entry.spec.nbytes == len(elsewhere[entry.name]["data"])
