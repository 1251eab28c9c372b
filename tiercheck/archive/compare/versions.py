"""What differs between two versions, whoever held which part of each: by tensor of the model.

The first version's stored tensors are gone through once, a rank at a time. The plan that resuming under another layout
uses (:mod:`tiercheck.format.index.assemble`) says which rank of the second version has the same elements. So two
versions of different numbers of ranks, stages or frameworks are compared as well.

Memory: the state of one rank of each version, as :mod:`tiercheck.archive.rebuild` makes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tiercheck import schema
from tiercheck.archive.compare.measure import Distance, Flat, measure
from tiercheck.archive.compare.paths import PathDifference, differing_paths
from tiercheck.archive.contents import read_contents
from tiercheck.archive.indexes import StoredIndex, read_indexes
from tiercheck.archive.rebuild import RankState, StoredVersion
from tiercheck.errors import RecoveryError
from tiercheck.format.index.assemble import Holdings, Transfer, assemble
from tiercheck.format.index.boxes import Copy, as_range
from tiercheck.format.index.logical import (
    EXTRA,
    MASTER,
    LogicalIndex,
    Padding,
    Piece,
    lies_as_master,
)
from tiercheck.streams.tensors.as_bytes import dtype_name
from tiercheck.types import Fidelity

__all__ = ["Compared", "Form", "TensorDifference", "compare"]

PLANNING_S = 600.0

Progress = Callable[[int, int], None]
Name = tuple[str, str]
"""A tensor's name, and which slice of it (:attr:`~tiercheck.format.index.logical.LogicalTensor.slice_name`)."""


@dataclass(frozen=True)
class Form:
    """What a tensor is in one version."""

    shape: tuple[int, ...]
    dtype: str
    """As it is stored: of a parameter that is trained, as the optimizer holds it."""
    model_dtype: str = ""
    """As the model has it. Empty for the optimizer's tensors."""
    trained: bool = True


@dataclass(frozen=True)
class TensorDifference:
    """A tensor of the model, or one that the optimizer has for it, in both versions."""

    name: str
    slice_name: str
    """Of a tensor that the model's own tensor parallelism has cut: which slice; else empty."""
    state: str
    """The optimizer's name of it, such as ``exp_avg``; empty: the tensor of the model itself."""
    before: Form | None
    """``None``: it is only in the second version."""
    after: Form | None
    distance: Distance
    """Of the elements that both have."""

    @property
    def differs(self) -> bool:
        return self.before != self.after or self.distance.changed > 0

    @property
    def order(self) -> tuple[object, ...]:
        """The outlier first: what is not finite, is only in one, or has another form; then by relative norm."""
        other_form = self.before != self.after
        each = self.distance
        return (-each.not_finite, not other_form, -each.relative, -each.l2, -each.changed, self.name, self.state)


@dataclass(frozen=True)
class Compared:
    """What :func:`compare` found."""

    versions: tuple[int, int]
    generations: tuple[int, int]
    world_sizes: tuple[int, int]
    tensors: tuple[TensorDifference, ...]
    """All of them, those that differ most first."""
    host_state: tuple[PathDifference, ...]
    """Of one rank."""
    written: tuple[PathDifference, ...]
    """Framework, model and optimizer, as the bases tell."""
    fidelity: Fidelity
    """The worst of the states that were compared."""
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether no tensor differs."""
        return not any(each.differs for each in self.tensors)


async def compare(
    before: StoredVersion, after: StoredVersion, *, rank: int, optimizer: bool, progress: Progress
) -> Compared:
    """``rank``: whose host states are compared. Errors: as of a rebuild; ``RecoveryError`` if the ranks of a version do
    not hold one model."""
    ours, theirs = await read(before, rank), await read(after, rank)
    work = _Work(before, after, plan(ours.indexes, theirs.indexes), optimizer, progress)
    await work.run()
    return Compared(
        (before.chosen.version, after.chosen.version),
        (before.chosen.points[0].generation, after.chosen.points[0].generation),
        (before.chosen.world_size, after.chosen.world_size),
        tuple(sorted(work.differences, key=lambda each: each.order)),
        tuple(differing_paths(ours.host, theirs.host)),
        tuple(differing_paths(ours.written, theirs.written)),
        Fidelity.worst(*work.fidelities),
        tuple(work.notes),
    )


@dataclass(frozen=True)
class Read:
    """What is read of a version before its tensors."""

    indexes: Mapping[int, StoredIndex]
    host: Mapping[str, Any]
    written: Mapping[str, Any]


async def read(source: StoredVersion, rank: int) -> Read:
    async def reading() -> Read:
        indexes = await read_indexes(source.hierarchy, source.inventory, source.chosen)
        contents = await read_contents(source.hierarchy, source.inventory, source.chosen, rank)
        host = {**contents.host_state, "hyperparameters": contents.hyperparameters}
        identity = schema.plain(
            replace(contents.identity, optimizer=replace(contents.identity.optimizer, stand_in=None))
        )
        return Read(indexes, host, {**identity, "world_size": contents.world_size})

    return await source.scheduler.call(reading(), what="reading what the ranks have saved", deadline_s=PLANNING_S)


# Who has what


@dataclass(frozen=True)
class Plan:
    """Whose stored tensors are compared with whose."""

    forms: Mapping[Name, tuple[Form | None, Form | None]]
    """By tensor of the model, what it is in each version."""
    transfers: Mapping[int, Mapping[int, Sequence[Transfer]]]
    """By rank of the first version and of the second one, elements of the second's stored tensor (the source) that lie
    in the first's (the target)."""
    tensors: Mapping[tuple[int, str], Sequence[tuple[int, int, Name]]]
    """By rank and stored tensor of the first version: from which element up to which one it holds which tensor."""

    def name_at(self, rank: int, stored: str, element: int) -> Name:
        return next(name for start, stop, name in self.tensors[rank, stored] if start <= element < stop)


def plan(ours: Mapping[int, StoredIndex], theirs: Mapping[int, StoredIndex]) -> Plan:
    """Errors: ``RecoveryError``."""
    try:
        Holdings({rank: each.index for rank, each in ours.items()})
        holdings = Holdings({rank: each.index for rank, each in theirs.items()})
    except ValueError as error:
        raise RecoveryError(f"the ranks do not hold one model: {error}") from None
    before, after = forms_of(ours), forms_of(theirs)
    transfers: dict[int, dict[int, list[Transfer]]] = defaultdict(lambda: defaultdict(list))
    seen: set[tuple[str, Piece]] = set()
    for rank, each in sorted(ours.items()):
        for transfer in assemble(once(each.index, seen), holdings, rank=rank).transfers:
            transfers[rank][transfer.rank].append(transfer)
    return Plan(
        {name: (before.get(name), after.get(name)) for name in {**before, **after}},
        transfers,
        {
            (rank, stored): tuple(named(pieces, each.index))
            for rank, each in ours.items()
            for stored, pieces in each.index.stored.items()
        },
    )


def forms_of(ranks: Mapping[int, StoredIndex]) -> dict[Name, Form]:
    found: dict[Name, Form] = {}
    for _, each in sorted(ranks.items()):
        for stored, pieces in each.index.stored.items():
            for _, _, key in named(pieces, each.index):
                tensor = each.index.tensors[key[0]]
                form = Form(tensor.shape, each.specs[stored].dtype, tensor.dtype, tensor.trained)
                found.setdefault(key, form)
    return found


def named(pieces: Sequence[Piece], index: LogicalIndex) -> Iterator[tuple[int, int, Name]]:
    start = 0
    for piece in pieces:
        if not isinstance(piece, Padding):
            yield start, start + piece.elements, index.tensors[piece.tensor].key
        start += piece.elements


def once(index: LogicalIndex, seen: set[tuple[str, Piece]]) -> LogicalIndex:
    """The index with padding in the place of every piece that an earlier rank has, too: a copy is compared once."""

    def place(piece: Piece) -> Piece:
        if isinstance(piece, Padding):
            return piece
        tensor = index.tensors[piece.tensor]
        known = (tensor.slice_name, as_range(piece, tensor.shape))
        if known in seen:
            return Padding(piece.elements)
        seen.add(known)
        return piece

    return replace(index, stored={name: tuple(map(place, pieces)) for name, pieces in index.stored.items()})


# Comparing


class _Work:
    """Goes through the plan, two ranks at a time."""

    def __init__(
        self, before: StoredVersion, after: StoredVersion, plan: Plan, optimizer: bool, progress: Progress
    ) -> None:
        self._before, self._after, self._plan = before, after, plan
        self._optimizer = optimizer
        self._progress = progress
        pairs = (each for theirs in plan.transfers.values() for transfers in theirs.values() for each in transfers)
        self._total = sum(each.copy.elements for each in pairs)
        self._done = 0
        self._found: dict[tuple[Name, str], TensorDifference] = {
            (name, ""): TensorDifference(*name, "", *forms, Distance()) for name, forms in plan.forms.items()
        }
        self.fidelities: list[Fidelity] = []
        self.notes: dict[str, None] = {}

    @property
    def differences(self) -> Iterable[TensorDifference]:
        return self._found.values()

    async def run(self) -> None:
        held: tuple[int, RankState] | None = None
        for rank, by_other in sorted(self._plan.transfers.items()):
            ours = await self._rebuilt(self._before, rank)
            # The state that is in memory comes first: the next rank of the first version often needs it again.
            for other in sorted(by_other, key=lambda each: (held is None or each != held[0], each)):
                if held is None or held[0] != other:
                    held = None
                    held = other, await self._rebuilt(self._after, other)
                self._compare(rank, ours, held[1], by_other[other])

    async def _rebuilt(self, source: StoredVersion, rank: int) -> RankState:
        found = await source.rebuild(rank)
        self.fidelities.append(found.fidelity)
        which = "the first version" if source is self._before else "the second version"
        self.notes |= {f"{which}: {note}": None for note in found.notes}
        return found

    def _compare(self, rank: int, ours: RankState, theirs: RankState, transfers: Sequence[Transfer]) -> None:
        before, after = tensors_of(ours), tensors_of(theirs)
        for each in transfers:
            name = self._plan.name_at(rank, each.target, each.copy.target_start)
            into = self._found[name, ""].distance
            measure(each.copy, flat(before[each.target]), flat(after[each.source]), into)
            if self._optimizer and each.target.startswith(MASTER) and each.source.startswith(MASTER):
                self._compare_states(name, each, ours, theirs)
            self._done += each.copy.elements
            self._progress(self._done, self._total)

    def _compare_states(self, name: Name, each: Transfer, ours: RankState, theirs: RankState) -> None:
        """What the optimizers have for the same elements."""
        before = states_of(ours, each.target.removeprefix(MASTER))
        after = states_of(theirs, each.source.removeprefix(MASTER))
        master, other = tensors_of(ours)[each.target], tensors_of(theirs)[each.source]
        for state in {**before, **after}:
            one, two = before.get(state), after.get(state)
            known = (name, state) in self._found
            if not known:
                shape = next(form.shape for form in self._plan.forms[name] if form is not None)
                forms = state_form(state, one, master, shape), state_form(state, two, other, shape)
                self._found[name, state] = TensorDifference(*name, state, *forms, Distance())
            if one is None or two is None:
                continue
            into = self._found[name, state].distance
            if lies(state, one, master) and lies(state, two, other):
                measure(each.copy, flat(one), flat(two), into)
            elif not known and one.shape == two.shape and one.numel():
                measure(Copy((one.numel(),), 0, (1,), 0, (1,)), flat(one), flat(two), into)


def tensors_of(found: RankState) -> dict[str, torch.Tensor]:
    """By their names in the shard, masters and extras."""
    held = {MASTER + name: each for name, each in found.state.masters().items()}
    return held | {EXTRA + name: each for name, each in found.state.buffers().items()}


def states_of(found: RankState, master: str) -> dict[str, torch.Tensor]:
    """What the optimizer has for a master; counts are tensors, too."""
    held = found.state.optimizer_state().get(master, {})
    kinds = torch.Tensor | bool | int | float
    return {name: torch.as_tensor(each) for name, each in held.items() if isinstance(each, kinds)}


def lies(state: str, tensor: torch.Tensor, master: torch.Tensor) -> bool:
    return lies_as_master(state, tuple(tensor.shape), tuple(master.shape))


def state_form(state: str, tensor: torch.Tensor | None, master: torch.Tensor, shape: tuple[int, ...]) -> Form | None:
    """``shape``: of the tensor of the model, which what lies as its master has as well."""
    if tensor is None:
        return None
    return Form(shape if lies(state, tensor, master) else tuple(tensor.shape), dtype_name(tensor, state))


def flat(tensor: torch.Tensor) -> Flat:
    return Flat.of(tensor, dtype_name(tensor, "a tensor"))
