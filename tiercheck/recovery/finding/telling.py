"""Every rank tells the others what it has found."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Raw, Struct

from tiercheck import schema
from tiercheck.policy.recovery.lineage import Branch
from tiercheck.recovery.finding.survey import Survey
from tiercheck.recovery.finding.told import Told, packed_others
from tiercheck.recovery.ranks import Ranks

__all__ = ["ToldByAll", "tell"]


class _Found(Struct, frozen=True, array_like=True):
    """What a rank tells the others of its survey."""

    told: Raw
    """A :class:`Told`, which most ranks have in common: it is read once."""
    others: bytes
    """See :func:`packed_others`."""


@dataclass(frozen=True)
class ToldByAll:
    """What a :class:`~tiercheck.recovery.finding.past.Past` is made of."""

    told: Sequence[Told]
    others: Sequence[bytes]
    lineages: Mapping[int, Collection[Branch]]


async def tell(what: str, found: Callable[[], Awaitable[tuple[Told, Survey]]], ranks: Ranks) -> ToldByAll:
    """Collective. ``found``: what this rank tells, and all that it has found. Errors: those of ``found`` and of
    :meth:`Ranks.gather`."""
    surveys: list[Survey] = []

    async def say() -> _Found:
        told, survey = await found()
        surveys.append(survey)
        return _Found(Raw(schema.pack(told)), packed_others(survey))

    answers: list[_Found] = await ranks.gather(what, say, kind=_Found)
    told = [bytes(answer.told) for answer in answers]
    read = {each: msgspec.msgpack.decode(each, type=Told) for each in set(told)}
    all_told = [read[each] for each in told]
    return ToldByAll(all_told, [answer.others for answer in answers], await _lineages(all_told, surveys[0], ranks))


async def _lineages(told: Sequence[Told], survey: Survey, ranks: Ranks) -> dict[int, Collection[Branch]]:
    """The branches behind every digest that some rank tells of. Collective, unless every rank knows all."""
    known: dict[int, Collection[Branch]] = {**survey.lineages}
    first: dict[int, int] = {}
    for rank, each in enumerate(told):
        for digest in filter(None, each.lineages):
            first.setdefault(digest, rank)
    if all(first.keys() <= set(digests) for digests in {each.lineages for each in told}):
        return known

    def tell_own() -> list[tuple[int, list[Branch]]]:
        return [(each, sorted(known[each])) for each in known if first[each] == ranks.rank]

    answers = await ranks.gather("what the lineage records tell", tell_own, kind=list[tuple[int, list[Branch]]])
    return {**known, **{digest: branches for answer in answers for digest, branches in answer}}
