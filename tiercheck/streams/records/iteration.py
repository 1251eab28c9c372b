"""What is recorded of every iteration: a differential, or a snapshot. This is what the recorder knows of either."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import xxhash

from tiercheck.format import host_state
from tiercheck.format.container import PackedObject, Shard
from tiercheck.format.index.logical import MASTER
from tiercheck.format.references import References
from tiercheck.kernels.threads import processors_of_rank
from tiercheck.keys import ShardKey
from tiercheck.streams.device.cuda import device_of
from tiercheck.streams.device.gate import Gate
from tiercheck.streams.device.protocol import Device
from tiercheck.streams.device.samples import Comparison
from tiercheck.streams.doubts import Doubts
from tiercheck.streams.records.base import BaseCapture, PackedIndex, base_nbytes, tensors_of
from tiercheck.streams.records.base_template import BaseTemplate
from tiercheck.streams.records.constants import Constants
from tiercheck.streams.tensors.as_bytes import view_of
from tiercheck.streams.tensors.optimizer_writes import OptimizerWatch
from tiercheck.streams.tensors.provider import StateProvider, forms_of, shown_form
from tiercheck.streams.tensors.writes import Watch, contents

__all__ = ["RECORD_SPARE_BYTES", "IterationCapture", "IterationStream"]

log = logging.getLogger(__name__)

CLOSING_THREADS_MAX = 4
"""A GPU fills the first tier's memory faster than one thread reads it: 53 GB/s on an H200."""
HOST_SPARE_BYTES, RECORD_SPARE_BYTES = 64 << 10, 32 << 10
"""Room for an object of a record to grow since the last one. Keep it small: reserved bytes that are not used are
allocated anew for each record. The sum must stay too small for the tier to make a file of it
(:mod:`tiercheck.tiers.shm.mapping`)."""
HOST_STEP_BYTES = 4 << 10
"""The room grows in such steps, so that what was reserved like the last record mostly suffices."""


class IterationCapture(abc.ABC):
    """One version on its way into the first tier's memory: :meth:`add` gradients, then :meth:`finish`."""

    nbytes_needed = 0
    """If its memory did not suffice to close it: what would."""
    is_on_its_way = False
    """Something of it may still be on its way from a device when it has ended: another thread closes it."""

    @abc.abstractmethod
    def add(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Take the gradients (by master, in the master's shape) of the coming step, or of a part of it. They are free
        on return. Errors: ``SaveError``; ``CapacityExceeded`` if memory does not suffice: :meth:`move`, and call this
        again; ``TierError``."""

    @abc.abstractmethod
    def move(self, memory: memoryview) -> None:
        """Go on in longer memory, which what there is so far is copied to."""

    @abc.abstractmethod
    def ended(self, *, skipped: bool, audit: bool = False) -> Callable[[], int]:
        """The step is done, or was skipped: take what is as of now. What is returned waits for what is on its way from
        a device, closes the shard, and returns its length in bytes. ``audit``: what is as of now are also the checksums
        of the state (:mod:`tiercheck.streams.records.audit`). Errors of that: ``WrittenUnseen``; ``OtherwiseStored``;
        ``CapacityExceeded`` if memory does not suffice: :meth:`move`, and call it again; ``TierError``."""

    def finish(self, *, skipped: bool, audit: bool = False) -> int:
        """End, and close the shard in this thread."""
        return self.ended(skipped=skipped, audit=audit)()

    def abandon(self) -> None:  # noqa: B027  most have nothing on its way
        """The record is given up: what is on its way to its memory has landed when this returns."""


class IterationStream(abc.ABC):
    """What one rank's records have in common: the room they take, and what changed since the last one."""

    supersedes = False
    """Whether each record holds what those before it held since the base. Then it needs that base:
    :meth:`set_reference_base`."""

    def __init__(
        self, provider: StateProvider, world_size: int, *, device: Device | None = None, defers: bool = False
    ) -> None:
        """``device``: where the state's tensors are, by default as torch has it. ``defers``: records of a state on a
        device are closed beside training, and take :meth:`comparisons`; without it the host waits for the device
        whenever the state is looked at. Errors: ``UnsupportedSetup`` if the tensors are on several devices."""
        self.provider = provider
        self.world_size = world_size
        self.device = device or device_of(tensors_of(provider)[0].values())
        """``None``: all of the state is on the host."""
        self.defers = defers and self.device is not None
        """Whether records are closed beside training."""
        self.closing_threads = max(1, min(CLOSING_THREADS_MAX, processors_of_rank() // 4)) if self.defers else 1
        """That compute the checksums of a record or base which is closed beside training."""
        self.gate = Gate(provider.tell_of_forward) if self.defers else None
        """What copies from the device wait for."""
        watched_on = self.device if self.defers else None
        self.token = ""
        """Of the generation that records: it is opened after this was made."""
        self.host_nbytes = 0
        """The length of the last host state."""
        self.doubts = Doubts()
        """What was seen that the versions from here on may not hold."""
        self.contents: dict[str, str] | None = None
        """A checksum of all bits of each master as of the last look, if a base is due."""
        self._recorded: dict[str, str] = {}
        self._index = PackedIndex(provider)
        self._template = BaseTemplate()
        self._constants = Constants(provider, watched_on)
        self._frozen = Watch(provider.frozen, watched_on)
        self._masters = Watch(provider.masters, watched_on)
        self._optimizer = OptimizerWatch(provider)
        self._buffers_there = Watch(self._deferred_buffers, watched_on)
        self._forms = forms_of(provider.buffers())
        """Of the buffers, as :meth:`reformed` has seen them last."""
        self.packed_host_state()
        self._index.of_now()
        self.mark_recorded()

    @abc.abstractmethod
    def key(self, generation: int, version: int, rank: int) -> ShardKey:
        """The key of this version's record."""

    @property
    @abc.abstractmethod
    def nbytes_max(self) -> int:
        """Bytes to reserve for one record: its published part is shorter."""

    @property
    def nbytes_unexpected(self) -> int:
        """The same of a record that is as long as one can be. It may exceed :attr:`nbytes_max`, which is by what is
        known of gradients."""
        return self.nbytes_max

    @property
    @abc.abstractmethod
    def nbytes_expected(self) -> int:
        """About the bytes that one record keeps, at most, once it is published."""

    @abc.abstractmethod
    def begin(self, key: ShardKey, memory: memoryview) -> IterationCapture:
        """Start a record in ``memory``, of at least :attr:`nbytes_max` bytes, before the step."""

    def base(self, key: ShardKey) -> BaseCapture:
        """The whole state, on its way into the first tier's memory."""
        return BaseCapture(
            self.provider,
            key,
            self.world_size,
            self.saved_with_bases(),
            token=self.token,
            host_state=self.host_state(),
            expected={f"{MASTER}{name}": content for name, content in (self.contents or {}).items()},
            index=self._index,
            template=self._template,
            constants=self._constants,
            device=self.device,
            gate=self.gate,
            threads=self.closing_threads,
        )

    def hurry(self) -> None:
        """Training is about to wait for what is copied from a device: it is not to be kept back."""
        if self.gate is not None:
            self.gate.open()

    @property
    def base_nbytes(self) -> int:
        """About the bytes of a base."""
        objects = self.host_nbytes + len(self._index.of_now().data)
        return base_nbytes(self.provider, self.saved_with_bases())[0] + objects

    @property
    def constants_nbytes(self) -> int:
        """About the bytes of the constants; 0 if there will be none."""
        return base_nbytes(self.provider, self.saved_with_bases())[1]

    @property
    def constants_unsettled(self) -> bool:
        """Whether the next base had better be captured, since it may bring new constants."""
        return self._constants.unsettled

    @property
    def trained_parameters(self) -> int:
        """The elements of this rank's masters."""
        return sum(tensor.numel() for tensor in self.provider.masters().values())

    def refer_to(self, key: ShardKey, references: References) -> None:
        """The state is what a base was that has these references: bases may refer to the same constants."""
        self._constants.adopt(key, references)

    def give_up_constants(self) -> None:
        """What bases refer to may be lost: the next one refers to none of it."""
        self._constants.give_up()

    def leave_out(self, gradients: Mapping[str, torch.Tensor], version: int) -> None:  # noqa: B027  most need not know
        """The coming step of ``version`` is not recorded."""

    def set_reference_base(self, base: Shard | None) -> None:  # noqa: B027  most do not
        """Records from here on are changes since this base, the newest one, whose memory may be kept."""

    def saved_with_bases(self) -> Mapping[str, torch.Tensor]:
        """Tensors beside the provider's that belong to the state."""
        return {}

    def load(self, residuals: Mapping[str, torch.Tensor]) -> None:  # noqa: B027  most have none
        """Put back what :meth:`saved_with_bases` had returned."""

    @property
    def host_nbytes_max(self) -> int:
        """Room for the next host state, which may grow from one version to the next."""
        return HOST_SPARE_BYTES + 2 * -(-self.host_nbytes // HOST_STEP_BYTES) * HOST_STEP_BYTES

    def host_state(self) -> dict[str, Any]:
        """The provider's, as of now, with the doubts there are."""
        return self.doubts.saved_in(self.provider.host_state())

    def packed_host_state(self) -> PackedObject:
        """Errors: :class:`tiercheck.format.host_state.Unstorable`, naming the path of what cannot be stored."""
        packed = host_state.pack(self.host_state(), name="host state")
        self.host_nbytes = len(packed)
        return PackedObject(packed)

    def mark_recorded(self) -> None:
        """The state as it is now is in a base: only what changes from here on matters."""
        there = self._deferred_buffers()
        here = {name: tensor for name, tensor in self.provider.buffers().items() if name not in there}
        self._recorded = {name: content_of(tensor) for name, tensor in here.items()}
        self._frozen.mark()
        self._buffers_there.mark()
        self.comparisons()

    def frozen_changed(self) -> bool:
        """Whether a parameter that no optimizer updates was written to since the last base: then a base is due,
        for records do not hold it. Told as :class:`~tiercheck.streams.tensors.writes.Watch` does."""
        return bool(self._frozen.written())

    def mark_stepped(self, *, every_bit: bool = False) -> None:
        """Masters and optimizer are as the optimizer's step, or a recovery, left them. ``every_bit``:
        :meth:`masters_rewritten` is going to be asked."""
        self._masters.mark()
        self._optimizer.mark()
        self.contents = self._contents() if every_bit and not self.supersedes else None

    def mark_published(self) -> None:
        """A version is published, with masters and optimizer as they were when :meth:`trained_written` looked last."""
        self._masters.mark_seen()
        self._optimizer.mark_seen()

    def masters_rewritten(self) -> tuple[str, ...]:
        """The masters of which any bit has changed since :meth:`mark_stepped`; none if it was not to look at every
        bit. :attr:`contents` is then as of now."""
        if self.contents is None:
            return ()
        before, self.contents = self.contents, self._contents()
        return tuple(name for name, content in self.contents.items() if content != before.get(name))

    def trained_written(self) -> bool:
        """Whether anything but the optimizer's step has written to a master, or to what the optimizer holds of one,
        since then: then no replay of gradients leads to what it holds. Told as in :meth:`frozen_changed`, and by
        :class:`~tiercheck.streams.tensors.optimizer_writes.OptimizerWatch`."""
        return any([self._masters.written(), self._optimizer.written()])

    def written(self) -> tuple[str, ...]:
        """The names of all that was written to since :meth:`mark_stepped` or, if no optimizer updates it, the last
        base."""
        optimizer = ("what the optimizer holds",) if self._optimizer.written() else ()
        return self._masters.counted() + optimizer + self._frozen.counted()

    def comparisons(self) -> list[Comparison]:
        """What was left to be compared since this was called last, or a base began: by the samples of tensors on a
        device. If any differ, something wrote past torch's counters, and the coming record does not lead to its
        version."""
        return [*self._masters.comparisons(), *self._frozen.comparisons(), *self._buffers_there.comparisons()]

    def changed_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that differ from what was recorded; they count as recorded then, unless a record supersedes those
        before it, and has to hold them itself."""
        changed: dict[str, torch.Tensor] = {}
        there = self._deferred_buffers()
        if there:
            changed = {name: there[name] for name in self._buffers_there.written() if name in there}
            self._buffers_there.mark_seen()
        for name, tensor in self.provider.buffers().items():
            if name in there:
                continue
            content = content_of(tensor)
            if self._recorded.get(name) != content:
                changed[name] = tensor
                if not self.supersedes:
                    self._recorded[name] = content
        return changed

    def reformed(self) -> bool:
        """Whether a buffer has another dtype or shape than when this was asked last, or is there only since then. A
        start refuses what its job does not hold in the same form, and a chain of records has one form."""
        forms, before = forms_of(self.provider.buffers()), self._forms
        if forms == before:
            return False
        self._forms = forms
        for name in sorted(name for name in {**before, **forms} if forms.get(name) != before.get(name)):
            log.warning(
                "the buffer %s has changed its form, from %s to %s: its version gets a base, and a restart is refused "
                "unless the script makes it so before it attaches",
                name,
                shown_form(before.get(name)),
                shown_form(forms.get(name)),
            )
        return True

    def _contents(self) -> dict[str, str]:
        """Of the masters on the host."""
        masters = self.provider.masters()
        if self.device is not None:
            masters = {name: each for name, each in masters.items() if not self.device.holds(each)}
        return contents(masters)

    def _deferred_buffers(self) -> dict[str, torch.Tensor]:
        """Those on a device, if the host must not wait for them: whether they have changed is told by torch's
        counters."""
        if self.device is None or not self.defers:
            return {}
        return {name: each for name, each in self.provider.buffers().items() if self.device.holds(each)}


def content_of(tensor: torch.Tensor) -> str:
    """A digest of the tensor's content."""
    return str(xxhash.xxh3_128_hexdigest(view_of(tensor).data))
