"""How far other tiers may lag behind training."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.failing import Failing
from tests.processes import until
from tests.training import Training
from tiercheck.errors import ConfigurationError, SaveError, Transient
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.policy.policies import Copying, PacingPolicy, Policies
from tiercheck.recording import waits
from tiercheck.runtime.backoff import Backoff
from tiercheck.tiers.wrappers.base import Call, Operation


@pytest.mark.parametrize("on_save_error", ["fail", "warn"])
def test_training_waits_by_name_for_a_tier_that_lags_too_far(
    tmp_path: Path, on_save_error: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on when it has caught up."""
    monkeypatch.setattr(waits, "TELL_S", 0.1)
    monkeypatch.setattr("tiercheck.replication.backoff.RETRY", Backoff(0.005, 0.02))
    refused: list[str] = []

    def away(call: Call) -> Exception | None:
        return Transient(refused[0]) if refused and call.operation is Operation.PUT else None

    training = Training()
    url = f"nvme://{tmp_path}/run"
    last = Tier(f"{url}?survives=rack", wrap=lambda driver: Failing(driver, away))
    tiers = Hierarchy.of(f"memory://lag-{tmp_path.name}", last)
    options = {"base_every": 50, "batch": 2, "lag_max": 4, "deadline_s": 1.0, "on_save_error": on_save_error}
    checkpointer = training.attach(tiers, **options)
    for version in (1, 2):
        training.step(version)
    checkpointer.flush()
    refused.append("the store is away")
    for version in range(3, 7):
        training.step(version)
    until(lambda: "nvme" in checkpointer.stats.mover.errors, "the mover sees that the store is away")
    said = rf"rank 0 .* lag_max=4 .*: nvme \({re.escape(url)}\) lacks the 4 versions after version 2: .*store is away"
    if on_save_error == "fail":
        with pytest.raises(SaveError, match=said + r".*did not change within 1 s.*raise lag_max"):
            training.step(7)
    else:
        training.step(7)
    assert re.search("training waits: " + said, caplog.text)
    newest = 6 if on_save_error == "fail" else 7  # a base, since no differential leads there
    reached = {"memory": newest, "nvme": 2}
    until(lambda: checkpointer.stats.mover.reached_versions == reached, "the mover sees what memory holds")
    assert checkpointer.stats.drain_stall_s >= 1
    refused.clear()
    checkpointer.flush()
    assert checkpointer.stats.mover.lag_versions == {"nvme": 0}
    if on_save_error == "warn":
        training.step(8)
        checkpointer.flush()
        assert checkpointer.stats.failed_saves == 1
    checkpointer.abort()


@dataclass(frozen=True)
class UntilAwaited(PacingPolicy):
    """A byte a second, unless somebody waits."""

    def bytes_per_s(self, seen: Copying) -> float | None:
        return None if seen.awaited else 1.0


def test_a_pace_keeps_no_training_that_waits(tmp_path: Path) -> None:
    training = Training()
    tiers = Hierarchy.of(f"memory://pace-{tmp_path.name}", f"nvme://{tmp_path}/run?survives=rack")
    options = {"base_every": 50, "batch": 1, "lag_max": 4, "deadline_s": 60.0}
    checkpointer = training.attach(tiers, policies=Policies(pacing=UntilAwaited()), **options)
    for version in range(1, 31):
        training.step(version)
    assert checkpointer.stats.mover.lag_versions["nvme"] <= 4
    checkpointer.close()


def test_a_bound_that_no_batch_fits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="lag_max=9 is less than two batches of 5"):
        Training().attach(Hierarchy.of(f"memory://{tmp_path.name}"), lag_max=9)
