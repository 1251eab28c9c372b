"""A rank's part of a state that several ranks hold alike: what it stores, and how all get the whole again.

Under DDP every rank has the whole model. Each of its trained and frozen tensors has one owner among the ranks, and only
that one captures it: the master, the optimizer's tensors for it, its gradients, its residual. What is each rank's own
(buffers, random generators, its place in the data) and what is no tensor (options, schedulers, counters) every rank
stores as ever. A recovery brings each rank to its own part, and :meth:`OwnedProvider.refresh` brings the parts to all.

Replicas must stay alike, or a version holds what one rank had. They are compared after a recovery, and whenever all
ranks make a base. If something other than the optimizer's step has written to a tensor that this rank does not store,
versions say so until the next comparison has found all alike. Loops that write so mostly do it in each iteration: as
long as any rank sees that, the ranks compare at the end of each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from tiercheck.errors import Mismatch
from tiercheck.format.container import checksum_of
from tiercheck.format.host_state import pack, unpack
from tiercheck.format.index.logical import EXTRA, MASTER, LogicalIndex, Padding
from tiercheck.runtime.group import Group
from tiercheck.streams.doubts import Doubts
from tiercheck.streams.tensors.as_bytes import DTYPES, dtype_name
from tiercheck.streams.tensors.provider import (
    Identity,
    StateProvider,
    check_shapes,
    describe_tensor,
    extras_of,
    identity_digest,
)
from tiercheck.streams.tensors.sharing import DIGEST_LENGTH, bring, digest, fingerprints
from tiercheck.streams.tensors.writes import Watch

__all__ = ["OwnedProvider", "Owners"]

log = logging.getLogger(__name__)

T = TypeVar("T")

MEETINGS = 8
"""Iterations after the start, and after a write outside of the step, in which ranks tell each other of such writes."""
STATE_TIMES_MAX = 16
STATE_NBYTES_MIN = 1 << 16
"""A tensor that an optimizer keeps of a master is at most so many times as large, or so large."""
NAMED_MAX = 3


@dataclass(frozen=True)
class Owners:
    """Who stores what the ranks of ``group`` hold alike. A tensor that has no owner is each rank's own."""

    group: Group
    masters: Mapping[str, int]
    """By name, the rank that stores it."""
    frozen: Mapping[str, int]
    deadline_s: float
    """Of each message."""


class OwnedProvider(StateProvider):
    """What this rank stores of ``whole``, which the ranks of ``owners.group`` hold alike but for what has no owner."""

    def __init__(self, whole: StateProvider, owners: Owners) -> None:
        self._whole = whole
        self._owners = owners
        self._apart: tuple[str, ...] = ()
        """What may differ between the ranks."""
        self._seen = False
        """A write was seen since the last comparison."""
        self._told = False
        self._meetings = MEETINGS
        """How many more there are, the same on all ranks."""
        self._alike = Watch(self._replicas)

    # What this rank stores

    def identity(self) -> Identity:
        whole = self._whole.identity()
        tensors = {**self._whole.masters(), **self._whole.frozen()}
        described = [describe_tensor(name, tensor) for name, tensor in tensors.items()]
        part = Identity.of(whole.framework, self, whole.optimizer, parameters=described)
        return replace(part, model=identity_digest([whole.model, part.model]))

    def masters(self) -> Mapping[str, torch.Tensor]:
        return self._own(self._whole.masters(), self._owners.masters)

    def group_of(self) -> Mapping[str, int]:
        return self._own(self._whole.group_of(), self._owners.masters)

    def gradient_dtypes(self) -> Mapping[str, torch.dtype]:
        return self._own(self._whole.gradient_dtypes(), self._owners.masters)

    def tell_of_forward(self, begins: Callable[[], None]) -> bool:
        return self._whole.tell_of_forward(begins)

    def steps_together(self) -> bool:
        return self._whole.steps_together()

    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        return self._own(self._whole.optimizer_state(), self._owners.masters)

    def held_by_optimizer(self) -> Sequence[Any] | None:
        return self._whole.held_by_optimizer()

    def frozen(self) -> Mapping[str, torch.Tensor]:
        return self._own(self._whole.frozen(), self._owners.frozen)

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return self._whole.buffers()

    def index(self) -> LogicalIndex:
        whole = self._whole.index()
        held = {*(MASTER + name for name in self.masters()), *(EXTRA + name for name in extras_of(self))}
        stored = {name: pieces for name, pieces in whole.stored.items() if name in held}
        named = {piece.tensor for pieces in stored.values() for piece in pieces if not isinstance(piece, Padding)}
        tensors = {name: tensor for name, tensor in whole.tensors.items() if name in named}
        aliases = {other: name for other, name in whole.aliases.items() if name in named}
        return LogicalIndex(tensors, stored, aliases)

    def hyperparameters(self) -> list[dict[str, Any]]:
        return self._whole.hyperparameters()

    def host_state(self) -> dict[str, Any]:
        self._look()
        return Doubts(apart=self._apart).saved_in(self._whole.host_state())

    def _own(self, held: Mapping[str, T], owner_of: Mapping[str, int]) -> dict[str, T]:
        rank = self._owners.group.rank
        return {name: each for name, each in held.items() if owner_of.get(name, rank) == rank}

    # What an integration tells

    def before_step(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of the gradients of the coming step, or of a part of it, those that this rank stores."""
        self._look()
        return self._own(gradients, self._owners.masters)

    def stepped(self) -> None:
        """The optimizer has stepped: what is written from here on is no part of the step."""
        self._alike.mark()

    def meet(self) -> None:
        """The iteration is over. As long as some rank has seen such a write within the last few iterations, the ranks
        tell each other whether they have seen one now, and with which options they have stepped, and compare if one has
        or these differ. In the first of these iterations and the last they compare anyway: gradients that are not the
        same on all ranks leave nothing else to see. Collective. Errors: those of the group."""
        if not self._meetings:
            return
        self._look()
        compares = self._meetings in (MEETINGS, 1)
        self._meetings -= 1
        group, deadline_s = self._owners.group, self._owners.deadline_s
        what = "telling of writes to what all ranks hold alike"
        options = checksum_of(pack(self.hyperparameters())).encode()
        told = group.all_gather(self._said + options, what=what, deadline_s=deadline_s)
        if compares or len(set(told)) > 1 or self._seen:
            self.compare()

    @property
    def _said(self) -> bytes:
        return b"seen" if self._seen else b""

    def compare(self) -> None:
        """See whether the ranks still hold alike what they are to. Collective. What does not is told by all versions
        from here on. Errors: those of the group."""
        self._look()
        apart = self._differing(fingerprints(self._replicas()), self._said)
        self._seen = False
        if apart and apart != self._apart:
            log.error(
                "the ranks hold different values of %s, of which one rank stores what all are to have: a recovery "
                "would give each rank the same. If they are to differ, start with CheckpointConfig(replicas='each')",
                named(apart),
            )
        self._apart = apart

    def _look(self) -> None:
        if not (written := self._alike.written()):
            return
        self._alike.mark()
        self._seen = True
        self._apart = Doubts(apart=self._apart).with_apart(written).apart
        if not self._told and not self._meetings:
            self._told = True
            log.warning(
                "something other than the optimizer's step wrote to %s, which one rank stores for all: versions are "
                "approximate until the ranks have compared what they hold, at the latest before their next base",
                named(written),
            )

    # The way back

    def load(
        self,
        *,
        masters: Mapping[str, torch.Tensor],
        optimizer_state: Mapping[str, Mapping[str, Any]],
        extras: Mapping[str, torch.Tensor],
        hyperparameters: list[dict[str, Any]],
    ) -> None:
        """As of any provider. What other ranks store stays as it is until :meth:`refresh` brings it."""
        own = self.masters()
        check_shapes(own, masters)
        check_shapes(extras_of(self), extras)
        others = {name: held for name, held in self._whole.optimizer_state().items() if name not in own}
        self._whole.load(
            masters={**self._whole.masters(), **masters},
            optimizer_state={**others, **optimizer_state},
            extras={**extras_of(self._whole), **extras},
            hyperparameters=hyperparameters,
        )

    def apply(self, gradients: Mapping[str, torch.Tensor], hyperparameters: list[dict[str, Any]]) -> None:
        self._whole.apply(gradients, hyperparameters)

    def refresh(self) -> None:
        """Bring what each rank has to the others. Collective. Errors: ``Mismatch``; those of the group."""
        owners, group = self._owners, self._owners.group
        what = "bringing to all ranks what each of them stores"
        self._make_states(group.all_gather(pack(self._described()), what=what, deadline_s=owners.deadline_s))
        bring(self._by_owner(), group, what=what, deadline_s=owners.deadline_s)
        if apart := self._differing(fingerprints(self._replicas(states=True)), b""):
            raise Mismatch(f"after {what}, {named(apart)} differ: start again, and look for what damages messages")
        self._whole.refresh()
        self._alike.mark()

    def translated_host_state(self, state: Mapping[str, Any], version: int) -> dict[str, Any]:
        return self._whole.translated_host_state(state, version)

    def restore_host_state(self, state: Mapping[str, Any]) -> None:
        self._whole.restore_host_state(state)

    def _described(self) -> dict[str, Any]:
        """What the optimizer holds of each replicated master that this rank stores: values, and forms of tensors."""
        return {
            name: {key: form_of(value, key) for key, value in held.items()}
            for name, held in self.optimizer_state().items()
            if name in self._owners.masters
        }

    def _make_states(self, told: Sequence[bytes]) -> None:
        """Give each master a state of the form that its owner has told. Errors: ``Mismatch``."""
        masters, states = self._whole.masters(), {**self.optimizer_state()}
        for rank, message in enumerate(told):
            described: Any = unpack(message)
            for name, forms in described.items() if rank != self._owners.group.rank else ():
                if name not in masters or self._owners.masters.get(name) != rank:
                    raise Mismatch(f"rank {rank} stores {name!r}, of which this rank knows nothing")
                states[name] = {key: made(form, masters[name], f"{key} of {name}") for key, form in forms.items()}
        self._whole.load(
            masters=masters,
            optimizer_state=states,
            extras=extras_of(self._whole),
            hyperparameters=self._whole.hyperparameters(),
        )

    def _by_owner(self) -> list[list[torch.Tensor]]:
        owners = self._owners
        found: list[list[torch.Tensor]] = [[] for _ in range(owners.group.world_size)]
        state = self._whole.optimizer_state()
        for name, master in self._whole.masters().items():
            if name in owners.masters:
                held = [each for _, each in sorted(state.get(name, {}).items()) if isinstance(each, torch.Tensor)]
                found[owners.masters[name]] += [master, *held]
        for name, tensor in self._whole.frozen().items():
            if name in owners.frozen:
                found[owners.frozen[name]].append(tensor)
        return found

    # What is to be alike

    def _replicas(self, *, states: bool = False) -> dict[str, torch.Tensor]:
        """``states``: with the optimizer's tensors."""
        owners = self._owners
        found = {name: each for name, each in self._whole.masters().items() if name in owners.masters}
        found |= {name: each for name, each in self._whole.frozen().items() if name in owners.frozen}
        for name, held in self._whole.optimizer_state().items() if states else ():
            if name in owners.masters:
                found |= {f"{name}/{key}": each for key, each in held.items() if isinstance(each, torch.Tensor)}
        return found

    def _differing(self, found: Mapping[str, str], seen: bytes) -> tuple[str, ...]:
        """The names of what is not the same on all ranks. ``seen``: whether this one has seen a write. Collective."""
        group, deadline_s = self._owners.group, self._owners.deadline_s
        what = "comparing what all ranks are to hold alike"
        answers = group.all_gather(digest(found).encode() + seen, what=what, deadline_s=deadline_s)
        if any(each[DIGEST_LENGTH:] for each in answers):
            self._meetings = MEETINGS
        if len({each[:DIGEST_LENGTH] for each in answers}) == 1:
            return ()
        told = [unpack(each) for each in group.all_gather(pack(dict(found)), what=what, deadline_s=deadline_s)]
        every = dict.fromkeys(name for each in told if isinstance(each, dict) for name in each)
        apart = tuple(name for name in every if len({each.get(name) for each in told if isinstance(each, dict)}) > 1)
        return Doubts().with_apart(apart).apart


def form_of(value: Any, what: str) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [dtype_name(value, what), list(value.shape)]
    return [value]


def made(form: Any, master: torch.Tensor, what: str) -> Any:
    """The value that was told, or a tensor of the form that was. Errors: ``Mismatch``."""
    if len(form) == 1:
        return form[0]
    dtype, shape = form
    limit = max(STATE_NBYTES_MIN, STATE_TIMES_MAX * master.numel() * master.element_size())
    if dtype not in DTYPES or torch.Size(shape).numel() * DTYPES[dtype].itemsize > limit:
        raise Mismatch(f"another rank holds a {dtype} of {shape} as {what}, which is not of this model")
    alike = tuple(shape) == tuple(master.shape) and bool(shape)
    return torch.zeros(shape, dtype=DTYPES[dtype], device=master.device if alike else None)


def named(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED_MAX]) + (", ..." if len(names) > NAMED_MAX else "")
