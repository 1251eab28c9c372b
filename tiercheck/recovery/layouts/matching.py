"""The model of a job compared with the one that was saved: what fits, what may be left out, and what is refused.

Tensors are compared by name and shape. If nothing differs, nothing is renamed: the names that a rename gives are those
under which this job saves, so that a rename which a restart repeats does no harm. If something differs, what was saved
takes the names that :class:`~tiercheck.streams.loading.Loading` gives, and is compared again. The differences that are
left must all be allowed by it.

All ranks know the tensors of all those that saved, and come to the same answer: a rank whose function gives other
names, or which allows something else, is found, and named.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import Struct

from tiercheck.errors import ConfigurationError, Mismatch
from tiercheck.format.container import checksum_of
from tiercheck.format.index.assemble import Missing
from tiercheck.format.index.logical import LogicalIndex, LogicalTensor, Padding
from tiercheck.policy.recovery.spans import Span, contain, joined, spans_of
from tiercheck.recovery.layouts.holders import Holders, lacking
from tiercheck.recovery.layouts.old_ranks import OldRanks
from tiercheck.recovery.layouts.renaming import names_given
from tiercheck.recovery.ranks import TOLD_S, Ranks
from tiercheck.recovery.report import Fit
from tiercheck.streams.loading import Loading

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
    claimed: tuple[Span, ...]
    """Of the tensors that were saved, in order, those of whose names this rank has one."""


@dataclass(frozen=True)
class Matched:
    """What was saved, as this rank takes it."""

    holders: Holders
    """Of what this rank is to load. What keeps what the script made is padding in that."""
    kept: frozenset[str] = frozenset()
    """The tensors of which nothing is loaded."""
    fit: Fit | None = None
    """``None``: everything fits as it is."""


@dataclass
class _Comparison:
    """Of what this rank wants with what was saved."""

    old: OldRanks
    wanted: LogicalIndex
    rank: int
    loading: Loading
    renaming: Mapping[str, str] = field(default_factory=dict)
    """By the name that was saved, the one that it is given."""

    def __post_init__(self) -> None:
        try:
            self.holders = Holders(self.old, self.wanted, self.rank, self.renaming)
        except ValueError as error:
            raise Mismatch(f"what was saved is not of one model: {error}") from error
        self.saved = sorted(self.holders.tensors, key=lambda tensor: tensor.key)

    async def told(self) -> _Compared:
        here = {tensor.key for tensor in self.wanted.tensors.values()}
        plan = await self.holders.cover(self.old.visible)
        differing = tuple(self._differences(lacking(plan)))
        found = sum(
            held is not None and held.shape == tensor.shape
            for tensor, held in ((each, self.holders.find(each)) for each in self.wanted.tensors.values())
        )
        claimed = spans_of(number for number, tensor in enumerate(self.saved) if tensor.key in here)
        names = "\n".join(f"{old}\t{new}" for old, new in sorted(self.renaming.items()))
        return _Compared(str(self.loading), checksum_of(names.encode()), differing, found, claimed)

    def _differences(self, nobody_has: Sequence[Missing]) -> Iterable[Difference]:
        gaps = {each.piece.tensor: each for each in nobody_has if not self.holders.may_have(each)}
        for name in dict.fromkeys(
            piece.tensor for pieces in self.wanted.stored.values() for piece in pieces if not isinstance(piece, Padding)
        ):
            tensor = self.wanted.tensors[name]
            held = self.holders.find(tensor)
            if held is not None and held.shape != tensor.shape:
                yield Difference(name, f"{name} was {held.shape}, and is {tensor.shape} here", (KEEP, DROP), True)
            elif not self.old.whole:
                continue  # an old rank that was not found may have it
            elif held is None:
                yield Difference(name, f"{name} was not there, and is {tensor.shape} here", (KEEP,), True)
            elif name in gaps:
                yield Difference(name, f"of {gaps[name]} nobody has anything", ())
        for tensor in self.wanted.tensors.values():
            held = self.holders.find(tensor)
            if held is not None and held.shape == tensor.shape and held.trained != tensor.trained:
                what = f"{tensor.name} was {state_of(held)}, and is {state_of(tensor)} here"
                yield Difference(tensor.name, what, (KEEP if tensor.trained else DROP,))

    def unclaimed(self, answers: Sequence[_Compared]) -> list[LogicalTensor]:
        """What was saved and no rank wants."""
        claimed = joined({span for answer in answers for span in answer.claimed})
        return [tensor for number, tensor in enumerate(self.saved) if not contain(claimed, number)]

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
    old: OldRanks,
    loading: Loading,
    refused: Callable[[Sequence[str], str], Mismatch],
) -> Matched:
    """Compare, and rename if need be. ``refused``: makes the error, of what differs and of what would allow it.
    Collective: each rank waits for tiers until the deadline.

    Errors: ``RecoveryError`` for what cannot be read; ``Mismatch`` for what is not allowed, and if nothing at all would
    be loaded; ``ConfigurationError`` for a rename that gives no names, or is for another checkpoint, and for ranks that
    load otherwise than rank 0.
    """
    doing = "comparing the model with what was saved"
    comparison = _Comparison(old, wanted, ranks.rank, loading)
    answers: list[_Compared] = await ranks.gather(doing, comparison.told, more_s=TOLD_S, kind=_Compared)
    refuse_other_options(answers)
    problems = comparison.problems(answers)
    if not problems:
        return Matched(comparison.holders)
    if loading.rename is not None:
        as_saved = sum(each.found for each in answers)
        made: list[_Comparison] = []

        async def compare() -> _Compared:
            names = names_given(loading.rename, comparison.saved)
            made.append(_Comparison(old, wanted, ranks.rank, loading, names))
            return await made[0].told()

        answers = await ranks.gather(f"{doing}, renamed", compare, more_s=TOLD_S, kind=_Compared)
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
    comparison.holders.wanted = without_tensors(comparison.wanted, kept)
    return Matched(comparison.holders, kept, fit)


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
