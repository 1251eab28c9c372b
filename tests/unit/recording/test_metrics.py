"""What the training loop reports of its versions."""

from __future__ import annotations

import pytest
import torch

from tiercheck.errors import ConfigurationError
from tiercheck.keys import MetricKey, parse
from tiercheck.recording.metrics import Metrics


def test_a_report_belongs_to_its_version_and_says_all_in_its_key() -> None:
    metrics = Metrics(2)
    (key,) = metrics.of(40, {"eval_loss": torch.tensor(0.25)})
    assert key == MetricKey(2, 40, "eval_loss", 0.25)
    assert str(key) == "job/metrics/g000002/000000000040/eval_loss/3fd0000000000000"
    assert parse(str(key)) == key
    assert metrics.of(40, {"eval_loss": 0.25, "accuracy": 1}) == [MetricKey(2, 40, "accuracy", 1.0)], "what is new"
    assert metrics.of(41, {"eval_loss": 0.5}) == [MetricKey(2, 41, "eval_loss", 0.5)]


def test_what_is_not_finite_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert Metrics(1).of(3, {"loss": float("nan"), "other": float("-inf")}) == []
    assert "the loss of version 3 is nan, which no policy is told" in caplog.messages


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"eval loss": 1.0}, "a metric has a name of at most 64 letters"),
        ({"x" * 65: 1.0}, "a metric has a name"),
        ({"loss": "low"}, "the metric loss must be a number, not 'low'"),
        ({"loss": None}, "must be a number"),
        ({f"m{number}": 1.0 for number in range(65)}, "at most 64 metrics"),
    ],
)
def test_what_is_no_metric_is_refused_and_nothing_is_reported(given: dict[str, object], message: str) -> None:
    metrics = Metrics(1)
    with pytest.raises(ConfigurationError, match=message):
        metrics.of(3, {"sound": 1.0, **given})
    assert metrics.of(3, {"sound": 1.0}) == [MetricKey(1, 3, "sound", 1.0)]


def test_a_second_value_for_a_version_is_refused() -> None:
    metrics = Metrics(1)
    metrics.of(3, {"loss": 0.5})
    with pytest.raises(ConfigurationError, match=r"reported already, as 0\.5, and is 0\.25 now"):
        metrics.of(3, {"loss": 0.25})


@pytest.mark.parametrize(
    "text",
    [
        "job/metrics/g000002/000000000040/eval_loss/7ff8000000000000",
        "job/metrics/g000002/000000000040/a-b/3fd0000000000000",
    ],
)
def test_a_forged_key_is_none(text: str) -> None:
    assert parse(text) is None
