"""Pipelines of ``torch.distributed.pipelining`` that lose a stage with every copy of it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import pytest

from tests.cluster.torch.lost_stage_worker import CASES
from tests.forks import Forks, tail
from tiercheck.tiers.shm.namespaces import namespaces, remove_namespace

pytestmark = pytest.mark.cluster

RANKS = 6
Reports = list[dict[str, list[str]]]


@pytest.fixture(scope="module")
def reports(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reports]:
    directory, name = tmp_path_factory.mktemp("lost-stage"), f"test-lost-stage-{secrets.token_hex(6)}"
    log = directory / "log"
    try:
        codes = forks.run("tests.cluster.torch.lost_stage_worker", directory, name, *CASES, ranks=RANKS, log=log)
        found = [json.loads((directory / f"r{rank}.json").read_text()) for rank in range(RANKS)]
        assert codes == [0] * RANKS, (found, tail(log))
        yield found
    finally:
        for namespace in namespaces():
            if namespace.name.startswith(name):
                remove_namespace(namespace.name)


@pytest.mark.parametrize("case", CASES)
def test_a_lost_stage(reports: Reports, case: str) -> None:
    assert [report[case] for report in reports] == [[]] * RANKS
