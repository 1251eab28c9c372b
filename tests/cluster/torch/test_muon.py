"""An optimizer whose step takes all ranks: they replay the same steps, though one has lost its newest base."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.torch.muon_worker import BASE_EVERY, FAILED_AT, MESHES
from tests.forks import Forks, tail
from tiercheck.tiers.shm.namespaces import namespaces, remove_namespace

pytestmark = pytest.mark.cluster

RANKS = 4


@pytest.fixture(scope="module")
def reports(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    directory, name = tmp_path_factory.mktemp("muon"), f"test-muon-{secrets.token_hex(6)}"
    log = directory / "log"
    try:
        codes = forks.run("tests.cluster.torch.muon_worker", directory, name, ranks=RANKS, log=log)
        assert codes == [0] * RANKS, tail(log)
        yield [json.loads((directory / f"r{rank}.json").read_text()) for rank in range(RANKS)]
    finally:
        for namespace in namespaces():
            if namespace.name.startswith(name):
                remove_namespace(namespace.name)


@pytest.mark.parametrize("kind", MESHES)
def test_ranks_replay_the_same_steps_from_the_same_base(reports: list[dict[str, Any]], kind: str) -> None:
    wanted = {"recovered": [FAILED_AT, BASE_EVERY, "exact"], "as it was": True, "as the whole": True}
    assert [report[kind] for report in reports] == [wanted] * RANKS
