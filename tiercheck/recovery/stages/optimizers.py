"""The optimizer's state of what is made anew: of a tied layer, another rank's; or moments, averaged as weights are."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tiercheck.format.index.boxes import Copy
from tiercheck.format.index.logical import LogicalIndex
from tiercheck.policy.neighbours import moment_share
from tiercheck.recovery.ranks import Ranks
from tiercheck.recovery.stages.transfers import Contribution, tied
from tiercheck.streams.stage import Moments, StageState, state_name

__all__ = ["averaged_moments", "tied_state"]


async def tied_state(
    planned: Sequence[Contribution], indexes: Mapping[int, LogicalIndex], state: StageState, ranks: Ranks
) -> list[Contribution]:
    """What brings the optimizer's state of what other ranks train too. Collective."""
    whole = tied(planned, indexes)
    if not whole:
        return []

    def tell() -> dict[str, Any]:
        return {each.stored: state.optimizer(each.stored) for each in whole if each.source == ranks.rank}

    told = await ranks.gather("the optimizer's state of tied layers", tell)
    found: list[Contribution] = []
    for each in whole:
        held: Mapping[str, Any] = told[each.source][each.stored]
        if each.target == ranks.rank:
            state.expect_optimizer(each.into, held)
        found += as_it_is(each, held)
    return found


async def averaged_moments(planned: Sequence[Contribution], state: StageState, ranks: Ranks) -> list[Contribution]:
    """What brings the moments of what is averaged or copied. Each moment has the weight of its master, and is corrected
    for its bias (:func:`~tiercheck.policy.neighbours.moment_share`). A master that is made has as many steps as the one
    with most of those that go into it, and the rest of that one's state. Collective."""
    masters: dict[tuple[int, str], list[Contribution]] = defaultdict(list)
    for each in planned:
        if not each.own:
            masters[each.target, each.into].append(each)
    tells = any(each.source == ranks.rank for parts in masters.values() for each in parts)
    told: list[dict[str, Moments]] = await ranks.gather(
        "the optimizer's moments", lambda: state.moments() if tells else {}, kind=dict[str, Moments]
    )
    found: list[Contribution] = []
    for (target, into), parts in masters.items():
        most = max(parts, key=lambda each: told[each.source][each.stored].steps)
        made = told[most.source][most.stored]
        if not made.steps:
            continue
        if target == ranks.rank:
            state.expect_optimizer(into, made.state, like_master=made.betas)
        found += as_it_is(most, made.state, but=made.betas)
        for each in parts:
            of = told[each.source][each.stored]
            for key, beta in of.betas.items() if of.steps else ():
                weight = moment_share(each.weight, beta, of.steps, made.steps)
                stored, goes = state_name(each.stored, key), state_name(into, key)
                found.append(replace(each, weight=weight, stored=stored, into=goes))
    return found


def as_it_is(each: Contribution, state: Mapping[str, Any], but: Collection[str] = ()) -> Iterator[Contribution]:
    """What brings the optimizer's tensors of a master whole."""
    for key, shape in state.items():
        if isinstance(shape, list) and key not in but:
            copy = Copy((math.prod(shape),), 0, (1,), 0, (1,))
            names = state_name(each.stored, key), state_name(each.into, key)
            yield Contribution(each.source, each.target, 1.0, *names, copy)
