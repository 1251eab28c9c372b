"""The policies of a job, from what the user composes and what the configuration says."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training import Training, memory
from tests.unit.opening.test_failing_ranks import ranks
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import ConfigurationError
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.keys import CommitKey, MetricKey, ShardKey, parse
from tiercheck.opening.policies import settle_policies
from tiercheck.policy.policies import (
    BasesOnly,
    BytesPerSecond,
    CadencePolicy,
    Candidate,
    Committed,
    EveryNth,
    EverySeconds,
    EveryVersions,
    Everywhere,
    Keep,
    KeepBest,
    KeepEvery,
    KeepLast,
    PlacementPolicy,
    Policies,
    Progress,
    RetentionPolicy,
    Unpaced,
    When,
)
from tiercheck.replication.job import JobTier, ReplicationJob
from tiercheck.runtime.group import SimulatedGroup


def test_the_options_of_the_configuration_are_the_short_form_of_the_same_values() -> None:
    config, policies = settle_policies(CheckpointConfig(base_every=20, batch=30, keep_last=3, keep_every=40), None)
    assert policies.cadence == EveryVersions(20)
    assert policies.retaining == KeepLast(3) | KeepEvery(40)
    assert (policies.placing, policies.pacing) == (Everywhere(), Unpaced())
    assert (config.base_every, policies.batch) == (20, 20), "a base supersedes a longer batch"


def test_a_cadence_s_interval_is_what_memory_is_sized_for() -> None:
    config, policies = settle_policies(CheckpointConfig(cadence="every_seconds?seconds=60&versions_max=30"), None)
    assert policies.cadence == EverySeconds(60, 30)
    assert config.base_every == policies.placement.interval == 30


@dataclass(frozen=True)
class Numbered(CadencePolicy):
    """With these numbers, whatever they are."""

    every: Any
    asked: Any

    @property
    def interval(self) -> Any:
        return self.every

    @property
    def check_every(self) -> Any:
        return 1 // self.asked if self.asked == 0 else self.asked

    def due(self, seen: Progress) -> bool:
        return False


@pytest.mark.parametrize("wrong", [None, 0, 2.5, "7", -1, True, 10**30])
def test_a_cadence_s_numbers_are_of_versions(wrong: Any) -> None:
    for cadence, name in ((Numbered(wrong, 1), "interval"), (Numbered(10, wrong), "check_every")):
        with pytest.raises(ConfigurationError, match=rf"the cadence Numbered\(.*: {name} (must be|raises Zero)"):
            settle_policies(CheckpointConfig(), Policies(cadence=cadence))


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({"keep_last": 3}, Policies(retention=KeepLast(4)), r"policies=Policies\(retention=...\) and by .*keep_last"),
        ({"retention": "keep_last?n=3"}, Policies(retention=KeepLast(3)), "the retention policy is given twice"),
        ({"retention": "keep_last?n=3", "keep_every": 10}, None, "retention='keep_last.n=3'. and by"),
        ({"base_every": 10}, Policies(cadence=EveryVersions(20)), "the cadence policy is given twice"),
        ({"pacing": "unpaced"}, Policies(pacing=Unpaced()), "the pacing policy is given twice"),
    ],
)
def test_naming_a_policy_twice_is_one_clear_error(options: dict[str, int], given: Policies, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        settle_policies(CheckpointConfig.from_mapping(options), given)


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"retention must be a RetentionPolicy, not EveryVersions\(n=50\)"):
        Policies(retention=EveryVersions())  # type: ignore[arg-type]  # what a user may write
    with pytest.raises(ConfigurationError, match=r"policies= must be Policies\(...\), not KeepLast"):
        settle_policies(CheckpointConfig(), KeepLast())  # type: ignore[arg-type]  # what a user may write
    with pytest.raises(ConfigurationError, match="there is no policy 'keep_lats'"):
        settle_policies(CheckpointConfig(retention="keep_lats"), None)


def test_the_agent_makes_the_same_policies_from_the_replication_job() -> None:
    given = Policies(
        cadence=When(lambda seen: True, versions_max=70),
        placement=BasesOnly("nvme"),
        retention=KeepLast(1) | KeepBest("eval_loss", 3),
        pacing=BytesPerSecond("nvme", 1e6),
    )
    _, policies = settle_policies(CheckpointConfig(), given)
    tiers = (JobTier("shm", "shm://x"), JobTier("nvme", "nvme:///x"))
    job = ReplicationJob(tiers, "n", 0, 1, 1, policies.batch, policies.cadence.interval, **policies.texts())
    assert job.policies().placement == policies.placement
    assert job.policies().retention == policies.retention
    assert job.policies().pacing == policies.pacing


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"placement": "bases_only?tier=s9"}, "placement"),
        ({"placement": "bases_only?tier=nvme; every_nth?tier=s9&n=2"}, "placement"),
        ({"pacing": "bytes_per_second?tier=s9&rate=1e6; spread"}, "pacing"),
        ({"placement": "every_nth?tier=memory&n=2"}, "placement"),
    ],
)
def test_a_policy_about_a_tier_that_there_is_not_is_refused(options: dict[str, str], kind: str, tmp_path: Path) -> None:
    """Nor does a policy decide what the first tier holds."""
    tiers = Hierarchy.of(memory(), f"nvme://{tmp_path}/run?survives=rack")
    message = (
        rf"the {kind} policy is about the tier '(s9|memory)'; behind the first tier, memory, the hierarchy has: nvme"
    )
    with pytest.raises(ConfigurationError, match=message):
        Training().attach(tiers, **options)


class Own(KeepLast):
    """Of no entry point."""


def test_a_policy_that_no_entry_point_names_is_refused_for_an_agent_and_says_what_to_do() -> None:
    _, policies = settle_policies(CheckpointConfig(), Policies(retention=Own(2)))
    with pytest.raises(ConfigurationError, match=r"knows policies by name only: .*register it in .*mover=.trainer"):
        policies.texts()


# In a job


def bases_in(path: Path) -> list[int]:
    """The versions of the committed bases in a directory."""
    keys = [parse(str(each.relative_to(path))) for each in path.glob("job/commits/*/*")]
    return sorted(key.version for key in keys if isinstance(key, CommitKey))


def flush_until_committed(checkpointer: Checkpointer, path: Path, version: int) -> None:
    """Rank 0 commits a base when it has seen what the others say, and they see that when they look again."""
    checkpointer.flush()
    deadline = time.monotonic() + 30
    while version not in bases_in(path):
        assert time.monotonic() < deadline, f"base {version} was not committed"
        checkpointer.flush()
    checkpointer.flush()


def records_in(path: Path) -> list[str]:
    return sorted(str(each.relative_to(path)) for each in path.rglob("*-*.safetensors"))


def test_the_best_versions_stay_over_a_restart_and_are_recovered_whole(tmp_path: Path) -> None:
    """Version 5 is no base: it stays with base 4 and the differential that leads to it."""
    hierarchy = Hierarchy.of(memory(), f"nvme://{tmp_path}?survives=rack")
    losses = {2: 0.9, 5: 0.1, 9: 0.2, 14: 0.5}
    policies = Policies(cadence=EveryVersions(4), retention=KeepLast(1) | KeepBest("loss", 1))
    training = Training()
    for first, last in ((1, 11), (12, 20)):
        training.checkpointer = None
        with training.attach(hierarchy, policies=policies, batch=2) as checkpointer:
            assert checkpointer.version == first - 1
            for version in range(first, last + 1):
                training.step(version)
                if version in losses:
                    checkpointer.report(loss=losses[version])
                checkpointer.flush()
    assert bases_in(tmp_path) == [4, 20]
    assert records_in(tmp_path) == ["r00000/g000001/differential/000000000005-000000000005.safetensors"]
    assert sorted(each.parent.parent.name for each in tmp_path.glob("job/metrics/*/*/*/*")) == ["000000000005"]


def test_a_value_that_is_none_keeps_nothing_and_a_second_one_is_refused(tmp_path: Path) -> None:
    training = Training()
    with training.attach(Hierarchy.of(memory(), f"nvme://{tmp_path}?survives=rack")) as checkpointer:
        training.step(1)
        checkpointer.report(loss=float("nan"))
        checkpointer.report(loss=torch.tensor(0.5))
        with pytest.raises(ConfigurationError, match="reported already"):
            checkpointer.report(loss=0.25)
        checkpointer.flush()
    assert [each.name for each in tmp_path.glob("job/metrics/*/*/loss/*")] == ["3fe0000000000000"]


def test_a_tier_gets_what_the_placement_says_and_memory_does_not_wait_for_the_rest(tmp_path: Path) -> None:
    archive = BasesOnly("nvme") & EveryNth("nvme", 3)
    training = Training()
    hierarchy = Hierarchy.of(memory(), f"nvme://{tmp_path}?survives=rack", must_survive="rack")
    policies = Policies(EveryVersions(2), archive, KeepLast(9), BytesPerSecond("nvme", 1e9))
    with training.attach(hierarchy, policies=policies) as checkpointer:
        checkpointer.flush()  # until a base of the generation is there, every base goes
        for version in range(1, 18):
            training.step(version)
        checkpointer.flush()
        assert checkpointer.stats.mover.undrained_bases == 0
        assert checkpointer.stats.mover.refused_decisions == 0
    assert bases_in(tmp_path) == [0, 6, 12]
    assert records_in(tmp_path) == []


def test_bases_by_a_function_and_by_seconds(tmp_path: Path) -> None:
    for cadence, wanted in (
        (When(lambda seen: seen.version in (3, 4), 6, ask_every=1), [0, 3, 4, 10]),
        (EverySeconds(1e-9, ask_every=4), [0, 4, 8]),
    ):
        training, folder = Training(), tmp_path / type(cadence).__name__
        hierarchy = Hierarchy.of(memory(), f"nvme://{folder}?survives=rack")
        with training.attach(hierarchy, policies=Policies(cadence, retention=KeepLast(9))) as checkpointer:
            for version in range(1, 12):
                training.step(version)
                checkpointer.flush()
        assert bases_in(folder) == wanted


@dataclass(frozen=True)
class Failing(RetentionPolicy):
    """Raises as soon as there are two bases."""

    def keep(self, seen: Committed) -> Keep:
        return Keep(since=seen.bases[-1] if len(seen.bases) < 2 else 1 // 0)


def test_a_policy_that_raises_stops_no_save_and_everything_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    hierarchy = Hierarchy.of(memory(), f"nvme://{tmp_path}?survives=rack")
    policies = Policies(cadence=EveryVersions(2), retention=Failing())
    with training.attach(hierarchy, policies=policies) as checkpointer:
        for version in range(1, 9):
            training.step(version)
        checkpointer.flush()
        status = checkpointer.stats.mover
        assert status.refused_decisions == 1
        assert "Failing() is refused: it raises ZeroDivisionError" in status.errors["policies"]
    assert bases_in(tmp_path) == [0, 2, 4, 6, 8]
    assert len([each for each in caplog.messages if "Failing() is refused" in each]) == 1, "told once"


@dataclass(frozen=True)
class Nowhere(PlacementPolicy):
    def wants(self, shard: Candidate) -> bool:
        return False


def test_a_placement_that_leaves_a_promised_failure_uncovered_is_refused_at_attach(tmp_path: Path) -> None:
    hierarchy = Hierarchy.of(memory(), f"nvme://{tmp_path}?survives=rack", must_survive="rack")
    with pytest.raises(ConfigurationError, match=r"placement policy Nowhere\(\) is refused: it sends no base to nvme"):
        Training().attach(hierarchy, policies=Policies(placement=Nowhere()))
    with pytest.raises(ConfigurationError, match="the retention policy is given twice"):
        Training().attach(hierarchy, policies=Policies(retention=KeepLast(3)), keep_last=3)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_ranks_keep_the_same_best_version_and_make_bases_together_by_rank_0_s_clock(tmp_path: Path) -> None:
    """Each rank deletes its own shards, by what it sees of rank 0's reports."""
    losses = {4: (0.1, 9.0), 8: (0.3, 0.0), 12: (0.2, 0.0)}
    policies = Policies(EverySeconds(1e-9, ask_every=4), retention=KeepLast(1) | KeepBest("loss"))

    def life(rank: int, group: SimulatedGroup) -> None:
        training = Training()
        provider = ModuleProvider(training.model, training.optimizer)
        hierarchy = Hierarchy.of(memory(), f"nvme://{tmp_path}?survives=rack")
        config = CheckpointConfig(deadline_s=30.0)
        with Checkpointer(provider, hierarchy, group=group, config=config, policies=policies) as checkpointer:
            for version in range(1, 18):
                training.backward(version)
                checkpointer.capture(version, provider.gradients())
                training.optimizer.step()
                checkpointer.complete(version)
                if version in losses:
                    checkpointer.report(loss=losses[version][rank])
                    flush_until_committed(checkpointer, tmp_path, version)

    assert ranks(life) == {0: None, 1: None}
    assert bases_in(tmp_path) == [4, 16]
    shards = [parse(str(each.relative_to(tmp_path))) for each in tmp_path.glob("r*/g000001/base/*.safetensors")]
    kept = {(key.first, key.rank) for key in shards if isinstance(key, ShardKey)}
    # When the last base is committed, rank 1 has closed: it leaves base 12 to its next start.
    assert kept - {(12, 1)} == {(version, rank) for version in (4, 16) for rank in (0, 1)}
    assert [each.name for each in tmp_path.glob("job/metrics/*/*/loss/*")] == [str(MetricKey(1, 4, "loss", 0.1))[-16:]]
