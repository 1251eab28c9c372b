"""What some ranks are to hold alike: brought from the rank that has it to the others, and compared.

The ranks exchange messages of the job's own group, on the host, in rounds of bounded length: each gives the next bytes
of what it owns, and takes everyone's. So it takes no process group of the framework's, has a deadline, and names a rank
that is late. Comparing the tensors afterwards verifies what has come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from tiercheck.format.container import checksum_of
from tiercheck.runtime.group import Group
from tiercheck.streams.tensors.as_bytes import array_of

__all__ = ["DIGEST_LENGTH", "bring", "digest", "fingerprints"]

ROUND_NBYTES = 64 << 20
"""What all ranks together give in a round: so much memory each of them needs beside the tensors."""
GIVEN_NBYTES_MIN = 64 << 10
DIGEST_LENGTH = 32
"""Characters of :func:`digest`."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element, a dtype that holds its pattern."""


def bring(owned: Sequence[Sequence[torch.Tensor]], group: Group, *, what: str, deadline_s: float) -> None:
    """Fill the tensors that other ranks own with what those hold. ``owned``: by rank, its tensors as they lie here, in
    one order on all ranks. Collective. Errors: those of the group."""
    rank = group.rank
    given = _Bytes(owned[rank])
    taken = [_Bytes(tensors) for tensors in owned]
    length = max(GIVEN_NBYTES_MIN, ROUND_NBYTES // group.world_size)
    for _ in range(0, max((nbytes_of(tensors) for tensors in owned), default=0), length):
        for other, chunk in enumerate(group.all_gather(given.read(length), what=what, deadline_s=deadline_s)):
            if other != rank:
                taken[other].write(chunk)


def nbytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _Bytes:
    """The bytes of some tensors, one after the other, to be read or written from the front."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._next = iter([tensor for tensor in tensors if tensor.numel()])
        self._tensor: torch.Tensor | None = None
        self._host: torch.Tensor | None = None
        self._left: NDArray[np.uint8] = np.empty(0, np.uint8)

    def read(self, length: int) -> bytes:
        """The next ``length`` bytes, or as many as are left."""
        parts: list[bytes] = []
        while length and self._more():
            part = self._left[:length]
            parts.append(part.tobytes())
            self._left, length = self._left[len(part) :], length - len(part)
        return b"".join(parts)

    def write(self, chunk: bytes) -> None:
        """Errors: ``ValueError`` for more than there is room for."""
        given = np.frombuffer(chunk, np.uint8)
        while len(given):
            if not self._more():
                raise ValueError(f"a rank has sent {len(given)} bytes more than it owns")
            count = min(len(given), len(self._left))
            self._left[:count] = given[:count]
            self._left, given = self._left[count:], given[count:]
            if not len(self._left):
                self._end()

    def _more(self) -> bool:
        if not len(self._left):
            self._tensor = next(self._next, None)
            if self._tensor is None:
                return False
            self._host = self._tensor.detach().contiguous().cpu()
            self._left = array_of(self._host).reshape(-1).view(np.uint8)
        return True

    def _end(self) -> None:
        """The tensor is written: bring it to where it belongs, if that is not where it was written."""
        assert self._tensor is not None
        assert self._host is not None
        if self._host.data_ptr() != self._tensor.data_ptr():
            with torch.no_grad():
                self._tensor.copy_(self._host)


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """By name, what differs if the tensor's bits do. A tensor on a device is added up there, as integers: its elements
    in another order would not be noticed."""
    found = dict.fromkeys(tensors, "")
    summed: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.device.type == "cpu":
            found[name] = checksum_of(array_of(tensor).reshape(-1).view(np.uint8).data)
        else:
            summed.setdefault(tensor.device, {})[name] = sum_of_bits(tensor)
    for sums in summed.values():
        found |= zip(sums, map(str, torch.stack([*sums.values()]).tolist()), strict=True)
    return found


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return real.contiguous().view(-1).view(INTEGERS[real.element_size()]).sum(dtype=torch.int64)


def digest(found: Mapping[str, str]) -> str:
    """One for all of them."""
    return xxhash.xxh3_128_hexdigest("\n".join(chain.from_iterable(sorted(found.items()))).encode())
