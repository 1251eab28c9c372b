"""Admission: before the first step, whether the first tier can hold what it will have to; and memory made ready."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tiercheck.config import CheckpointConfig, int_of
from tiercheck.errors import CapacityExceeded, ConfigurationError, TierError
from tiercheck.hierarchy import OpenTier
from tiercheck.policy.first_tier import BASES_MAX, FOLD_EVERY_MIN, RECORDS_BESIDE, Holding, Sizes, holding
from tiercheck.policy.observation import Role
from tiercheck.policy.policies import CadencePolicy, EveryVersions
from tiercheck.policy.recovery.agreement import needs_agreement
from tiercheck.recording.record_closer import ON_THEIR_WAY_MAX
from tiercheck.streams.state import StateStream
from tiercheck.types import bytes_text

__all__ = [
    "Demand",
    "demand_of",
    "prepare_memory",
    "ranks_sharing",
    "refuse_gaps",
    "sizes_of",
]

log = logging.getLogger(__name__)

OPENING_SHARE = 0.9
"""Of a base: memory for so much is used again for one."""
PAGES_MATTER_NBYTES = 1 << 30
"""Memory that takes a second to make in pages of 4 KiB."""


@dataclass(frozen=True)
class Demand:
    """What the ranks of a node bring into the first tier, each as much as this one."""

    holding: Holding
    ranks: int = 1
    """That share the tier."""
    parameters: int = 0
    """That this rank trains; 0: nobody knows."""

    @property
    def base_nbytes(self) -> int:
        return self.holding.sizes.base_nbytes

    @property
    def constants_nbytes(self) -> int:
        return self.holding.sizes.constants_nbytes

    @property
    def nbytes_usual(self) -> int:
        """While the other tiers keep up."""
        return self.ranks * self.holding.nbytes_usual

    @property
    def nbytes(self) -> int:
        """The least room that is enough."""
        return self.ranks * self.holding.nbytes_least

    def check(
        self,
        limit_bytes: int,
        config: CheckpointConfig,
        cadence: CadencePolicy,
        *,
        tier: str,
        foldable: Callable[[], bool],
    ) -> None:
        """``config``: with the interval of ``cadence`` as ``base_every``. ``foldable``: whether bases are captured, and
        ``bases="fold"`` would have them folded; asked only for what is refused. Errors: ``CapacityExceeded`` if a tier
        of ``limit_bytes`` cannot hold this."""
        if self.nbytes > limit_bytes:
            ways = ", or ".join(self._ways_out(limit_bytes, config, cadence, foldable))
            raise CapacityExceeded(
                f"the first tier must hold {self._held(self.holding.bases_max, self.holding.records_usual)}, "
                f"{self._in_all(self.holding.nbytes_least)}, but has room for {bytes_text(limit_bytes)}: {ways}",
                tier=tier,
            )

    def tell(self, tier: str, pages: str = "") -> None:
        """Log what the tier will hold, and, if that is much, in which ``pages``: how fast memory is made depends on
        them."""
        holding = self.holding
        log.info(
            "%s will hold %s, %s, while the other tiers keep up; after a restart, or while they lag, up to %d bases "
            "and %d %s, %s",
            tier,
            self._held(holding.bases_usual, holding.records_usual),
            self._in_all(holding.nbytes_usual),
            holding.bases_max,
            holding.records_lagging,
            self._kind,
            self._in_all(holding.nbytes_max),
        )
        if pages and self.nbytes_usual >= PAGES_MATTER_NBYTES:
            log.info("the pages of %s are %s", tier, pages)

    def reservations(self, room: int, base_every: int, opening_nbytes: int) -> list[tuple[int, int]]:
        """(bytes, count) of the reservations to come, in the order of need, beside the opening base and its constants.
        If not all fit into ``room``, bases come first: what one costs that is not ready is felt most.
        ``opening_nbytes``: of the opening base. Before the first step the optimizer has no state, and the memory of a
        base without it is too short for one that is captured later."""
        sizes = self.holding.sizes
        lasts = self.holding.fold_every > 0 or opening_nbytes >= OPENING_SHARE * sizes.base_nbytes
        bases = min(self.holding.bases_usual - lasts, room // sizes.base_nbytes)
        records = min(self.holding.records_usual, (room - bases * sizes.base_nbytes) // sizes.record_nbytes_max)
        soon = min(records, base_every)
        return [(sizes.record_nbytes_max, soon), (sizes.base_nbytes, bases), (sizes.record_nbytes_max, records - soon)]

    @property
    def _kind(self) -> str:
        return "snapshots" if self.holding.sizes.supersedes else "differentials"

    def _held(self, bases: int, records: int) -> str:
        sizes = self.holding.sizes
        constants = bytes_text(sizes.constants_nbytes)
        once = f", what does not change ({constants}, at times twice)" if sizes.constants_nbytes else ""
        each = f" for each of {self.ranks} ranks" if self.ranks > 1 else ""
        return (
            f"{bases} bases of {bytes_text(sizes.base_nbytes)}{once} and {records} {self._kind} of "
            f"{bytes_text(sizes.record_nbytes)}{each}"
        )

    def _in_all(self, nbytes: int) -> str:
        a_parameter = f" ({nbytes / self.parameters:.0f} bytes a trained parameter)" if self.parameters else ""
        return f"{bytes_text(self.ranks * nbytes, at_least=True)} in all{a_parameter}"

    def _ways_out(
        self, limit_bytes: int, config: CheckpointConfig, cadence: CadencePolicy, foldable: Callable[[], bool]
    ) -> list[str]:
        """What lets it fit."""
        ways = ["give it more (size=)"]
        if self.ranks > 1:
            ways.append("have fewer ranks on a node")
        holding = self.holding
        if holding.sizes.supersedes:
            return ways  # the number of snapshots does not depend on the interval
        if holding.fold_every:
            least = holding.nbytes(holding.bases_max, FOLD_EVERY_MIN + RECORDS_BESIDE + holding.sizes.on_their_way)
            helps = config.batch > 1 and self.ranks * least <= limit_bytes
            return [*ways, f"lower batch (now {config.batch})"] if helps else ways
        by_versions = isinstance(cadence, EveryVersions)
        option = "base_every" if by_versions and not config.cadence else "the interval of cadence"
        interval = config.base_every
        intervals = BASES_MAX if holding.records_usual >= BASES_MAX * interval else 1
        room = limit_bytes // self.ranks - holding.nbytes(
            holding.bases_max, holding.records_usual - intervals * interval
        )
        fitting = room // max(1, intervals * holding.sizes.record_nbytes)
        fits = f"; {fitting} would fit" if config.batch <= fitting < interval else ""
        if interval > 1:
            ways.append(f"lower {option} (now {interval}{fits})")
        if by_versions and foldable():
            ways.append('have bases folded (bases="fold")')
        return ways


def sizes_of(stream: StateStream) -> Sizes:
    """Of what this rank brings into the first tier."""
    return Sizes(
        stream.base_nbytes,
        stream.nbytes_expected,
        stream.nbytes_max,
        stream.constants_nbytes,
        stream.supersedes,
        ON_THEIR_WAY_MAX if stream.defers else 0,
    )


def demand_of(
    stream: StateStream,
    config: CheckpointConfig,
    *,
    fold_every: int = 0,
    each_commits: bool = True,
    agrees: bool = False,
    ranks: int = 1,
    limit_bytes: int | None = None,
) -> Demand:
    """``ranks``: that share the first tier, which has ``limit_bytes``. The rest as of
    :func:`~tiercheck.policy.first_tier.holding`."""
    held = holding(
        sizes_of(stream),
        interval=config.base_every,
        batch=min(config.batch, config.base_every),
        fold_every=fold_every,
        each_commits=each_commits,
        agrees=agrees,
        room_nbytes=None if limit_bytes is None else limit_bytes // ranks,
    )
    return Demand(held, ranks, stream.trained_parameters)


def refuse_gaps(config: CheckpointConfig, world_size: int, roles: Sequence[Role], *, together: bool) -> None:
    """Errors: ``ConfigurationError`` if ranks may go on after failed saves, or replay their steps ``together``, and
    nothing tells one rank which bases the others still have: it would delete the last one that all of them share."""
    if not needs_agreement(roles, world_size):
        return
    if together:
        raise ConfigurationError(
            f"the optimizer's step takes all {world_size} ranks (as Muon's under FSDP2), so that a recovery replays "
            "from a base that all have, and only a tier that all of them share keeps one: add it, such as "
            "nvme:///shared/path?survives=rack"
        )
    if config.on_save_error == "warn":
        raise ConfigurationError(
            f'on_save_error="warn" with {world_size} ranks needs a tier that all of them share, such as '
            'nvme:///shared/path?survives=rack; add one, or use on_save_error="fail"'
        )


async def prepare_memory(tier: OpenTier, demand: Demand, base_every: int, opening_nbytes: int) -> None:
    """Have the first tier's memory touched and mapped, as far as there is room, or the tier keeps ready. That takes as
    long as the memory is large, so it is done beside training, after the opening base has got its own. What is not
    ready yet costs its first use more. What the tier keeps for reuse beyond what it usually holds it gives back."""
    driver = tier.driver
    try:
        await driver.expect(demand.nbytes_usual)
        usage = await driver.usage()
        if usage.free_bytes is None or usage.limit_bytes is None:
            return
        try:
            await driver.prepare_reservations(demand.reservations(usage.free_bytes, base_every, opening_nbytes))
        except CapacityExceeded:  # it keeps less than that beside its objects
            room = min(usage.free_bytes, usage.limit_bytes // 2)
            await driver.prepare_reservations(demand.reservations(room, base_every, opening_nbytes))
    except TierError as error:
        log.warning("not all memory is prepared, so that some captures take longer: %s", error)


def ranks_sharing(url: str, environment: Mapping[str, str], world_size: int) -> int:
    """How many ranks of a node have the first tier at this URL in common, as the launcher tells."""
    if "{rank}" in url or "{local_rank}" in url:
        return 1
    return min(world_size, max(1, int_of("LOCAL_WORLD_SIZE", 1, environment)))
