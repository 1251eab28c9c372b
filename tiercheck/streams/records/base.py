"""The base stream: now and then, a rank's full state.

A base v is the state after iteration v. Its tensors are

- ``master/NAME``: what the optimizer updates,
- ``state/NAME/KEY``: the optimizer's tensors for it,
- ``extra/NAME``: what no optimizer updates: persistent buffers, frozen parameters. What has not changed lies in the
  rank's constants instead (:mod:`tiercheck.streams.records.constants`), and the object ``references`` tells of it,
- ``residual/NAME``: where training uses compressed gradients with error feedback, what of the master's gradients it
  has not used yet (:mod:`tiercheck.streams.gradients.encoder`),

and its objects ``identity``, ``optimizer`` (options of the parameter groups, the group of each master, and state that
is no tensor), ``host``, ``index`` and ``blocks``. The index says what of the model each tensor is
(:mod:`tiercheck.format.index`); the differentials and snapshots of a generation follow its first base, whose index is
theirs. By the digests in ``blocks`` a part of a long tensor is verified without the rest
(:mod:`tiercheck.format.checksums`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from tiercheck import schema
from tiercheck.errors import Corruption, UnsupportedSetup
from tiercheck.format.checksums import BLOCKS
from tiercheck.format.container import PackedObject, Shard, ShardMetadata, ShardWriter, checksum_of
from tiercheck.format.host_state import pack
from tiercheck.format.index.logical import EXTRA, MASTER
from tiercheck.format.index.message import INDEX, plain_index
from tiercheck.format.references import REFERENCES, References, read_references, referred
from tiercheck.kernels.reference.gathering import bytes_at
from tiercheck.keys import ShardKey
from tiercheck.streams.device.gate import Gate
from tiercheck.streams.device.protocol import Device
from tiercheck.streams.device.reading import Reading, cloned
from tiercheck.streams.device.samples import Comparison
from tiercheck.streams.doubts import Doubts, listed, together
from tiercheck.streams.gradients.pieces import checksums_of, hash_all
from tiercheck.streams.records.base_template import HOST, IDENTITY, OPTIMIZER, BaseTemplate
from tiercheck.streams.records.constants import Constants, Split, checksum, constants_nbytes, made_of, nbytes_of
from tiercheck.streams.tensors.as_bytes import absent_tensor, given, tensor_in
from tiercheck.streams.tensors.provider import Form, Identity, StateProvider, extras_of, forms_of

__all__ = [
    "HOST",
    "OPTIMIZER",
    "BaseCapture",
    "BaseState",
    "PackedIndex",
    "base_nbytes",
    "optimizer_object",
    "read_base",
    "tensors_of",
]

log = logging.getLogger(__name__)

GATHERED_NBYTES_MAX = 1 << 20
"""Up to so many bytes of a tensor are copied by their address: torch's own copy, which several threads may share, takes
some microseconds more."""


@dataclass(frozen=True)
class BaseState:
    """What a base holds, decoded. Tensors lie over the shard's memory: copy before writing to them."""

    identity: Identity
    masters: Mapping[str, torch.Tensor]
    optimizer_state: Mapping[str, Mapping[str, Any]]
    extras: Mapping[str, torch.Tensor]
    hyperparameters: list[dict[str, Any]]
    host_state: Mapping[str, Any]
    residuals: Mapping[str, torch.Tensor] = field(default_factory=dict)
    group_of: Mapping[str, int] = field(default_factory=dict)
    """The index of each master's parameter group."""


class PackedIndex:
    """The provider's index, as bases carry it. It is packed again only if the tensors are others than before."""

    def __init__(self, provider: StateProvider) -> None:
        self._provider = provider
        self._forms: Mapping[str, Form] = {}
        self._packed: PackedObject | None = None

    def of(self, tensors: Mapping[str, torch.Tensor]) -> PackedObject:
        """``tensors``: the base's. Errors: ``UnsupportedSetup`` if the index does not speak of these."""
        forms = forms_of({name: each for name, each in tensors.items() if name.startswith((MASTER, EXTRA))})
        if self._packed is None or forms != self._forms:
            try:
                index = self._provider.index()
                index.check({name: shape for name, (_, shape) in forms.items()})
            except ValueError as error:
                raise UnsupportedSetup(
                    f"the index() of {type(self._provider).__name__} does not fit the tensors it speaks of: {error}"
                ) from error
            if self._packed is not None:
                self._warn_of_parameters(forms)
            packed = pack(plain_index(index), name="index")
            self._forms, self._packed = forms, PackedObject(packed, checksum_of(packed))
        return self._packed

    def _warn_of_parameters(self, forms: Mapping[str, Form]) -> None:
        """Of the parameters that are others than before. Of buffers
        :meth:`~tiercheck.streams.records.iteration.IterationStream.reformed` tells."""
        buffers = {f"{EXTRA}{name}" for name in self._provider.buffers()}
        changed = {name for name in {**self._forms, **forms} if self._forms.get(name) != forms.get(name)} - buffers
        if changed:
            log.warning(
                "the model has other parameters than when it was attached (%s): a restart is refused unless the script "
                "makes them so before it attaches",
                listed(together((), tuple(sorted(each.partition("/")[2] for each in changed)))),
            )

    def of_now(self) -> PackedObject:
        """Of the provider's tensors as they are."""
        tensors, _ = tensors_of(self._provider)
        return self.of(tensors)


class BaseCapture:
    """A base on its way into the first tier's memory.

    Made right after iteration v. What the next forward pass may change (buffers, host state) is taken at
    once; masters, optimizer state, frozen parameters and residuals stand still until the next step, so :meth:`copy` may
    take them during the next forward and backward pass, on another thread, and must have returned before that step.
    Training's thread calls :meth:`let_change` before it; the other thread calls :meth:`arrive` before :meth:`finish`.
    What is on ``device`` is read where training's stream stood when this was made, by a stream of its own, and the step
    comes behind that by an event.

    ``host_state`` is the provider's where it is not given. ``expected`` has the checksums that tensors and objects of
    the base are to have, by their names in it: :meth:`finish` compares them with the copy's. ``audited``: they are of
    everything.
    ``constants``: what the base may refer to; by default it is whole by itself. ``gate``: what copies from ``device``
    wait for. ``threads``: that compute checksums. ``template``: what the last base of these was made by, which has been
    finished or given up.
    """

    def __init__(
        self,
        provider: StateProvider,
        key: ShardKey,
        world_size: int,
        residuals: Mapping[str, torch.Tensor] = MappingProxyType({}),
        *,
        token: str = "",
        host_state: Mapping[str, Any] | None = None,
        expected: Mapping[str, str] | None = None,
        index: PackedIndex | None = None,
        template: BaseTemplate | None = None,
        constants: Constants | None = None,
        audited: bool = False,
        device: Device | None = None,
        gate: Gate | None = None,
        threads: int = 1,
    ) -> None:
        everything, values = tensors_of(provider)
        everything |= {f"residual/{name}": tensor for name, tensor in residuals.items()}
        extras = {name: tensor for name, tensor in everything.items() if name.startswith(EXTRA)}
        self._later = later = {name: tensor for name, tensor in everything.items() if name not in extras}
        self._known = constants
        trained_nbytes = nbytes_of(self._later.values())
        self._split = split = constants.split(trained_nbytes) if constants is not None else Split(extras, {}, {}, {})
        self.constants, live = made_of(split, provider, key, world_size, token, device)
        """New ones: they are to be copied before the base, finished before it, and published before it."""
        self.key = replace(key, refers_to=self._refers_to())
        self._metadata = ShardMetadata.of(self.key, world_size, token)
        frozen = {EXTRA + name for name in provider.frozen()}
        self._at_once = {name: cloned(each, device) for name, each in split.inline.items() if name not in frozen}
        later.update((name, each) for name, each in split.inline.items() if name in frozen)
        tensors = {**split.inline, **later}
        self._on_device = frozenset(name for name, each in tensors.items() if device and device.holds(each))
        held = {
            IDENTITY: schema.plain(provider.identity()),
            OPTIMIZER: optimizer_object(provider, values),
            HOST: provider.host_state() if host_state is None else host_state,
        }
        template = template or BaseTemplate()
        self._layout = template.layout(tensors)
        self._objects = {name: PackedObject(pack(value, name=name)) for name, value in held.items()}
        self._objects[INDEX] = (index or PackedIndex(provider)).of(everything)
        # Not by way of self: the template keeps it, and is not to keep the capture.
        self._watch = template.watch(lambda: {**later, **live}, device)
        self.disturbed = False
        """Whether somebody wrote to the state before it was read: then the copy is of no one moment. It is final when
        :meth:`arrive` has returned."""
        self._expected = dict(expected or {})
        self.audited = audited
        self.unexpected: tuple[str, ...] = ()
        """After :meth:`finish`: the masters, and what else by its name in the base, whose content is not the expected
        one."""
        self._writer: ShardWriter | None = None
        self._memory = memoryview(b"")
        """Of all tensors."""
        self._device = device
        self._threads = threads
        self._fills = False
        """Whether the shard is to be as long as its memory."""
        self._reading = None if device is None else Reading(device, gate)
        if self.constants is not None:
            self.constants.reading = self._reading
        self._comparison: Comparison | None = None
        self._deciding = threading.Lock()
        self._decided = device is None
        """Whether it was looked who had written to the state while it was read."""

    @property
    def nbytes_max(self) -> int:
        """Bytes to reserve for the shard."""
        objects = {name: len(each.data) for name, each in self._objects.items()}
        references = self._references
        objects[REFERENCES] = 0 if references is None else len(pack(references.plain))
        return self._layout.nbytes_max(objects)

    def copy(self, memory: memoryview) -> None:
        """Copy the state into ``memory``. Blocking; call it once. What is on a device may still be on its way when this
        returns. The state may change from its return on, after :meth:`let_change`."""
        reading = self._reading
        self._fills = reading is not None and reading.reaches(memory)
        self._lay_out(memory)
        sources = {name: self._source(name) for name in self._layout.specs}
        if reading is not None:
            reading.copy_all((self._place(name), sources[name]) for name in sources if name in self._on_device)
        held = np.frombuffer(self._memory, np.uint8)
        for name, source in sources.items():
            if name in self._on_device:
                continue
            if (into := held[self._layout.ranges[name]]).size <= GATHERED_NBYTES_MAX and lies_as_it_is(source):
                into[:] = bytes_at(source.data_ptr(), into.size)
            else:
                self._place(name).copy_(source)
        if reading is None:
            self.disturbed = bool(self._watch.written())
        else:
            self._comparison = self._watch.compared_in(reading.stream)

    def let_change(self) -> bool:
        """In training's thread, when :meth:`copy` has returned and before the state changes: what this thread puts into
        its stream from now on comes behind the reading. The host does not wait. Returns whether it is disturbed as far
        as can be told now."""
        self._decide()
        if self._reading is not None:
            self._reading.hold_back()
        return self.disturbed

    def arrive(self) -> None:
        """In the thread of :meth:`copy`: wait until everything is in host memory. :attr:`disturbed` is final then."""
        if self._reading is None:
            return
        self._reading.arrive()
        self._decide()
        if self._comparison is not None and self._comparison.differing():
            self.disturbed = True

    def _decide(self) -> None:
        """Whether somebody has written to the state so far. Asked once: before the next step, which writes to it, or
        when everything was read, whichever comes first. A write that comes later comes behind the reading."""
        with self._deciding:
            if not self._decided:
                self._decided = True
                self.disturbed = self.disturbed or bool(self._watch.counted())

    def _lay_out(self, memory: memoryview) -> None:
        writer = ShardWriter(memory, self._layout.header_nbytes)
        self._memory = writer.recurring(self._layout.tensors, "")
        self._writer = writer

    def _place(self, name: str) -> torch.Tensor:
        """Where the tensor is to be copied. Nobody may keep this beyond :meth:`finish`."""
        spec = self._layout.specs[name]
        return tensor_in(self._memory[self._layout.ranges[name]], spec.dtype, spec.shape, what=name)

    def _source(self, name: str) -> torch.Tensor:
        """The tensor that is to be copied."""
        return self._at_once[name] if name in self._at_once else self._later[name]

    def finish(self) -> int:
        """Close the shard; returns its length in bytes. Not before :meth:`copy` has returned, and the constants are
        finished. If what the base refers to turns out to be of other bits, it is :attr:`disturbed`."""
        if self._writer is None:
            raise ValueError("a base is finished after it was copied")
        self._verify_referred()
        if (references := self._references) is not None:
            self._writer.add_object(REFERENCES, references.plain)
        for name, value in self._objects.items():
            self._writer.add_object(name, value)
        digests = hash_all(self._layout.pieces, self._memory, threads=self._threads)
        self._writer.add_object(BLOCKS, self._layout.blocks(digests))
        numbers = checksums_of(self._layout.pieces, digests)
        each_checksum = zip(self._layout.specs, numbers.tolist(), strict=True)
        checksums = {name: f"{number:016x}" for name, number in each_checksum if name in self._expected}
        held = {name: checksum_of(self._objects[name].data) for name in self._expected.keys() & {OPTIMIZER, HOST}}
        if references is not None:
            held |= {name: each.checksum for name, each in references.tensors.items()}
        self.unexpected = tuple(
            name.removeprefix("master/")
            for name, found in {**checksums, **held}.items()
            if found != self._expected.get(name, found)
        )
        if self._fills:
            self._writer.fill()
        nbytes = self._writer.finish(self._metadata, recurring=numbers)
        self._at_once = {}
        self._memory, self._writer = memoryview(b""), None  # the tier reuses it only when nobody has a view of it
        return nbytes

    def arrived(self) -> None:
        """The base is in the first tier: later ones may refer to its constants."""
        if self._known is not None and self.constants is not None:
            self._known.arrived(self.constants.key, self.constants.references)

    def _refers_to(self) -> tuple[int, ...]:
        found = self.constants.key if self.constants is not None else None
        if self._split.referred and self._known is not None:
            found = self._known.key
        return () if found is None else (found.generation, found.first)

    @property
    def _references(self) -> References | None:
        if self.constants is not None:
            return self.constants.references
        if self._split.referred and self._known is not None:
            return References(self._known.token, self._split.referred)
        return None

    def _verify_referred(self) -> None:
        """Compare all bits of what counts as unchanged since no write to it was seen."""
        unverified, referred = self._split.unverified, self._split.referred
        if differing := [name for name, each in unverified.items() if checksum(each) != referred[name].checksum]:
            assert self._known is not None
            self._known.differs(differing)
            self.disturbed = True


def lies_as_it_is(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie in host memory at its address."""
    plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    return plain and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def optimizer_object(provider: StateProvider, values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A base's object ``optimizer``. ``values``: the optimizer's state that is no tensor."""
    group_of = provider.group_of()
    groups = [group_of[name] for name in provider.masters()]
    return {"hyperparameters": provider.hyperparameters(), "groups": groups, "values": values}


def base_nbytes(
    provider: StateProvider, residuals: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> tuple[int, int]:
    """About how many bytes the tensors of a base take, and those of the constants that it refers to, for checking a
    tier's space ahead. Before the first step
    an optimizer may hold no state yet: then two tensors a master (Adam's moments) are assumed."""
    tensors, _ = tensors_of(provider)
    nbytes = nbytes_of((*tensors.values(), *residuals.values()))
    if not provider.optimizer_state():
        nbytes += 2 * nbytes_of(provider.masters().values())
    return nbytes - constants_nbytes(provider, nbytes), constants_nbytes(provider, nbytes)


def read_base(shard: Shard, constants: Shard | None = None, *, tier: str, alone: bool = False) -> BaseState:
    """Decode a base. ``constants``: what it refers to. ``alone``: without them, tensors without memory stand for
    theirs. Errors: ``Corruption`` if a checksum or the layout is wrong, of either of the constants."""
    where = str(shard.metadata.key)
    masters: dict[str, torch.Tensor] = {}
    extras: dict[str, torch.Tensor] = {}
    residuals: dict[str, torch.Tensor] = {}
    state: dict[str, dict[str, Any]] = {}
    for name in shard.names:
        kind, _, rest = name.partition("/")
        entry = shard.entry(name)
        tensor = tensor_in(memoryview(entry.data), entry.dtype, entry.shape, what=f"tensor {name} of {where}")
        if kind == "master":
            masters[rest] = tensor
        elif kind == "extra":
            extras[rest] = tensor
        elif kind == "residual":
            residuals[rest] = tensor
        elif kind == "state" and "/" in rest:
            master, _, key = rest.rpartition("/")
            state.setdefault(master, {})[key] = given(tensor) if shard.is_given else tensor
        else:
            raise Corruption(f"a base has no tensor {name!r}", tier=tier, key=where)
    references = read_references(shard)
    if references is not None and alone:
        for name, held in references.tensors.items():
            extras[name.removeprefix(EXTRA)] = absent_tensor(held.dtype, held.shape, what=f"tensor {name} of {where}")
    elif references is not None:
        if constants is None:
            raise Corruption("the constants that the base refers to are not at hand", tier=tier, key=where)
        for entry in referred(references, constants):
            what = f"tensor {entry.name} of {constants.metadata.key}"
            tensor = tensor_in(memoryview(entry.data), entry.dtype, entry.shape, what=what)
            name = entry.name.removeprefix(EXTRA)
            if not entry.name.startswith(EXTRA) or extras.setdefault(name, tensor) is not tensor:
                raise Corruption(f"a base refers to no tensor {entry.name!r}", tier=tier, key=where)
    try:
        optimizer: Any = shard.object("optimizer")
        identity: Any = shard.object("identity")
        host_state: Any = shard.object("host")
        Doubts.of(host_state)
        for master, values in optimizer["values"].items():
            state.setdefault(master, {}).update(values)
        return BaseState(
            identity=schema.read(Identity, identity),
            masters=masters,
            optimizer_state=state,
            extras=extras,
            hyperparameters=optimizer["hyperparameters"],
            host_state=host_state,
            residuals=residuals,
            group_of=_group_of(masters, optimizer["groups"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Corruption(f"the base's objects lack {error}", tier=tier, key=where) from error


def _group_of(masters: Iterable[str], groups: Sequence[int]) -> dict[str, int]:
    """Errors: ``ValueError``; ``TypeError``."""
    if not all(type(group) is int and group >= 0 for group in groups):
        raise ValueError("the number of a parameter group for each trained tensor")
    return dict(zip(masters, groups, strict=True))


def tensors_of(provider: StateProvider) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """The state's tensors by their name in the shard, live, and the optimizer's values that are none."""
    tensors = {f"master/{name}": tensor for name, tensor in provider.masters().items()}
    values: dict[str, dict[str, Any]] = {}
    for name, state in provider.optimizer_state().items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"state/{name}/{key}"] = value
            else:
                values.setdefault(name, {})[key] = value
    tensors.update({f"extra/{name}": tensor for name, tensor in extras_of(provider).items()})
    return tensors, values
