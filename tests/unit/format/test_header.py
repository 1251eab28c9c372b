import json
import tracemalloc

import pytest
import xxhash

from tiercheck.errors import Corruption
from tiercheck.format.container import ALIGNMENT, ShardMetadata, TensorEntry, checksum_of, parse, payload
from tiercheck.format.header import HEADER_NBYTES_MAX, HeaderTooLarge
from tiercheck.keys import Stream

METADATA = ShardMetadata(Stream.DIFFERENTIAL, 2, 41, 45, 1, 4, {"codec": "exact", "é": "naïve"})
KEY = str(METADATA.key)
TIER = "shm://test"


def forge(change, data=b""):
    """A file whose header is ``change``d and has a valid checksum nevertheless."""
    header = json.loads(json.dumps({"__metadata__": sample_strings()}))
    text = change(header)
    text = text if isinstance(text, bytes) else json.dumps(text, separators=(",", ":")).encode()
    file = bytearray(len(text).to_bytes(8, "little") + text)
    start = file.index(b'"xxh3_64":"') + 11
    file[start : start + 16] = b"0" * 16
    file[start : start + 16] = xxhash.xxh3_64_hexdigest(file).encode()
    return bytes(file) + data


def sample_strings():
    file = b"".join(payload(METADATA, [], {}))
    return json.loads(file[8:])["__metadata__"]


def with_tensors(**tensors):
    def change(header):
        for name, (dtype, shape, offsets) in tensors.items():
            header["__metadata__"]["xxh3_64:" + name] = checksum_of(b"")
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        return header

    return change


def with_logical(logical, *stored):
    def change(header):
        header["__metadata__"]["dtype:x"] = logical
        return with_tensors(x=stored)(header)

    return change


def raw_header(header, old, new):
    text = json.dumps(header, separators=(",", ":")).encode()
    assert old in text
    return text.replace(old, new)


X = {"x": ("U8", [4], [0, 4])}

HOSTILE = {
    "overlapping": (with_tensors(a=("U8", [4], [0, 4]), b=("U8", [4], [2, 6])), bytes(6)),
    "hole": (with_tensors(a=("U8", [4], [0, 4]), b=("U8", [4], [5, 9])), bytes(9)),
    "not from zero": (with_tensors(x=("U8", [4], [1, 5])), bytes(5)),
    "negative offset": (with_tensors(x=("U8", [4], [-4, 0])), b""),
    "reversed": (with_tensors(x=("U8", [4], [4, 0])), bytes(4)),
    "past the end": (with_tensors(x=("U8", [2**40], [0, 2**40])), b""),
    "shape overflow": (with_tensors(x=("F32", [2**62, 2**62, 0], [0, 0])), b""),
    "huge shape": (with_tensors(x=("F32", [2**62, 2**62], [0, 2**40])), b""),
    "20 digits": (with_tensors(x=("U8", [10**19], [0, 10**19])), b""),
    "negative dimension": (with_tensors(x=("U8", [-2, -2], [0, 4])), bytes(4)),
    "float dimension": (with_tensors(x=("U8", [4.0], [0, 4])), bytes(4)),
    "many dimensions": (with_tensors(x=("U8", [1] * 65, [0, 1])), bytes(1)),
    "wrong size": (with_tensors(x=("F32", [4], [0, 4])), bytes(4)),
    "unknown dtype": (with_tensors(x=("F31", [4], [0, 4])), bytes(4)),
    "logical dtype": (with_tensors(x=("C128", [1], [0, 16])), bytes(16)),
    "unknown logical dtype": (with_logical("F31", "F64", [1, 2], [0, 16]), bytes(16)),
    "logical dtype stored otherwise": (with_logical("C128", "F64", [1, 3], [0, 24]), bytes(24)),
    "three offsets": (with_tensors(x=("U8", [4], [0, 4, 4])), bytes(4)),
    "nested shape": (with_tensors(x=("U8", [[4]], [0, 4])), bytes(4)),
    "object of floats": (with_tensors(**{"__object__:o": ("F32", [1], [0, 4])}), bytes(4)),
    "padding with checksum": (with_tensors(**{"__padding_0__": ("U8", [4], [0, 4])}), bytes(4)),
    "empty name": (with_tensors(**{"": ("U8", [4], [0, 4])}), bytes(4)),
    "long name": (with_tensors(**{"n" * 1025: ("U8", [4], [0, 4])}), bytes(4)),
    "surrogate name": (with_tensors(**{"\ud800": ("U8", [4], [0, 4])}), bytes(4)),
    "deep nesting": (lambda header: raw_header(header, b"}}", b'},"x":' + b"[" * 10**6), b""),
    "deep objects": (lambda header: raw_header(header, b"}}", b'},"x":' + b'{"a":' * 10**6), b""),
    "many lists": (lambda header: raw_header(header, b"}}", b'},"x":[' + b"[]," * 10**6), b""),
    "long number": (lambda header: raw_header(header, b"}}", b'},"x":' + b"9" * 10**6), b""),
    "open string": (lambda header: raw_header(header, b"}}", b'},"' + b"\\\\" * 10**6), b""),
    "number in metadata": (lambda header: raw_header(header, b'"41"', b"41"), b""),
    "list in metadata": (lambda header: raw_header(header, b'"41"', b'["41"]'), b""),
    "bad number": (lambda header: raw_header(header, b'"41"', b'"4_1"'), b""),
    "unicode number": (lambda header: raw_header(header, b'"41"', b'"\\u0664\\u0661"'), b""),
    "negative version": (lambda header: raw_header(header, b'"41"', b'"-1"'), b""),
    "huge version": (lambda header: raw_header(header, b'"41"', b'"999999999999999999"'), b""),
    "no version": (lambda header: raw_header(header, b'"first":"41",', b""), b""),
    "bad stream": (lambda header: raw_header(header, b'"differential"', b'"other"'), b""),
    "rank outside": (lambda header: raw_header(header, b'"rank":"1"', b'"rank":"9"'), b""),
    "checksum of nothing": (lambda header: raw_header(header, b'"first"', b'"xxh3_64:x":"%016d","first"' % 0), b""),
    "dtype of nothing": (lambda header: raw_header(header, b'"first"', b'"dtype:x":"C128","first"'), b""),
    "string twice": (lambda header: raw_header(header, b'"first":"41",', b'"first":"41","first":"41",'), b""),
    "escaped twice": (lambda header: raw_header(header, b'"first":"41",', b'"first":"41","f\\u0069rst":"41",'), b""),
    "metadata twice": (lambda header: raw_header(header, b"}}", b'},"__metadata__":{}}'), b""),
    "not ASCII": (lambda header: raw_header(header, b'"exact"', '"é"'.encode()), b""),
    "control character": (lambda header: raw_header(header, b'"exact"', b'"\n"'), b""),
    "bad escape": (lambda header: raw_header(header, b'"exact"', b'"\\x00"'), b""),
    "trailing": (lambda header: raw_header(header, b"}}", b"}} x"), b""),
    "no end": (lambda header: raw_header(header, b"}}", b"}"), b""),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused_without_allocating(name):
    file = forge(*HOSTILE[name])
    tracemalloc.start()
    try:
        with pytest.raises(Corruption, match="no whole shard") as caught:
            parse(file, key=KEY, tier=TIER)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "checksum (" not in str(caught.value) and len(str(caught.value)) < 1000
    assert peak < 100_000 + 4 * len(file)


@pytest.mark.parametrize("field", [b'"color":"red",', b'"color:x":"red",'])
def test_what_a_later_release_adds_to_the_metadata_is_ignored(field):
    file = forge(lambda header: raw_header(header, b'"first"', field + b'"first"'), b"")
    assert parse(file, key=KEY, tier=TIER).metadata == METADATA


def test_as_many_tensors_are_read_as_are_written(monkeypatch):
    few = [TensorEntry(f"{number}", "U8", (ALIGNMENT,), bytes(ALIGNMENT)) for number in range(4)]
    file = b"".join(payload(METADATA, few, {}))
    monkeypatch.setattr("tiercheck.format.header.TENSORS_MAX", 3)
    with pytest.raises(HeaderTooLarge, match="at most 3 tensors, not 4"):
        payload(METADATA, few, {})
    with pytest.raises(Corruption, match="over 3 tensors"):
        parse(file)
    assert len(parse(b"".join(payload(METADATA, few[:3], {}))).names) == 3


def test_the_forger_can_forge():
    def tensor_twice(header):
        text = json.dumps(with_tensors(**X)(header), separators=(",", ":")).encode()
        return text[:-1] + text[text.index(b',"x":') :]

    shard = parse(forge(with_tensors(**X), bytes(4)))
    assert shard.names == ("x",) and shard.metadata == METADATA
    assert parse(forge(lambda header: header)).metadata == METADATA
    assert parse(forge(with_logical("C128", "F64", [1, 2], [0, 16]), bytes(16))).specs[0].dtype == "C128"
    with pytest.raises(Corruption, match="twice"):
        parse(forge(tensor_twice, bytes(4)))


def test_header_lengths_that_lie_are_refused():
    for length in (0, 1, HEADER_NBYTES_MAX, 2**40, 2**63, 2**64 - 1):
        file = length.to_bytes(8, "little") + b"".join(payload(METADATA, [], {}))[8:]
        with pytest.raises(Corruption, match="header"):
            parse(file)
