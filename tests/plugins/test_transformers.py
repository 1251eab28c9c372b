"""The plug-in for Hugging Face's Trainer, installed from its wheel, and run by its own tests."""

from __future__ import annotations

import pytest

from tests.plugins.outside import Outside
from tests.plugins.test_plugins import copy_tests

pytestmark = pytest.mark.cluster

RANKS = "two_ranks or fsdp2 or deepspeed"
OTHER_STARTS = "other_ranks or schedule or whatever or version_zero or another_order"


@pytest.mark.parametrize(
    "chosen",
    [RANKS, OTHER_STARTS, f"not ({RANKS} or {OTHER_STARTS})"],
    ids=["ranks", "other starts", "process"],
)
def test_jobs_of_a_trainer_are_resumed_bit_for_bit(outside: Outside, chosen: str) -> None:
    copy_tests("tiercheck-transformers", outside, "tests", "pyproject.toml", "README.md")
    printed = outside.pytest("-k", chosen, environment={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    assert "skipped" not in printed
