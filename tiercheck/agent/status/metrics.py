"""The agent in Prometheus' terms, from a snapshot at the time of asking."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from tiercheck.agent.jobs.states import State
from tiercheck.agent.status.snapshot import AgentSnapshot, PeerSnapshot, RankSnapshot

__all__ = ["metrics_text"]

RANK_LABELS = ("namespace", "rank")


def metrics_text(snapshot: AgentSnapshot) -> tuple[str, str]:
    """Content type and text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_OfSnapshot(snapshot))
    return CONTENT_TYPE_LATEST, generate_latest(registry).decode()


class _OfSnapshot(Collector):
    def __init__(self, snapshot: AgentSnapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        yield from _of_agent(self._snapshot)
        yield from _of_ranks(self._snapshot.ranks)
        if self._snapshot.peer is not None:
            yield from _of_peer(self._snapshot.peer)


def _of_agent(snapshot: AgentSnapshot) -> Iterator[Metric]:
    about = {"version": snapshot.version, "node": snapshot.node}
    yield InfoMetricFamily("tiercheck_agent", "The node agent.", value=about)
    yield GaugeMetricFamily("tiercheck_agent_uptime_seconds", "Since it started.", value=snapshot.uptime_s)
    yield GaugeMetricFamily(
        "tiercheck_agent_private_memory_bytes", "Resident memory, without shared memory.", value=snapshot.resident_bytes
    )
    yield CounterMetricFamily(
        "tiercheck_agent_dropped_messages", "Messages that were no request.", value=snapshot.dropped_messages
    )
    yield GaugeMetricFamily(
        "tiercheck_agent_unreadable_jobs",
        "Replication jobs that the agent cannot read.",
        value=len(snapshot.unreadable),
    )


def _of_ranks(ranks: tuple[RankSnapshot, ...]) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "tiercheck_rank_state", "1 for the state the rank's mover is in.", labels=(*RANK_LABELS, "state")
    )
    for each in ranks:
        for one in State:
            state.add_metric([*_labels(each), one.value], float(each.state is one))
    yield state
    gauges: dict[str, tuple[str, Callable[[RankSnapshot], float]]] = {
        "generation": ("The generation registered.", lambda r: r.generation),
        "watermark_version": (
            "The newest base committed in the tier that survives most; -1 for none.",
            lambda r: -1 if r.mover.watermark is None else r.mover.watermark,
        ),
        "undrained_bases": ("Bases that the durable tier still lacks.", lambda r: r.mover.undrained_bases),
        "fold_lag_versions": (
            "Versions recorded since the oldest base that is left to be folded, and is not there.",
            lambda r: r.mover.fold_lag_versions,
        ),
        "differing_version": (
            "The newest version whose folded base differed from what training had; -1 for none.",
            lambda r: -1 if r.mover.differing_version is None else r.mover.differing_version,
        ),
        "idle": ("1 where nothing was left to do at the last look.", lambda r: float(r.mover.idle)),
        "silent_seconds": ("Since its trainer was last heard of.", lambda r: r.silent_s),
        "tiers_in_trouble": (
            "Tiers whose last action failed, or 1 if they cannot be opened.",
            lambda r: r.mover.troubled_tiers,
        ),
    }
    for name, (help_text, value) in gauges.items():
        gauge = GaugeMetricFamily(f"tiercheck_rank_{name}", help_text, labels=RANK_LABELS)
        for each in ranks:
            gauge.add_metric(_labels(each), value(each))
        yield gauge
    slow = GaugeMetricFamily(
        "tiercheck_rank_slow_view_seconds",
        "Since the tier's last listing began; only of tiers of which that was over a minute ago.",
        labels=(*RANK_LABELS, "tier"),
    )
    for each in ranks:
        for tier, age_s in each.mover.slow_views_s.items():
            slow.add_metric([*_labels(each), tier], age_s)
    yield slow
    lag = GaugeMetricFamily(
        "tiercheck_rank_lag_versions",
        "Versions in the first tier that the tier is to hold, and lacks.",
        labels=(*RANK_LABELS, "tier"),
    )
    for each in ranks:
        for tier, versions in each.mover.lag_versions.items():
            lag.add_metric([*_labels(each), tier], versions)
    yield lag
    counters: dict[str, tuple[str, Callable[[RankSnapshot], float]]] = {
        "copied_bytes": ("Bytes copied to slower tiers.", lambda r: r.mover.copied_bytes),
        "folded_bases": ("Bases folded.", lambda r: r.mover.folded_bases),
        "skipped_folds": (
            "Bases not folded, since something unusable lies in their place.",
            lambda r: r.mover.skipped_folds,
        ),
        "copied_objects": ("Objects copied to slower tiers.", lambda r: r.mover.copied_objects),
        "refused_decisions": ("Decisions of policies that were refused.", lambda r: r.mover.refused_decisions),
        "audited_bases": ("Folded bases found to be what training had.", lambda r: r.mover.audited_bases),
        "deleted_objects": ("Objects deleted since nothing needed them any more.", lambda r: r.mover.deleted_objects),
    }
    for name, (help_text, value) in counters.items():
        counter = CounterMetricFamily(f"tiercheck_rank_{name}", help_text, labels=RANK_LABELS)
        for each in ranks:
            counter.add_metric(_labels(each), value(each))
        yield counter


def _of_peer(peer: PeerSnapshot) -> Iterator[Metric]:
    for name, value in peer.counts.items():
        yield GaugeMetricFamily(f"tiercheck_peer_{name}", "Of the server for neighbours' objects.", value=value)
    lost = "1 where another process has the port that some neighbours know; they are cut off until they attach again."
    yield GaugeMetricFamily("tiercheck_peer_lost_port", lost, value=float(peer.lost_port is not None))
    dropped = CounterMetricFamily("tiercheck_peer_dropped_frames", "Frames that made no sense.", labels=("reason",))
    for reason, count in peer.dropped.items():
        dropped.add_metric([reason], count)
    yield dropped


def _labels(rank: RankSnapshot) -> list[str]:
    return [rank.namespace, str(rank.rank)]
