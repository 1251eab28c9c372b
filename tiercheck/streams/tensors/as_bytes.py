"""Torch tensors as the bytes of a shard, and back, without a copy."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tiercheck.errors import Corruption, UnsupportedSetup

__all__ = [
    "absent_tensor",
    "array_of",
    "counting_through",
    "dtype_name",
    "given",
    "is_given",
    "tensor_in",
    "tensor_of",
    "view_of",
    "wrappers_of",
    "writes_to",
]

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "C128": torch.complex128,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
STAND_INS = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
"""The dtypes that NumPy lacks, and the one it holds their patterns in."""
_NUMPY = {dtype: np.dtype(str(dtype).removeprefix("torch.")) for dtype in DTYPES.values() if dtype not in STAND_INS}
"""NumPy's own dtypes: it has the others' names."""
WRAPPER, GIVEN = "tiercheck_wrapper", "tiercheck_given"


def dtype_name(tensor: torch.Tensor, what: str) -> str:
    """The container's name of the tensor's dtype. Errors: ``UnsupportedSetup`` naming ``what``."""
    try:
        return NAMES[tensor.dtype]
    except KeyError:
        raise UnsupportedSetup(f"{what} has the dtype {tensor.dtype}, which a shard cannot hold") from None


def tensor_in(memory: memoryview, dtype: str, shape: Sequence[int], *, what: str) -> torch.Tensor:
    """A tensor over ``memory``: of writable memory one to copy into, of read-only memory one only to read.

    Errors: ``Corruption`` naming ``what`` if the dtype is none of torch's, or the lengths differ.
    """
    if dtype not in DTYPES:
        raise Corruption(f"{what} has the dtype {dtype}, which torch lacks")
    kind = DTYPES[dtype]
    if 0 in shape:
        return torch.empty(tuple(shape), dtype=kind)
    if memory.nbytes != torch.Size(shape).numel() * kind.itemsize:
        raise Corruption(f"{what} has {memory.nbytes} bytes, not those of {dtype} {tuple(shape)}")
    with _reading() if memory.readonly and torch.is_warn_always_enabled() else nullcontext():
        return torch.frombuffer(memory, dtype=kind).view(tuple(shape))


def absent_tensor(dtype: str, shape: Sequence[int], *, what: str) -> torch.Tensor:
    """A tensor without memory, which stands for one that is not at hand. Errors: ``Corruption`` naming ``what``."""
    if dtype not in DTYPES:
        raise Corruption(f"{what} has the dtype {dtype}, which torch lacks")
    return torch.empty(tuple(shape), dtype=DTYPES[dtype], device="meta")


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """The tensor as a NumPy array, in the dtype in which NumPy can hold its patterns; its own memory where it
    is contiguous and on the host, and no view that torch conjugates or negates lazily, else a copy."""
    return _readable(tensor).numpy()


def view_of(tensor: torch.Tensor) -> NDArray[Any]:
    """As :func:`array_of`, for a look that ends before anybody may resize the tensor: the array is invalid then.
    After :func:`array_of` torch refuses to, and some modules resize their buffers."""
    host = _readable(tensor)
    if type(host) is not torch.Tensor or host.dtype not in _NUMPY:
        return host.numpy()
    return np.asarray(_Memory(host)) if host.numel() else np.empty(host.shape, _NUMPY[host.dtype])


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    host = tensor.detach().contiguous().cpu().resolve_conj().resolve_neg()
    stand_in = STAND_INS.get(host.dtype)
    return host if stand_in is None else host.view(stand_in)


class _Memory:
    """What NumPy needs to know of a contiguous tensor's memory. An array over it keeps the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "typestr": _NUMPY[tensor.dtype].str,
        }


def tensor_of(array: NDArray[Any], dtype: str) -> torch.Tensor:
    """The inverse of :func:`array_of`, over the array's memory."""
    kind = DTYPES[dtype]
    with _reading() if torch.is_warn_always_enabled() else nullcontext():
        tensor = torch.from_numpy(array)
    return tensor.view(kind) if kind in STAND_INS else tensor


def wrappers_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None] | None:
    """The other tensors through which these are written to (:func:`counting_through`); ``None`` if there are none."""
    wrappers = [getattr(each, WRAPPER, None) for each in tensors]
    return wrappers if wrappers.count(None) < len(wrappers) else None


def writes_to(tensors: Sequence[torch.Tensor], wrappers: Sequence[torch.Tensor | None] | None) -> list[int]:
    """Torch's counter of the writes in place to each, which those through ``.data`` bypass."""
    if wrappers is None:
        return [each._version for each in tensors]
    return [
        each._version if wrapper is None else each._version + wrapper._version
        for each, wrapper in zip(tensors, wrappers, strict=True)
    ]


def counting_through(tensor: torch.Tensor, wrapper: torch.Tensor) -> torch.Tensor:
    """The tensor, of which :func:`writes_to` now also counts the writes that go through ``wrapper``, which holds it:
    torch counts what is written to a ``DTensor`` there, and not in its local tensor."""
    setattr(tensor, WRAPPER, wrapper)
    return tensor


def given(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, whose memory is from now on that of whoever gets it: it need not be copied to be kept."""
    setattr(tensor, GIVEN, True)
    return tensor


def is_given(tensor: torch.Tensor) -> bool:
    return getattr(tensor, GIVEN, False)


@contextmanager
def _reading() -> Iterator[None]:
    """Torch has no read-only tensors, and warns of read-only memory; here nothing is written to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given (buffer|NumPy array) is not writable")
        yield


def _let_torch_warn() -> None:
    """It does so once a process, unless it is told otherwise: now, while this module is loaded, and nobody sees it. To
    catch it each time would take longer than all else."""
    array = np.zeros(1, np.uint8)
    array.flags.writeable = False
    with _reading():
        torch.frombuffer(bytes(1), dtype=torch.uint8)
        torch.from_numpy(array)


_let_torch_warn()
