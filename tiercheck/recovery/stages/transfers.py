"""Which elements of which surviving rank go into the masters of a lost one, and in which messages they travel.

Every rank makes the same plan from the same indexes. The ranks exchange messages of the job's own group, in rounds of
bounded length: each gives the next elements that are taken from it, and the lost ranks pick theirs out of what all have
given. So the memory that this takes does not grow with the stage, and all ranks of the job see what is sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from tiercheck.errors import RecoveryError
from tiercheck.format.index.assemble import Holdings, assemble, shifted
from tiercheck.format.index.boxes import Copy
from tiercheck.format.index.logical import Block, LogicalIndex, Padding, Range
from tiercheck.recovery.ranks import Ranks
from tiercheck.recovery.report import named
from tiercheck.streams.stage import StageState

__all__ = ["Contribution", "Ingredient", "contributions", "exchange", "split"]

ROUND_NBYTES = 64 << 20
"""What all ranks together give in a round: so much memory each of them needs beside the state."""
GIVEN_NBYTES_MIN = 64 << 10
ELEMENT_NBYTES = 4


@dataclass(frozen=True)
class Ingredient:
    """A stage of which a lost one is made."""

    parts: Mapping[str, tuple[str, float]]
    """By the name of the lost stage's tensor, the one that takes its place there, and its weight."""
    held: Holdings
    """What the ranks of that stage have."""


@dataclass(frozen=True)
class Contribution:
    """Elements of the rank ``source``, to be weighed and added to those of the lost rank ``target``."""

    source: int
    target: int
    weight: float
    stored: str
    """The tensor that the source stores them in."""
    into: str
    copy: Copy
    own: bool = False
    """The source has it under the same name: it is no substitute."""


def contributions(
    rank: int, wanted: LogicalIndex, left: Holdings, ingredients: Sequence[Ingredient] | None
) -> list[Contribution]:
    """What the lost ``rank`` is made of. What any surviving rank has under the same name is taken as it is (``left``:
    tied layers, data-parallel copies); all else is the weighted sum of the ingredients, or stays if there are none
    (``None``). Errors: ``RecoveryError`` naming what nobody has."""
    found: list[Contribution] = []
    lacking: list[str] = []
    for into, start, piece in pieces_of(wanted):
        one = LogicalIndex({piece.tensor: wanted.tensors[piece.tensor]}, {into: (piece,)})
        own = assemble(one, left, rank=rank)
        if not own.missing:
            found += [
                Contribution(each.rank, rank, 1.0, each.source, into, shifted(each.copy, 0, start), own=True)
                for each in own.transfers
            ]
            continue
        if ingredients is None:
            continue
        plans = []
        for ingredient in ingredients:
            if (part := ingredient.parts.get(piece.tensor)) is None:
                lacking.append(piece.tensor)
                break
            name, weight = part
            plan = assemble(replace_name(one, piece, name), ingredient.held, rank=rank)
            lacking += [each.piece.tensor for each in plan.missing]
            if weight:
                plans.append((weight, plan))
        if not ingredients:
            lacking.append(piece.tensor)
        found += [
            Contribution(each.rank, rank, weight, each.source, into, shifted(each.copy, 0, start))
            for weight, plan in plans
            for each in plan.transfers
        ]
    if lacking:
        said = named(list(dict.fromkeys(lacking)))
        raise RecoveryError(f"rank {rank} cannot be made of what is left: no surviving rank has {said}")
    return found


def tied(planned: Iterable[Contribution], indexes: Mapping[int, LogicalIndex]) -> list[Contribution]:
    """Of the plan, what brings whole masters that the source has under the same name: the optimizer's state goes with
    them. Copies that ranks train apart stay alike only if that is alike too. Errors: ``RecoveryError`` for a part of a
    master: its optimizer's state is one with that of the rest, which begins anew."""
    found = [each for each in planned if each.own]
    for each in found:
        sizes = {
            sum(piece.elements for piece in indexes[rank].stored[stored])
            for rank, stored in ((each.source, each.stored), (each.target, each.into))
        }
        if sizes != {each.copy.elements}:
            raise RecoveryError(
                f"{each.into} of rank {each.target} has elements that rank {each.source} trains too (tied layers), and "
                "they would drift apart: ZeRO keeps one optimizer state for them and others. Supported are tied layers "
                "under ZeRO 0"
            )
    return found


def pieces_of(index: LogicalIndex) -> Iterator[tuple[str, int, Range | Block]]:
    """Each piece with the stored tensor that it is in, and its first element there."""
    for stored, pieces in index.stored.items():
        start = 0
        for piece in pieces:
            if not isinstance(piece, Padding):
                yield stored, start, piece
            start += piece.elements


def replace_name(index: LogicalIndex, piece: Range | Block, name: str) -> LogicalIndex:
    """An index of one piece, of the tensor of another name."""
    ((stored, _),) = index.stored.items()
    tensor = msgspec.structs.replace(index.tensors[piece.tensor], name=name)
    return LogicalIndex({name: tensor}, {stored: (replace(piece, tensor=name),)})


def split(copy: Copy, elements_max: int) -> Iterator[Copy]:
    """The same elements in copies of at most so many."""
    if copy.elements <= elements_max:
        yield copy
        return
    axis = next(axis for axis, length in enumerate(copy.lengths) if length > 1)
    inner = copy.elements // copy.lengths[axis]
    step = max(1, elements_max // inner)
    for first in range(0, copy.lengths[axis], step):
        lengths = list(copy.lengths)
        lengths[axis] = min(step, copy.lengths[axis] - first)
        part = Copy(
            tuple(lengths),
            copy.source_start + first * copy.source_strides[axis],
            copy.source_strides,
            copy.target_start + first * copy.target_strides[axis],
            copy.target_strides,
        )
        yield from split(part, elements_max)


async def exchange(planned: Iterable[Contribution], state: StageState, ranks: Ranks) -> None:
    """Carry the plan out. The lost ranks' masters were cleared. Collective. Errors: those of the group."""
    given_nbytes = max(GIVEN_NBYTES_MIN, ROUND_NBYTES // ranks.world_size)
    left: dict[int, list[Contribution]] = defaultdict(list)
    for each in planned:
        parts = split(each.copy, given_nbytes // ELEMENT_NBYTES)
        left[each.source] += [replace(each, copy=part) for part in parts]
    rounds = {source: list(in_rounds(parts, given_nbytes)) for source, parts in left.items()}
    for number in range(max(map(len, rounds.values()), default=0)):
        now = {source: parts[number] for source, parts in rounds.items() if number < len(parts)}

        def give(now: Mapping[int, Sequence[Contribution]] = now) -> bytes:
            return b"".join(state.read(each.stored, each.copy) for each in now.get(ranks.rank, ()))

        for source, elements in enumerate(await ranks.gather("bringing a lost stage's weights", give, kind=bytes)):
            start = 0
            for each in now.get(source, ()):
                stop = start + each.copy.elements * ELEMENT_NBYTES
                if each.target == ranks.rank:
                    state.add(each.into, each.copy, elements[start:stop], each.weight)
                start = stop


def in_rounds(parts: Iterable[Contribution], nbytes_max: int) -> Iterator[list[Contribution]]:
    """In their order, as many a round as there is room for."""
    found: list[Contribution] = []
    nbytes = 0
    for each in parts:
        more = each.copy.elements * ELEMENT_NBYTES
        if found and nbytes + more > nbytes_max:
            yield found
            found, nbytes = [], 0
        found.append(each)
        nbytes += more
    if found:
        yield found
