"""The model of a job compared with the one that was saved: what fits, what may be left out, and what is refused.

Tensors are compared by name and shape. If nothing differs, nothing is renamed: the names that a rename gives are those
under which this job saves, so that a rename which a restart repeats does no harm. If something differs, what was saved
takes the names that :class:`~tiercheck.streams.loading.Loading` gives, and is compared again. The differences that are
left must all be allowed by it.

All ranks hold the same indexes of those that saved, and come to the same answer: a rank whose function gives other
names, or which allows something else, is found, and named.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import Struct, structs

from tiercheck.errors import ConfigurationError, Mismatch
from tiercheck.format.container import checksum_of
from tiercheck.format.index.assemble import Holdings, assemble
from tiercheck.format.index.logical import Block, LogicalIndex, LogicalTensor, Padding, Piece, Range
from tiercheck.recovery.ranks import Ranks
from tiercheck.recovery.report import Fit
from tiercheck.streams.loading import Loading
from tiercheck.types import shown

__all__ = ["Matched", "match", "without_tensors"]

KEEP, DROP = 'missing="keep"', 'unexpected="drop"'
NAMED_MAX = 3


class Difference(Struct, frozen=True, array_like=True):
    """Between what one rank is to hold and what all old ranks have."""

    name: str
    said: str
    needs: tuple[str, ...]
    """What :class:`Loading` must allow; nothing allows it if this is empty."""
    absent: bool = False
    """The tensor keeps what the script made. Otherwise its elements are loaded, and the optimizer's state is not."""


class _Compared(Struct, frozen=True, array_like=True):
    """What one rank tells the others."""

    loading: str
    renaming: str
    """A digest of the names that its function gives."""
    differences: tuple[Difference, ...]
    found: int
    """Of its tensors, how many were saved under their name and in their shape."""
    claimed: bytes
    """By tensor that was saved, whether this rank has one of that name."""


@dataclass(frozen=True)
class Matched:
    """What was saved, as this rank takes it."""

    indexes: Mapping[int, LogicalIndex]
    """By old rank, under the names that this model has."""
    wanted: LogicalIndex
    """What this rank is to load. What keeps what the script made is padding in it."""
    kept: frozenset[str] = frozenset()
    """The tensors of which nothing is loaded."""
    fit: Fit | None = None
    """``None``: everything fits as it is."""


@dataclass
class _Comparison:
    """Of what this rank wants with what was saved. ``whole``: every old rank's index is known."""

    wanted: LogicalIndex
    indexes: Mapping[int, LogicalIndex]
    whole: bool
    rank: int
    loading: Loading
    renaming: Mapping[str, str] = field(default_factory=dict)
    """By the name that was saved, the one that it is given."""

    def __post_init__(self) -> None:
        try:
            self.holdings = Holdings(self.indexes)
        except ValueError as error:
            raise Mismatch(f"what was saved is not of one model: {error}") from error
        self.saved = sorted(self.holdings.tensors, key=lambda tensor: tensor.key)

    def told(self) -> _Compared:
        here = {tensor.key for tensor in self.wanted.tensors.values()}
        differing = tuple(self._differences())
        found = sum(
            held is not None and held.tensor.shape == tensor.shape
            for tensor, held in ((each, self.holdings.find(each)) for each in self.wanted.tensors.values())
        )
        claimed = bytes(tensor.key in here for tensor in self.saved)
        names = "\n".join(f"{old}\t{new}" for old, new in sorted(self.renaming.items()))
        return _Compared(str(self.loading), checksum_of(names.encode()), differing, found, claimed)

    def _differences(self) -> Iterable[Difference]:
        said: set[str] = set()
        for missing in assemble(self.wanted, self.holdings, rank=self.rank).missing:
            tensor = self.wanted.tensors[missing.piece.tensor]
            if tensor.name in said:
                continue
            said.add(tensor.name)
            if missing.shape is not None:
                what = f"{tensor.name} was {missing.shape}, and is {tensor.shape} here"
                yield Difference(tensor.name, what, (KEEP, DROP), True)
            elif not self.whole:
                continue  # an old rank that was not found may have it
            elif self.holdings.find(tensor) is None:
                what = f"{tensor.name} was not there, and is {tensor.shape} here"
                yield Difference(tensor.name, what, (KEEP,), True)
            else:
                yield Difference(tensor.name, f"of {missing} nobody has anything", ())
        for tensor in self.wanted.tensors.values():
            held = self.holdings.find(tensor)
            if held is not None and held.tensor.shape == tensor.shape and held.tensor.trained != tensor.trained:
                what = f"{tensor.name} was {state_of(held.tensor)}, and is {state_of(tensor)} here"
                yield Difference(tensor.name, what, (KEEP if tensor.trained else DROP,))

    def unclaimed(self, answers: Sequence[_Compared]) -> list[LogicalTensor]:
        """What was saved and no rank wants."""
        columns = zip(self.saved, *(each.claimed for each in answers), strict=True)
        return [tensor for tensor, *claimed in columns if not any(claimed)]

    def problems(self, answers: Sequence[_Compared]) -> list[Difference]:
        """All differences, of all ranks, each once."""
        found = dict.fromkeys(each for answer in answers for each in answer.differences)
        return [
            *found,
            *(
                Difference(each.name, f"{each.name} was saved, and is not there here", (DROP,))
                for each in self.unclaimed(answers)
            ),
        ]


async def match(
    ranks: Ranks,
    wanted: LogicalIndex,
    indexes: Mapping[int, LogicalIndex],
    loading: Loading,
    refused: Callable[[Sequence[str], str], Mismatch],
    *,
    whole: bool,
) -> Matched:
    """Compare, and rename if need be. ``refused``: makes the error, of what differs and of what would allow it.
    ``whole``: every old rank's index is there. Collective.

    Errors: ``Mismatch`` for what is not allowed, and if nothing at all would be loaded; ``ConfigurationError`` for a
    rename that gives no names, or is for another checkpoint, and for ranks that load otherwise than rank 0.
    """
    doing = "comparing the model with what was saved"
    comparison = _Comparison(wanted, indexes, whole, ranks.rank, loading)
    answers: list[_Compared] = await ranks.gather(doing, comparison.told, kind=_Compared)
    refuse_other_options(answers)
    problems = comparison.problems(answers)
    if not problems:
        return Matched(indexes, wanted)
    if loading.rename is not None:
        as_saved = sum(each.found for each in answers)
        made: list[_Comparison] = []

        def compare() -> _Compared:
            names = names_given(loading.rename, comparison.saved)
            renamed = {old: renamed_index(index, names) for old, index in indexes.items()}
            made.append(_Comparison(wanted, renamed, whole, ranks.rank, loading, names))
            return made[0].told()

        answers = await ranks.gather(f"{doing}, renamed", compare, kind=_Compared)
        comparison, problems = made[0], made[0].problems(answers)
        refuse_other_names(answers)
        if (found := sum(each.found for each in answers)) < as_saved:
            raise ConfigurationError(
                f"under the names that rename gives, {found} tensors are found, and under those that were saved "
                f"{as_saved}: it is for another checkpoint; leave it out"
            )
    try:
        refuse(problems, answers, loading, refused)
    except Mismatch as error:
        said = str(error)  # of this rank's model and tiers; all tell of rank 0's
        first, *_ = await ranks.gather("what differs from what was saved", lambda: said)
        raise Mismatch(first) from error
    return comparison_settled(comparison, answers)


def refuse(
    problems: Sequence[Difference],
    answers: Sequence[_Compared],
    loading: Loading,
    refused: Callable[[Sequence[str], str], Mismatch],
) -> None:
    """Errors: ``Mismatch`` unless all that differs is allowed, and something is loaded."""
    wrong = [each for each in problems if not each.needs or not set(each.needs) <= loading.options]
    if not wrong and any(each.found for each in answers):
        return
    raise refused([each.said for each in wrong or problems], advice(wrong, problems, loading))


def advice(wrong: Sequence[Difference], problems: Sequence[Difference], loading: Loading) -> str:
    """What would allow it, as a user writes it; empty if nothing does."""
    if any(not each.needs for each in wrong):
        return ""
    named = loading.rename is not None
    if not wrong:
        return "nothing of it would be loaded" + ("" if named else "; rename=... gives what was saved other names")
    needed = sorted({need for each in problems for need in each.needs})
    also = ["rename=..."] if named else []
    said = f"attach(..., loading=Loading({', '.join([*also, *needed])})) loads what fits"
    both = {KEEP, DROP} <= set(needed) and not named
    return said + ("; rename=... gives what was saved other names" if both else "")


def comparison_settled(comparison: _Comparison, answers: Sequence[_Compared]) -> Matched:
    """All that differs is allowed."""
    kept = frozenset(each.name for each in answers[comparison.rank].differences if each.absent)
    everywhere = [each for answer in answers for each in answer.differences]
    reshaped = {each.name for each in everywhere if each.absent and DROP in each.needs}
    left_out = reshaped | {each.name for each in comparison.unclaimed(answers)}
    saved_as = {new: old for old, new in comparison.renaming.items()}
    fit = Fit(
        loaded=in_order(tensor.name for tensor in comparison.saved if tensor.name not in left_out),
        renamed=tuple((o, n) for o, n in sorted(comparison.renaming.items()) if o != n and n not in left_out),
        kept=in_order(each.name for each in everywhere if each.absent),
        dropped=in_order(saved_as.get(name, name) for name in left_out),
        restarted=in_order(each.name for each in everywhere if not each.absent and KEEP in each.needs),
        stopped=in_order(each.name for each in everywhere if not each.absent and DROP in each.needs),
    )
    return Matched(comparison.indexes, without_tensors(comparison.wanted, kept), kept, fit)


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))


def refuse_other_options(answers: Sequence[_Compared]) -> None:
    """Errors: ``ConfigurationError`` naming a rank that allows something else than rank 0."""
    for rank, each in enumerate(answers):
        if each.loading != answers[0].loading:
            raise ConfigurationError(
                f"loading= allows {each.loading} on rank {rank}, and {answers[0].loading} on rank 0: all must say the "
                "same"
            )


def refuse_other_names(answers: Sequence[_Compared]) -> None:
    """Errors: ``ConfigurationError`` naming a rank whose function gives other names than that of rank 0."""
    for rank, each in enumerate(answers):
        if each.renaming != answers[0].renaming:
            raise ConfigurationError(
                f"rename= gives other names on rank {rank} than on rank 0: it must be the same function of the name on "
                "every rank"
            )


def names_given(rename: Callable[[str], Any] | None, saved: Iterable[LogicalTensor]) -> dict[str, str]:
    """By each name that was saved, the one that it is given. Errors: ``ConfigurationError``."""
    given: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in dict.fromkeys(tensor.name for tensor in saved):
        try:
            new = name if rename is None else rename(name)
        except Exception as error:
            raise ConfigurationError(f"rename({name!r}) raised {type(error).__name__}: {error}") from error
        if not isinstance(new, str) or not new:
            raise ConfigurationError(f"rename({name!r}) must return a name, not {shown(new)}")
        if new in taken:
            raise ConfigurationError(f"rename gives {taken[new]} and {name} the same name {shown(new)}")
        taken[new], given[name] = name, new
    return given


def renamed_index(index: LogicalIndex, names: Mapping[str, str]) -> LogicalIndex:
    """The index with the model's tensors under other names. What is stored keeps its own. Errors:
    ``ConfigurationError`` for a name that no shard can hold."""

    def renamed(piece: Piece) -> Piece:
        match piece:
            case Range():
                return Range(names[piece.tensor], piece.start, piece.length)
            case Block():
                return Block(names[piece.tensor], piece.offsets, piece.lengths)
        return piece

    try:
        tensors = {names[name]: structs.replace(each, name=names[name]) for name, each in index.tensors.items()}
        stored = {name: tuple(map(renamed, pieces)) for name, pieces in index.stored.items()}
        return replace(index, tensors=tensors, stored=stored, aliases={})
    except ValueError as error:
        raise ConfigurationError(f"rename gives a name that no tensor can have: {error}") from error


def without_tensors(index: LogicalIndex, names: Collection[str]) -> LogicalIndex:
    """The index with padding in place of these tensors."""
    if not names:
        return index
    stored = {
        name: tuple(
            Padding(piece.elements) if not isinstance(piece, Padding) and piece.tensor in names else piece
            for piece in pieces
        )
        for name, pieces in index.stored.items()
    }
    left = {name: each for name, each in index.tensors.items() if name not in names}
    return replace(index, tensors=left, stored=stored, aliases={})


def state_of(tensor: LogicalTensor) -> str:
    return "trained" if tensor.trained else "frozen"
