"""What is written to a tier or said to another process. Each field's type, bounds and default are declared once.

Such a value is a frozen dataclass, or a struct of msgspec if it is an array on the wire. Its annotations say what a
field may be, and msgspec checks them. Neighbouring releases understand each other: a reader ignores the fields that it
does not know, and a missing field has its default. So a release may add fields with defaults, and never gives a field
another meaning.

Lengths are bounded before anything is built: by the limits of :mod:`tiercheck.format.host_state`, or by the frame.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from tiercheck.keys import GENERATION_MAX, RANK_MAX, VERSION_MAX

__all__ = ["Count", "Generation", "Name", "Rank", "Text", "Version", "WorldSize", "pack", "plain", "read", "ready"]

T = TypeVar("T")

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Generation = Annotated[int, Meta(ge=0, le=GENERATION_MAX)]
Rank = Annotated[int, Meta(ge=0, le=RANK_MAX)]
Version = Annotated[int, Meta(ge=0, le=VERSION_MAX)]
WorldSize = Annotated[int, Meta(ge=0, le=RANK_MAX + 1)]
Name = Annotated[str, Meta(max_length=255)]
Text = Annotated[str, Meta(max_length=16 << 10)]

ERROR_CHARACTERS_MAX = 200


def pack(value: object) -> bytes:
    """``value`` as msgpack. Fields keep their names and their order. Errors: ``TypeError`` or ``ValueError`` for what
    has no such form."""
    return msgspec.msgpack.encode(value)


def plain(value: object) -> Any:
    """``value`` in dicts, lists and atoms: what a reader of :func:`pack`'s bytes sees."""
    return msgspec.msgpack.decode(pack(value))


def ready(kind: type[T]) -> type[T]:
    """The class, decorated: msgspec knows it from here on. Otherwise msgspec learns a class when the first value is
    read, and two threads that read the first one at the same time may crash the process."""
    msgspec.msgpack.Decoder(kind)
    return kind


def read(kind: type[T], value: Any) -> T:
    """``value``, which is plain, as a ``kind``.

    Errors: ``ValueError`` naming the field, for a missing field, a wrong type, a value out of bounds, or what ``kind``
    itself refuses.
    """
    try:
        return msgspec.convert(value, kind)
    except ValueError as error:
        raise ValueError(f"invalid {kind.__name__}: {error}"[:ERROR_CHARACTERS_MAX]) from None
