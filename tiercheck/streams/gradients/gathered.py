"""Gradients that are stored as they are, all of them at once: what does not change from step to step is kept.

A model may have ten thousand tensors of a few hundred elements. Encoding each by itself takes a hundred times as long
as copying its bytes, all of it in Python. Here a step asks each gradient for its address, shape and dtype; a kernel
copies many at a time; and the layout, the description and the header's text are those of the last record.
What is stored are the same bytes as :class:`~tiercheck.streams.codecs.exact.Exact` stores for each gradient.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tiercheck import kernels
from tiercheck.errors import SaveError
from tiercheck.format.container import Recurring, ShardWriter, TensorSpec
from tiercheck.kernels import Kernel
from tiercheck.kernels.reference.gathering import first_word, words_at
from tiercheck.streams.codecs import Encoding
from tiercheck.streams.codecs.exact import SCALE, Exact
from tiercheck.streams.gradients.description import Description, Gathered
from tiercheck.streams.gradients.pieces import Piece, Stored, checksums_of, copy_all, look_at_all, pieces_of
from tiercheck.streams.gradients.scales import Scale, Scales
from tiercheck.streams.records.record_names import STAMP_DIGITS, gradient_name, stamp
from tiercheck.streams.tensors.as_bytes import NAMES

__all__ = ["KERNELS_USED", "GatheredGradients", "check_trained"]

KERNELS_USED: tuple[Kernel[..., Any], ...] = (
    kernels.are_bfloat16,
    kernels.gather_into,
    kernels.hash_each,
    kernels.are_scaled,
    kernels.gather_scaled_into,
)
FEW = 400
"""Up to so many tensors are copied by NumPy, which takes a millisecond longer than a kernel. Importing Numba for a
kernel takes more than a second of a step, and a model of few tensors does without, if bf16 does not hold its gradients.
A Llama of 13 billion parameters has 363."""
LOOKED_AT = 1 << 20
"""Elements that NumPy looks at, or narrows. For more there is a kernel."""
KEPT_MAX = 4
"""Arrangements kept: gradients that are zero at some steps, such as those of experts, are stored as bf16 then."""


@dataclass(frozen=True)
class Arrangement:
    """Where each gradient lies in the record, and what is said of it."""

    tensors: Recurring
    pieces: tuple[Piece, ...]
    few: bool
    """Whether NumPy does it."""
    description: Description


class GatheredGradients:
    """Puts gradients into the records of one rank. One thread uses it."""

    def __init__(self, codec: Exact, masters: Mapping[str, TensorSpec], *, threads: int = 1) -> None:
        """``threads``: so many copy, at most."""
        self._codec = codec
        self._threads = threads
        self._masters = masters
        self._names: list[str] = []
        self._shapes: list[torch.Size] = []
        self._dtypes: list[torch.dtype] = []
        self._sizes = np.empty(0, np.int64)
        self._nbytes = np.empty(0, np.int64)
        self._floats = np.empty(0, np.bool_)
        self._has_complex = False
        self._arrangements: OrderedDict[tuple[bytes, bytes, str], Arrangement] = OrderedDict()
        self._scales = Scales()

    def put(self, gradients: Mapping[str, torch.Tensor], writer: ShardWriter, version: int) -> Gathered | None:
        """The gradients, in a shard that holds nothing yet. ``None``: they are to be encoded one by one. Errors:
        ``SaveError`` for one of no trained tensor; ``CapacityExceeded``."""
        tensors = list(gradients.values())
        if (found := self._unchanged(list(gradients), tensors)) is None:
            if (looked_at := self._looked_at(gradients)) is None:
                return None
            tensors, found = looked_at, [each.data_ptr() for each in looked_at]
        addresses = np.array(found, np.int64)
        if ((addresses == 0) & (self._sizes > 0)).any():
            return None  # a tensor of a class of its own has its values elsewhere, or makes them when it is read
        arrangement, scale = self._arranged(addresses)
        memory = writer.recurring(arrangement.tensors, stamp(version))
        # ``tensors`` holds what is copied.
        digests = copy_all(arrangement.pieces, addresses, scale, memory, few=arrangement.few, threads=self._threads)
        return Gathered(checksums_of(arrangement.pieces, digests), arrangement.description, scale)

    def _unchanged(self, names: list[str], tensors: list[torch.Tensor]) -> list[int] | None:
        """Where the tensors lie, if they are like the last ones, and each lies in host memory as it is. In one pass, so
        that what torch knows of a tensor comes into the processor's cache once. No list of shapes: Python's garbage
        collector would look at each."""
        if names != self._names or self._has_complex:
            return None
        found = [
            each.data_ptr()
            for each, dtype, shape in zip(tensors, self._dtypes, self._shapes, strict=True)
            if each.dtype is dtype
            and each.shape == shape
            and each.is_cpu
            and each.is_contiguous()
            and not each.is_neg()
        ]
        return found if len(found) == len(tensors) else None

    def _looked_at(self, gradients: Mapping[str, torch.Tensor]) -> list[torch.Tensor] | None:
        """The tensors, contiguous. From here on those that come are compared with them. ``None``, and errors: as of
        :meth:`put`."""
        tensors = list(gradients.values())
        if not all(each.is_cpu for each in tensors) or any(each.is_neg() or each.is_conj() for each in tensors):
            return None  # on another device, or views that torch negates or conjugates lazily
        names, dtypes = list(gradients), [each.dtype for each in tensors]
        shapes = [each.shape for each in tensors]
        if (names, dtypes, shapes) != (self._names, self._dtypes, self._shapes):
            for name, shape in zip(names, shapes, strict=True):
                check_trained(self._masters, name, shape)
            if not all(each in NAMES for each in dtypes):
                return None
            self._begin_anew(names, dtypes, shapes)
        return [each.contiguous() for each in tensors]

    def _begin_anew(self, names: list[str], dtypes: list[torch.dtype], shapes: list[torch.Size]) -> None:
        self._names, self._dtypes, self._shapes = names, dtypes, shapes
        self._sizes = np.array([shape.numel() for shape in shapes], np.int64)
        self._nbytes = self._sizes * np.array([dtype.itemsize for dtype in dtypes], np.int64)
        self._floats = np.array([dtype is torch.float32 for dtype in dtypes], np.bool_)
        self._has_complex = any(dtype.is_complex for dtype in dtypes)
        self._arrangements.clear()

    def _arranged(self, addresses: NDArray[np.int64]) -> tuple[Arrangement, Scale | None]:
        """Of gradients with these values: those that bf16 holds exactly take half the room, and so do those that are
        half-precision numbers times one scale."""
        narrowed = np.zeros(len(self._names), np.bool_)
        floats = np.flatnonzero(self._floats)
        if floats.size <= FEW:
            each = zip(addresses[floats].tolist(), self._sizes[floats].tolist(), strict=True)
            floats = floats[[may_be_bfloat16(address, size) for address, size in each]]
        if floats.size:
            are_bfloat16 = kernels.are_bfloat16.reference if self._few(floats) else kernels.are_bfloat16
            where, sizes = addresses[floats], self._sizes[floats]
            narrowed[floats] = look_at_all(are_bfloat16, where, sizes, threads=self._threads)
        scaled, scale = self._scaled(addresses, np.flatnonzero(self._floats & ~narrowed & (self._sizes > 0)))
        key = (narrowed.tobytes(), scaled.tobytes(), "" if scale is None else scale.dtype)
        if (known := self._arrangements.get(key)) is None:
            known = self._arrangements[key] = self._arrange(narrowed, scaled, scale)
            if len(self._arrangements) > KEPT_MAX:
                self._arrangements.popitem(last=False)
        self._arrangements.move_to_end(key)
        return known, scale

    def _scaled(self, addresses: NDArray[np.int64], floats: NDArray[np.intp]) -> tuple[NDArray[np.bool_], Scale | None]:
        """Which of the tensors ``floats`` are half-precision numbers times a scale, and that scale."""
        scaled = np.zeros(len(self._names), np.bool_)
        where, sizes = addresses[floats], self._sizes[floats]
        if (scale := self._scales.find(where, sizes) if floats.size else None) is None:
            return scaled, None
        are_scaled = kernels.are_scaled.reference if self._few(floats) else kernels.are_scaled
        are_products = partial(are_scaled, scale=scale.value, fp16=scale.fp16)
        scaled[floats] = look_at_all(are_products, where, sizes, threads=self._threads)
        return scaled, scale if scaled.any() else None

    def _few(self, to_compute: NDArray[np.int64]) -> bool:
        """Whether NumPy does it in a millisecond, if there is something to compute of these tensors."""
        return len(self._names) <= FEW and int(self._sizes[to_compute].sum()) <= LOOKED_AT

    def _arrange(self, narrowed: NDArray[np.bool_], scaled: NDArray[np.bool_], scale: Scale | None) -> Arrangement:
        specs: list[TensorSpec] = []
        stored: dict[str, str] = {}
        each = zip(self._names, self._dtypes, self._shapes, narrowed.tolist(), scaled.tolist(), strict=True)
        for name, dtype, shape, narrow, is_scaled in each:
            stored[name] = scale.dtype if scale and is_scaled else "BF16" if narrow else NAMES[dtype]
            specs.append(TensorSpec(gradient_name(0, name, ""), stored[name], tuple(shape)))
        tensors = Recurring(specs, STAMP_DIGITS)
        return Arrangement(
            tensors=tensors,
            pieces=tuple(pieces_of(tensors, Stored(self._sizes, self._nbytes, narrowed, scaled))),
            few=self._few(np.flatnonzero(narrowed | scaled)),
            description=Description.of(stored, partial(self._encodings, scaled)),
        )

    def _encodings(self, scaled: NDArray[np.bool_], pattern: int) -> dict[str, dict[str, Any]]:
        encodings: dict[str, dict[str, Any]] = {}
        for name, dtype, shape, is_scaled in zip(self._names, self._dtypes, self._shapes, scaled.tolist(), strict=True):
            scalars = {SCALE: pattern} if is_scaled else {}
            encoding = Encoding(self._codec.text, NAMES[dtype], tuple(shape), ("",), scalars)
            encodings[name] = encoding.to_object()
        return encodings


def may_be_bfloat16(address: int, size: int) -> bool:
    """Whether none of the first fp32 values at ``address`` is one that bf16 cannot hold. There are ``size``."""
    if not size or first_word(address) & 0xFFFF:
        return False
    words = words_at(address, min(size, LOOKED_AT))
    tiles = range(0, words.size, LOOKED_AT // 16)
    return not any(np.any(words[start : start + tiles.step] & np.uint32(0xFFFF)) for start in tiles)


def check_trained(masters: Mapping[str, TensorSpec], name: str, shape: Sequence[int]) -> None:
    """Errors: ``SaveError`` if a gradient of this name and shape is that of no master."""
    spec = masters.get(name)
    if spec is None or spec.shape != tuple(shape):
        raise SaveError(f"there is no trained tensor {name!r} of shape {tuple(shape)}")
