"""What a user composes: when a base is due, what goes where, what stays, and how fast it is copied.

::

    policies = Policies(
        cadence=EverySeconds(600, versions_max=200),
        placement=BasesOnly("s3") & EveryNth("s3", 10),
        retention=KeepLast(2) | KeepEvery(1000) | KeepBest("eval_loss", 3),
        pacing=BytesPerSecond("s3", 200e6),
    )

Each is a frozen value with one method, which takes an observation and returns a decision: no I/O, no clock, no
randomness. Safety does not depend on it: see :mod:`tiercheck.policy.guard`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from tiercheck.errors import ConfigurationError
from tiercheck.policy.compose.cadence import (
    AnyDue,
    CadencePolicy,
    EverySeconds,
    EveryVersions,
    Progress,
    When,
)
from tiercheck.policy.compose.pacing import BytesPerSecond, Copying, PacingPolicy, SlowestOf, Spread, Unpaced
from tiercheck.policy.compose.placement import AllWant, BasesOnly, Candidate, EveryNth, Everywhere, PlacementPolicy
from tiercheck.policy.compose.retention import (
    AnyKeep,
    Best,
    Committed,
    Keep,
    KeepBest,
    KeepEvery,
    KeepLast,
    Metric,
    RetentionPolicy,
)

__all__ = [
    "KINDS",
    "AllWant",
    "AnyDue",
    "AnyKeep",
    "BasesOnly",
    "Best",
    "BytesPerSecond",
    "CadencePolicy",
    "Candidate",
    "Committed",
    "Copying",
    "EveryNth",
    "EverySeconds",
    "EveryVersions",
    "Everywhere",
    "Keep",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "Metric",
    "PacingPolicy",
    "PlacementPolicy",
    "Policies",
    "Policy",
    "Progress",
    "RetentionPolicy",
    "SlowestOf",
    "Spread",
    "Unpaced",
    "When",
    "kept_by",
]

Policy = CadencePolicy | PlacementPolicy | RetentionPolicy | PacingPolicy

KINDS: dict[str, type[CadencePolicy | PlacementPolicy | RetentionPolicy | PacingPolicy]] = {
    "cadence": CadencePolicy,
    "placement": PlacementPolicy,
    "retention": RetentionPolicy,
    "pacing": PacingPolicy,
}
"""What each field of :class:`Policies` must be."""


def kept_by(keep_last: int, keep_every: int) -> RetentionPolicy:
    """The retention policy that ``CheckpointConfig(keep_last=..., keep_every=...)`` stands for."""
    return KeepLast(keep_last) | KeepEvery(keep_every) if keep_every else KeepLast(keep_last)


@dataclass(frozen=True)
class Policies:
    """The policies of a job. What is ``None`` is as :class:`~tiercheck.config.CheckpointConfig` says."""

    cadence: CadencePolicy | None = None
    placement: PlacementPolicy | None = None
    retention: RetentionPolicy | None = None
    pacing: PacingPolicy | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value, kind = getattr(self, each.name), KINDS[each.name]
            if value is not None and not isinstance(value, kind):
                raise ConfigurationError(f"{each.name} must be a {kind.__name__}, not {value!r}")
