"""Training on compressed gradients under DDP over gloo: the ranks stay the same, and resume what was, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.torch.ddp_compressed_worker import checks
from tests.forks import Forks, tail

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

RANKS = {3: CHECKS, 2: ("sums", "all-reduce-with-feedback-saved")}
"""Of two ranks a sum is the same in either order: there the checks of three are made that divide by their number."""

Results = list[dict[str, list[str]]]


@pytest.fixture(scope="module")
def results(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    """By the number of ranks, and by rank."""
    return {ranks: launch(forks, tmp_path_factory.mktemp("ddp"), ranks) for ranks in RANKS}


def launch(forks: Forks, directory: Path, ranks: int) -> Results:
    log = directory / "log"
    program = "tests.cluster.torch.ddp_compressed_worker"
    codes = forks.run(program, directory, *RANKS[ranks], ranks=ranks, log=log, deadline_s=LAUNCH_SECONDS_MAX)
    files = [directory / f"r{rank}.json" for rank in range(ranks)]
    if any(codes):
        pytest.fail(f"the launch ended with {codes}:\n{tail(log)}")
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.timeout(LAUNCH_SECONDS_MAX + 30)
@pytest.mark.parametrize(("ranks", "check"), [(ranks, check) for ranks, checks in RANKS.items() for check in checks])
def test_compressed(results: dict[int, Results], ranks: int, check: str) -> None:
    for rank, ran in enumerate(results[ranks]):
        assert ran.get(check) == [], f"rank {rank}, which ran {list(ran)}"


def test_every_check_of_the_worker_is_listed_here() -> None:
    assert set(checks(Path())) == set(CHECKS)
