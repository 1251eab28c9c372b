"""What was saved under another layout, put together as a provider's rank holds it.

Each old rank that is needed is rebuilt by itself, under its own layout
(:class:`~tiercheck.streams.rebuilding.stored.StoredReader`), and what this rank wants of it is copied into new tensors:
masters, the optimizer's tensors and residuals that lie as their masters do, buffers and frozen parameters. So steps are
replayed as they were taken, whatever the optimizer, and one old rank is in memory at a time. The live state changes in
:meth:`TensorConversion.finish` alone.

What belongs to a master as a whole, such as a count of steps, goes with any element of it. If elements of one master
come from several that count otherwise, no value is right for all of them: the largest is taken, and the state is
approximate.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from tiercheck import schema
from tiercheck.errors import ConfigurationError, Mismatch
from tiercheck.format.index.assemble import Transfer
from tiercheck.format.index.boxes import Copy, copy_elements
from tiercheck.format.index.logical import EXTRA, MASTER, LogicalIndex, Padding, lies_as_master
from tiercheck.streams.loading import Loading
from tiercheck.streams.rebuilding.carry_over import carried_over, given_by, options_at_end
from tiercheck.streams.rebuilding.stored import StoredReader, StoredState, check_replayable
from tiercheck.streams.state import Rebuilt, StateReader
from tiercheck.streams.tensors.as_bytes import array_of
from tiercheck.streams.tensors.group_options import merged_options
from tiercheck.streams.tensors.provider import Identity, StateProvider, extras_of
from tiercheck.streams.tensors.storable import from_storable, to_storable

__all__ = ["TensorConversion"]

NAMED_MAX = 3


class TensorConversion:
    """See :class:`~tiercheck.streams.state.Conversion`. Errors: ``UnsupportedSetup``, of the provider's index."""

    def __init__(self, provider: StateProvider, loading: Loading) -> None:
        self._provider = provider
        self.loading = loading
        self._kept: frozenset[str] = frozenset()
        """What keeps what the script made, by the names of the stored tensors that have elements of it."""
        self._index = provider.index()
        self._groups = provider.group_of()
        self._reading: StoredReader | None = None
        self._begin()

    def _begin(self) -> None:
        masters, extras = self._provider.masters(), extras_of(self._provider)
        self._masters = {name: new_like(each, keep=MASTER + name in self._kept) for name, each in masters.items()}
        self._extras = {name: new_like(each, keep=EXTRA + name in self._kept) for name, each in extras.items()}
        self._states: dict[str, dict[str, Any]] = {}
        self._stated: dict[str, int] = {}
        """By master, of how many of its elements there was an optimizer's state."""
        self._kinds: dict[int, dict[str, Any]] = {}
        """By parameter group, the optimizer's state of one of its masters, as :func:`kinds_of` has it."""
        self._residuals: dict[str, torch.Tensor] = {}
        self._options: dict[int, dict[str, Any]] = {}
        """By parameter group, its options at the end of the version."""
        self._host_state: Mapping[str, Any] | None = None
        self._own = False
        """The host state is that of the old rank of this number."""
        self._told_of: dict[int, Any] = {}
        """By old rank of which this one tells, what its batches were drawn from."""
        self._given: dict[str, Any] | None = None
        """What the user's function has made of what all of them had."""
        self._inexact: dict[str, None] = {}
        self._notes: tuple[str, ...] = ()

    @property
    def wanted(self) -> LogicalIndex:
        return self._index

    def read_identity(self, value: Any) -> Identity:
        return schema.read(Identity, value)

    def refuse(self, identity: Identity, places: str) -> None:
        before, now = identity.optimizer.kind, self._provider.identity().optimizer.kind
        if before != now:
            raise Mismatch(
                f"the checkpoint in {places} is of an optimizer {before}, this job has {now}: "
                "resume with the same one, or use another place"
            )

    def other_model(self, differing: Sequence[str], identity: Identity, places: str, advice: str) -> Mismatch:
        said = "; ".join([*differing[:NAMED_MAX], *([f"and {len(differing) - NAMED_MAX} more"] * (len(differing) > 3))])
        here = self._provider.identity()
        return Mismatch(
            f"the checkpoint in {places} is of another model: {said} ({identity.model_summary} against "
            f"{here.model_summary}); resume with the same one, or use another place{advice and f'; {advice}'}"
        )

    def keep(self, tensors: Collection[str]) -> None:
        self._kept = frozenset(
            name
            for name, pieces in self._index.stored.items()
            if any(not isinstance(each, Padding) and each.tensor in tensors for each in pieces)
        )

    def begin(self, identity: Identity) -> bool:
        self._begin()
        try:
            check_replayable(identity)
        except ConfigurationError:
            return False
        return True

    def reader(self) -> StateReader:
        self._reading = StoredReader()
        return self._reading

    def take(self, transfers: Sequence[Transfer], rebuilt: Rebuilt, *, own: bool, tells: int | None = None) -> None:
        if self._reading is None:
            raise ValueError("a state is taken after it was rebuilt")
        state, self._reading = self._reading.state, None
        options = options_at_end(state.hyperparameters(), rebuilt.host_state)
        pairs: dict[tuple[str, str], list[Copy]] = {}
        for each in transfers:
            pairs.setdefault((each.source, each.target), []).append(each.copy)
        for (source, target), copies in pairs.items():
            self._take_tensor(state, source, target, copies)
            if source.startswith(MASTER) and target.startswith(MASTER):
                before, name = source.removeprefix(MASTER), target.removeprefix(MASTER)
                self._take_state(state, before, name, copies)
                self._take_residual(rebuilt.residuals.get(before), name, copies)
                self._take_options(self._groups[name], options[state.group_of()[before]])
        if self._host_state is None or own:
            self._host_state, self._own = rebuilt.host_state, own
        if tells is not None:
            self._told_of[tells] = rebuilt.host_state.get("stateful", {})

    def _take_options(self, group: int, options: dict[str, Any]) -> None:
        if self._options.setdefault(group, options) != options:
            self._inexact[f"parameter group {group} is one here, and were several whose options differed"] = None

    def _take_tensor(self, state: StoredState, source: str, target: str, copies: Sequence[Copy]) -> None:
        found = held_of(source, state.masters(), state.buffers())
        here = held_of(target, self._masters, self._extras)
        self._copy(copies, found, here, target)

    def _take_state(self, state: StoredState, before: str, name: str, copies: Sequence[Copy]) -> None:
        saved, master = state.optimizer_state().get(before, {}), state.masters()[before]
        if not saved:
            return
        self._stated[name] = self._stated.get(name, 0) + sum(math.prod(each.lengths) for each in copies)
        held = self._states.setdefault(name, {})
        self._kinds.setdefault(self._groups[name], kinds_of(saved, master))
        for key, value in saved.items():
            if isinstance(value, torch.Tensor) and lies_as_master(key, tuple(value.shape), tuple(master.shape)):
                if key not in held:
                    dtype = self._masters[name].dtype if value.dtype == master.dtype else value.dtype
                    held[key] = torch.zeros(self._masters[name].shape, dtype=dtype)
                self._copy(copies, value, held[key], f"the optimizer's {key} of {name}")
            elif key not in held:
                held[key] = value.clone() if isinstance(value, torch.Tensor) else value
            elif not same(held[key], value):
                self._inexact[f"{name} is one tensor here, and were several whose optimizer's {key!r} differed"] = None
                held[key] = larger(held[key], value)

    def _take_residual(self, residual: torch.Tensor | None, name: str, copies: Sequence[Copy]) -> None:
        if residual is not None:
            here = self._residuals.setdefault(name, torch.zeros(self._masters[name].numel(), dtype=residual.dtype))
            self._copy(copies, residual, here, f"the residual of {name}")

    def _copy(self, copies: Iterable[Copy], source: torch.Tensor, target: torch.Tensor, what: str) -> None:
        if source.dtype != target.dtype:
            if torch.promote_types(source.dtype, target.dtype) != target.dtype:
                self._inexact[f"{what} was {source.dtype}, and is rounded to {target.dtype}"] = None
            source = source.to(target.dtype)
        copy_elements(copies, array_of(source).reshape(-1), array_of(target).reshape(-1))

    def _elements(self, master: str) -> int:
        return sum(each.elements for each in self._index.stored[MASTER + master] if not isinstance(each, Padding))

    def told(self) -> Any:
        options = {str(group): options for group, options in self._options.items()}
        kinds = {str(group): to_storable(kinds, "the optimizer's state") for group, kinds in self._kinds.items()}
        stateful = {str(old): held for old, held in self._told_of.items()}
        without = [name for name, each in self._masters.items() if each.numel() and not self._states.get(name)]
        return {"options": options, "states": kinds, "stateless": without, "stateful": stateful}

    def carry_over(self, told: Sequence[Any], *, rank: int, world_size: int, saved_by: int) -> None:
        found = {int(old): held for each in told for old, held in each["stateful"].items()}
        if lost := [old for old in range(saved_by) if old not in found]:
            self._inexact[
                f"carry_over got nothing of what batches were drawn from on rank {', '.join(map(str, lost))}: it is "
                "lost"
            ] = None
        if (function := self.loading.carry_over) is not None:
            attached = self._provider.host_state().get("stateful", {})
            saved = [found.get(old) for old in range(saved_by)]
            self._given = given_by(function, saved, rank, world_size, attached)

    def finish(self, told: Sequence[Any], version: int, *, gone: range = range(0)) -> Rebuilt:
        elsewhere = {int(group): options for each in reversed(told) for group, options in each["options"].items()}
        found = {**elsewhere, **self._options}
        live = self._provider.hyperparameters()
        options = [merged_options(here, found.get(group, {})) for group, here in enumerate(live)]
        kinds = {int(group): kinds for each in told for group, kinds in each["states"].items()}
        self._state_of_nothing(kinds, stateless={name for each in told for name in each["stateless"]})
        for name in sorted(name for name, elements in self._stated.items() if elements < self._elements(name)):
            self._inexact[f"{name} is one tensor here, and the optimizer had a state of only a part of it"] = None
        host_state, lost, self._notes = carried_over(
            self._provider,
            self._host_state or {},
            options=options,
            version=version,
            own=self._own,
            gone=gone,
            given=self._given,
        )
        self._inexact |= dict.fromkeys(lost)
        self._provider.load(
            masters=self._masters, optimizer_state=self._states, extras=self._extras, hyperparameters=options
        )
        return Rebuilt(host_state, residuals=self._residuals)

    def _state_of_nothing(self, kinds: Mapping[int, Any], stateless: Collection[str]) -> None:
        """A master without elements, as of a rank whose shard is empty, has the state that others of its group have:
        else this rank would count its steps otherwise than the others. Or none, if it has none where it has elements.
        ``kinds``: as all ranks have told."""
        for name, master in self._masters.items():
            if master.numel() or name in stateless or self._groups[name] not in kinds:
                continue
            self._states[name] = {
                key: torch.zeros(master.shape, dtype=value.dtype) if is_empty(value) else value
                for key, value in from_storable(kinds[self._groups[name]]).items()
            }

    @property
    def exact(self) -> bool:
        return not self._inexact

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self._inexact, *self._notes)


def new_like(tensor: torch.Tensor, *, keep: bool) -> torch.Tensor:
    """On the host: of zeros, since what no piece covers is padding; or a copy, if it has elements that are kept."""
    return tensor.detach().to("cpu", copy=True) if keep else torch.zeros(tensor.shape, dtype=tensor.dtype)


def held_of(stored: str, masters: Mapping[str, torch.Tensor], extras: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if stored.startswith(MASTER):
        return masters[stored.removeprefix(MASTER)]
    return extras[stored.removeprefix(EXTRA)]


def kinds_of(state: Mapping[str, Any], master: torch.Tensor) -> dict[str, Any]:
    """What a master without elements has of such a state. An empty tensor stands for one that lies as its master does.
    Nothing, if tensors lie otherwise: who has no elements cannot say how."""
    kinds = {
        key: value.new_empty(0) if lies_as_master(key, tuple(value.shape), tuple(master.shape)) else value
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    if any(each.numel() > 1 for each in kinds.values()):
        return {}
    return {**state, **kinds}


def is_empty(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 0


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def larger(one: Any, other: Any) -> Any:
    try:
        return max(one, other)
    except (TypeError, ValueError, RuntimeError):
        return one
