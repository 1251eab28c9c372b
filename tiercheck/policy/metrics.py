"""Which reports of the training loop are copied to which tier, and which count.

Rank 0's reports are put into its first tier. Its mover copies them to the shared tiers, before it commits a base there,
so that a rank that sees a commit sees what was reported before. A report says all it has to say in its key: see
:class:`tiercheck.keys.MetricKey`.
"""

from __future__ import annotations

from tiercheck.keys import MetricKey
from tiercheck.policy.commit import COORDINATOR
from tiercheck.policy.compose.retention import Metric
from tiercheck.policy.observation import Contents, Observation

__all__ = ["metrics_of", "to_report"]


def metrics_of(seen: Observation, contents: Contents, since: int) -> tuple[Metric, ...]:
    """What was reported of the job's own past, of versions from ``since`` on. If a version was trained twice, the newer
    generation's report counts."""
    values: dict[tuple[int, str], float] = {}
    for key in contents.metrics:
        if key.version >= since and seen.lineage.admits(key.generation, key.version):
            values[key.version, key.name] = key.value
    return tuple(Metric(version, name, value) for (version, name), value in sorted(values.items()))


def to_report(seen: Observation, tier: int) -> list[MetricKey]:
    """Reports that rank 0 has to put into the tier, oldest first."""
    if seen.rank != COORDINATOR or not seen.roles[tier].shared:
        return []
    there = seen.contents[tier]
    return [
        key for key in seen.contents[0].metrics if key not in there and seen.lineage.admits(key.generation, key.version)
    ]
