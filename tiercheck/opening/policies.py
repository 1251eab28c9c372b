"""The policies of a job, from what the user has composed and what the configuration says."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from tiercheck.config import CheckpointConfig
from tiercheck.errors import ConfigurationError
from tiercheck.hierarchy import Hierarchy, OpenHierarchy
from tiercheck.policy.compose.placement import INTERVALS_MAX
from tiercheck.policy.folding import FOLD_EVERY
from tiercheck.policy.guard import refuse_no_versions, refuse_uncovered
from tiercheck.policy.placement import Placement
from tiercheck.policy.policies import (
    CadencePolicy,
    EveryVersions,
    Everywhere,
    PacingPolicy,
    PlacementPolicy,
    Policies,
    RetentionPolicy,
    Unpaced,
    kept_by,
)
from tiercheck.policy.watermark import Retention
from tiercheck.replication.named_policies import parse_policies, policy_texts

__all__ = ["JobPolicies", "settle_policies"]

DEFAULTS = CheckpointConfig()
SHORT_FORMS = {"cadence": ("base_every",), "retention": ("keep_last", "keep_every")}


@dataclass(frozen=True)
class JobPolicies:
    """Every policy of a job, whoever has named it."""

    cadence: CadencePolicy
    placing: PlacementPolicy
    retaining: RetentionPolicy
    pacing: PacingPolicy
    batch: int
    fold_every: int = 0
    """Versions between the bases that are folded for the first tier alone; 0: there are none."""

    @property
    def placement(self) -> Placement:
        return Placement(self.batch, self.placing, self.cadence.interval, self.fold_every)

    @property
    def retention(self) -> Retention:
        return Retention(self.retaining, self.placement)

    def texts(self) -> dict[str, tuple[str, ...]]:
        """What the replication job says of them. Errors: ``ConfigurationError`` for a policy without a name."""
        found: dict[str, tuple[str, ...]] = {}
        for kind, policy in (("placement", self.placing), ("retention", self.retaining), ("pacing", self.pacing)):
            try:
                found[kind] = policy_texts(policy)
            except ConfigurationError as error:
                raise ConfigurationError(
                    f'the node\'s agent knows policies by name only: {error}. Or use CheckpointConfig(mover="trainer")'
                ) from None
        return found

    def folding(self, *, agrees: bool) -> JobPolicies:
        """The policies of a job that folds. ``agrees``: it shares no tier, and what it needs is agreed on once an
        interval. Then, and if versions alone do not say when a base is due, none are folded in between. Nor are they if
        a tier is not to hold everything: other ranks may have no way to the version of a base that is in memory alone.
        """
        if agrees or not isinstance(self.cadence, EveryVersions) or not isinstance(self.placing, Everywhere):
            return self
        return replace(self, fold_every=min(FOLD_EVERY, self.cadence.interval))

    def each_commits(self, tiers: OpenHierarchy) -> bool:
        """Whether each base that is due is to be committed in the tier that survives most."""
        return isinstance(self.placing, Everywhere) and any(role.shared for role in tiers.roles)

    def check(self, hierarchy: Hierarchy, tiers: OpenHierarchy) -> None:
        """Errors: ``ConfigurationError`` for a policy about a tier that there is not, and for a placement that leaves a
        promised failure uncovered."""
        behind = [tier.name for tier in hierarchy.tiers[1:]]
        for kind, policy in (("placement", self.placing), ("pacing", self.pacing)):
            for name in policy.named_tiers:
                if name not in behind:
                    first = hierarchy.tiers[0].name
                    raise ConfigurationError(
                        f"the {kind} policy is about the tier {name!r}; behind the first tier, {first}, the hierarchy "
                        f"has: {', '.join(behind) or 'none'}. A tier has its scheme's name, or that of "
                        "Tier(url, name=...)"
                    )
        refuse_uncovered(self.placing, tiers.roles, hierarchy.must_survive, INTERVALS_MAX)


def settle_policies(config: CheckpointConfig, given: Policies | None) -> tuple[CheckpointConfig, JobPolicies]:
    """The policies, and the configuration with the cadence's interval as ``base_every``.

    Errors: ``ConfigurationError`` for a policy that is named twice, or does not exist, and for a cadence whose
    interval is no number of versions.
    """
    given = Policies() if given is None else given
    if not isinstance(given, Policies):
        raise ConfigurationError(f"policies= must be Policies(...), not {type(given).__name__}")
    texts = {each.name: getattr(config, each.name) for each in fields(Policies)}
    named = parse_policies(**texts)
    for kind, text in texts.items():
        ways = [f"policies=Policies({kind}=...)"] if getattr(given, kind) is not None else []
        ways += [f"CheckpointConfig({kind}={text!r})"] if text else []
        if short := [each for each in SHORT_FORMS.get(kind, ()) if getattr(config, each) != getattr(DEFAULTS, each)]:
            ways.append(f"CheckpointConfig({', '.join(f'{each}={getattr(config, each)}' for each in short)})")
        if len(ways) > 1:
            raise ConfigurationError(
                f"the {kind} policy is given twice, by {' and by '.join(ways)}: leave one of them out"
            )
    cadence = given.cadence or named.cadence or EveryVersions(config.base_every)
    refuse_no_versions(cadence)
    policies = JobPolicies(
        cadence=cadence,
        placing=given.placement or named.placement or Everywhere(),
        retaining=given.retention or named.retention or kept_by(config.keep_last, config.keep_every),
        pacing=given.pacing or named.pacing or Unpaced(),
        batch=min(config.batch, cadence.interval),
    )
    if 0 < config.lag_max < 2 * policies.batch:
        raise ConfigurationError(
            f"lag_max={config.lag_max} is less than two batches of {policies.batch}: a tier that takes batches lacks "
            "one while it is being made; raise lag_max, or lower batch"
        )
    return replace(config, base_every=cadence.interval), policies
