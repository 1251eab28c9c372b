"""What a base says of the tensors that it lacks: they lie in the rank's constants, which its key names.

A reader takes such a tensor from any copy of these constants, of whatever tier, and compares it with what the base
says: dtype, shape and checksum. The token says which generation wrote them: two jobs may have opened one of the same
number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct

from tiercheck import schema
from tiercheck.errors import Corruption
from tiercheck.format.container import Shard, TensorEntry
from tiercheck.format.header import DIMENSIONS_MAX, NAME_BYTES_MAX, TENSORS_MAX, ShardHeader, TensorSpec
from tiercheck.schema import Count

__all__ = ["REFERENCES", "Reference", "References", "read_references", "referred"]

REFERENCES = "references"
"""The object of a base that has them."""

Name = Annotated[str, Meta(max_length=NAME_BYTES_MAX)]


class Reference(Struct, frozen=True, array_like=True):
    """What a tensor of the constants must be."""

    dtype: Annotated[str, Meta(max_length=16)]
    shape: Annotated[tuple[Count, ...], Meta(max_length=DIMENSIONS_MAX)]
    checksum: Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]


@dataclass(frozen=True)
class References:
    """By name, the tensors that a base has in its constants."""

    token: Annotated[str, Meta(max_length=16)]
    """Of the generation that wrote the constants."""
    tensors: Annotated[Mapping[Name, Reference], Meta(max_length=TENSORS_MAX)]

    @property
    def plain(self) -> Any:
        return schema.plain(self)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name, each.dtype, each.shape) for name, each in self.tensors.items())

    @classmethod
    def read(cls, value: Any) -> References:
        """What :attr:`plain` returned. Errors: ``ValueError``."""
        found = schema.read(cls, value)
        _ = found.specs
        return found

    def check(self, header: ShardHeader, *, tier: str) -> None:
        """Errors: ``Corruption`` if the constants with this header are not those that are meant."""
        key = str(header.metadata.key)
        if header.metadata.token != self.token:
            raise Corruption("another job has written these constants", tier=tier, key=key)
        held = {extent.spec.name: extent for extent in header.extents}
        for spec in self.specs:
            extent = held.get(spec.name)
            if extent is None or extent.spec != spec or extent.checksum != self.tensors[spec.name].checksum:
                raise Corruption(f"the tensor {spec.name!r} is not the one that a base refers to", tier=tier, key=key)


def read_references(base: Shard) -> References | None:
    """``None`` if the base refers to nothing. Errors: ``Corruption``."""
    if not base.metadata.refers_to:
        return None
    try:
        return References.read(base.object(REFERENCES))
    except (KeyError, ValueError) as error:
        raise Corruption(f"what it refers to cannot be read: {error}", tier=base.tier, key=base.key) from error


def referred(references: References, constants: Shard) -> Iterator[TensorEntry]:
    """The tensors that a base refers to, each verified. Errors: ``Corruption``, of the constants."""
    references.check(constants.header, tier=constants.tier or "")
    return map(constants.entry, references.tensors)
