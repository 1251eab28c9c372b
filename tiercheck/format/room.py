"""How much room a header takes at most, before anything that it says is known but the names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from tiercheck import keys
from tiercheck.format.header import (
    ALIGNMENT,
    LENGTH_NBYTES,
    NBYTES_MAX,
    OBJECT_PREFIX,
    ZEROS,
    Extent,
    ShardMetadata,
    TensorSpec,
    appended,
    check_count,
    description_of,
    header_texts,
    round_up,
)

__all__ = ["header_room"]


def header_room(
    tensors: Iterable[TensorSpec], objects: Iterable[str] = (), notes: Mapping[str, str] | None = None
) -> int:
    """Bytes to reserve for the header of a shard with these tensors, object names and notes, whatever its
    version, the order of its tensors and their offsets, and however they are shrunk later."""
    return _worst_case_nbytes(tuple(tensors), tuple(objects), tuple((notes or {}).items()))


@lru_cache(maxsize=16)
def _worst_case_nbytes(
    tensors: tuple[TensorSpec, ...], objects: tuple[str, ...], notes: tuple[tuple[str, str], ...]
) -> int:
    """Bytes that no header of such a shard passes, wherever its tensors come to lie: the room to reserve. Cached:
    what a job writes has the same tensors from version to version."""
    worst = ShardMetadata(
        stream=keys.Stream.DIFFERENTIAL,
        generation=keys.GENERATION_MAX,
        first=keys.VERSION_MAX,
        last=keys.VERSION_MAX,
        rank=keys.RANK_MAX,
        world_size=keys.RANK_MAX + 1,
        notes=dict(notes),
        token=ZEROS,
    )
    refers = f',"refers_to":"{keys.reference((keys.GENERATION_MAX, keys.VERSION_MAX))}"'  # as a base may
    extents = [Extent(spec, NBYTES_MAX, ZEROS) for spec in tensors]
    # An object is U8: its offsets and its one dimension have at most as many digits as NBYTES_MAX.
    extents += [Extent(TensorSpec(OBJECT_PREFIX + name, "U8", (NBYTES_MAX,)), 0, ZEROS) for name in objects]
    check_count(2 * len(extents))
    longest = Extent.padding(2 * len(extents), NBYTES_MAX, ALIGNMENT)  # one may come before each
    paddings = len(extents) * len(appended({longest.spec.name: description_of(longest)}))
    slack = len(refers) + len(extents) * len(str(NBYTES_MAX))  # the objects' start offsets, counted above as one digit
    return round_up(LENGTH_NBYTES + sum(map(len, header_texts(worst, extents))) + paddings + slack)
