"""Stages of a pipeline that are made anew, since no copy of them is left: of what, and the making itself.

:class:`StageMaking` is used by a recovery (:mod:`tiercheck.recovery.restorer`) in two steps. :meth:`StageMaking.plan`
comes before anything is read: what cannot be made is refused then, and the state is as it was. :meth:`StageMaking.make`
comes when the other ranks are at the version at which they meet: their masters are brought to the lost ranks, in rounds
of bounded length (:mod:`tiercheck.recovery.stages.transfers`).

What is not made of the neighbours: the optimizer's state of a stage that was averaged or copied begins anew, as the
script made it, unless averaged moments are asked for (:mod:`tiercheck.recovery.stages.optimizers`). So does what no
optimizer updates (frozen parameters, buffers). The host state (counters, schedule, loss scale, random generators,
``stateful=``) is that of the nearest surviving stage's rank in the same column.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from tiercheck.errors import RecoveryError
from tiercheck.format.index.assemble import Holdings
from tiercheck.format.index.logical import LogicalIndex
from tiercheck.format.index.message import plain_index, read_index
from tiercheck.policy.neighbours import Layer, Method, Share, Substitute, check_layers, substitutes
from tiercheck.policy.recovery.lost_stage import LostStage
from tiercheck.policy.recovery.spans import spans_of, spans_text
from tiercheck.recovery.ranks import Ranks
from tiercheck.recovery.report import named
from tiercheck.recovery.stages.optimizers import averaged_moments, tied_state
from tiercheck.recovery.stages.places import refuse_one_name_for_two
from tiercheck.recovery.stages.transfers import Contribution, Ingredient, contributions, exchange, tied
from tiercheck.streams.stage import StagePlace, StageState, parameter_name

__all__ = ["RAISED_RATE", "Made", "StageMaking"]

RAISED_RATE = "raised_rate"
"""In a version's host state, while the learning rate is raised after a recovery: the factor, and the last version."""
TEXTS_MAX, CHARACTERS_MAX = 5, 600
"""What a lineage record tells of it: the texts, and how long each is."""


@dataclass(frozen=True)
class Made:
    """What has come of it on this rank."""

    host_state: Mapping[str, Any]
    """To be put back."""
    said: tuple[str, ...]
    """What was made of what, in words, a stage each. The same on all ranks."""


class StageMaking:
    """Makes what the ranks ``lost`` held. ``newest_of``: the newest version that these ranks can come to."""

    def __init__(
        self,
        state: StageState,
        ranks: Ranks,
        option: LostStage,
        lost: frozenset[int],
        newest_of: Callable[[Iterable[int]], int | None],
    ) -> None:
        self._state = state
        self._ranks = ranks
        self._option = option
        self.lost = lost
        self._newest_of = newest_of
        self._places: list[StagePlace] = []
        self._columns: list[int] = []
        """By rank, which one it is of its stage. Ranks of one column are one pipeline."""
        self._planned: tuple[Substitute, ...] = ()
        self._exponent = 0.0
        """Of the norms, from the moment on at which they are known; all weigh alike before."""
        self._layer_norms: dict[int, list[float | None]] = {}
        """By stage, of each of its layers that go into a lost stage."""
        self._indexes: Mapping[int, LogicalIndex] = {}
        """By rank, what it holds, of those that are made, and those that something may be taken of."""

    # Before anything is read

    async def look(self) -> None:
        """Learn the stages of the pipeline. Collective. Errors: ``RecoveryError``."""
        doing = "the stages of the pipeline"
        self._places = await self._ranks.gather(doing, lambda: self._state.place, kind=StagePlace)
        if len({place.stages for place in self._places}) > 1:
            raise RecoveryError("the ranks are stages of pipelines of different lengths: no lost stage can be made")
        one_of = {place.stage: place for place in self._places}
        for stage in sorted({self._places[rank].stage for rank in self.lost}):
            for other in one_of.values():
                refuse_one_name_for_two(one_of[stage], other)
        of_stage: dict[int, Iterator[int]] = defaultdict(count)
        self._columns = [next(of_stage[place.stage]) for place in self._places]

    @property
    def has_copies(self) -> bool:
        """Whether ranks that are left may hold all that the lost ones held: data-parallel copies."""
        stages = {self._places[rank].stage for rank in self.lost}
        return all(self._copies(stage) > len(self._lost_of(stage)) for stage in stages)

    async def plan(self) -> None:
        """Decide of what each lost stage is made. Collective. Errors: ``RecoveryError`` naming what cannot be made, and
        why."""
        self._planned = self._substitutes({})
        self._indexes = await self._told_indexes()
        tied(self._contributions(), self._indexes)

    def version_of(self, rank: int) -> int | None:
        """The version that a lost rank goes back to by itself; ``None``: it is made of others."""
        each = self._substitute(rank)
        return each.base if each.method is Method.ROLL_BACK else None

    def _substitute(self, rank: int) -> Substitute:
        return next(each for each in self._planned if each.stage == self._places[rank].stage)

    def _substitutes(self, norms: Mapping[int, float | None]) -> tuple[Substitute, ...]:
        lost = sorted({self._places[rank].stage for rank in self.lost})
        bases = {stage: self._newest_of(self._lost_of(stage)) for stage in lost}
        found = substitutes(
            self._stages,
            lost,
            norms,
            methods=self._option.methods,
            exponent=self._exponent,
            bases={stage: [version] for stage, version in bases.items() if version is not None},
        )
        for each in found:
            if each.shares:
                check_layers(each, {stage: self._layers(each, stage) for stage in (each.stage, *_shared(each))})
        return found

    @property
    def _stages(self) -> int:
        return self._places[0].stages

    def _of_stage(self, stage: int) -> list[int]:
        return [rank for rank, place in enumerate(self._places) if place.stage == stage]

    def _copies(self, stage: int) -> int:
        ranks = self._of_stage(stage)
        return self._places[ranks[0]].copies or len(ranks)

    def _lost_of(self, stage: int) -> list[int]:
        return [rank for rank in self._of_stage(stage) if rank in self.lost]

    def _layers(self, substitute: Substitute, stage: int) -> list[Layer]:
        """The layers of a stage that are averaged, or copied. An end stage has others besides (embedding, head): those
        whose like the lost stage does not have, or, of a lost end, those whose like its neighbour does not have."""
        own = self._all_layers(stage)
        if 0 < stage < self._stages - 1:
            return own
        others = _shared(substitute) if stage == substitute.stage else (substitute.stage,)
        known = {each.shapes for other in others for each in self._all_layers(other)}
        return [each for each in own if each.shapes in known] or own

    def _all_layers(self, stage: int) -> list[Layer]:
        return [Layer(name, shapes) for name, shapes in self._places[self._of_stage(stage)[0]].layers]

    # The other ranks are at the version

    async def make(self, version: int, host_state: Mapping[str, Any] | None) -> Made:
        """Make what is lost. ``host_state``: of the version, of a rank that is not lost. Collective. Errors:
        ``RecoveryError``; those of the group."""
        self._planned = self._substitutes(await self._norms(host_state))
        planned = self._contributions()
        of_optimizers = await tied_state(planned, self._indexes, self._state, self._ranks)
        if self._option.averages_moments:
            of_optimizers += await averaged_moments(planned, self._state, self._ranks)
        self._state.clear({each.into for each in planned if each.target == self._ranks.rank})
        await exchange([*planned, *of_optimizers], self._state, self._ranks)
        await self._ranks.gather("taking over what was brought", self._state.finish)
        taken = await self._host_states(host_state)
        rate = self._option.rate(scheduled=any(place.scheduled for place in self._places))
        said = tuple(self._said(each, version) for each in self._planned)
        if rate.factor != 1 and rate.steps:
            taken = {**taken, RAISED_RATE: {"factor": rate.factor, "until": version + rate.steps}}
            said += (f"the learning rate is raised by a factor of {rate.factor:g} for {rate.steps} steps",)
        return Made(taken, bounded(said))

    async def _norms(self, host_state: Mapping[str, Any] | None) -> dict[int, float | None]:
        """By stage, the norm of its last gradient, of the layers that go into a lost stage. If one is not known, all
        weigh alike."""

        def tell() -> list[float | None] | None:
            return None if host_state is None else list(self._state.norms(host_state))

        told: list[list[float | None] | None] = await self._ranks.gather("the norms of the last gradients", tell)
        norms: dict[int, float | None] = {}
        for each in self._planned:
            for stage in _shared(each):
                layers = [layer.name for layer in self._layers(each, stage)]
                norms[stage] = self._norm(stage, layers, told)
                self._layer_norms[stage] = [self._norm(stage, [layer], told) for layer in layers]
        known = all(each is not None for each in norms.values())
        self._exponent = self._option.exponent if known else 0.0
        return norms

    def _norm(self, stage: int, counted: Collection[str], told: Sequence[list[float | None] | None]) -> float | None:
        squares: list[float | None] = []
        for rank in self._of_stage(stage):
            of_rank = told[rank] or [None]
            names = [name for name, _ in self._places[rank].layers]
            squares += [square for name, square in zip(names, of_rank, strict=False) if name in counted]
        if not squares or any(square is None for square in squares):
            return None
        total = math.fsum(square for square in squares if square is not None)
        return math.sqrt(total / self._copies(stage))

    async def _told_indexes(self) -> dict[int, LogicalIndex]:
        """By rank, what it holds: of those that are made, and those that something may be taken of."""
        made = [each for each in self._planned if each.method is not Method.ROLL_BACK]
        concerned = {stage for each in made for stage in (each.stage, *_shared(each))}
        own = self._places[self._ranks.rank]
        tied = {layer for rank in self.lost for layer in self._places[rank].tied}
        tells = own.stage in concerned or not tied.isdisjoint(name for name, _ in own.layers)

        def tell() -> Any:
            if self._option.averages_moments and own.stage in concerned:
                self._state.moments()  # which refuses what it does not know
            return plain_index(self._state.index()) if tells else None

        told = await self._ranks.gather("what the stages hold", tell)
        return {rank: read_index(each) for rank, each in enumerate(told) if each is not None}

    def _contributions(self) -> list[Contribution]:
        """Errors: ``RecoveryError`` naming what no rank has that is left."""
        indexes = self._indexes
        left = Holdings({rank: each for rank, each in indexes.items() if rank not in self.lost})
        held = {
            stage: Holdings({rank: indexes[rank] for rank in self._of_stage(stage)})
            for each in self._planned
            if each.method is not Method.ROLL_BACK
            for stage in _shared(each)
        }
        planned: list[Contribution] = []
        for each in self._planned:
            ingredients = None
            if each.method is not Method.ROLL_BACK:
                ingredients = [Ingredient(self._parts(each, stage), held[stage]) for stage in _shared(each)]
            for rank in self._lost_of(each.stage):
                if rank in indexes:
                    planned += contributions(rank, indexes[rank], left, ingredients)
        return planned

    def _parts(self, substitute: Substitute, stage: int) -> dict[str, tuple[str, float]]:
        """By the name of a tensor of the lost stage, the one that takes its place in another stage, and its weight."""
        layers = [self._layers(substitute, each) for each in (substitute.stage, stage)]
        at = _shared(substitute).index(stage)
        return {
            parameter_name(own.name, each): (parameter_name(other.name, each), shares[at].weight)
            for own, other, shares in zip(*layers, self._layer_shares(substitute), strict=True)
            for each, _ in own.shapes
        }

    def _weighs_layers(self, each: Substitute) -> bool:
        return self._option.by_layer and self._exponent != 0 and len(each.shares) > 1

    def _layer_shares(self, each: Substitute) -> Sequence[tuple[Share, ...]]:
        """The shares of each of its layers."""
        if self._weighs_layers(each):
            return each.by_layer(self._layer_norms, self._exponent)
        return [each.shares] * len(self._layers(each, each.stage))

    def _nearest(self, rank: int) -> int:
        """The rank whose host state a lost one takes: of the same column, in the nearest stage, the earlier of two."""
        stage = self._places[rank].stage
        left = [each for each in range(len(self._places)) if each not in self.lost]
        column = [each for each in left if self._columns[each] == self._columns[rank]] or left
        return min(column, key=lambda each: (abs(self._places[each].stage - stage), self._places[each].stage))

    async def _host_states(self, host_state: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """This rank's, or that of the nearest one."""
        sources = {self._nearest(rank) for rank in self.lost}
        tells = self._ranks.rank in sources
        told = await self._ranks.gather("the host state of the nearest stages", lambda: host_state if tells else None)
        if self._ranks.rank not in self.lost and host_state is not None:
            return host_state
        taken: Mapping[str, Any] = told[self._nearest(self._ranks.rank)]
        return taken

    def _said(self, each: Substitute, version: int) -> str:
        lost = self._lost_of(each.stage)
        stage = f"stage {each.stage} of {self._stages} ({ranks_text(lost)})"
        began = f"{stage} was lost with every copy, and at version {version}"
        host = f"the host state is that of {ranks_text(map(self._nearest, lost))}"
        if each.method is Method.ROLL_BACK:
            return f"{began} it is that of version {each.base}, its optimizer's state too; {host}"
        moments = "moments are made in the same way" if self._option.averages_moments else "state begins anew"
        kept = sorted({name for rank in lost for name in self._places[rank].kept})
        more = f"; what no optimizer updates is as the script made it ({named(kept)})" if kept else ""
        return f"{began} it is made of {self._said_parts(each)}; its optimizer's {moments}, and {host}{more}"

    def _said_parts(self, each: Substitute) -> str:
        if self._weighs_layers(each):
            columns = list(zip(*self._layer_shares(each), strict=True))
            weights = [[share.weight for share in column] for column in columns]
            parts = [
                f"{min(some):.6g} to {max(some):.6g} of stage {s}"
                for some, s in zip(weights, _shared(each), strict=True)
            ]
            return f"{' and '.join(parts)}, each layer by its own norms to the power of {self._exponent:g}"
        parts = [
            f"{share.weight:.6g} of stage {share.stage}" + ("" if share.norm is None else f" (norm {share.norm:.6g})")
            for share in each.shares
        ]
        why = f", norms to the power of {self._exponent:g}" if self._exponent else ""
        if not self._exponent and self._option.exponent and len(each.shares) > 1:
            why = ", alike, since the version does not hold the gradients' norms"
        return f"{' and '.join(parts)}{why}"


def bounded(said: Sequence[str]) -> tuple[str, ...]:
    """What a lineage record has room for."""
    kept = [each[:CHARACTERS_MAX] for each in said[:TEXTS_MAX]]
    return (*kept, *([f"and {len(said) - TEXTS_MAX} more"] if len(said) > TEXTS_MAX else []))


def ranks_text(ranks: Iterable[int]) -> str:
    """``ranks 4..7``."""
    found = spans_of(set(ranks))
    said = spans_text(found)
    return f"rank {said}" if said.isdigit() else f"ranks {said}"


def _shared(each: Substitute) -> tuple[int, ...]:
    return tuple(share.stage for share in each.shares)
