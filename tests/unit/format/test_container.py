import dataclasses
import itertools
import math
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
import xxhash

from tests.unit.format.shards import KEY, METADATA, OBJECTS, TIER, entry, sample_entries, sample_file
from tiercheck.errors import CapacityExceeded, Corruption
from tiercheck.format.container import (
    ALIGNMENT,
    DTYPES,
    PackedObject,
    ShardWriter,
    TensorEntry,
    TensorSpec,
    checksum_of,
    header_length,
    header_room,
    parse,
    parse_header,
    payload,
    shard_nbytes,
)
from tiercheck.format.header import encode_header
from tiercheck.format.host_state import Unstorable, pack
from tiercheck.format.layout import ShardLayout
from tiercheck.format.recurring import Recurring
from tiercheck.keys import Stream


def parses(file):
    try:
        parse(file)
    except Corruption:
        return False
    return True


def write(entries, objects, *, metadata=METADATA, fill=0xFF):
    specs = [item.spec for item in entries]
    sizes = {name: len(pack(value)) for name, value in objects.items()}
    memory = bytearray([fill]) * shard_nbytes(specs, sizes, metadata.notes)
    writer = ShardWriter(memoryview(memory), header_room(specs, sizes, metadata.notes))
    slots = [(writer.slot(item.name, item.dtype, item.shape), item.data) for item in entries]
    for name, value in objects.items():
        writer.add_object(name, value)
    for slot, data in reversed(slots):
        slot[:] = data
    return bytes(memory[: writer.finish(metadata)])


def content(shard):
    tensors = [(item.name, item.dtype, item.shape, bytes(item.data), item.checksum) for item in shard.entries()]
    return shard.metadata, tensors, shard.objects


# What safetensors sees


def test_the_safetensors_library_opens_a_shard():
    for file in (sample_file(), write(sample_entries(), OBJECTS)):
        tensors = safetensors.torch.load(file)
        assert torch.equal(tensors["weight"], torch.arange(6, dtype=torch.float32).reshape(2, 3))
        assert tensors["scale"].dtype is torch.bfloat16 and tensors["scale"].item() == 1.0
        assert tensors["mask"].tolist() == [True, False, True]
        assert tensors["empty"].shape == (0, 3)
        assert torch.equal(torch.view_as_complex(tensors["phase"]), torch.tensor([1 + 2j, 3j], dtype=torch.complex128))
        others = set(tensors) - {"weight", "scale", "mask", "empty", "phase"}
        assert all(name.startswith(("__padding_", "__object__:")) for name in others)


def test_the_metadata_is_readable_by_anyone(tmp_path):
    path = tmp_path / "shard.safetensors"
    path.write_bytes(sample_file())
    with safetensors.safe_open(path, framework="pt") as file:
        strings = file.metadata()
    assert strings["format"] == "tiercheck/2" and strings["stream"] == "differential"
    assert (strings["generation"], strings["first"], strings["last"]) == ("2", "41", "45")
    assert (strings["rank"], strings["world_size"]) == ("1", "4")
    assert strings["note:codec"] == "exact" and strings["note:é"] == "naïve"
    assert strings["xxh3_64:scale"] == xxhash.xxh3_64_hexdigest(b"\x80\x3f")


def test_every_dtype_round_trips_and_opens_elsewhere():
    for dtype, shape in itertools.product(DTYPES, [(6,), (2, 3), (1, 6, 1)]):
        data = np.random.default_rng(0).bytes(DTYPES[dtype] * 6) if dtype != "BOOL" else bytes([0, 1] * 3)
        file = b"".join(payload(METADATA, [TensorEntry("x", dtype, shape, data)], {}))
        back = parse(file).entry("x")
        assert (back.dtype, back.shape, bytes(back.data)) == (dtype, shape, data)
        ((_, stored),) = safetensors.deserialize(file)
        assert bytes(stored["data"]) == data
        assert (stored["dtype"], stored["shape"]) == (("F64", [*shape, 2]) if dtype == "C128" else (dtype, list(shape)))


@pytest.mark.parametrize(
    ("dtype", "array_dtype"),
    [("F8_E4M3", ml_dtypes.float8_e4m3fn), ("F8_E5M2", ml_dtypes.float8_e5m2), ("BF16", ml_dtypes.bfloat16)],
)
def test_small_floats_read_back_as_torch_reads_them(dtype, array_dtype):
    values = np.array([0, 1, -2, 0.5], array_dtype)
    file = b"".join(payload(METADATA, [entry("x", values.view(np.uint8 if values.itemsize == 1 else "u2"), dtype)], {}))
    assert safetensors.torch.load(file)["x"].float().tolist() == [0, 1, -2, 0.5]
    assert np.frombuffer(parse(file).entry("x").data, array_dtype).tolist() == values.tolist()


def test_torch_and_numpy_memory_compare_equal_through_the_library():
    tensor = torch.randn(3, 5, dtype=torch.float64)
    file = b"".join(payload(METADATA, [TensorEntry("x", "F64", tensor.shape, tensor.numpy().data)], {}))
    np.testing.assert_array_equal(safetensors.numpy.load(file)["x"], tensor.numpy())


@pytest.mark.parametrize("half", [rb"\ud800", rb"\udc00", rb"a\ud800\u0041"])
def test_half_of_a_surrogate_pair_is_refused_as_other_readers_do(half):
    """Under a checksum that is right."""
    metadata = dataclasses.replace(METADATA, notes={"said": "\U00010000" + "." * (len(half) - 6)})
    file = b"".join(payload(metadata, [TensorEntry("x", "U8", (1,), b"1")], {}))
    whole = rb"\ud800\udc00" + b"." * (len(half) - 6)
    assert file.count(whole) == 1
    assert parse(file).metadata.notes["said"][0] == "\U00010000"
    forged = bytearray(file.replace(whole, half.ljust(len(whole), b".")))
    digest = forged.index(b'"xxh3_64":"') + 11
    forged[digest : digest + 16] = b"0" * 16
    length = 8 + int.from_bytes(forged[:8], "little")
    forged[digest : digest + 16] = xxhash.xxh3_64_hexdigest(bytes(forged[:length])).encode()
    with pytest.raises(Corruption, match="half of a surrogate pair"):
        parse(forged)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(bytes(forged))


def test_tensors_are_aligned_from_the_files_start():
    entries = [TensorEntry(f"t{size}", "U8", (size,), bytes([size]) * size) for size in (1, 63, 64, 65, 0, 7, 128)]
    for file in (b"".join(payload(METADATA, entries, OBJECTS)), write(entries, OBJECTS)):
        header = parse_header(file, len(file))
        assert header.nbytes % ALIGNMENT == 0
        ranges = header.ranges
        assert all(ranges[item.name].start % ALIGNMENT == 0 for item in entries if item.data)
        assert all(file[ranges[item.name].start : ranges[item.name].stop] == item.data for item in entries)
        safetensors.deserialize(file)


# Payload


def test_a_payload_hands_through_the_very_memory():
    arrays = [np.arange(1000, dtype="<f4"), np.arange(7, dtype="u1")]
    buffers = payload(METADATA, [entry("a", arrays[0], "F32"), entry("b", arrays[1], "U8")], {})
    for array in arrays:
        assert any(np.shares_memory(array, np.frombuffer(buffer, "u1")) for buffer in buffers)
    before = [bytes(buffer) for buffer in buffers]
    arrays[0][0] = 42
    assert [bytes(buffer) for buffer in buffers] != before


def test_a_payload_of_nothing_is_a_shard():
    file = b"".join(payload(METADATA, [], {}))
    assert content(parse(file)) == (METADATA, [], {})
    assert safetensors.deserialize(file) == []


def test_a_given_checksum_is_taken_on_trust():
    lie = dataclasses.replace(sample_entries()[0], checksum="0123456789abcdef")
    shard = parse(b"".join(payload(METADATA, [lie], {})))
    with pytest.raises(Corruption, match=r"'weight'.*0123456789abcdef"):
        shard.entry("weight")


def test_merging_keeps_checksums_and_so_detects_older_damage():
    file = bytearray(sample_file())
    location = parse_header(file, len(file)).ranges["weight"]
    file[location.start] ^= 1
    shard = parse(file)
    renamed = [dataclasses.replace(item, name=f"41/{item.name}") for item in shard.raw_entries()]
    objects = {f"41/{name}": packed for name, packed in shard.raw_objects().items()}
    merged = parse(b"".join(payload(METADATA, renamed, objects)), key=KEY, tier=TIER)
    assert merged.object("41/host") == OBJECTS["host"]
    assert bytes(merged.entry("41/mask").data) == b"\1\0\1"
    with pytest.raises(Corruption, match="41/weight"):
        merged.entry("41/weight")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorEntry("x", "F33", (1,), b"1234"), "unknown dtype"),
        (lambda: TensorEntry("x", "F32", (2,), b"1234"), "8 bytes"),
        (lambda: TensorEntry("x", "F32", (-1,), b""), "impossible shape"),
        (lambda: TensorEntry("x", "F32", (1,) * 65, b"1234"), "impossible shape"),
        (lambda: TensorEntry("x", "U8", (10**16,), b""), "bytes"),
        (lambda: TensorEntry("", "U8", (1,), b"1"), "name"),
        (lambda: TensorEntry("x" * 1025, "U8", (1,), b"1"), "name"),
        (lambda: TensorEntry("\ud800", "U8", (1,), b"1"), "Unicode"),
        (lambda: TensorEntry("__metadata__", "U8", (1,), b"1"), "belongs"),
        (lambda: TensorEntry("x", "U8", (5,), np.arange(10, dtype="u1")[::2].data), "contiguous"),
        (lambda: payload(METADATA, [TensorEntry("__padding_0__", "U8", (1,), b"1")], {}), "prefix"),
        (lambda: payload(METADATA, [TensorEntry("__object__:x", "U8", (1,), b"1")], {}), "prefix"),
        (lambda: payload(METADATA, [TensorEntry("x", "U8", (1,), b"1")] * 2, {}), "already"),
        (lambda: payload(METADATA, [TensorEntry("x", "U8", (1,), b"1", checksum="0" * 15)], {}), "checksum"),
        (lambda: payload(METADATA, [], {"x" * 1024: 1}), "name"),
        (lambda: dataclasses.replace(METADATA, rank=4), "world"),
        (lambda: dataclasses.replace(METADATA, first=46), "first <= last"),
        (lambda: dataclasses.replace(METADATA, stream=Stream.BASE), "one version"),
        (lambda: dataclasses.replace(METADATA, generation=-1), "generation"),
        (lambda: dataclasses.replace(METADATA, notes={"a": "b" * 5000}), "note"),
        (lambda: dataclasses.replace(METADATA, notes={str(i): "" for i in range(65)}), "notes"),
        (lambda: dataclasses.replace(METADATA, notes={"a": 1}), "note"),
    ],
)
def test_mistakes_of_the_writer_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_object_that_cannot_be_stored_is_named():
    with pytest.raises(Unstorable, match=r"host\.lr_lambdas\[0\] is a function"):
        payload(METADATA, [], {"host": {"lr_lambdas": [lambda epoch: epoch]}})


# The streaming writer


def test_the_writer_and_the_payload_say_the_same():
    assert content(parse(write(sample_entries(), OBJECTS))) == content(parse(sample_file()))


def test_nothing_parses_before_finish():
    file = sample_file()
    memory = bytearray(file + bytes(8192))  # a segment in reuse, with a whole shard in it
    specs = [item.spec for item in sample_entries()]
    writer = ShardWriter(memoryview(memory), header_room(specs, {"host": 0}, METADATA.notes))

    def refuses():
        for length in (len(file), writer.nbytes, len(memory)):
            with pytest.raises(Corruption):
                parse(memory[:length])
            with pytest.raises(safetensors.SafetensorError):
                safetensors.deserialize(bytes(memory[:length]))

    refuses()
    for item in sample_entries():
        writer.slot(item.name, item.dtype, item.shape)[:] = item.data
        refuses()
    writer.add_object("host", OBJECTS["host"])
    refuses()
    nbytes = writer.finish(METADATA)
    assert parse(memory[:nbytes]).object("host") == OBJECTS["host"]


def test_a_writer_killed_at_any_line_leaves_nothing_that_parses():
    """The memory as a kill at each line of the writer's code would leave it, in a segment that held a shard."""
    file = sample_file()
    memory = bytearray(file + bytes(8192))
    room = header_room([item.spec for item in sample_entries()], OBJECTS, METADATA.notes)
    snapshots = {}  # distinct, in order

    def trace(frame, event, _):
        if frame.f_globals["__name__"].startswith("tiercheck."):
            snapshots[bytes(memory)] = None
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        writer = ShardWriter(memoryview(memory), room)
        for item in sample_entries():
            writer.slot(item.name, item.dtype, item.shape)[:] = item.data
        for name, value in OBJECTS.items():
            writer.add_object(name, value)
        nbytes = writer.finish(METADATA)
    finally:
        sys.settrace(previous)
    before, *during, after = snapshots
    assert parses(before[: len(file)]) and parses(after[:nbytes])
    assert len(during) >= 7
    assert not any(parses(state[:length]) for state in during for length in (len(file), nbytes, len(state)))


def test_checksums_known_already_are_not_computed_again():
    memory = memoryview(bytearray(4096))
    writer = ShardWriter(memory, 1024)
    writer.slot("x", "U8", (5,))[:] = b"hello"
    with pytest.raises(ValueError, match="no tensor"):
        writer.finish(METADATA, checksums={"y": "0" * 16})
    with pytest.raises(ValueError, match="hexadecimal"):
        writer.finish(METADATA, checksums={"x": "0" * 17})
    shard = parse(memory[: writer.finish(METADATA, checksums={"x": "0" * 16})])
    with pytest.raises(Corruption, match="'x'"):
        shard.verify()


def test_a_finish_that_failed_can_be_repeated_with_other_bytes():
    memory = memoryview(bytearray(4096))
    writer = ShardWriter(memory, 1024)
    slot = writer.slot("x", "U8", (5,))
    with pytest.raises(ValueError, match="room has 1024"):
        writer.finish(dataclasses.replace(METADATA, notes={"long": "n" * 2000}))
    slot[:] = b"other"
    parse(memory[: writer.finish(METADATA)]).verify()


@pytest.mark.parametrize("left", [0, 1, 64, 8191])
def test_a_shard_that_is_to_fill_its_memory_does(left):
    entries = [entry("long", np.arange(20_000, dtype="<f4"), "F32"), *sample_entries()]
    plain = write(entries, OBJECTS)
    memory = memoryview(bytearray(b"\xff") * (len(plain) + left))
    writer = ShardWriter(memory, header_length(plain))
    for item in entries:
        writer.slot(item.name, item.dtype, item.shape)[:] = item.data
    for name, value in OBJECTS.items():
        writer.add_object(name, value)
    writer.fill()
    assert writer.finish(METADATA) == len(memory)
    shard = parse(memory)
    shard.verify()
    assert content(shard) == content(parse(plain))
    assert {"long", "weight"} < {name for name, _ in safetensors.deserialize(bytes(memory))}
    if left:
        memory[-1] ^= 1
        with pytest.raises(Corruption, match="not zeros"):
            parse(memory).verify()
    merged = b"".join(payload(METADATA, shard.entries(), shard.raw_objects()))
    assert len(merged) <= len(plain), "what fills a shard is nobody's"


def test_memory_that_is_much_longer_is_not_filled():
    memory = memoryview(bytearray(1 << 20))
    writer = ShardWriter(memory, 1024)
    writer.slot("x", "U8", (5,))[:] = b"hello"
    writer.fill()
    assert writer.finish(METADATA) == 1024 + 5


def test_nothing_comes_behind_what_fills_a_shard():
    layout = ShardLayout()
    layout.fill(100)
    spec = TensorSpec("x", "U8", (5,))
    layout.append(spec, layout.gap_before(spec))
    header = encode_header(METADATA, layout.with_checksums({"x": "0" * 16}))
    with pytest.raises(Corruption, match="behind what fills"):
        parse(header + bytes(105))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("known", [set(), {"long"}, {"long", "short", "none"}])
def test_threads_find_the_same_checksums(threads, known):
    entries = [entry("long", np.arange(3_000_000, dtype="<f4"), "F32"), entry("short", np.arange(3), "I64")]
    entries.append(TensorEntry("none", "F32", (0,), b""))
    memory = memoryview(bytearray(13 << 20))
    writer = ShardWriter(memory, 1024)
    for item in entries:
        writer.slot(item.name, item.dtype, item.shape)[:] = item.data
    checksums = {item.name: checksum_of(item.data) for item in entries if item.name in known}
    parse(memory[: writer.finish(METADATA, checksums=checksums, threads=threads)]).verify()


def test_tensors_that_recur_may_be_stored_as_another_dtype():
    """In each version's shard the header names the logical dtype by the version's name."""
    entries = [entry("0/phase", np.array([1 + 2j, 3j]), "C128"), entry("0/real", np.arange(3.0), "F64")]
    recurring = Recurring([item.spec for item in entries], 1)
    for stamp in "123":
        memory = memoryview(bytearray(4096))
        writer = ShardWriter(memory, 2048)
        place = writer.recurring(recurring, stamp)
        for item, start, stop in zip(entries, recurring.starts, recurring.stops, strict=True):
            place[start:stop] = item.data
        checksums = [int(checksum_of(item.data), 16) for item in entries]
        shard = parse(memory[: writer.finish(METADATA, recurring=checksums)])
        shard.verify()
        assert [(each.name, each.dtype, each.shape) for each in shard.specs] == [
            (f"{stamp}/phase", "C128", (2,)),
            (f"{stamp}/real", "F64", (3,)),
        ]


def test_a_finished_shard_takes_nothing_more():
    memory = memoryview(bytearray(4096))
    writer = ShardWriter(memory, 1024)
    file = bytes(memory[: writer.finish(METADATA)])
    for misuse in (
        lambda: writer.slot("y", "U8", (1,)),
        lambda: writer.recurring(Recurring([TensorSpec("0/y", "U8", (1,))], 1), "1"),
        lambda: writer.add_object("o", 1),
        lambda: writer.move(memoryview(bytearray(4096))),
        writer.fill,
        lambda: writer.finish(METADATA),
    ):
        with pytest.raises(ValueError, match="finished"):
            misuse()
    assert memory[: len(file)] == file


def test_a_full_reservation_is_refused_and_changes_nothing():
    memory = memoryview(bytearray(2048))
    writer = ShardWriter(memory, 1024)
    writer.slot("x", "U8", (1000,))
    with pytest.raises(CapacityExceeded, match="2048 are reserved"):
        writer.slot("y", "U8", (1,))
    with pytest.raises(CapacityExceeded, match="object"):
        writer.add_object("o", bytes(100))
    with pytest.raises(ValueError, match="already"):
        writer.slot("x", "U8", (1,))
    shard = parse(memory[: writer.finish(METADATA)])
    assert shard.names == ("x",) and shard.object_names == ()


@pytest.mark.parametrize(
    ("memory", "header"),
    [(memoryview(bytes(4096)), 1024), (memoryview(np.zeros(64)), 64), (memoryview(bytearray(99))[::3], 64)],
)
def test_memory_that_cannot_be_written_is_refused(memory, header):
    with pytest.raises(ValueError, match="writable contiguous"):
        ShardWriter(memory, header)


def test_a_header_room_out_of_step_is_refused():
    with pytest.raises(ValueError, match="multiple"):
        ShardWriter(memoryview(bytearray(4096)), 100)
    with pytest.raises(CapacityExceeded):
        ShardWriter(memoryview(bytearray(64)), 128)


def test_packed_objects_are_taken_as_they_are():
    packed = PackedObject(pack({"a": 1}))
    assert parse(b"".join(payload(METADATA, [], {"o": packed}))).object("o") == {"a": 1}
    memory = memoryview(bytearray(4096))
    writer = ShardWriter(memory, 1024)
    writer.add_object("o", packed)
    assert parse(memory[: writer.finish(METADATA)]).object("o") == {"a": 1}


# Reading


def test_tensors_are_views_of_the_file():
    file = bytearray(sample_file())
    shard = parse(file)
    view = shard.entry("weight").data
    assert np.shares_memory(np.frombuffer(view, "u1"), np.frombuffer(file, "u1"))
    assert shard.nbytes == len(file)
    assert "weight" in shard and "host" not in shard
    assert shard.specs[0] == TensorSpec("weight", "F32", (2, 3))
    for lookup in (lambda: shard.entry("__object__:host"), lambda: shard.object("weight")):
        with pytest.raises(KeyError):
            lookup()


def test_a_header_can_be_read_without_the_rest():
    file = sample_file()
    length = header_length(file[:8])
    header = parse_header(file[:length], len(file), key=KEY)
    assert header.metadata == METADATA
    assert header.file_nbytes == len(file)
    for bad in (b"", b"\0" * 8, b"\xff" * 8):
        with pytest.raises(Corruption, match=r"shm://test"):
            header_length(bad, tier=TIER)
    with pytest.raises(Corruption):
        parse_header(file[: length - 1], len(file))


def test_a_shard_under_the_wrong_key_is_refused():
    other = str(dataclasses.replace(METADATA, rank=2).key)
    with pytest.raises(Corruption, match=KEY):
        parse(sample_file(), key=other)
    parse(sample_file(), key="anything/else")


def test_a_large_header_is_read_in_full_and_stays_bounded():
    entries = [TensorEntry(f"layers.{index}.weight", "U8", (3,), b"abc") for index in range(1000)]
    file = write(entries, {})
    shard = parse(file)
    shard.verify()
    assert len(shard.names) == 1000
    room = header_room(item.spec for item in entries)
    assert room < 300 * len(entries) and math.gcd(room, ALIGNMENT) == ALIGNMENT
