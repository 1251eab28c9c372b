"""The configuration: what cannot be meant is refused, by name and with what is possible."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest

from tiercheck.config import CheckpointConfig
from tiercheck.errors import ConfigurationError

ENDLESS = 10**5000
"""Python itself refuses to print it."""


def name_of(value: object) -> str:
    """A test's name."""
    return "endless" if isinstance(value, int) and abs(value) == ENDLESS else str(value)


def test_a_misspelt_field_is_named_with_the_one_that_is_meant() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown key 'base_evry'.*did you mean 'base_every'"):
        CheckpointConfig(base_evry=3)  # type: ignore[call-arg]  # that is the mistake
    with pytest.raises(ConfigurationError, match=r"unknown key 'base_evry'.*did you mean 'base_every'"):
        CheckpointConfig.from_mapping({"base_evry": 3})
    with pytest.raises(ConfigurationError, match=r"unknown key 'x'.*known are base_every, batch"):
        CheckpointConfig.from_mapping({"x": 3})
    with pytest.raises(ConfigurationError, match="unknown key 5"):
        CheckpointConfig.from_mapping({5: 3})  # type: ignore[dict-item]  # that, too


@pytest.mark.parametrize("deadline_s", [float("nan"), float("inf"), 0, -1.0, 1e300, ENDLESS, -ENDLESS], ids=name_of)
def test_a_deadline_that_is_none_is_refused(deadline_s: float) -> None:
    with pytest.raises(ConfigurationError, match="deadline_s must be positive, and at most"):
        CheckpointConfig(deadline_s=deadline_s)


@pytest.mark.parametrize(
    "name", ["base_every", "batch", "keep_last", "keep_every", "encode_threads", "recovery_threads"]
)
@pytest.mark.parametrize("value", [-1, ENDLESS], ids=name_of)
def test_a_number_that_nothing_can_hold_is_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be at least"):
        CheckpointConfig.from_mapping({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("base_every", "3"), ("base_every", True), ("base_every", 3.0), ("codec", 1), ("exact_replay", ENDLESS)],
    ids=name_of,
)
def test_another_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be"):
        CheckpointConfig.from_mapping({name: value})


def test_a_configuration_can_be_copied() -> None:
    config = CheckpointConfig(7, deadline_s=5)
    assert config.base_every == 7
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == replace(config) == config
