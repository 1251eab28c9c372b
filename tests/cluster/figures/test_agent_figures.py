"""What an agent costs, on a small scale."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main

pytestmark = pytest.mark.cluster


def test_an_agent_of_two_ranks_is_measured_at_rest_and_at_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "--json", "--agent", "2", "--seconds", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 2
    assert 0 <= found["idle"] < 1
    assert 0 < found["version_a_second"] < 2
