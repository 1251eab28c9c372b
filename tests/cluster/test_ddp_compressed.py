"""Training on compressed gradients under DDP over gloo: the ranks stay the same, and resume what was, bit for bit."""

from __future__ import annotations

import json

import pytest

from tests.forks import Forks

pytestmark = pytest.mark.cluster

LAUNCH_SECONDS_MAX = 180
CHECKS = (
    "sums",
    "refusals",
    "loss-scale",
    "hook-of-the-step",
    "hook-of-the-step-with-feedback",
    "all-reduce",
    "all-reduce-with-feedback",
    "all-reduce-with-feedback-saved",
    "all-reduce-int8",
)

Results = list[dict[str, list[str]]]


@pytest.fixture(scope="module", params=[2, 3], ids=["2-ranks", "3-ranks"])
def results(request: pytest.FixtureRequest, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Results:
    directory, ranks = tmp_path_factory.mktemp("ddp"), request.param
    log = directory / "log"
    codes = forks.run(
        "tests.cluster.ddp_compressed_worker", directory, ranks=ranks, log=log, deadline_s=LAUNCH_SECONDS_MAX
    )
    files = [directory / f"r{rank}.json" for rank in range(ranks)]
    if not all(file.exists() for file in files):
        pytest.fail(f"the launch ended with {codes}:\n{log.read_text()[-4000:]}")
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.timeout(LAUNCH_SECONDS_MAX + 30)
@pytest.mark.parametrize("check", CHECKS)
def test_compressed(results: Results, check: str) -> None:
    for rank, checks in enumerate(results):
        assert checks.get(check) == [], f"rank {rank}, which ran {list(checks)}"


@pytest.mark.timeout(LAUNCH_SECONDS_MAX + 30)
def test_every_check_of_the_worker_is_listed_here(results: Results) -> None:
    assert set(results[0]) == set(CHECKS)
