"""The learning rate after a stage was made anew, and the norms that a version holds for that case."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tiercheck.integrations.after_loss import AfterLoss
from tiercheck.recovery.stages.making import RAISED_RATE
from tiercheck.streams.tensors.stage import GradientNorms

RAISED = {RAISED_RATE: {"factor": 1.5, "until": 4}}


def stepped(after: AfterLoss, groups: list[dict[str, Any]], version: int) -> list[float]:
    """The rates that a step of several calls takes."""
    seen = []
    for group in groups:
        after.raise_rate(groups, version)
        seen.append(group["lr"])
    after.lower_rate(groups)
    return seen


def test_the_rate_is_raised_for_the_steps_alone_until_it_ends() -> None:
    after, groups = AfterLoss(), [{"lr": 0.1}, {"lr": 0.3}]
    assert stepped(after, groups, 1) == [0.1, 0.3], "nothing was lost"
    after.restore(RAISED)
    assert stepped(after, groups, 3) == [0.1 * 1.5, 0.3 * 1.5]
    assert [group["lr"] for group in groups] == [0.1, 0.3], "to the bit, whatever the factor"
    assert after.host_state() == RAISED, "a start in between goes on with it"
    groups[0]["lr"] = 0.2  # a schedule
    assert stepped(after, groups, 4) == [0.2 * 1.5, 0.3 * 1.5]
    assert after.host_state() == {}
    assert stepped(after, groups, 5) == [0.2, 0.3]
    after.restore({})
    assert stepped(after, groups, 3) == [0.2, 0.3], "a version that knows nothing of it"


def test_a_schedule_moves_the_rate_between_two_parts_of_a_step() -> None:
    after, groups = AfterLoss(), [{"lr": 0.1}, {"lr": 0.2}]
    after.restore(RAISED)
    for group in groups:
        after.raise_rate(groups, 4)
        assert group["lr"] == pytest.approx(0.15 if group is groups[0] else 0.3 * 0.5)
        after.lower_rate(groups, done=False)
        groups[1]["lr"] *= 0.5
    after.lower_rate(groups)
    assert [group["lr"] for group in groups] == [0.1, 0.05]
    assert after.host_state() == {}, "the last version of a raised rate has both parts"


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.5)
    after, groups = AfterLoss(), [{"lr": rate}]
    after.restore(RAISED)
    assert stepped(after, groups, 4) == [torch.tensor(0.75)]
    assert groups[0]["lr"] is rate
    assert rate == 0.5


def test_norms_are_measured_only_if_they_are_asked_for() -> None:
    after = AfterLoss()
    after.measure({"a": torch.ones(2)})
    assert after.host_state() == {}
    after.norms = GradientNorms(["3"], {"a": [("3", 0, 2)]})
    after.measure({"a": torch.tensor([3.0, 4.0])})
    state = after.host_state()
    assert state == {"gradient_norms": {"3": 25.0}}
    again = AfterLoss()
    again.norms = GradientNorms(["3"], {})
    again.restore(state)
    assert again.host_state() == state, "a start that takes no step saves them again"
