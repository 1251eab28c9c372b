"""The job's generation: all ranks open it together, or take it back if one of them fails."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tiercheck import schema
from tiercheck.errors import ConfigurationError, GroupError, RecoveryError, TierCheckError
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.policy.recovery.lineage import Branch, Layout
from tiercheck.recovery.ranks import Ranks
from tiercheck.recovery.restored import Restored
from tiercheck.replication.objects.generation import (
    UNSEEN,
    Opening,
    finds_probe,
    open_generation,
    put_probe,
    remove_probe,
    withdraw_captures,
    withdraw_records,
)

__all__ = ["open_on_all_ranks", "take_back"]

log = logging.getLogger(__name__)

NUMBERS_TRIED = 16
"""Numbers for a generation, one after the other, until one is free in every tier."""


async def open_on_all_ranks(
    ranks: Ranks,
    tiers: OpenHierarchy,
    restored: Restored,
    layout: Layout,
    token: Callable[[], str],
    *,
    asked: str = "",
    kept: tuple[int, ...] = (),
) -> Branch:
    """The generation that begins with what was restored, recorded in every rank's tiers; later in those that cannot be
    written to just now, if each rank's memory has served the recovery. ``layout``: under which it saves; ``token``
    draws its name; ``asked`` and ``kept``: as of :class:`Branch`.

    Errors: ``JobConflict``; ``TierError``; ``RecoveryError`` if one number after the other is occupied;
    ``ConfigurationError`` if a tier that all ranks should share is another place for some.
    """
    taken = restored.past.taken
    if restored.past.away:
        taken += UNSEEN
        if ranks.rank == 0:
            log.info("%d numbers of generations are left out: a tier that could not be asked may know of them", UNSEEN)
    past = restored.past.worth_telling(restored.parent)
    for _ in range(NUMBERS_TRIED):
        # Rank 0's is taken.
        size, digest = layout.world_size, layout.digest
        parent, version, made = restored.parent, restored.version, restored.made
        proposal = Branch(taken + 1, parent, version, size, token(), digest, asked, kept, made)
        proposals = await ranks.gather("choosing the generation", partial(schema.plain, proposal))
        branch = schema.read(Branch, proposals[0])

        async def open_it(branch: Branch = branch) -> Any:
            opening = open_generation(
                tiers,
                branch,
                past=past,
                stores=restored.past.stores,
                may_wait=restored.in_memory,
                deadline_s=0.9 * ranks.deadline_s,  # the error names the tier
            )
            return schema.plain(await ranks.call(opening, f"opening generation {branch.generation}"))

        try:
            openings = [schema.read(Opening, each) for each in await ranks.gather("opening the generation", open_it)]
            await refuse_places_apart(ranks, tiers, branch, openings)
        except GroupError:  # the ranks cannot agree to take it back, and a generation that nobody is in does no harm
            raise
        except Exception:
            await take_back(ranks, tiers, branch)
            raise
        if not any(opening.occupied for opening in openings):
            for tier, error in openings[ranks.rank].later.items():
                log.warning("generation %d is recorded in tier %s later: %s", branch.generation, tier, error)
            return branch
        await take_back(ranks, tiers, branch)
        taken = branch.generation
    raise RecoveryError(
        f"{NUMBERS_TRIED} numbers of generations up to {taken} are occupied by what is no lineage record: remove "
        f"what is foreign under lineage/ in {', '.join(tier.driver.url for tier in tiers.tiers)}"
    )


async def refuse_places_apart(ranks: Ranks, tiers: OpenHierarchy, branch: Branch, openings: Sequence[Opening]) -> None:
    """``openings``: of all ranks. One of them at most puts the record of a generation into a tier that they share, and
    the others find it. If several seem to have put it, the first of them puts something else, for which the others
    look.

    Errors, on all ranks: ``ConfigurationError`` if a tier is not the place that all share; ``TierError``.
    """
    creators: dict[str, list[int]] = defaultdict(list)
    for rank, opening in enumerate(openings):
        for name in opening.created:
            creators[name].append(rank)
    doubtful = {name: each for name, each in creators.items() if len(each) > 1}
    if not doubtful:
        return
    first = [tier for tier in tiers.tiers if doubtful.get(tier.name, [-1])[0] == ranks.rank]
    others = [tier for tier in tiers.tiers if ranks.rank in doubtful.get(tier.name, ())[1:]]
    doing = "trying whether all ranks share a tier"

    async def put() -> None:
        for tier in first:
            await ranks.call(put_probe(tier, branch), doing)

    async def missing() -> list[str]:
        return [tier.name for tier in others if not await ranks.call(finds_probe(tier, branch), doing)]

    async def remove() -> None:
        for tier in first:
            await ranks.call(remove_probe(tier, branch), doing)

    await ranks.gather(doing, put)
    told = await ranks.gather(doing, missing)
    await ranks.gather(doing, remove)
    found = next(((rank, name) for rank, names in enumerate(told) for name in names), None)
    if found is None:
        return
    rank, name = found
    other = doubtful[name][0]
    raise ConfigurationError(
        f"the tier {name} is {openings[other].created[name]} for rank {other} and {openings[rank].created[name]} for "
        f"rank {rank}, and these are two places: neither finds what the other has put there. Point all ranks at one "
        "place that they share, or say with survives=process that the tier is one of each node"
    )


async def take_back(ranks: Ranks, tiers: OpenHierarchy, branch: Branch) -> None:
    """Take the generation back, of which nobody has moved or trained anything: first what ranks captured, then, once
    all have, its records. If that fails it stays, and is superseded by the next one."""
    doing = f"taking back generation {branch.generation}"
    try:
        await ranks.gather(doing, lambda: ranks.call(withdraw_captures(tiers, branch, ranks.rank), doing))
        await ranks.gather(doing, lambda: ranks.call(withdraw_records(tiers, branch), doing))
    except TierCheckError as error:
        log.warning("%s: %s; it stays, without a version of its own, until the job starts again", doing, error)
