"""The policy passes the kit, and keeps what it says."""

import pytest
from keep_progress import KeepProgress

from tiercheck.errors import ConfigurationError
from tiercheck.policy.policies import Committed, Keep, Metric, Policy
from tiercheck.testing.policies import PolicyTests


class TestKeepProgress(PolicyTests):
    metrics = ("eval_loss",)

    def make_policy(self) -> Policy:
        return KeepProgress("eval_loss", 0.05)


def test_each_step_of_progress_stays() -> None:
    losses = {10: 1.0, 15: 0.95, 20: 0.5, 30: 0.48, 40: 0.4}
    metrics = tuple(Metric(version, "eval_loss", loss) for version, loss in losses.items())
    seen = Committed("s3", (0, 10, 20, 30, 40), metrics)
    assert KeepProgress("eval_loss").keep(seen) == Keep(frozenset({10, 20, 40}))
    assert KeepProgress("accuracy").keep(seen) == Keep()


@pytest.mark.parametrize("by", [-0.1, 1.0, float("nan")])
def test_an_impossible_share_is_refused(by: float) -> None:
    with pytest.raises(ConfigurationError, match="by must be"):
        KeepProgress("eval_loss", by)
