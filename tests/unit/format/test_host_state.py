import enum
import functools
import random
import struct
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import ml_dtypes
import msgpack
import numpy as np
import pytest
import torch

from tiercheck.errors import Corruption
from tiercheck.format import host_state
from tiercheck.format.host_state import (
    DEPTH_MAX,
    HOST_STATE,
    INTEGER_NBYTES_MAX,
    Extension,
    Limits,
    Unstorable,
    pack,
    unpack,
)

Point = namedtuple("Point", "x y")


class Metres(np.float64):
    pass


class Colour(enum.IntEnum):
    RED = 1


def nested(make, levels, core=0):
    for _ in range(levels):
        core = make(core)
    return core


VALUES = (
    None,
    True,
    0,
    -(2**63),
    2**63,
    2**64 - 1,
    2**64,
    -(2**63) - 1,
    3**1000,
    -(3**1000),
    "",
    "é\0\ud800",
    b"\0\xff",
    (),
    ((1,), [2], ({},)),
    {1: "a", "1": "b", None: 0, b"1": 1, 2.5: 2, (1, (2, "x")): 3, 1j: 4, frozenset({1}): 5},
    {True: 1},
    {10**2000: 1},
    {1, "a", None, (1, 2)},
    frozenset(),
    OrderedDict([("b", 1), ("a", 2)]),
    Counter("abca"),
    deque([1, 2], maxlen=5),
    deque([(1,)]),
    random.Random(3).getstate(),
    {"nested": [{"a": (1, {"b": [None, {2, 3}]})}]},
)


def test_python_values_come_back_with_their_types():
    for value in VALUES:
        back = unpack(pack(value))
        assert back == value
        assert type(back) is type(value)
        if isinstance(value, dict | tuple | set | list):
            assert set(map(type, back)) == set(map(type, value))
        assert pack(back) == pack(value)


def test_dictionaries_keep_their_order():
    assert list(unpack(pack({"z": 1, "a": 2, "m": 3}))) == ["z", "a", "m"]


def test_floats_come_back_bit_for_bit():
    for bits in (0x7FF8000000000000, 0xFFF8000000000123, 0x7FF0000000000001, 1 << 63, 0x7FF << 52, 1):
        value = struct.unpack("<d", struct.pack("<Q", bits))[0]
        assert struct.unpack("<Q", struct.pack("<d", unpack(pack(value))))[0] == bits
        both = unpack(pack(complex(value, value)))
        assert struct.pack("<dd", both.real, both.imag) == struct.pack("<Q", bits) * 2


@pytest.mark.parametrize(
    "dtype", ["?", "i1", "<i2", ">i4", "<u8", "<f2", "<f4", ">f8", "<c8", "<c16", "S5", "<U3", "<M8[ns]", "<m8[25s]"]
)
def test_arrays_come_back_with_dtype_shape_and_bits(dtype):
    for shape in [(), (0,), (3,), (2, 0, 3), (2, 3)]:
        array = (np.arange(int(np.prod(shape))) % 2).astype(dtype).reshape(shape)
        back = unpack(pack(array))
        assert type(back) is np.ndarray
        assert (back.dtype.str, back.shape, back.tobytes()) == (array.dtype.str, shape, array.tobytes())
        assert back.flags.writeable


def test_an_array_in_any_memory_order_keeps_its_values():
    array = np.arange(12).reshape(3, 4).T[::2]
    np.testing.assert_array_equal(unpack(pack(array)), array)


SCALARS = (
    np.float32(1.5),
    np.float64(-0.0),
    np.int64(-3),
    np.bool_(True),
    np.complex64(1j),
    np.datetime64("2020-01-02", "D"),
    np.timedelta64(5, "ms"),
    np.str_(""),
    np.str_("a\0"),
    np.bytes_(b""),
    np.bytes_(b"a\0"),
)


def test_numpy_scalars_come_back_as_numpy_scalars():
    for scalar in SCALARS:
        back = unpack(pack(scalar))
        assert (type(back), repr(back)) == (type(scalar), repr(scalar))


def test_numpy_and_torch_generators_resume():
    generator = np.random.Generator(np.random.MT19937(1))
    legacy = np.random.RandomState(2)
    state = unpack(pack({"new": generator.bit_generator.state, "legacy": legacy.get_state()}))
    expected = generator.random(5), legacy.rand(5)
    resumed = np.random.Generator(np.random.MT19937(99))
    resumed.bit_generator.state = state["new"]
    resumed_legacy = np.random.RandomState(99)
    resumed_legacy.set_state(state["legacy"])
    np.testing.assert_array_equal(resumed.random(5), expected[0])
    np.testing.assert_array_equal(resumed_legacy.rand(5), expected[1])


def test_a_scheduler_state_comes_back():
    parameter = torch.nn.Parameter(torch.zeros(1))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([parameter], lr=0.1), [2, 2, 5])
    state = scheduler.state_dict()
    assert unpack(pack(state)) == state


def test_equal_sets_give_equal_bytes_whatever_their_order():
    one, other = {8, 0}, {0, 8}
    assert pack(one) == pack(other)


def test_plain_values_are_plain_msgpack():
    value = {"epoch": 3, "lr": [0.1, None, True], "raw": b"x"}
    assert msgpack.unpackb(pack(value)) == value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"scheduler": {"lr_lambdas": [len, lambda epoch: epoch]}}, ["state.scheduler.lr_lambdas[0]", "builtin"]),
        ({"scheduler": {"lr_lambdas": [lambda epoch: epoch]}}, ["state.scheduler.lr_lambdas[0] is a function"]),
        ({"a b": (1, {2: {object()}})}, ["state['a b'][1][2]{...}", "object"]),
        ([torch.zeros(2)], ["state[0]", "torch.Tensor", "tensors of the shard"]),
        (torch.Size([1]), ["state is a torch.Size", "plain tuple"]),
        (Point(1, 2), ["Point", "plain tuple"]),
        (Colour.RED, ["Colour", "plain int"]),
        ({Colour.RED: 1}, ["state's key <Colour.RED: 1>", "plain int"]),
        (Metres(1.0), ["Metres", "plain float"]),
        (defaultdict(list), ["defaultdict", "plain dict"]),
        (bytearray(b"x"), ["bytearray"]),
        (functools.partial(print), ["partial"]),
        (np.zeros(2, ml_dtypes.bfloat16), ["bfloat16"]),
        (np.zeros(2, "V3"), ["dtype"]),
        (np.zeros(2, np.longdouble), ["float", "dtype"]),
        (np.array([None]), ["dtype object"]),
        (np.zeros(2, [("a", "i4")]), ["dtype"]),
        (np.rec.array([1]), ["recarray", "plain ndarray"]),
        (np.ma.array([1]), ["Masked", "plain ndarray"]),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_cannot_be_stored_is_refused_with_its_path(value, words):
    with pytest.raises(Unstorable) as caught:
        pack(value, name="state")
    for word in words:
        assert word in str(caught.value)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("make", [lambda x: [x], lambda x: (x,), lambda x: {"k": x}, lambda x: deque([x])])
def test_nesting_is_bounded_alike_on_both_sides(make):
    deepest = nested(make, DEPTH_MAX, np.arange(3))
    back = unpack(pack([1, deepest][1]))
    assert repr(back) == repr(deepest)
    with pytest.raises(Unstorable, match="nested"):
        pack(nested(make, DEPTH_MAX + 1))


def test_deep_siblings_do_not_add_up():
    value = [nested(lambda x: [x], 50), nested(lambda x: (x,), 50), nested(lambda x: {x}, 0)]
    assert unpack(pack(value)) == value


def test_a_path_through_a_key_too_long_to_print_is_still_named():
    with pytest.raises(Unstorable, match=r"state's key <an integer of 16610 bits> is an integer"):
        pack({10**5000: print}, name="state")


@pytest.mark.parametrize("sign", [1, -1])
def test_the_longest_integer_comes_back_and_the_next_is_refused(sign):
    bits = 8 * INTEGER_NBYTES_MAX - 1
    longest = sign * (2**bits - 1)
    assert unpack(pack(longest)) == longest
    with pytest.raises(Unstorable, match=f"an integer of {bits + 1} bits"):
        pack(sign * 2**bits)


def test_an_integer_that_python_would_not_print_is_refused_on_both_sides():
    with pytest.raises(Unstorable, match=r"state\.seed is an integer of 16610 bits"):
        pack({"seed": 10**5000}, name="state")
    with pytest.raises(Corruption, match="integer"):
        unpack(extension(Extension.INTEGER, (10**5000).to_bytes(2077, "little")))


P = 2**61 - 1
"""Integers of one remainder by it have one hash."""


@pytest.mark.parametrize(
    "value",
    [
        {2**70 + n * P: 0 for n in range(500)},
        {2**70 + n * P for n in range(500)},
        {(n % 8 * P, n // 8 % 8 * P, n // 64 % 8 * P, n // 512 * P): 0 for n in range(1024)},
        OrderedDict.fromkeys(complex(-1000003 * n, n) for n in range(500)),
    ],
    ids=["integers", "set", "tuples", "complex"],
)
def test_keys_of_one_hash_are_refused_on_both_sides(value, monkeypatch):
    with pytest.raises(Unstorable, match="same hash"):
        pack(value)
    with monkeypatch.context() as patch:
        patch.setattr(host_state, "check_hashes", lambda keys: None)
        packed = pack(value)
    with pytest.raises(Corruption, match="same hash"):
        unpack(packed)


def test_what_passes_a_limit_is_neither_read_nor_written():
    limits = Limits(nbytes=100, values=10, depth=2, text_nbytes=20, extensions=False)
    for value in ([0] * 9, {"a": [1]}, "x" * 20):
        assert unpack(pack(value, limits=limits), limits=limits) == value
    for value in ([0] * 10, {"a": {"b": {"c": {"d": 0}}}}, "x" * 40, ["x" * 20] * 6, 2**70, (1,)):
        with pytest.raises(Unstorable):
            pack(value, limits=limits)
        with pytest.raises(Corruption):
            unpack(pack(value), limits=limits)
    with pytest.raises(Corruption):
        unpack(pack("\ud800"), limits=limits)


def test_millions_of_values_are_refused_before_any_is_built():
    many = b"\xdd" + (HOST_STATE.values + 1).to_bytes(4, "big") + bytes(HOST_STATE.values + 1)
    hidden = extension(Extension.TUPLE, many)
    for data in (many, hidden):
        tracemalloc.start()
        try:
            with pytest.raises(Corruption, match="values"):
                unpack(data)
            assert tracemalloc.get_traced_memory()[1] < 2 * len(data)
        finally:
            tracemalloc.stop()


def test_a_value_that_contains_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(Unstorable, match="contains itself"):
        pack(loop)


SAMPLE = {"a": [1, 2.5, (3, {4})], "b": np.arange(3), "c": 2**70, "d": 1j, "e": deque([1], 2), "f": "text" * 10}


def test_every_truncation_is_refused():
    packed = pack(SAMPLE)
    for length in range(len(packed)):
        with pytest.raises(Corruption):
            unpack(packed[:length])
    with pytest.raises(Corruption, match="follow"):
        unpack(packed + b"\0")


def test_every_flipped_bit_unpacks_to_something_or_is_refused():
    packed = bytearray(pack(SAMPLE))
    refused = 0
    for position in range(len(packed)):
        for bit in range(8):
            packed[position] ^= 1 << bit
            try:
                unpack(packed)
            except Corruption:
                refused += 1
            packed[position] ^= 1 << bit
    assert refused > len(packed)


def extension(code, content):
    return msgpack.packb(msgpack.ExtType(code, content))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff\x00",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\xc9",
        b"\xd4",
        b"\x9f" * 1000,
        b"\x91" * 100_000 + b"\x00",
        b"\xdd\x00\x0f\x00\x00" * 1000 + bytes(983_040),
        b"\xdd\x00\x00\x40\x00" * 50 + bytes(0x4000),
        b"\xd6\xff" + bytes(4),
        extension(99, b"\x00"),
        extension(Extension.TUPLE, b"\x01"),
        extension(Extension.TUPLE, b""),
        extension(Extension.COMPLEX, b"\x00"),
        extension(Extension.SET, msgpack.packb([[]])),
        extension(Extension.ARRAY, msgpack.packb(["|O", b"12345678", 1])),
        extension(Extension.ARRAY, msgpack.packb(["<f4", b"1234", 2])),
        extension(Extension.ARRAY, msgpack.packb(["<f4", b"12345678", 1])),
        extension(Extension.ARRAY, msgpack.packb(["<f4", b"", 2**62, 2**62])),
        extension(Extension.ARRAY, msgpack.packb(["<f4", b"", 2**62, 0])),
        extension(Extension.ARRAY, msgpack.packb(["<f4", b"1234", -1])),
        extension(Extension.ARRAY, msgpack.packb(["<f4", b"1234", True])),
        extension(Extension.ARRAY, msgpack.packb(["<f4", b"1234", *[1] * 100])),
        extension(Extension.ARRAY, msgpack.packb(["<U999999999", b"", 0])) + b"x",
        extension(Extension.ARRAY, msgpack.packb(["f4,f4", b"", 0])),
        extension(Extension.SCALAR, msgpack.packb(["S", "text"])),
        b"\x82\xa1a\x01\xa1a\x02",
        b"\x81\x90\x01",
        b"\xa1\xff",
        b"\xd9",
    ],
    ids=lambda data: data[:12].hex(),
)
def test_hostile_bytes_are_refused_without_allocating(data):
    tracemalloc.start()
    try:
        with pytest.raises(Corruption):
            unpack(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000 + 16 * len(data)


def test_extensions_nested_too_deep_are_refused():
    data = b"\x00"
    for _ in range(DEPTH_MAX + 5):
        data = extension(Extension.TUPLE, b"\x91" + data)
    with pytest.raises(Corruption, match="nested"):
        unpack(data)
