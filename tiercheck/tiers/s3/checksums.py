"""Checksums as S3 spells them: CRC32C where a fast one is installed, else zlib's CRC32.

A multipart object has the checksum of the whole (``FULL_OBJECT``), which is combined from those of its parts, so that
no byte is read twice. Source: "Checking object integrity in Amazon S3", Amazon S3 User Guide; the combination is
multiplication by x^(8n) modulo the polynomial, as in zlib's ``crc32_combine``.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["PREFERRED", "Checksum", "stored_checksum"]


@dataclass(frozen=True)
class Checksum:
    """One algorithm. ``update(data, value)`` goes on from ``value``; ``polynomial`` is bit-reflected.

    ``quick``: of bytes that are in the processor's cache it takes less than copying them.
    """

    name: str
    polynomial: int
    update: Callable[[Any, int], int]
    quick: bool = False

    @property
    def field(self) -> str:
        """The name of the request's and the answer's field."""
        return f"Checksum{self.name}"

    def encode(self, value: int) -> str:
        return base64.b64encode(value.to_bytes(4, "big")).decode()

    def combine(self, first: int, second: int, second_nbytes: int) -> int:
        """The checksum of two pieces put together, from theirs and the second one's length."""
        return self._multiply(self._power_of_x(8 * second_nbytes), first) ^ second

    def _multiply(self, a: int, b: int) -> int:
        """The product modulo the polynomial; bit 31 stands for x^0."""
        product = 0
        mask = 1 << 31
        while mask:
            if a & mask:
                product ^= b
            mask >>= 1
            b = (b >> 1) ^ (self.polynomial if b & 1 else 0)
        return product

    def _power_of_x(self, exponent: int) -> int:
        result, square = 1 << 31, 1 << 30
        while exponent:
            if exponent & 1:
                result = self._multiply(result, square)
            square = self._multiply(square, square)
            exponent >>= 1
        return result


CRC32 = Checksum("CRC32", 0xEDB88320, zlib.crc32)
KNOWN = {CRC32.name: CRC32}
PREFERRED = CRC32

try:
    import crc32c
except ModuleNotFoundError:  # zlib's takes eight times as long: installing tiercheck[s3] brings the fast one
    pass
else:
    CRC32C = Checksum("CRC32C", 0x82F63B78, crc32c.crc32c, quick=True)
    KNOWN[CRC32C.name] = CRC32C
    PREFERRED = CRC32C


def stored_checksum(answer: Mapping[str, Any]) -> tuple[Checksum, str] | None:
    """The whole object's checksum in an answer, and its algorithm, where this process can compute it.

    A ``COMPOSITE`` one (of part checksums, with ``-N`` at its end) says nothing without the parts' bounds.
    """
    for checksum in KNOWN.values():
        value = answer.get(checksum.field)
        if value and "-" not in value and answer.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT":
            return checksum, str(value)
    return None
