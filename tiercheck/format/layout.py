"""Where the tensors of a shard lie while it is being put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tiercheck.format.header import FILLING, OBJECT_PREFIX, PADDING_PREFIX, Extent, TensorSpec, round_up
from tiercheck.format.recurring import Recurring

__all__ = ["ShardLayout", "object_spec", "tensor_name", "tensor_spec"]


class ShardLayout:
    """Where each tensor lies. Offsets count from the end of the header. ``leading``: the recurring tensors ahead of
    these."""

    def __init__(self, leading: Recurring | None = None, stamp: str = "") -> None:
        self.leading = leading
        self.stamp = stamp
        self.nbytes = 0 if leading is None else leading.nbytes
        self._extents: list[Extent] = []
        self._names: set[str] = set()
        self._paddings = 0 if leading is None else leading.paddings

    def gap_before(self, spec: TensorSpec) -> int:
        """Bytes of padding that ``spec`` needs in front of it; ``ValueError`` if its name is taken."""
        if spec.name in self._names or (self.leading is not None and self.leading.holds(spec.name, self.stamp)):
            raise ValueError(f"the shard has {spec.name!r} already; names are unique in a shard")
        aligned = spec.name.startswith(OBJECT_PREFIX) or not spec.nbytes
        return 0 if aligned else round_up(self.nbytes) - self.nbytes

    def append(self, spec: TensorSpec, gap: int) -> Extent:
        """The extent of the next tensor. ``gap``: what :meth:`gap_before` said of it."""
        if gap:
            self._extents.append(Extent.padding(self._paddings, self.nbytes, gap))
            self._paddings += 1
        extent = Extent(spec, self.nbytes + gap, None)
        self._names.add(spec.name)
        self._extents.append(extent)
        self.nbytes = extent.stop
        return extent

    def fill(self, nbytes: int) -> None:
        """So many bytes of padding at the end."""
        self._extents.append(Extent(TensorSpec(FILLING, "U8", (nbytes,)), self.nbytes, None))
        self.nbytes += nbytes

    def tensors(self) -> Iterator[Extent]:
        """All but the padding and what recurs, in file order."""
        return (extent for extent in self._extents if not extent.is_padding)

    def with_checksums(self, checksums: Mapping[str, str]) -> list[Extent]:
        return [Extent(each.spec, each.start, checksums.get(each.spec.name)) for each in self._extents]


def tensor_spec(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(tensor_name(name), dtype, tuple(shape))


def tensor_name(name: str) -> str:
    if name.startswith((OBJECT_PREFIX, PADDING_PREFIX)):
        raise ValueError(f"the tensor name {name[:80]!r} begins with a prefix that the file format keeps for itself")
    return name


def object_spec(name: str, nbytes: int) -> TensorSpec:
    return TensorSpec(OBJECT_PREFIX + name, "U8", (nbytes,))
