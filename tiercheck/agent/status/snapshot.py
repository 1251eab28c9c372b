"""What an agent shows of itself: the status page, the metrics and ``status`` are three views of one snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from tiercheck.agent.jobs.replicator import RankReplicator
from tiercheck.agent.jobs.states import State
from tiercheck.errors import ConfigurationError
from tiercheck.policy.observation import Contents
from tiercheck.replication.mover import MoverStatus
from tiercheck.tiers.url import TierURL

__all__ = ["AgentSnapshot", "PeerSnapshot", "RankSnapshot", "TierSnapshot", "Versions", "versions_of"]

VERSIONS_MAX = 512
"""Of one tier, the newest that are shown."""


@dataclass(frozen=True)
class Versions:
    """What one tier holds of one rank, oldest first."""

    bases: tuple[int, ...] = ()
    committed: tuple[int, ...] = ()
    """Bases of which every rank's shard is there."""
    batches: tuple[tuple[int, int], ...] = ()
    """First and last version of each object of differentials; of a snapshot its own alone."""
    objects: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class TierSnapshot:
    name: str
    url: str
    """Without secrets."""
    survives: str | None = None
    """``None`` while the tier is not open."""
    holds: Versions | None = None
    """As its mover saw it last; ``None`` if it has not yet listed the tier."""


@dataclass(frozen=True)
class RankSnapshot:
    """One replication job."""

    namespace: str
    rank: int
    world_size: int
    generation: int
    state: State
    silent_s: float
    """Since its trainer was last heard of."""
    mover: MoverStatus
    conflict: str | None
    bytes_per_s: float
    """Copied, over the last ten seconds."""
    history: tuple[float, ...]
    """The same, about once a second, over the last two minutes."""
    tiers: tuple[TierSnapshot, ...]


@dataclass(frozen=True)
class PeerSnapshot:
    """The server that keeps the neighbours' objects. ``counts`` by name; ``dropped``: frames by reason."""

    endpoint: str
    encrypted: bool
    counts: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    lost_port: str | None = None
    """The port that it had before, and that another process has now: ranks that attached before are cut off."""


@dataclass(frozen=True)
class AgentSnapshot:
    node: str
    version: str
    pid: int
    http: str
    """URL of the status page."""
    detached: bool
    ending: bool
    uptime_s: float
    resident_bytes: int
    """Private memory of the process: shared memory that it has mapped is the tiers'."""
    dropped_messages: int
    ranks: tuple[RankSnapshot, ...]
    unreadable: dict[str, str]
    peer: PeerSnapshot | None


def rank_snapshot(replicator: RankReplicator, now: float) -> RankSnapshot:
    """``now``: the event loop's time."""
    job = replicator.job
    tiers = [TierSnapshot(tier.name, shown(tier.url)) for tier in job.tiers]
    for role, held in replicator.seen:
        holds = None if held is None else versions_of(held, job.rank)
        tiers[role.index] = replace(tiers[role.index], survives=role.survives.name.lower(), holds=holds)
    return RankSnapshot(
        namespace=tiers[0].url,
        rank=job.rank,
        world_size=job.world_size,
        generation=job.generation,
        state=replicator.state,
        silent_s=replicator.silent_s,
        mover=replicator.status,
        conflict=str(replicator.conflict) if replicator.conflict else None,
        bytes_per_s=replicator.throughput.rate(now),
        history=tuple(replicator.throughput.history()),
        tiers=tuple(tiers),
    )


def versions_of(contents: Contents, rank: int) -> Versions:
    bases = sorted({key.first for key in contents.bases(rank)})
    committed = sorted({key.version for key in contents.commits})
    differentials = {(key.first, key.last) for key in contents.differentials(rank)}
    batches = sorted(differentials | {(key.last, key.last) for key in contents.snapshots(rank)})
    return Versions(
        tuple(bases[-VERSIONS_MAX:]),
        tuple(committed[-VERSIONS_MAX:]),
        tuple(batches[-VERSIONS_MAX:]),
        objects=len(contents.nbytes),
        nbytes=sum(contents.nbytes.values()),
    )


def shown(url: str) -> str:
    """The URL as it may be shown."""
    try:
        return TierURL.parse(url).text
    except ConfigurationError:
        return url.partition("://")[0] + "://..."


def private_bytes() -> int:
    """Anonymous memory of this process that is resident."""
    with Path("/proc/self/status").open(encoding="ascii") as file:
        for line in file:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    return 0
