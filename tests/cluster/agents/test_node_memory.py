"""Hosts with real agents come back in another order, one of them replaced: every rank is restored from memory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Forks, tail
from tiercheck.agent.server.neighbours import shm_name
from tiercheck.demo.nodes import kill_agent, remove_when_released
from tiercheck.errors import NotFound

pytestmark = pytest.mark.cluster

RANKS = 3


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A job's name, whose hosts' agents and memory go with the test."""
    name = f"found-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        monkeypatch.setenv("TIERCHECK_RUN_DIR", f"{folder}/run")
        yield name
        for host in range(RANKS + 1):
            fail(name, host)


def fail(name: str, host: int) -> None:
    """The host is lost, with its agent and all of its memory."""
    kill_agent(f"{name}-{host}")
    for namespace in (f"{name}-{host}", shm_name(f"{name}-{host}", name)):
        with contextlib.suppress(NotFound):
            remove_when_released(namespace)


def life(
    forks: Forks, name: str, directory: Path, hosts: str, last: int, replicas: str = "each"
) -> list[dict[str, Any]]:
    log, ranks = directory / f"{hosts}.log", len(hosts.split(","))
    environment = {"TIERCHECK_RUN_DIR": os.environ["TIERCHECK_RUN_DIR"]}
    arguments = (name, directory, hosts, str(last), replicas)
    codes = forks.run(
        "tests.cluster.agents.node_memory_worker", *arguments, ranks=ranks, log=log, environment=environment
    )
    assert set(codes) <= {-signal.SIGKILL}, tail(log)
    found = [directory / f"{hosts.replace(',', '-')}-r{rank}.json" for rank in range(ranks)]
    assert all(each.exists() for each in found), tail(log)
    return [json.loads(each.read_text()) for each in found]


def test_hosts_in_another_order_and_one_replaced_lose_nothing(forks: Forks, tmp_path: Path, job: str) -> None:
    before = life(forks, job, tmp_path, "0,1,2", 7)
    fail(job, 1)
    after = life(forks, job, tmp_path, "2,0,3", 9)
    assert [each["version"] for each in after] == [7, 7, 7]
    for rank in range(RANKS):
        assert after[rank]["weights"]["7"] == before[rank]["weights"]["7"]
    memory = {host: f"memory of {socket.gethostname()}/{host}" for host in (0, 2, 3)}
    assert after[0]["sources"] == [memory[0]]
    assert after[1]["sources"] == [f"{memory[2]} for its neighbours"], "host 1 is gone, and host 2 was its neighbour"
    assert after[2]["sources"] == [memory[2]]
    assert {memory[0], memory[2], f"{memory[2]} for its neighbours"} <= set(after[0]["matrix"])
    again = life(forks, job, tmp_path, "2,0,3", 10)
    assert [each["sources"] for each in again] == [["shm"]] * RANKS, "what is in its place is read there"


def test_what_each_rank_stores_for_all_outlives_its_host(forks: Forks, tmp_path: Path, job: str) -> None:
    """No tier is shared: what a lost host stored is in its neighbour's memory alone. Then a host is not replaced."""
    before = life(forks, job, tmp_path, "0,1,2", 7, "owner")
    assert before[0]["weights"]["7"] == before[1]["weights"]["7"]
    fail(job, 1)
    replaced = life(forks, job, tmp_path, "2,0,3", 9, "owner")
    assert {(each["version"], each["fidelity"]) for each in replaced} == {(7, "exact")}
    assert all(each["weights"]["7"] == before[0]["weights"]["7"] for each in replaced)
    assert replaced[1]["sources"] == [f"memory of {socket.gethostname()}/2 for its neighbours"]
    fail(job, 3)
    fewer = life(forks, job, tmp_path, "2,0", 10, "owner")
    assert {each["version"] for each in fewer} == {9}
    assert all(each["weights"]["9"] == replaced[0]["weights"]["9"] for each in fewer)
    assert fewer[0]["weights"]["10"] == fewer[1]["weights"]["10"]
