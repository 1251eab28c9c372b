"""Checksums as S3 spells them.

A multipart object has the checksum of the whole (``FULL_OBJECT``), which is combined from those of its parts, so that
no byte is read twice. Source: "Checking object integrity in Amazon S3", Amazon S3 User Guide.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from awscrt import checksums as crt

__all__ = ["CRC32C", "KNOWN", "Checksum", "stored_checksum"]


@dataclass(frozen=True)
class Checksum:
    """One algorithm. ``update(data, value)`` goes on from ``value``; ``combine(first, second, second_nbytes)`` is the
    checksum of two pieces put together.

    ``quick``: of bytes that are in the processor's cache it takes less than copying them.
    """

    name: str
    nbytes: int
    update: Callable[[Any, int], int]
    combine: Callable[[int, int, int], int]
    quick: bool = True

    @property
    def field(self) -> str:
        """The name of the request's and the answer's field."""
        return f"Checksum{self.name}"

    def encode(self, value: int) -> str:
        return base64.b64encode(value.to_bytes(self.nbytes, "big")).decode()


CRC32C = Checksum("CRC32C", 4, crt.crc32c, crt.combine_crc32c)
"""The one that is sent."""
KNOWN = (
    CRC32C,
    Checksum("CRC64NVME", 8, crt.crc64nvme, crt.combine_crc64nvme),
    Checksum("CRC32", 4, zlib.crc32, crt.combine_crc32, quick=False),
)
"""Those that are verified, whoever has put the object."""


def stored_checksum(answer: Mapping[str, Any]) -> tuple[Checksum, str] | None:
    """The whole object's checksum in an answer, and its algorithm, if it is one of the known.

    A ``COMPOSITE`` one (of part checksums, with ``-N`` at its end) says nothing without the parts' bounds.
    """
    for checksum in KNOWN:
        value = answer.get(checksum.field)
        if value and "-" not in value and answer.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT":
            return checksum, str(value)
    return None
