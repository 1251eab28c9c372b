"""Host state as msgpack: plain Python and NumPy values, with their types, and never a pickle.

``None``, ``bool``, ``int`` up to 64 bits, ``float``, ``str``, ``bytes``, ``list`` and ``dict`` are what any
msgpack reader shows. Everything else is an extension type, numbered by :class:`Extension`, whose content is
msgpack again. Types are taken exactly: a subclass (an enum, a named tuple, a ``torch.Size``) would come back as
its base, so it is refused with the path to it. Sets are stored in the order of their packed elements, so that
equal values give equal bytes.
"""

from __future__ import annotations

import re
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import msgpack
import numpy as np

from tiercheck.errors import Corruption, UnsupportedSetup
from tiercheck.types import Buffer, shown

__all__ = ["DEPTH_MAX", "HOST_STATE", "Limits", "Unstorable", "pack", "pack_with", "unpack"]

DEPTH_MAX = 64
INTEGER_NBYTES_MAX = 1 << 10
"""Of one integer. Python refuses to print one that is much longer, so that it could not even be named in a message."""
TAG_NBYTES_MAX = 6
"""Before the content of a string, an array or an extension value."""
SAME_HASHES_MAX = 64
"""Keys of one dictionary, or elements of one set, that may have the same hash: each is compared with all the others."""
MANY = 16
"""Of fewer values each is looked at by itself: that is faster."""


@dataclass(frozen=True)
class Limits:
    """What :func:`unpack` refuses before it builds anything, and :func:`pack` refuses to write."""

    nbytes: int
    values: int
    """All values, those inside of containers included."""
    depth: int = DEPTH_MAX
    text_nbytes: int | None = None
    """Of one string, or one ``bytes``."""
    extensions: bool = True
    """Whether there may be other values than those any msgpack reader shows."""


HOST_STATE = Limits(nbytes=1 << 30, values=4 << 20)
"""What a process keeps beside its tensors. It takes seconds to unpack at the very most."""


class Unstorable(UnsupportedSetup, TypeError):
    """A value has no faithful form in a shard; the message names the path to it and what to do."""


class Extension(IntEnum):
    """The msgpack extension types. Their numbers are part of the file format."""

    INTEGER = 1
    COMPLEX = 2
    TUPLE = 3
    SET = 4
    FROZENSET = 5
    ORDERED_DICT = 6
    COUNTER = 7
    DEQUE = 8
    ARRAY = 9
    SCALAR = 10


Path = tuple["Path", str] | None
"""The way to a value from its root, innermost step last."""

_DTYPE = re.compile(
    r"(?:\|b1|[<>|][iu][1248]|[<>]f[248]|[<>]c(?:8|16)|[<>|][SU][1-9]\d{0,8}|[<>][mM]8(?:\[\d{0,9}[a-zA-Zμ]+\])?)"
)
_ATOMS = frozenset({type(None), bool, float, bytes, str})
"""What goes into msgpack as it is; so does an ``int`` of :data:`_PLAIN_INTEGERS`."""
_PLAIN_INTEGERS = range(-(2**63), 2**64)
_PLAIN = _ATOMS | {int}


def pack(value: object, *, name: str = "value", limits: Limits = HOST_STATE) -> bytes:
    """``value`` as bytes that :func:`unpack` turns back into an equal value of equal types.

    ``name`` is what the root is called in messages. Errors: :class:`Unstorable`, naming the path to the value, or the
    limit that it passes.
    """
    packed = packb(lower(value, (None, name), 0), (None, name))
    # A value takes a byte at least, so that few bytes are within the usual limits.
    if limits is not HOST_STATE or len(packed) > limits.values:
        try:
            unpack(packed, limits=limits)
        except Corruption as error:
            raise Unstorable(f"{name} cannot be stored, since it could not be read again: {error}") from error
    return packed


def pack_with(value: Mapping[str, object], packed: Mapping[str, bytes], *, name: str = "value") -> bytes:
    """Both dictionaries packed as one, of at most 15 keys. The values of ``packed`` are packed already."""
    count = len(value) + len(packed)
    if count > 15:
        raise ValueError(f"{count} keys do not fit into a small dictionary")
    parts = [bytes([0x80 + count]), pack(dict(value), name=name)[1:]]
    for key, content in packed.items():
        parts += [pack(key), content]
    return b"".join(parts)


def packb(lowered: object, path: Path) -> bytes:
    try:
        return bytes(msgpack.packb(lowered, strict_types=True, unicode_errors="surrogatepass"))
    except (ValueError, OverflowError) as error:
        raise Unstorable(f"{render(path)} is too large for one object: {error}") from error


def render(path: Path) -> str:
    steps: list[str] = []
    while path is not None:
        path, step = path
        steps.append(step)
    return "".join(reversed(steps))


def lower(value: object, path: Path, depth: int) -> object:
    """``value`` in the types msgpack has, extension types for the others."""
    if depth > DEPTH_MAX:
        raise Unstorable(f"{render(path)[:200]}... is nested over {DEPTH_MAX} levels deep, or contains itself")
    kind = type(value)
    if kind in _ATOMS or (kind is int and value in _PLAIN_INTEGERS):
        return value
    lowering = _LOWERINGS.get(kind)
    if lowering is not None:
        return lowering(value, path, depth + 1)
    if isinstance(value, np.generic) and kind is value.dtype.type:
        return lower_scalar(value, path)
    raise Unstorable(f"{render(path)} is {describe(value)}")


def describe(value: object) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if isinstance(value, FunctionType | MethodType):
        return "a function, which cannot be stored: leave it out and set it up again in the code that restores"
    if hasattr(value, "data_ptr"):
        return f"a {kind}: store tensors as tensors of the shard, or as NumPy arrays"
    for base in (bool, int, float, str, bytes, tuple, list, dict, np.ndarray):
        if isinstance(value, base):
            return f"a {kind}, which would come back as a plain {base.__name__}: convert it to one first"
    return (
        f"a {kind}, which cannot be stored: turn it into None, bool, int, float, complex, str, bytes, list, tuple, "
        "dict, set or NumPy values, for instance by its state_dict()"
    )


def atoms_at(depth: int) -> frozenset[type]:
    """What goes into msgpack as it is, so deep; nothing goes in below ``DEPTH_MAX``."""
    return _ATOMS if depth <= DEPTH_MAX else frozenset()


def is_plain(values: Collection[object]) -> bool:
    """Whether all of them go into msgpack as they are. A generator's state has hundreds of numbers: one look at all of
    them takes a fraction of the time of one at each."""
    kinds = set(map(type, values))
    if int in kinds:
        integers: Any = values if len(kinds) == 1 else [value for value in values if type(value) is int]
        if min(integers) not in _PLAIN_INTEGERS or max(integers) not in _PLAIN_INTEGERS:
            return False
    return kinds <= _PLAIN


def lower_int(value: int, path: Path, depth: int) -> object:
    """Of one that msgpack has no room for."""
    if value.bit_length() >= 8 * INTEGER_NBYTES_MAX:
        raise Unstorable(f"{render(path)} is an integer of {value.bit_length()} bits: store it as bytes")
    return msgpack.ExtType(Extension.INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def lower_complex(value: complex, path: Path, depth: int) -> object:
    return msgpack.ExtType(Extension.COMPLEX, struct.pack("<dd", value.real, value.imag))


def lower_list(value: Collection[object], path: Path, depth: int) -> list[object]:
    atoms = atoms_at(depth)
    if atoms and len(value) >= MANY and is_plain(value):
        return list(value)
    return [
        item if type(item) in atoms else lower(item, (path, f"[{index}]"), depth) for index, item in enumerate(value)
    ]


def lower_tuple(value: tuple[object, ...], path: Path, depth: int) -> object:
    return extension(Extension.TUPLE, lower_list(value, path, depth), path)


def lower_set(value: set[object] | frozenset[object], path: Path, depth: int) -> object:
    if not is_plain(value):
        check_hashes_of(value, path)
    packed = [(packb(lowered, path), lowered) for lowered in (lower(item, (path, "{...}"), depth) for item in value)]
    packed.sort(key=lambda pair: pair[0])
    code = Extension.SET if type(value) is set else Extension.FROZENSET
    return extension(code, [lowered for _, lowered in packed], path)


def lower_deque(value: deque[object], path: Path, depth: int) -> object:
    return extension(Extension.DEQUE, [value.maxlen, *lower_list(value, path, depth)], path)


def lower_dict(value: dict[object, object], path: Path, depth: int) -> dict[object, object]:
    atoms = atoms_at(depth)
    if atoms and len(value) >= MANY and is_plain(value) and is_plain(value.values()):
        return dict(value)
    lowered: dict[object, object] = {}
    for key, item in value.items():
        lowered_key = key if type(key) in atoms else lower(key, (path, f"'s key {shown(key)}"), depth)
        if type(item) not in atoms:
            plain = isinstance(key, str) and key.isidentifier()
            item = lower(item, (path, f".{key}" if plain else f"[{shown(key)}]"), depth)
        lowered[lowered_key] = item
    if not is_plain(value):
        check_hashes_of(value, path)
    return lowered


def check_hashes_of(values: Collection[object], path: Path) -> None:
    try:
        check_hashes(values)
    except ValueError as error:
        raise Unstorable(f"{render(path)} cannot be stored: {error}") from error


def lower_ordered_dict(value: OrderedDict[object, object], path: Path, depth: int) -> object:
    return extension(Extension.ORDERED_DICT, lower_dict(value, path, depth), path)


def lower_counter(value: Counter[object], path: Path, depth: int) -> object:
    return extension(Extension.COUNTER, lower_dict(dict(value), path, depth), path)


def lower_array(value: np.ndarray[Any, Any], path: Path, depth: int) -> object:
    check_dtype(value.dtype, path)
    return extension(Extension.ARRAY, [value.dtype.str, value.tobytes(), *value.shape], path)


def lower_scalar(value: np.generic, path: Path) -> object:
    # NumPy drops trailing NULs from its strings, so these go as the Python strings they are.
    if type(value) is np.str_:
        return extension(Extension.SCALAR, ["U", str(value)], path)
    if type(value) is np.bytes_:
        return extension(Extension.SCALAR, ["S", bytes(value)], path)
    check_dtype(value.dtype, path)
    return extension(Extension.SCALAR, [value.dtype.str, value.tobytes()], path)


def check_dtype(dtype: np.dtype[Any], path: Path) -> None:
    if not _DTYPE.fullmatch(dtype.str):
        raise Unstorable(
            f"{render(path)} has the NumPy dtype {dtype}, which cannot be stored faithfully: use a plain number, "
            "string or time dtype"
        )


def extension(code: Extension, lowered: object, path: Path) -> msgpack.ExtType:
    return msgpack.ExtType(code, packb(lowered, path))


_LOWERINGS: dict[type, Callable[[Any, Path, int], object]] = {
    int: lower_int,
    complex: lower_complex,
    list: lower_list,
    tuple: lower_tuple,
    set: lower_set,
    frozenset: lower_set,
    deque: lower_deque,
    dict: lower_dict,
    OrderedDict: lower_ordered_dict,
    Counter: lower_counter,
    np.ndarray: lower_array,
}


# Reading


def unpack(data: Buffer, *, limits: Limits = HOST_STATE) -> Any:
    """The value that :func:`pack` packed.

    Nesting, the number of values and every length are within ``limits`` before anything is built. Errors:
    ``Corruption`` for bytes that ``pack`` did not write.
    """
    content = memoryview(data).cast("B")
    try:
        if content.nbytes > limits.nbytes:
            raise ValueError(f"there are {content.nbytes} bytes, and at most {limits.nbytes} are allowed")
        return Unpacking(limits).value(content, 0)
    except (ValueError, TypeError, OverflowError, struct.error, msgpack.UnpackException) as error:
        raise Corruption(f"the bytes are no packed object: {error}") from error


class Unpacking:
    """One object on its way from bytes to a value."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._values = 0

    def value(self, data: memoryview, depth: int) -> Any:
        skeleton = check_skeleton(data, depth, self._limits, values_max=self._limits.values - self._values)
        self._values += skeleton.values
        depths = iter(skeleton.extensions)
        return msgpack.unpackb(
            data,
            strict_map_key=False,
            unicode_errors="surrogatepass" if self._limits.extensions else "strict",
            object_pairs_hook=restore_dict,
            ext_hook=lambda code, content: self._extension(code, memoryview(content), next(depths)),
        )

    def _extension(self, code: int, content: memoryview, depth: int) -> object:
        if code == Extension.INTEGER:
            if content.nbytes > INTEGER_NBYTES_MAX:
                raise ValueError(f"an integer has {content.nbytes} bytes")
            return int.from_bytes(content, "little", signed=True)
        if code == Extension.COMPLEX:
            return complex(*struct.unpack("<dd", content))
        return restore(code, self.value(content, depth))


def restore_dict(pairs: list[tuple[object, object]]) -> dict[object, object]:
    if not is_plain([key for key, _ in pairs]):
        check_hashes([key for key, _ in pairs])
    restored = dict(pairs)
    if len(restored) != len(pairs):
        raise ValueError("a dictionary has a key twice")
    return restored


def restore_set(items: list[object]) -> set[object]:
    if not is_plain(items):
        check_hashes(items)
    return set(items)


def check_hashes(keys: Iterable[object]) -> None:
    """Errors: ``ValueError`` if so many keys have the same hash that a table of them would take for ever."""
    _, count = max(Counter(map(hash, keys)).items(), key=lambda each: each[1], default=(0, 0))
    if count > SAME_HASHES_MAX:
        raise ValueError(f"{count} of the keys have the same hash; at most {SAME_HASHES_MAX} may")


def restore(code: int, inner: Any) -> object:
    match Extension(code), inner:
        case Extension.TUPLE, list():
            return tuple(inner)
        case Extension.SET, list():
            return restore_set(inner)
        case Extension.FROZENSET, list():
            return frozenset(restore_set(inner))
        case Extension.ORDERED_DICT, dict():
            return OrderedDict(inner)
        case Extension.COUNTER, dict():
            return Counter(inner)
        case Extension.DEQUE, [int() | None as maxlen, *items]:
            return deque(items, maxlen)
        case Extension.ARRAY, [str() as dtype, bytes() as raw, *shape]:
            return restore_array(dtype, shape, raw)
        case Extension.SCALAR, ["U", str() as text]:
            return np.str_(text)
        case Extension.SCALAR, ["S", bytes() as raw]:
            return np.bytes_(raw)
        case Extension.SCALAR, [str() as dtype, bytes() as raw]:
            return restore_array(dtype, [], raw)[()]
    raise ValueError(f"extension type {code} has malformed content")


def restore_array(dtype: str, shape: list[int], raw: bytes) -> np.ndarray[Any, Any]:
    if not _DTYPE.fullmatch(dtype):
        raise ValueError(f"an array has the dtype {dtype[:80]!r}")
    if not all(type(dimension) is int and dimension >= 0 for dimension in shape):
        raise ValueError("an array has an impossible shape")
    array: np.ndarray[Any, Any] = np.ndarray(tuple(shape), np.dtype(dtype), buffer=raw)
    if array.nbytes != len(raw):
        raise ValueError(f"an array of {array.nbytes} bytes has {len(raw)}")
    return array.copy()


class Skeleton(NamedTuple):
    values: int
    extensions: list[int]
    """The depths of the extension values, in order."""


def check_skeleton(data: memoryview, depth: int, limits: Limits, *, values_max: int) -> Skeleton:
    """Walk the values without building any.

    msgpack allocates for as many elements as a header claims. Here every element claimed is found first, of at
    least one byte each, so that the claims of all headers together are bounded by the length of ``data``.
    """
    position = values = 0
    extensions: list[int] = []
    counts = [1]  # elements still due, by level
    while counts:
        level = depth + len(counts) - 1
        if level > limits.depth + 1:  # the content of an array or a scalar is one level below it
            raise ValueError(f"it is nested over {limits.depth} levels deep")
        if position >= len(data):
            raise ValueError("it ends in the middle of a value")
        if (code_offset := _CODE_OFFSETS.get(data[position])) is not None:
            check_code(data, position + code_offset)
            if not limits.extensions:
                raise ValueError(f"byte {position} begins a value of an extension type")
            extensions.append(level)
        nbytes, children = measure(data, position)
        values += 1
        if values + children > values_max:
            raise ValueError(f"it has over {limits.values} values")
        if limits.text_nbytes is not None and nbytes > limits.text_nbytes + TAG_NBYTES_MAX:
            raise ValueError(f"it has a string of {nbytes} bytes; at most {limits.text_nbytes} are allowed")
        position += nbytes
        counts[-1] -= 1
        if children:
            counts.append(children)
        while counts and not counts[-1]:
            counts.pop()
    if position > len(data):
        raise ValueError("it ends in the middle of a value")
    if position < len(data):
        raise ValueError(f"{len(data) - position} bytes follow it")
    return Skeleton(values, extensions)


def check_code(data: memoryview, position: int) -> None:
    if position >= len(data) or data[position] not in _CODES:
        raise ValueError(f"byte {position} is the code of no extension type")


def measure(data: memoryview, position: int) -> tuple[int, int]:
    """Bytes of the value's own (header and content, without elements) at ``position``, and its elements."""
    tag = data[position]
    if tag <= 0x7F or tag >= 0xE0 or tag in (0xC0, 0xC2, 0xC3):
        return 1, 0
    if tag <= 0x8F:
        return 1, 2 * (tag & 0x0F)
    if tag <= 0x9F:
        return 1, tag & 0x0F
    if tag <= 0xBF:
        return 1 + (tag & 0x1F), 0
    if tag in _FIXED_NBYTES:
        return _FIXED_NBYTES[tag], 0
    if tag not in _LENGTHS:
        raise ValueError(f"byte {position} begins no value")
    width, extra, elements = _LENGTHS[tag]
    length = int.from_bytes(data[position + 1 : position + 1 + width], "big")
    return (1 + width, length * elements) if elements else (1 + width + extra + length, 0)


# Tag: bytes of the whole value (numbers, fixext).
_FIXED_NBYTES = {
    **{0xCA: 5, 0xCB: 9},
    **{0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9},
    **{0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18},
}
# Tag of an extension value: where its code lies.
_CODE_OFFSETS = {**dict.fromkeys(range(0xD4, 0xD9), 1), 0xC7: 2, 0xC8: 3, 0xC9: 5}
_CODES = frozenset(Extension)
# Tag: bytes of the length, bytes of the extension code, elements for each unit of length (0: bytes).
_LENGTHS = {
    **{0xC4: (1, 0, 0), 0xC5: (2, 0, 0), 0xC6: (4, 0, 0)},
    **{0xC7: (1, 1, 0), 0xC8: (2, 1, 0), 0xC9: (4, 1, 0)},
    **{0xD9: (1, 0, 0), 0xDA: (2, 0, 0), 0xDB: (4, 0, 0)},
    **{0xDC: (2, 0, 1), 0xDD: (4, 0, 1), 0xDE: (2, 0, 2), 0xDF: (4, 0, 2)},
}
