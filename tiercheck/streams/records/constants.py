"""What does not change: it is stored once, as the rank's constants, and bases refer to it.

A tensor is constant while its bits are: the checksums of all of them are compared at every base, whatever
``requires_grad`` says. Frozen parameters are constants from the first base on, and buffers when they have stood still
from one base to the next. What has changed since is stored with the base, as if there were no constants. If that
becomes much, and stands still again, the base brings new constants, and those after it refer to these.

Of frozen parameters to which no write was seen (:class:`~tiercheck.streams.tensors.writes.Watch`) the checksums are
computed beside training, after the base was copied. If one differs after all, the base is given up, and the next one
holds the tensor. So a base never refers to other bits than the state had.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tiercheck.format.checksums import BLOCK_NBYTES, BLOCKS, DIGEST_NBYTES, block_digests, checksum_of_blocks
from tiercheck.format.container import (
    PackedObject,
    ShardMetadata,
    ShardWriter,
    TensorSpec,
    checksum_of,
    header_room,
    shard_nbytes,
)
from tiercheck.format.host_state import pack
from tiercheck.format.index.logical import EXTRA
from tiercheck.format.references import Reference, References
from tiercheck.keys import ShardKey
from tiercheck.streams.device.protocol import Device
from tiercheck.streams.device.reading import Reading, cloned
from tiercheck.streams.tensors.as_bytes import array_of, dtype_name, tensor_in, view_of
from tiercheck.streams.tensors.provider import StateProvider
from tiercheck.streams.tensors.writes import Watch

__all__ = [
    "CarriedOn",
    "Constants",
    "ConstantsCapture",
    "Split",
    "checksum",
    "constants_nbytes",
    "made_of",
    "nbytes_of",
]

NBYTES_MIN = 64 << 10
"""Less is stored with each base: an object of its own is not worth it."""
SHARE = 8
"""New constants are worth it if a base would hold an eighth of its bytes less."""


def nbytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def checksum(tensor: torch.Tensor, look: Callable[[torch.Tensor], NDArray[Any]] = array_of) -> str:
    """As a shard has it. A tensor on a GPU is brought here, one at a time."""
    return checksum_of(look(tensor).reshape(-1).view(np.uint8).data)


def is_worth_it(nbytes: int, base_nbytes: int) -> bool:
    """Whether new constants are, if the base would hold so many bytes less of so many."""
    return nbytes >= NBYTES_MIN and nbytes * SHARE >= base_nbytes


def constants_nbytes(provider: StateProvider, base_nbytes: int) -> int:
    """About how many bytes the constants of a job will have whose bases had ``base_nbytes`` with them."""
    nbytes = nbytes_of(provider.frozen().values())
    return nbytes if is_worth_it(nbytes, base_nbytes) else 0


@dataclass(frozen=True)
class Split:
    """How a base stores what no optimizer updates, by name in the shard."""

    inline: Mapping[str, torch.Tensor]
    referred: Mapping[str, Reference]
    """What the newest constants hold already."""
    unverified: Mapping[str, torch.Tensor]
    """Those of them of which no write was seen, and no bits were compared."""
    made: Mapping[str, torch.Tensor]
    """What new constants are to hold; empty if none are made."""


class Constants:
    """A rank's newest constants, and what may be some."""

    def __init__(self, provider: StateProvider, device: Device | None = None) -> None:
        self.key: ShardKey | None = None
        """``None``: there are none that a base may refer to."""
        self.token = ""
        """Of the generation that wrote them."""
        self._tensors: Mapping[str, Reference] = {}
        self._provider = provider
        # Samples are of no use: all bits are compared beside training.
        self._watch = Watch(provider.frozen, device)
        self._differing: set[str] = set()
        """Frozen parameters that are known to differ from what the constants hold."""
        self.unsettled = False
        """Whether the next captured base may well bring new constants."""
        self._before: Mapping[str, str] = {}
        """The checksums, as of the last base, of buffers and of what differed from the constants."""

    def adopt(self, key: ShardKey, references: References) -> None:
        """The state is what these references say: bases may refer to them."""
        self.key, self.token, self._tensors = key, references.token, references.tensors
        self._differing.clear()
        self._watch.mark()

    def arrived(self, key: ShardKey, references: References) -> None:
        """The state was what these references say when the base began that brought them (:meth:`split`). What was seen
        to be written to since may differ."""
        self.key, self.token, self._tensors = key, references.token, references.tensors
        self._differing = {EXTRA + name for name in self._watch.written()}
        self._watch.mark_seen()

    def give_up(self) -> None:
        """These constants cannot be read any more: the next base refers to none of them."""
        self.key, self._tensors = None, {}

    def differs(self, names: Collection[str]) -> None:
        """These have other bits than the constants hold."""
        self._differing.update(names)

    def split(self, trained_nbytes: int) -> Split:
        """As of now. ``trained_nbytes``: of the base's other tensors."""
        frozen = {EXTRA + name: tensor for name, tensor in self._provider.frozen().items()}
        buffers = {EXTRA + name: tensor for name, tensor in self._provider.buffers().items()}
        found = {name: checksum(tensor, look=view_of) for name, tensor in buffers.items()}
        self._differing.update(EXTRA + name for name in self._watch.counted())
        self._watch.mark()
        unverified = {name: each for name, each in frozen.items() if name not in self._differing}
        written = self._differing & self._tensors.keys()
        found |= {name: checksum(each) for name, each in frozen.items() if name in written}
        referred = {
            name: held
            for name, held in self._tensors.items()
            if (name in unverified and lies_as(unverified[name], held)) or found.get(name) == held.checksum
        }
        self._differing -= referred.keys()
        everything = {**frozen, **buffers}
        rest = {name: each for name, each in everything.items() if name not in referred}
        before, self._before = self._before, found
        still = {name for name in buffers if before.get(name) == found[name]}
        still |= {name for name in frozen if before.get(name, found.get(name)) == found.get(name)}
        if not referred:
            self.give_up()  # a base that does not refer to them is the end of them
        inline_nbytes = trained_nbytes + nbytes_of(rest.values())
        # Of these the next base tells whether they stand still. Of buffers that changed once, it is not expected.
        untold = nbytes_of(each for name, each in rest.items() if name in frozen or name not in before)
        saved = nbytes_of(each for name, each in rest.items() if name in still)
        made_now = is_worth_it(saved, inline_nbytes)
        self.unsettled = is_worth_it(untold - (saved if made_now else 0), inline_nbytes)
        if made_now:
            made = {name: each for name, each in everything.items() if name in still or name in referred}
            return Split({name: each for name, each in rest.items() if name not in made}, {}, {}, made)
        return Split(rest, referred, {name: each for name, each in unverified.items() if name in referred}, {})


class CarriedOn(Constants):
    """The references of the base that a folded state was loaded from. The constants themselves are not read: the state
    has a tensor without memory (``meta``) for each constant that no differential has changed."""

    def __init__(self, provider: StateProvider, key: ShardKey, references: References) -> None:
        super().__init__(provider)
        self.adopt(key, references)

    def split(self, trained_nbytes: int) -> Split:
        """It makes no new constants."""
        extras = {EXTRA + name: tensor for name, tensor in self._provider.buffers().items()}
        referred = {
            name: held
            for name, held in self._tensors.items()
            if extras[name].is_meta or checksum(extras[name]) == held.checksum
        }
        return Split({name: each for name, each in extras.items() if name not in referred}, referred, {}, {})


def made_of(
    split: Split, provider: StateProvider, key: ShardKey, world_size: int, token: str, device: Device | None = None
) -> tuple[ConstantsCapture | None, dict[str, torch.Tensor]]:
    """The new constants that a base brings, if any, and the live tensors among them: what a forward pass may change is
    taken at once, frozen parameters while it runs."""
    if not split.made:
        return None, {}
    frozen = {EXTRA + name for name in provider.frozen()}
    live = {name: tensor for name, tensor in split.made.items() if name in frozen}
    tensors = {name: tensor if name in live else cloned(tensor, device) for name, tensor in split.made.items()}
    own = ShardKey.constant(key.generation, key.first, key.rank)
    there = frozenset(name for name, each in split.made.items() if device is not None and device.holds(each))
    return ConstantsCapture(own, tensors, world_size, token, there), live


def lies_as(tensor: torch.Tensor, held: Reference) -> bool:
    return (dtype_name(tensor, "a frozen parameter"), tuple(tensor.shape)) == (held.dtype, held.shape)


class ConstantsCapture:
    """New constants on their way into the first tier's memory: :meth:`copy`, then :meth:`finish`."""

    def __init__(
        self,
        key: ShardKey,
        tensors: Mapping[str, torch.Tensor],
        world_size: int,
        token: str,
        on_device: Collection[str] = (),
    ) -> None:
        """``on_device``: those that ``reading`` copies."""
        self.key = key
        self.reading: Reading | None = None
        self._on_device = on_device
        self._metadata = ShardMetadata.of(key, world_size, token)
        self._tensors = tensors
        specs = (TensorSpec(name, dtype_name(each, name), tuple(each.shape)) for name, each in tensors.items())
        self._specs = {spec.name: spec for spec in specs}
        self._slots: dict[str, memoryview] = {}
        self._writer: ShardWriter | None = None
        self._fills = False
        """Whether the shard is to be as long as its memory."""
        self._checksums: Mapping[str, str] = dict.fromkeys(tensors, "0" * 16)

    @property
    def references(self) -> References:
        """To all of them. Before :meth:`finish` only their length is right."""
        tensors = {name: Reference(each.dtype, each.shape, self._checksums[name]) for name, each in self._specs.items()}
        return References(self._metadata.token, tensors)

    @property
    def nbytes_max(self) -> int:
        """Bytes to reserve for the shard."""
        of_blocks = {name: bytes(-(-spec.nbytes // BLOCK_NBYTES) * DIGEST_NBYTES) for name, spec in self._specs.items()}
        return shard_nbytes(self._specs.values(), {BLOCKS: len(pack(of_blocks))})

    def copy(self, memory: memoryview) -> None:
        """Copy the tensors into ``memory``. Blocking; call it once. Those on a device have arrived when the base has
        (:meth:`~tiercheck.streams.records.base.BaseCapture.arrive`)."""
        writer = ShardWriter(memory, header_room(self._specs.values(), [BLOCKS]))
        self._fills = self.reading is not None and self.reading.reaches(memory)
        for name, tensor in self._tensors.items():
            spec = self._specs[name]
            self._slots[name] = writer.slot(name, spec.dtype, spec.shape)
            place = tensor_in(self._slots[name], spec.dtype, spec.shape, what=name)
            if self.reading is not None and name in self._on_device:
                self.reading.copy(place, tensor)
            else:
                place.copy_(tensor)
        self._writer = writer

    def finish(self) -> int:
        """Close the shard; returns its length in bytes."""
        if self._writer is None:
            raise ValueError("constants are finished after they were copied")
        digests = {name: block_digests(slot) for name, slot in self._slots.items() if slot.nbytes > BLOCK_NBYTES}
        self._checksums = {
            name: checksum_of_blocks(digests[name]) if name in digests else checksum_of(slot)
            for name, slot in self._slots.items()
        }
        self._writer.add_object(BLOCKS, PackedObject(pack(digests)))
        if self._fills:
            self._writer.fill()
        nbytes = self._writer.finish(self._metadata, checksums=self._checksums)
        self._slots.clear()
        self._tensors = {}
        self._writer = None  # the tier reuses the memory only when nobody has a view of it
        return nbytes
