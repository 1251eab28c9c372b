"""Does a job fit? What each tier of a hierarchy would hold, compared with the room that the doctor found there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiercheck.config import CheckpointConfig
from tiercheck.diagnostics.doctor import Diagnosis
from tiercheck.errors import ConfigurationError
from tiercheck.opening.folding import NOT_SHARED, opens_elsewhere
from tiercheck.opening.room import TierRoom, first_room, room_behind
from tiercheck.policy.first_tier import Sizes, holding
from tiercheck.policy.folding import FOLD_EVERY, no_processor_to_fold
from tiercheck.policy.observation import Role
from tiercheck.policy.other_tiers import tier_need
from tiercheck.policy.policies import Everywhere, kept_by
from tiercheck.runtime.processors import processors
from tiercheck.tiers.registry import TierURL
from tiercheck.types import Survives

__all__ = ["JobSize", "fit", "why_captured"]

BASE_NBYTES = 12
"""Bytes of a base for each trained parameter: a master and Adam's two moments, in fp32."""


@dataclass(frozen=True)
class JobSize:
    """The size of a job. ``parameters``: how many one rank trains. ``ranks``: how many run on each of ``nodes`` nodes.
    ``gradient_nbytes``: what a differential takes for each parameter. ``folds``: whether bases are folded; ``None``: as
    ``bases="auto"``, the default, decides on this machine (:func:`why_captured`)."""

    parameters: int
    ranks: int = 1
    nodes: int = 1
    gradient_nbytes: int = 4
    base_every: int = CheckpointConfig.base_every
    folds: bool | None = None


def why_captured(job: JobSize, found: Sequence[Diagnosis]) -> str:
    """Why the job would capture its bases; empty if it folds them. What ``bases="auto"`` asks of tiers and processors
    is asked here; the optimizer and the codec are taken for the defaults."""
    if job.folds is not None:
        return "" if job.folds else "as asked for"
    if any(TierURL.parse(each.url).scheme == "peer" for each in found):
        return ""  # the node's agent folds
    first = found[0].capabilities
    if first is None or not opens_elsewhere(first.survives):
        return NOT_SHARED
    return no_processor_to_fold(processors(), job.ranks)


def fit(job: JobSize, found: Sequence[Diagnosis]) -> list[TierRoom]:
    """What each tier would hold. ``found``: the doctor's diagnosis of each tier, fastest first. Headers and host state
    are small, and not counted. Errors: ``ConfigurationError`` for a tier that could not be opened, since nobody knows
    then what it survives."""
    roles: list[Role] = []
    for index, each in enumerate(found):
        if each.capabilities is None:
            raise ConfigurationError(f"what {each.url} would hold is not known: the tier could not be opened")
        roles.append(Role(index, TierURL.parse(each.url).scheme, each.capabilities.survives))
    config = CheckpointConfig(base_every=job.base_every)
    record = job.gradient_nbytes * job.parameters
    sizes = Sizes(BASE_NBYTES * job.parameters, record, record)
    commits = any(role.survives >= Survives.RACK for role in roles)
    agrees = not commits and job.ranks * job.nodes > 1
    batch = min(config.batch, job.base_every)
    limit = found[0].usage.limit_bytes if found[0].usage else None
    first = holding(
        sizes,
        interval=job.base_every,
        batch=batch,
        fold_every=min(FOLD_EVERY, job.base_every) if commits and not why_captured(job, found) else 0,
        each_commits=commits,
        agrees=agrees,
        room_nbytes=None if limit is None else limit // job.ranks,
    )
    rooms = [first_room(roles[0], found[0].url, first, job.ranks, job.parameters, limit)]
    for role, each in zip(roles[1:], found[1:], strict=True):
        need = tier_need(
            role,
            sizes,
            placing=Everywhere(),
            retaining=kept_by(config.keep_last, config.keep_every),
            interval=job.base_every,
            batch=batch,
            each_commits=commits,
            agrees=agrees,
        )
        ranks = job.ranks * (job.nodes if role.shared else 1)
        limit = each.usage.limit_bytes if each.usage else None
        rooms.append(room_behind(role, each.url, need, [sizes] * ranks, job.parameters, limit))
    return rooms
